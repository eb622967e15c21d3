"""Who holds what: a partition's manifest as a table, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flcore.core.errors import DataError
from pipelines.reporting.figures.parts import annotate_cells, draw_cells, name_cells
from pipelines.reporting.figures.style import COUNTS, WIDTH, house_style

_PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class PartitionTable:
    """Who holds what: `counts` is int64 of shape (clients, classes); `sizes` has the columns train, val and test.

    One that was read twice is the same object: the runs of a seed share it, and its figure is drawn once for all.
    """

    client_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    counts: np.ndarray
    sizes: pd.DataFrame
    manifest: Mapping[str, Any]


def load_partition(directory: Path, class_names: Sequence[str] = ()) -> PartitionTable:
    """Read `manifest.json` of a partition directory.

    Args:
        directory: holds `manifest.json` with `clients`, each with `id` and `class_counts` (a list, or an object keyed
            by class number); `num_classes` and the sizes are used where they are given.
        class_names: of the data, in order; without them classes are shown by number.

    Returns:
        The table; clients stay in the manifest's order, absent classes count 0.

    Raises:
        DataError: the manifest is missing or damaged, or names no clients with class counts.
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
        sizes=pd.DataFrame(
            [[client.get("sizes", client).get(part) for part in _PARTS] for client in clients], columns=list(_PARTS)
        ),
        manifest=manifest,
    )


def _counts_by_class(counts: Any) -> dict[int, int]:
    pairs = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return {int(label): int(count) for label, count in pairs}


def partition_data(partition: PartitionTable) -> pd.DataFrame:
    """Samples per client (index = client id) and class (columns = class names)."""
    return pd.DataFrame(partition.counts, index=list(partition.client_ids), columns=list(partition.class_names))


def draw_partition(partition: PartitionTable) -> Figure:
    """Samples per class (rows) and client (columns): white is none, darker is more, one colour bar."""
    clients, classes = partition.counts.shape
    with house_style():
        height = min(max(1.4 + 0.24 * classes, 2.2), 7.5)
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_subplot()
        top = max(int(partition.counts.max()), 1)
        mesh = draw_cells(axes, partition.counts.T, COUNTS, top)
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        name_cells(axes.xaxis, [_short_id(client) for client in partition.client_ids], 32)
        name_cells(axes.yaxis, partition.class_names, 26)
        figure.colorbar(mesh, ax=axes, label="training samples", pad=0.015, fraction=0.03, aspect=max(15, 6 * height))
        if clients <= 24 and classes <= 20:
            annotate_cells(axes, partition.counts.T, mesh, lambda value: f"{value:.0f}" if value else "")
        return figure


def _short_id(client: str) -> str:
    return str(int(client)) if client.isdigit() else client
