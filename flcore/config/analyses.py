"""Names of analyses of finished runs (`flcore/analyses`), and of their snapshots. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

SUMMARIES: Mapping[str, str] = {
    "class_heatmap": "accuracy by client and class, with the models that answer for clients",
    "class_heatmap_trained": "the same with each client's model as its training left it (needs evaluation.private)",
    "confusion": "test images by true and predicted class (confusion matrix)",
    "averaged_bodies": "nearest prototype under clients' own bodies and under their mean (no global model)",
    "tsne": "t-SNE of test features of the global model, or of several clients' models in one embedding",
    "tsne_trained": "t-SNE of several clients' models as their training left them (needs evaluation.private)",
    "tsne_projections": "t-SNE of what is compared with a frame in place of features, of the same models (GFPL)",
    "tsne_calibration": "t-SNE of test features before and after the server's calibration, with accuracies",
    "tsne_calibration_trained": "the same of several clients' models as trained, in one embedding (evaluation.private)",
    "tsne_prototypes": "t-SNE of one client's features with prototypes: class means, and means of 2 and 4 clusters",
    "tsne_generated": "t-SNE of real and generated features together",
    "virtual_images": "sheet of the virtual images that clients learned from last, a row per class",
    "generator_distances": "distances within and between classes of generated and of real features",
    "inversion": "images rebuilt from a feature, and from means of features, by a decoder; error against their number",
    "inversion_search": "the same by searching the image whose feature fits, without other images",
    "gradcam": "where the model looks before and after calibration: kept right, mended, broken, still wrong",
}
"""Name → one line, in the order of reports."""

if TYPE_CHECKING:
    AnalysisName = str
else:
    AnalysisName = Literal[tuple(SUMMARIES)]

_ROUND = "_round_"


def with_snapshots(names: Sequence[str], snapshots: Sequence[int]) -> list[str]:
    """Return the names with those of snapshots: ``tsne`` of the finished run, ``tsne_round_2`` of round 2."""
    rounds = sorted(set(snapshots))
    return [*names, *(f"{name}{_ROUND}{number}" for name in names for number in rounds)]


def without_round(name: str) -> tuple[str, int | None]:
    """Return the name in :data:`SUMMARIES`, and the round of the snapshot; None: the finished run."""
    base, mark, number = name.rpartition(_ROUND)
    return (base, int(number)) if mark else (name, None)
