"""Stage *prepare*: converts files of a dataset to tensors of one format."""

from __future__ import annotations

import os
from pathlib import Path

from flcore.config.schema import Config
from flcore.data.dataset import Dataset
from flcore.io.files import given_path
from pipelines.runs.cache import Cache, place
from pipelines.runs.file_state import refuse_linked_folders


def prepare(config: Config, directory: Path) -> Dataset:
    """Put the prepared data of a configuration into a folder, from the cache if it has them undamaged.

    Raises:
        DataError: data are missing or damaged, or DVC runs this stage and would not detect a change of them.
    """
    if "DVC_STAGE" in os.environ and config.data.root is not None:
        refuse_linked_folders(given_path(config.data.root))
    place("prepared", Cache.here().prepared(config, look=True), directory)
    return Dataset.load(directory)
