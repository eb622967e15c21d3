"""Analyses of finished runs (evaluation.md section 5): from what a run left to arrays and tables, without figures.

One module per analysis; `registry.py` lists them. What stands here is light, so that a configuration can be checked
without importing what computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flcore.config.sections import EvaluationConfig

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

_ROUND = "_round_"


def with_snapshots(names: Sequence[str], snapshots: Sequence[int]) -> list[str]:
    """The analyses that a run asks for: ``tsne`` of the finished run, ``tsne_round_2`` of what it was after round 2."""
    rounds = sorted(set(snapshots))
    return [*names, *(f"{name}{_ROUND}{number}" for name in names for number in rounds)]


def without_round(name: str) -> tuple[str, int | None]:
    """The name in :data:`SUMMARIES`, and the round whose snapshot is analysed; None: the finished run."""
    base, mark, number = name.rpartition(_ROUND)
    return (base, int(number)) if mark else (name, None)


def chosen(name: str, evaluation: EvaluationConfig) -> dict[str, Any]:
    """What a configuration says of who and what an analysis shows, as JSON values; nothing where it leaves that open.

    It is no part of a run's name: whoever finds an analysis of a run must ask whether it is of the same choice.
    """
    if not name.startswith("tsne") or name.startswith("tsne_prototypes"):
        return {}
    said = {"clients": evaluation.tsne_clients, "classes": evaluation.tsne_classes, "samples": evaluation.tsne_samples}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
    return {key: value for key, value in values.items() if value is not None}
