"""Stage *prepare*: files of a dataset to tensors of one form."""

from __future__ import annotations

from pathlib import Path

from flcore.config import Config
from flcore.data.dataset import Dataset
from pipelines.runs.cache import Cache, place


def prepare(config: Config, directory: Path) -> Dataset:
    """Put the prepared data of a configuration into a folder, from the cache where they are there and whole."""
    place("prepared", Cache.here().prepared(config, look=True), directory)
    return Dataset.load(directory)
