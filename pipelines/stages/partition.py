"""Stage *partition*: divides the data among clients, for each seed of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.text import to_yaml
from flcore.data.partition import Partition
from flcore.data.summary import summarise_partition
from flcore.io import disk
from pipelines.runs.cache import Cache, place


def partition(config: Config, seeds: Sequence[int], prepared: Path, directory: Path) -> dict[int, Partition]:
    """Divide prepared data into ``<directory>/seed-<seed>`` for each seed; remove folders of other seeds.

    If ``partition.seed`` is set, there is one partition, of this seed.
    """
    cache = Cache.here()
    made: dict[int, Partition] = {}
    for own in (replace(config, seed=seed) for seed in seeds):
        if own.partition_seed not in made:
            folder = partition_folder(directory, own)
            place("partition", cache.partition(own, prepared), folder)
            made[own.partition_seed] = Partition.load(folder)
    remove_others(directory, [f"seed-{seed}" for seed in made])
    return made


def refuse_other_division(config: Config, directory: Path) -> None:
    """Refuse a partition that was made with other parameters than a run's, with a ConfigError that names them."""
    folder, section = partition_folder(directory, config), config.partition
    made = Partition.load(folder).parameters
    wanted: dict[str, Any] = {
        "name": config.partitioner.name,
        "num_clients": section.num_clients,
        "seed": config.partition_seed,
        "validation": section.validation,
        "client_test": section.client_test,
        "test_fraction": section.test_fraction,
        "test_shots": section.test_shots,
        "imbalance": None if section.imbalance is None else asdict(section.imbalance),
    }
    if config.to_mapping()["partition"].get("path") is None:  # else a digest of this file, which may have moved
        wanted["options"] = config.partitioner.options()
    if made.get("client_test") == "imported":  # not a parameter
        del wanted["client_test"]
    for key, value in json.loads(json.dumps(wanted)).items():
        if made.get(key) != value:
            raise ConfigError(
                f"partition.{key} = {to_yaml(value)}: {folder} was made with {to_yaml(made.get(key))}; "
                "carry out the stage partition again"
            )


def partition_folder(directory: Path, config: Config) -> Path:
    """Return the folder of a run's partition."""
    return directory / f"seed-{config.partition_seed}"


def remove_others(directory: Path, names: Sequence[str]) -> None:
    """Remove files of an earlier configuration: DVC would include them in the folder's hash."""
    for path in directory.iterdir():
        if path.name not in names:
            disk.remove_tree(path) if path.is_dir() else disk.remove(path)


def partition_table(division: Partition) -> list[str]:
    """Return the lines that ``protofl stage partition`` prints."""
    rows = summarise_partition(division)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
