"""Figures of analyses: drawn from what `pipelines.runs.analyses` stored; what was analysed stands above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pipelines.reporting.figures.charts import (
    ACCURACY_COLOURS,
    INK,
    MOST_SHAPES,
    WIDTH,
    annotate_cells,
    draw_cells,
    house_style,
    name_cells,
    percent_axis,
    save,
)
from pipelines.runs.analyses import StoredAnalysis
from pipelines.runs.record import RunRecord

_MARKERS = ("o", "^", "s", "D")
_MADE, _REAL, _GUESS = "#D55E00", "#0072B2", "#888888"
# Ten colours that stay apart; more classes share hues of a continuous map, which a colour bar explains.
_CLASS_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#882255", "#666666", "#117733", "#AA4499"),
)

HEADINGS: Mapping[str, str] = {
    "class_heatmap": "Accuracy by client and class",
    "tsne": "Features of test images",
    "tsne_calibration": "Features before and after calibration",
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
    "tsne": "t-SNE (perplexity 30, from a PCA); its axes have no unit. Colour: true class, then predicted class; "
    "marker: model. Right: training samples.",
    "tsne_calibration": "t-SNE of the same test images under both models, each in an embedding of its own; accuracy on "
    "the whole test set.",
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


def draw_analysis(analysis: StoredAnalysis, subject: str) -> Figure:
    """The figure of an analysis that was done.

    Args:
        analysis: its data.
        subject: what was analysed (dataset, partition, seed, method, round), written above the figure.
    """
    with house_style():
        figure = _DRAWINGS[analysis.name](analysis)
        figure.suptitle(subject, fontsize=7.5, color="#777777", x=0.01, horizontalalignment="left")
        return figure


def subject_of(run: RunRecord) -> str:
    """What every figure of a run's analyses states above it."""
    return f"{run.dataset}, {run.partition} partition, seed {run.seed}: {run.method} after round {run.rounds}"


def write_analyses(analyses: Sequence[StoredAnalysis], run: RunRecord, directory: Path) -> tuple[Path, ...]:
    """Write ``<name>.png`` of every analysis that was done into an existing folder; returns the files."""
    return tuple(
        save(draw_analysis(analysis, subject_of(run)), directory / f"{analysis.name}.png")
        for analysis in analyses
        if analysis.skipped is None
    )


def _class_heatmap(analysis: StoredAnalysis) -> Figure:
    classes = list(dict.fromkeys(row["class"] for row in analysis.rows))
    models = list(dict.fromkeys(row["model"] for row in analysis.rows))
    tests = [test for test in ("all", "own") if any(row["test"] == test for row in analysis.rows)]
    if not any(row["test"] == "all" and row["model"] != "global" for row in analysis.rows):
        tests = ["own"]  # one panel, whose last row is the global model's
    panels = []
    for test in tests:
        table = np.full((len(models), len(classes)), np.nan)
        for row in analysis.rows:
            if row["accuracy"] and (row["test"] == test or (len(tests) == 1 and row["model"] == "global")):
                table[models.index(row["model"]), classes.index(row["class"])] = float(row["accuracy"])
        panels.append((test, table))
    height = min(max(1.3 + 0.24 * len(models), 2.2), 9.0)
    figure = Figure(figsize=(WIDTH, height))
    titles = {"all": "whole test set", "own": "clients' own test data"}
    axes_list = []
    for position, (test, table) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), position + 1)
        mesh = draw_cells(axes, table, ACCURACY_COLOURS, 1.0)
        name_cells(axes.xaxis, classes, 26 // len(panels))
        name_cells(axes.yaxis, models, 30)
        if "global" in models:
            axes.axhline(len(models) - 1, color=INK, linewidth=1.2)
        axes.set_xlabel("class")
        axes.set_ylabel("client" if position == 0 else "")
        if len(panels) > 1:
            axes.set_title(titles[test])
        if table.size <= 400 and len(classes) <= 24 // len(panels):
            annotate_cells(axes, table, mesh, lambda value: f"{100 * value:.0f}")
        axes_list.append(axes)
    bar = figure.colorbar(mesh, ax=axes_list, label="accuracy", pad=0.015, fraction=0.03, aspect=max(10, 6 * height))
    percent_axis(bar.ax.yaxis)
    return figure


def _tsne(analysis: StoredAnalysis) -> Figure:
    arrays = analysis.arrays
    names, models = _texts(arrays["class_names"]), _texts(arrays["models"])
    colours = _class_colours(len(names))
    figure = Figure(figsize=(WIDTH, 4.0))
    panels = figure.subplot_mosaic(
        [["label", "prediction", "bars"], ["label", "prediction", "key"]],
        width_ratios=(1, 1, 0.8),
        height_ratios=(3, 1),
    )
    left, middle, right, key = panels["label"], panels["prediction"], panels["bars"], panels["key"]
    for axes, title, by in (
        (left, "true class", np.broadcast_to(arrays["labels"], arrays["predictions"].shape)),
        (middle, "predicted class", arrays["predictions"]),
    ):
        for model in range(len(models)):
            _scatter(axes, arrays["embedding"][model], by[model], colours, marker=_MARKERS[model])
        _bare(axes, title)
    scores = [f"{name}: {100 * score:.1f} %" for name, score in zip(models, arrays["accuracies"], strict=True)]
    tints = _tints(len(models))
    handles = [Line2D([], [], linestyle="", marker=_MARKERS[model], color=tints[model]) for model in range(len(models))]
    key.set_axis_off()
    key.legend(handles, scores, loc="center", frameon=False, fontsize=7.5, title="accuracy on the test set")
    _class_key(figure, left, names, colours)
    width = 0.8 / len(models)
    for model in range(len(models)):
        offsets = np.arange(len(names)) + (model - (len(models) - 1) / 2) * width
        right.bar(offsets, arrays["counts"][model], width, color=tints[model])
    right.set_title("training samples")
    right.set_xlabel("class")
    right.grid(visible=False, axis="x")
    right.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    _name_positions(right, names, 12)
    return figure


def _tsne_calibration(analysis: StoredAnalysis) -> Figure:
    arrays = analysis.arrays
    names, models = _texts(arrays["class_names"]), _texts(arrays["models"])
    colours = _class_colours(len(names))
    figure = Figure(figsize=(WIDTH, 4.6))
    panels = figure.subplots(1, len(models))
    for axes, points, name, score in zip(panels, arrays["embedding"], models, arrays["accuracies"], strict=True):
        _scatter(axes, points, arrays["labels"], colours)
        _bare(axes, f"{name}: {100 * score:.1f} %")
    _class_key(figure, panels[0], names, colours)
    return figure


def _tsne_prototypes(analysis: StoredAnalysis) -> Figure:
    arrays = analysis.arrays
    names, labels, clusters = _texts(arrays["class_names"]), arrays["labels"], arrays["clusters"]
    classes = list(dict.fromkeys(labels.tolist()))
    tints = dict(zip(classes, (_REAL, _MADE), strict=False))
    figure = Figure(figsize=(WIDTH, 3.9))
    numbers = sorted({int(k) for k in clusters if k > 0})
    for position, (axes, k) in enumerate(zip(figure.subplots(1, len(numbers)), numbers, strict=True)):
        for label in classes:
            for kind, style in (
                (0, {"s": 8, "alpha": 0.35, "linewidths": 0}),
                (k, {"s": 75, "edgecolors": "black", "linewidths": 1.1, "zorder": 3}),
                (-1, {"s": 170, "marker": "*", "edgecolors": "black", "linewidths": 1.1, "zorder": 4}),
            ):
                points = arrays["embedding"][(labels == label) & (clusters == kind)]
                axes.scatter(points[:, 0], points[:, 1], color=tints[label], **style)
        _bare(axes, "class means" if k == 1 else f"means of {k} clusters")
        if position == 0:
            handles = [Line2D([], [], linestyle="", marker="o", color=tints[label]) for label in classes]
            texts = [f"class {names[label]}" for label in classes]
            if (clusters == -1).any():
                handles.append(Line2D([], [], linestyle="", marker="*", markersize=11, color="white", mec="black"))
                texts.append("server's prototype")
            handles.append(Line2D([], [], linestyle="", marker="o", markersize=7, color="white", mec="black"))
            texts.append("client's prototype")
            figure.legend(handles, texts, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _tsne_generated(analysis: StoredAnalysis) -> Figure:
    arrays = analysis.arrays
    names, made = _texts(arrays["class_names"]), arrays["generated"]
    colours = _class_colours(len(names))
    figure = Figure(figsize=(WIDTH, 4.7))
    left, right = figure.subplots(1, 2)
    for which, marker in ((~made, "o"), (made, "x")):
        _scatter(left, arrays["embedding"][which], arrays["labels"][which], colours, marker=marker)
    _bare(left, "by class")
    for which, colour, name, marker in ((~made, _REAL, "real", "o"), (made, _MADE, "generated", "x")):
        points = arrays["embedding"][which]
        lines = 0.9 if marker == "x" else 0
        right.scatter(
            points[:, 0],
            points[:, 1],
            s=12,
            color=colour,
            marker=marker,
            linewidths=lines,
            alpha=0.7,
            label=name,
            rasterized=len(made) > MOST_SHAPES,
        )
    _bare(right, "by origin")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False)
    _class_key(figure, left, names, colours)
    return figure


def _virtual_images(analysis: StoredAnalysis) -> Figure:
    sheet, names = analysis.arrays["sheet"], _texts(analysis.arrays["class_names"])
    figure = Figure(figsize=(WIDTH, min(WIDTH * sheet.shape[0] / sheet.shape[1] + 0.5, 16)))
    axes = figure.add_subplot()
    _show(axes, sheet.transpose(2, 0, 1))
    axes.set_xticks([])
    step, height = -(-len(names) // 40), sheet.shape[0] / len(names)
    axes.set_yticks([(row + 0.5) * height for row in range(0, len(names), step)], names[::step])
    axes.set_ylabel("class")
    axes.tick_params(length=0)
    return figure


def _generator_distances(analysis: StoredAnalysis) -> Figure:
    columns = {"intra": "within a class", "inter": "between classes", "centroid_inter": "between class means"}
    figure = Figure(figsize=(WIDTH, 3.2))
    for position, (axes, space) in enumerate(zip(figure.subplots(1, 2), ("feature", "tsne"), strict=True)):
        for offset, (which, colour) in enumerate((("real", _REAL), ("generated", _MADE))):
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
    axes.legend(frameon=False, loc="upper left")
    return figure


def _inversion(analysis: StoredAnalysis) -> Figure:
    attacks = list(dict.fromkeys(row["attack"] for row in analysis.rows))
    sizes = list(dict.fromkeys(row["m"] for row in analysis.rows))
    figure = Figure(figsize=(WIDTH, 8.0))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.75), squeeze=False)[:, 0]
    panels = top.subplots(1, 3)
    handles: list[Any] = []
    for axes, column, title in zip(
        panels,
        ("mse", "ssim", "accuracy"),
        ("mean squared error (pixels 0 to 1)", "structural similarity", "taken for its class"),
        strict=True,
    ):
        for attack, colour in zip(attacks, (_MADE, _GUESS), strict=True):
            # Whether the model recognises an image does not depend on what it is compared with.
            for against, dashes in (("closest", "-"), ("class mean", ":"))[: 1 if column == "accuracy" else 2]:
                rows = [row for row in analysis.rows if row["attack"] == attack and row["against"] == against]
                heights = [float(row[column]) for row in rows]
                positions = [sizes.index(row["m"]) for row in rows]
                lines = axes.plot(
                    positions,
                    heights,
                    color=colour,
                    linestyle=dashes,
                    marker="o",
                    markersize=3,
                    label=f"{attack}, against the {'closest member' if against == 'closest' else against}",
                )
                handles += lines if column == "mse" else []
        axes.set_title(title)
        axes.set_xticks(range(len(sizes)), sizes, rotation=45 if len(sizes) > 6 else 0)
        axes.set_xlabel("features averaged, m")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    percent_axis(panels[2].yaxis)
    panels[2].set_ylim(-0.03, 1.03)
    top.legend(handles, [str(line.get_label()) for line in handles], loc="outside lower center", ncols=2, frameon=False)
    _sheet(bottom.add_subplot(), analysis)
    return figure


def _sheet(axes: Axes, analysis: StoredAnalysis, most: int = 5) -> None:
    """Pairs of rows per class: the closest image, and what was rebuilt of it; a column per m, and the guess."""
    arrays = analysis.arrays
    names = _texts(arrays["class_names"])
    labels = arrays["labels"][:most]
    if len(labels) == 0:
        axes.set_axis_off()
        return
    strips, texts = [], []
    for position, label in enumerate(labels):
        blank = np.full_like(arrays["guesses"][position], 255)
        strips.append([*arrays["truths"][position], blank])
        strips.append([*arrays["rebuilt"][position], arrays["guesses"][position]])
        texts += [f"class {names[label]}: closest member", "rebuilt"]
    height, width = strips[0][0].shape[-2:]
    gap = max(1, height // 14)
    rows, columns = len(strips), len(strips[0])
    canvas = np.full((strips[0][0].shape[0], rows * (height + gap), columns * (width + gap)), 255, dtype=np.uint8)
    for row, strip in enumerate(strips):
        for column, image in enumerate(strip):
            top, left = row * (height + gap), column * (width + gap)
            canvas[:, top : top + height, left : left + width] = image
    _show(axes, canvas)
    axes.set_xticks(
        [column * (width + gap) + width / 2 for column in range(columns)],
        [*_texts(arrays["sizes"]), "class mean\nimage"],
    )
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("features averaged, m")
    axes.set_yticks([row * (height + gap) + height / 2 for row in range(rows)], texts)
    axes.tick_params(length=0)


def _gradcam(analysis: StoredAnalysis) -> Figure:
    arrays = analysis.arrays
    names, cases = _texts(arrays["class_names"]), _texts(arrays["cases"])
    examples = max((cases.count(row["case"]) for row in analysis.rows), default=1)
    figure = Figure(figsize=(WIDTH, 1.35 * len(analysis.rows) + 0.5))
    engine = figure.get_layout_engine()
    assert engine is not None  # the house style has one
    engine.set(hspace=0.2, rect=(0, 0, 1, 0.955))  # type: ignore[call-arg]
    grid = figure.subplots(len(analysis.rows), 3 * max(examples, 1), squeeze=False)
    shown = None
    for line, row in zip(grid, analysis.rows, strict=True):
        for axes in line:
            axes.set_axis_off()
        share = 100 * float(row["share"])
        line[0].text(
            0,
            1.33,
            f"{row['case']}: {row['count']} images, {share:.1f} %",
            transform=line[0].transAxes,
            fontweight="bold",
            in_layout=False,  # else the first column would be as wide as this line
        )
        for place, example in enumerate(np.flatnonzero(arrays["cases"] == row["case"])):
            image, label = arrays["images"][example], names[arrays["labels"][example]]
            titles = (
                f"true {label}",
                *(f"{when}: {names[arrays[f'predicted_{when}'][example]]}" for when in ("before", "after")),
            )
            maps = (None, arrays["before"][example], arrays["after"][example])
            for axes, title, heat in zip(line[3 * place : 3 * place + 3], titles, maps, strict=True):
                _show(axes, image)
                if heat is not None:
                    shown = axes.imshow(heat, cmap="inferno", alpha=0.6, vmin=0, vmax=1)
                axes.set_title(title, fontsize=7, fontweight="normal", loc="center", pad=2)
    if shown is not None:
        figure.colorbar(shown, ax=grid, label="weight of the place, of its maximum", fraction=0.02, pad=0.01)
    return figure


_DRAWINGS: Mapping[str, Callable[[StoredAnalysis], Figure]] = {
    "class_heatmap": _class_heatmap,
    "tsne": _tsne,
    "tsne_calibration": _tsne_calibration,
    "tsne_prototypes": _tsne_prototypes,
    "tsne_generated": _tsne_generated,
    "virtual_images": _virtual_images,
    "generator_distances": _generator_distances,
    "inversion": _inversion,
    "inversion_search": _inversion,
    "gradcam": _gradcam,
}


# ------------------------------------------------------------------------------------------------------------ parts


def _texts(values: np.ndarray) -> list[str]:
    return [str(value) for value in values]


def _class_colours(count: int) -> ListedColormap:
    if count <= len(_CLASS_COLOURS):
        return ListedColormap(list(_CLASS_COLOURS[:count]))
    return ListedColormap(matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, count)))


def _scatter(axes: Axes, points: np.ndarray, labels: np.ndarray, colours: ListedColormap, marker: str = "o") -> None:
    axes.scatter(
        points[:, 0],
        points[:, 1],
        c=labels,
        cmap=colours,
        vmin=-0.5,
        vmax=colours.N - 0.5,
        s=12,
        marker=marker,
        linewidths=0.9 if marker == "x" else 0,
        alpha=0.75,
        rasterized=len(points) > MOST_SHAPES // 4,
    )


def _bare(axes: Axes, title: str) -> None:
    """A panel without ticks: the axes of an embedding have no unit."""
    axes.set_title(title)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_box_aspect(1)
    for spine in axes.spines.values():
        spine.set_visible(True)


def _class_key(figure: Figure, axes: Axes, names: Sequence[str], colours: ListedColormap) -> None:
    """Which colour is which class: a legend below the figure, or for many classes a bar below one panel."""
    if len(names) <= len(_CLASS_COLOURS):
        handles = [Line2D([], [], linestyle="", marker="o", color=colours(label)) for label in range(len(names))]
        columns = 10 if max(map(len, names)) < 8 else 5
        figure.legend(handles, list(names), loc="outside lower center", ncols=columns, frameon=False, title="class")
        return
    mappable = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-0.5, len(names) - 0.5), colours)
    figure.colorbar(mappable, ax=axes, label="class number", orientation="horizontal", fraction=0.05, pad=0.04)


def _name_positions(axes: Axes, names: Sequence[str], most: int) -> None:
    step = -(-len(names) // most)
    positions = range(0, len(names), step)
    rotation = 0 if max(map(len, names)) <= 2 else 45
    axes.set_xticks(list(positions), [names[position] for position in positions], rotation=rotation)


def _tints(count: int) -> list[str]:
    return ["#5b6f8a"] if count == 1 else ["#25364d", "#5b7aa5", "#98b4d4", "#c0894f"][:count]


def _show(axes: Axes, image: np.ndarray) -> None:
    """An image uint8 [C, H, W], every pixel as a square."""
    pixels = image.transpose(1, 2, 0)
    axes.imshow(
        pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest"
    )
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
