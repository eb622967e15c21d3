"""What tables of an earlier comparison, or sweep, take with them when those of another take their place."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from pipelines.runs.layout import read_json


def replaced(kind: str, folder: Path, hashes: Collection[str]) -> Iterator[str]:
    """A line on the tables that lie in a folder, where they have runs that the next ones will not have; else none.

    Many do not name a folder for each comparison, so it is no error; what was trained stays, and is found again.

    Args:
        kind: ``comparison`` or ``sweep``, as its JSON file is called.
        folder: of both.
        hashes: of the runs that the next tables are about.
    """
    try:
        document = read_json(folder / f"{kind}.json")
        rows: list[dict[str, Any]] = document["runs"]
        lost = [f"{row['method']} seed {row['seed']}" for row in rows if row["config_hash"] not in hashes]
    except (DataError, KeyError, TypeError):  # none there, or damaged: nothing to miss
        return
    if lost:
        others = f" and {len(lost) - 1} other run{'s' if len(lost) > 2 else ''}" if len(lost) > 1 else ""
        yield (
            f"{folder}: the tables of an earlier {kind} there, with {lost[0]}{others}, are replaced; "
            f"its runs stay in {folder / 'runs'}"
        )
