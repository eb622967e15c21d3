"""Stage *partition*: which client holds what."""

from __future__ import annotations

from pathlib import Path

from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition, make_partition


def partition(config: Config, prepared: Path, directory: Path) -> Partition:
    """Divide the prepared data into ``directory``."""
    division = make_partition(
        Dataset.load(prepared),
        config.partitioner,
        num_clients=config.partition.num_clients,
        seed=config.partition_seed,
        validation=config.partition.validation,
        client_test=config.partition.client_test,
        test_fraction=config.partition.test_fraction,
        test_shots=config.partition.test_shots,
    )
    directory.mkdir(parents=True, exist_ok=True)
    division.save(directory)
    return division
