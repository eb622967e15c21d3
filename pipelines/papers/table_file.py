"""What ``table.json`` says of how a table was made, for whoever goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flcore.core.errors import DataError
from pipelines.runs.layout import read_json


@dataclass(frozen=True)
class Told:
    """What the file of a table says of how it was made.

    Attributes:
        id: of the table. seeds: of its figures. partition_seeds: of their divisions; None: as the table has them.
        rounds_scale: share of the printed rounds.
        assignments: by setting, what was set beside the table's own values.
    """

    id: str
    seeds: tuple[int, ...]
    partition_seeds: tuple[int, ...] | None
    rounds_scale: float
    assignments: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, folder: Path) -> Told:
        """Read a table's folder.

        Raises:
            DataError: the file is not there, or damaged.
        """
        path = folder / "table.json"
        if not path.is_file():
            raise DataError(f"{folder}: no table there (table.json); protofl paper run makes one, below runs/papers")
        said = read_json(path)
        try:
            draws = said["partition_seeds"]
            return cls(
                str(said["id"]),
                tuple(map(int, said["seeds"])),
                None if draws is None else tuple(map(int, draws)),
                float(said["rounds_scale"]),
                # Tables that were written before assignments were told have none.
                {str(name): tuple(map(str, each)) for name, each in said.get("assignments", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path}: damaged; delete it, and paper run writes it anew from the finished runs"
            ) from error
