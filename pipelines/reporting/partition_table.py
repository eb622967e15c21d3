"""A partition's manifest as a table of clients and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flcore.core.errors import DataError


@dataclass(frozen=True, eq=False)
class PartitionTable:
    """Training samples by client and class: `counts` is int64 of shape (clients, classes).

    A manifest read twice is the same object: the runs of a seed share it, and its figure is drawn once for all.
    """

    client_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    counts: np.ndarray
    manifest: Mapping[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """Return samples per client (index = client id) and class (columns = class names)."""
        return pd.DataFrame(self.counts, index=list(self.client_ids), columns=list(self.class_names))


def load_partition(directory: Path, class_names: Sequence[str] = ()) -> PartitionTable:
    """Read `manifest.json` of a partition directory.

    Args:
        directory: holds `manifest.json` with `clients`, each with `id` and `class_counts` (a list, or an object keyed
            by class number); `num_classes` is used where it is given.
        class_names: of the data, in order; without them classes are shown by number.

    Returns:
        The table; clients stay in the manifest's order, absent classes count 0.
    """
    path = Path(directory) / "manifest.json"
    try:
        return _parsed(path.read_text(encoding="utf-8"), tuple(class_names))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error.__class__.__name__}); make the partition again.") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; make the partition again.") from error


@lru_cache(maxsize=16)
def _parsed(text: str, names: tuple[str, ...]) -> PartitionTable:
    manifest = json.loads(text)
    clients = manifest.get("clients") if isinstance(manifest, dict) else None
    if not clients or any("class_counts" not in client for client in clients):
        raise ValueError("no clients with 'class_counts'")
    by_class = [_counts_by_class(client["class_counts"]) for client in clients]
    num_classes = max(int(manifest.get("num_classes") or 0), 1 + max(max(row, default=0) for row in by_class))
    counts = np.zeros((len(clients), num_classes), dtype=np.int64)
    for position, row in enumerate(by_class):
        for label, count in row.items():
            counts[position, label] = count
    return PartitionTable(
        client_ids=tuple(str(client.get("id", position)) for position, client in enumerate(clients)),
        class_names=tuple(names[label] if label < len(names) else str(label) for label in range(num_classes)),
        counts=counts,
        manifest=manifest,
    )


def _counts_by_class(counts: Any) -> dict[int, int]:
    pairs = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return {int(label): int(count) for label, count in pairs}
