"""Stage *prepare*: files of a dataset to tensors of one form."""

from __future__ import annotations

import json
from pathlib import Path

import flcore.data.dataset as dataset
from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.errors import DataError
from pipelines.files import write_json


def prepare(config: Config, directory: Path) -> Dataset:
    """Read the configured source into ``directory``, unless it already holds just that.

    What was asked for is kept beside the folder, in ``<directory>.request.json``, because it names places on this
    machine.
    """
    request_file = directory.with_name(f"{directory.name}.request.json")
    request = config.to_mapping()["data"]
    if request_file.exists() and json.loads(request_file.read_text()) == request:
        try:
            return Dataset.load(directory)
        except DataError:
            pass  # interrupted or damaged: made again below
    root = None if config.data.root is None else Path(config.data.root)
    request_file.unlink(missing_ok=True)
    prepared = dataset.prepare(
        config.source,
        root,
        download=config.data.download,
        size=config.data.size,
        channels=config.data.channels,
        limit_per_class=config.data.limit_per_class,
        directory=directory,
    )
    write_json(request_file, request)
    return prepared
