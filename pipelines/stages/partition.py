"""Stage *partition*: which client holds what."""

from __future__ import annotations

from pathlib import Path

from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.summary import summarise


def partition(config: Config, prepared: Path, directory: Path) -> Partition:
    """Divide the prepared data into ``directory``, and draw samples by class and client in ``<directory>.svg``.

    The figure lies beside the folder, because its bytes also depend on the version of matplotlib.
    """
    division = make_partition(
        Dataset.load(prepared),
        config.partitioner,
        num_clients=config.partition.num_clients,
        seed=config.partition_seed,
        validation=config.partition.validation,
        client_test=config.partition.client_test,
        test_fraction=config.partition.test_fraction,
        test_shots=config.partition.test_shots,
        imbalance=config.partition.imbalance,
    )
    directory.mkdir(parents=True, exist_ok=True)
    division.save(directory)
    draw_heatmap(directory)
    return division


def draw_heatmap(directory: Path) -> Path:
    """Draw a stored partition in ``<directory>.svg``."""
    from pipelines import figures  # matplotlib takes a second, which most commands need not spend

    figure = figures.draw_partition(figures.load_partition(directory))
    return figures.save(figure, directory.with_name(f"{directory.name}.svg"))


def partition_table(division: Partition) -> list[str]:
    """The lines that ``protofl stage partition`` prints."""
    rows = summarise(division)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
