"""Warning before new tables replace an earlier comparison's or sweep's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from pipelines.runs.layout import read_json


def replaced(kind: str, folder: Path, hashes: Collection[str]) -> Iterator[str]:
    """Yield a warning if a folder's tables have runs that the next ones lack.

    No error: many users do not name a folder for each comparison, and the runs themselves remain.

    Args:
        kind: ``comparison`` or ``sweep``, the name of its JSON file.
        folder: of both.
        hashes: of the runs in the next tables.
    """
    try:
        document = read_json(folder / f"{kind}.json")
        rows: list[dict[str, Any]] = document["runs"]
        lost = [f"{row['method']} seed {row['seed']}" for row in rows if row["config_hash"] not in hashes]
    except (DataError, KeyError, TypeError):  # missing or damaged: nothing is lost
        return
    if lost:
        others = f" and {len(lost) - 1} other run{'s' if len(lost) > 2 else ''}" if len(lost) > 1 else ""
        yield (
            f"{folder}: the tables of an earlier {kind} there, with {lost[0]}{others}, are replaced; "
            f"its runs stay in {folder / 'runs'}"
        )
