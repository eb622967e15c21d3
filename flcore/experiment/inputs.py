"""A run's inputs: prepared data and a partition of them, made from a configuration."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.core.errors import DataError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.summary import repeated_images
from flcore.experiment.run_folder import write_result
from flcore.io import disk
from flcore.io.files import given_path, read_json, remove_stale_temp

logger = logging.getLogger(__name__)


def prepare_data(config: Config, directory: Path) -> Dataset:
    """Read the configured source into ``directory``, unless it already holds the same data.

    The request is stored next to the folder, in ``<directory>.request.json``, because it has paths of this machine.
    """
    request_file = directory.with_name(f"{directory.name}.request.json")
    request = config.to_mapping()["data"]
    if needed := plugins.used(config.plugins, [config.source]):
        request["plugins"] = {plugin.name: plugin.sha256 for plugin in needed}
    remove_stale_temp(directory)
    remove_stale_temp(directory.parent, request_file.name)
    with suppress(DataError):  # missing, interrupted or damaged: made below
        if read_json(request_file, "") == request:
            return Dataset.load(directory)
    disk.remove(request_file, missing_ok=True)
    prepared = read_source(config, directory)
    write_result(request_file, request)
    return prepared


def read_source(config: Config, directory: Path) -> Dataset:
    """Read the configured source into ``directory``; warn of test images that are also training images."""
    data = config.data
    prepared = prepare_dataset(
        config.source,
        None if data.root is None else given_path(data.root),
        download=data.download,
        size=data.size,
        channels=data.channels,
        limit_per_class=data.limit_per_class,
        normalisation=data.normalisation,
        directory=directory,
    )
    warning = repeated_images(prepared)
    if warning is not None:
        logger.warning(warning)
    return prepared


def divide(config: Config, prepared: Path, directory: Path) -> Partition:
    """Divide the prepared data among clients, into ``directory``, unless it already holds the same partition.

    An equal partition is not written again: another process may be reading it.
    """
    data = Dataset.load(prepared)
    data.check_content(prepared)  # a partition by damaged labels would be found again after their repair
    division = make_partition(
        data,
        config.partitioner,
        num_clients=config.partition.num_clients,
        seed=config.partition_seed,
        validation=config.partition.validation,
        client_test=config.partition.client_test,
        test_fraction=config.partition.test_fraction,
        test_shots=config.partition.test_shots,
        imbalance=config.partition.imbalance,
    )
    with suppress(DataError):  # missing, interrupted or damaged
        known = Partition.load(directory)
        if all(getattr(known, name) == getattr(division, name) for name in ("fingerprint", "version", "parameters")):
            return division
    disk.make_folder(directory)
    remove_stale_temp(directory)
    division.save(directory)
    return division
