"""Figures of analyses: drawn from what `pipelines.runs.analyses` stored; above each the run and the round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from flcore.config.analyses import without_round
from pipelines.reporting.figures.cells import draw_class_heatmap, draw_confusion
from pipelines.reporting.figures.embeddings import (
    MADE,
    REAL,
    draw_calibration,
    draw_calibration_trained,
    draw_generated,
    draw_prototypes,
    draw_tsne,
)
from pipelines.reporting.figures.images import draw_gradcam, draw_inversion, draw_virtual_images
from pipelines.reporting.figures.parts import whole_line
from pipelines.reporting.figures.sets import Drawing, drawing
from pipelines.reporting.figures.style import MUTED, house_style
from pipelines.runs.analyses import StoredAnalysis
from pipelines.runs.record import RunRecord

HEADINGS: Mapping[str, str] = {
    "class_heatmap": "Accuracy by client and class",
    "class_heatmap_trained": "Accuracy by client and class, as trained",
    "confusion": "True and predicted classes",
    "averaged_bodies": "Nearest prototype under own and averaged bodies",
    "tsne": "Features of test images",
    "tsne_trained": "Features of test images under clients' own models",
    "tsne_projections": "Projections of test images",
    "tsne_calibration": "Features before and after calibration",
    "tsne_calibration_trained": "Features under clients' own models before and after calibration",
    "tsne_prototypes": "Prototypes over a client's features",
    "tsne_generated": "Real and generated features",
    "virtual_images": "Virtual images",
    "generator_distances": "Distances of generated features",
    "inversion": "Images rebuilt from features: decoder",
    "inversion_search": "Images rebuilt from features: search",
    "gradcam": "Where the model looks before and after calibration",
}
CAPTIONS: Mapping[str, str] = {
    "class_heatmap": "Models that answer for clients, on the whole test set or the client's own test data; last row: "
    "the global model on the whole test set. Grey: no test samples.",
    "class_heatmap_trained": "Each client's model as its own training left it, before anything was averaged, on the "
    "whole test set or its own test data; last row: the global model. Grey: no test samples.",
    "confusion": "Share of a true class's test images (row) by predicted class (column). Grey: no test samples.",
    "averaged_bodies": "Accuracy on the whole test set of the nearest global prototype: under each client's own body, "
    "in the last row under their mean, weighted by training samples. Grey: no test samples.",
    "tsne": "t-SNE (perplexity 30, from a PCA); its axes have no unit. Colour: true class, then predicted class; "
    "marker: model. Right: training samples.",
    "tsne_trained": "t-SNE (perplexity 30, from a PCA); its axes have no unit. Colour: true class, then predicted "
    "class; marker: client. Right: training samples.",
    "tsne_projections": "t-SNE (perplexity 30, from a PCA) of what is compared with the frame; its axes have no unit. "
    "Colour: true class, then predicted class; marker: model. Right: training samples.",
    "tsne_calibration": "t-SNE of the same test images under both models, each in an embedding of its own; accuracy on "
    "the whole test set.",
    "tsne_calibration_trained": "t-SNE of the same test images under several clients' models, in one embedding before "
    "and one after calibration. Before: as their training left them. After: their encoders below the calibrated "
    "layers. Above, colour: true class, marker: client. Percentages: accuracy on the whole test set.",
    "tsne_prototypes": "t-SNE of training features and prototypes together. Black-edged: means of one, two and four "
    "clusters per class; star: the server's prototype.",
    "tsne_generated": "t-SNE of test features and generated features together, as many of each.",
    "virtual_images": "What clients learned from last beside their own images; a row per class.",
    "generator_distances": "Euclidean: mean over classes within, mean over pairs of classes between, and between class "
    "means.",
    "inversion": "A decoder trained on the test split rebuilds training images from one feature or from means over m. "
    "Only what beats the class's mean image has been learnt from the feature.",
    "inversion_search": "The image is searched whose feature fits; no other images are used. Only what beats the "
    "class's mean image has been learnt from the feature.",
    "gradcam": "GradCAM of the true class at the last convolution; the examples with the highest margins.",
}


def analysis_drawings(analyses: Sequence[StoredAnalysis], run: RunRecord) -> dict[str, Drawing]:
    """Draw the finished analyses of a run, by name; their data are stored with the analyses."""
    return {
        analysis.name: drawing(analysis.name, {"": draw_analysis(analysis, subject_of(run, analysis.name))})
        for analysis in analyses
        if analysis.skipped is None
    }


def draw_analysis(analysis: StoredAnalysis, subject: str) -> Figure:
    """Draw a finished analysis.

    Args:
        analysis: its data.
        subject: what was analysed (dataset, partition, seed, method, round), written above the figure.
    """
    with house_style():
        figure = _DRAWINGS[without_round(analysis.name)[0]](analysis)
        figure.suptitle(subject, fontsize=7.5, color=MUTED, x=0.01, horizontalalignment="left")
        return figure


def subject_of(run: RunRecord, name: str) -> str:
    """Return the text above each figure of a run's analyses."""
    _, number = without_round(name)
    when = f"after round {run.rounds if number is None else number}" if number != 0 else "before the first round"
    return f"{run.dataset}, {run.partition} partition, seed {run.seed}: {run.method} {when}"


def heading(name: str) -> str:
    """Return the heading of an analysis."""
    base, number = without_round(name)
    if number is None:
        return HEADINGS[base]
    return f"{HEADINGS[base]}, {f'after round {number}' if number else 'before the first round'}"


def _generator_distances(analysis: StoredAnalysis) -> Figure:
    columns = {"intra": "within a class", "inter": "between classes", "centroid_inter": "between class means"}
    figure = whole_line(3.2)
    for position, (axes, space) in enumerate(zip(figure.subplots(1, 2), ("feature", "tsne"), strict=True)):
        for offset, (which, colour) in enumerate((("real", REAL), ("generated", MADE))):
            row = next(r for r in analysis.rows if r["features"] == which and r["space"] == space)
            heights = [float(row[column]) if row[column] else np.nan for column in columns]
            bars = axes.bar(np.arange(3) + 0.38 * (offset - 0.5), heights, 0.36, color=colour, label=which)
            axes.bar_label(bars, fmt="%.3g", fontsize=7.5, padding=1.5)
            if row["nearest_distance"]:
                axes.annotate(
                    f"to the nearest real feature of the class: distance {float(row['nearest_distance']):.3g}, "
                    f"cosine {float(row['nearest_cosine']):.3f}",
                    (0.01, -0.16),
                    xycoords="axes fraction",
                    fontsize=7.5,
                )
        axes.set_xticks(range(3), list(columns.values()))
        axes.set_title("feature space" if space == "feature" else "t-SNE embedding (its own scale)")
        axes.set_ylabel("Euclidean distance" if position == 0 else "")
        axes.margins(y=0.12)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
    axes.legend(loc="upper left")
    return figure


_DRAWINGS: Mapping[str, Callable[[StoredAnalysis], Figure]] = {
    "class_heatmap": draw_class_heatmap,
    "class_heatmap_trained": draw_class_heatmap,
    "confusion": draw_confusion,
    "averaged_bodies": draw_class_heatmap,
    "tsne": draw_tsne,
    "tsne_trained": draw_tsne,
    "tsne_projections": draw_tsne,
    "tsne_calibration": draw_calibration,
    "tsne_calibration_trained": draw_calibration_trained,
    "tsne_prototypes": draw_prototypes,
    "tsne_generated": draw_generated,
    "virtual_images": draw_virtual_images,
    "generator_distances": _generator_distances,
    "inversion": draw_inversion,
    "inversion_search": draw_inversion,
    "gradcam": draw_gradcam,
}
