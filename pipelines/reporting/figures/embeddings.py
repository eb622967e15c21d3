"""Figures of embeddings: t-SNE of features, by class, by model, beside prototypes and generated features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pipelines.reporting.figures.style import MOST_SHAPES, WIDTH
from pipelines.runs.analyses import StoredAnalysis

MADE, REAL = "#d55e00", "#0072b2"
_MARKERS = ("o", "^", "s", "D")
# Ten colours that stay apart; more classes share hues of a continuous map, which a colour bar explains.
_CLASS_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#882255", "#666666", "#117733", "#aa4499"),
)

_CLIENT_COLOURS = ("#25364d", "#e0a458", "#8fb339", "#b24c63")


def draw_tsne(analysis: StoredAnalysis) -> Figure:
    """The same test images under one or several models, by true and by predicted class, and what was trained on."""
    arrays = analysis.arrays
    names, models = as_texts(arrays["class_names"]), as_texts(arrays["models"])
    colours = _class_colours(len(names), arrays["labels"], arrays["predictions"])
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
    _class_key(figure, left, names, colours, arrays["labels"], arrays["predictions"])
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


def draw_calibration(analysis: StoredAnalysis) -> Figure:
    """The same test images before and after a calibration."""
    arrays = analysis.arrays
    names, models = as_texts(arrays["class_names"]), as_texts(arrays["models"])
    colours = _class_colours(len(names), arrays["labels"])
    figure = Figure(figsize=(WIDTH, 4.6))
    panels = figure.subplots(1, len(models))
    for axes, points, name, score in zip(panels, arrays["embedding"], models, arrays["accuracies"], strict=True):
        _scatter(axes, points, arrays["labels"], colours)
        _bare(axes, f"{name}: {100 * score:.1f} %")
    _class_key(figure, panels[0], names, colours, arrays["labels"])
    return figure


def draw_calibration_trained(analysis: StoredAnalysis) -> Figure:
    """The same test images under several clients' models before and after a calibration, by class and by client.

    By client, because that is what a calibration is to make disappear, and markers alone do not show it.
    """
    arrays = analysis.arrays
    names, models, states = (as_texts(arrays[key]) for key in ("class_names", "models", "states"))
    colours, tints = _class_colours(len(names), arrays["labels"]), ListedColormap(_CLIENT_COLOURS[: len(models)])
    figure = Figure(figsize=(WIDTH, 8.2))
    panels = figure.subplots(2, len(states))
    for state, points in enumerate(arrays["embedding"]):
        for model in range(len(models)):
            _scatter(panels[0, state], points[model], arrays["labels"], colours, marker=_MARKERS[model])
            _scatter(panels[1, state], points[model], np.full(points.shape[1], model), tints, marker=_MARKERS[model])
        score = 100 * arrays["global_accuracies"][state]
        _bare(panels[0, state], f"{states[state]} (global model: {score:.1f} %)")
        _bare(panels[1, state], "the same, by client")
        scores = [f"{name}: {100 * own:.1f} %" for name, own in zip(models, arrays["accuracies"][state], strict=True)]
        handles = [
            Line2D([], [], linestyle="", marker=_MARKERS[model], color=tints(model)) for model in range(len(models))
        ]
        panels[1, state].legend(
            handles, scores, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False
        )
    _class_key(figure, panels[0, 0], names, colours, arrays["labels"])
    return figure


def draw_prototypes(analysis: StoredAnalysis) -> Figure:
    """A client's features with the means of their clusters, and the server's prototypes."""
    arrays = analysis.arrays
    names, labels, clusters = as_texts(arrays["class_names"]), arrays["labels"], arrays["clusters"]
    classes = list(dict.fromkeys(labels.tolist()))
    tints = dict(zip(classes, (REAL, MADE), strict=False))
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


def draw_generated(analysis: StoredAnalysis) -> Figure:
    """Real and generated features, by class and by origin."""
    arrays = analysis.arrays
    names, made = as_texts(arrays["class_names"]), arrays["generated"]
    colours = _class_colours(len(names), arrays["labels"])
    figure = Figure(figsize=(WIDTH, 4.7))
    left, right = figure.subplots(1, 2)
    for which, marker in ((~made, "o"), (made, "x")):
        _scatter(left, arrays["embedding"][which], arrays["labels"][which], colours, marker=marker)
    _bare(left, "by class")
    for which, colour, name, marker in ((~made, REAL, "real", "o"), (made, MADE, "generated", "x")):
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
    _class_key(figure, left, names, colours, arrays["labels"])
    return figure


def as_texts(values: np.ndarray) -> list[str]:
    """An array of names."""
    return [str(value) for value in values]


def _class_colours(count: int, *drawn: np.ndarray) -> ListedColormap:
    """A colour of each class; where there are more classes than colours, those that are drawn are set apart."""
    if count <= len(_CLASS_COLOURS):
        return ListedColormap(list(_CLASS_COLOURS[:count]))
    classes = _distinct(drawn)
    hues = matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, len(classes)))
    some = _CLASS_COLOURS if len(classes) <= len(_CLASS_COLOURS) else hues
    places = np.searchsorted(classes, np.arange(count)).clip(max=len(classes) - 1)
    return ListedColormap([some[place] for place in places])


def _distinct(drawn: Iterable[np.ndarray]) -> np.ndarray:
    """The numbers of the classes in some arrays, ascending."""
    return np.unique(np.concatenate([labels.ravel() for labels in drawn]))


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


def _class_key(figure: Figure, axes: Axes, names: Sequence[str], colours: ListedColormap, *drawn: np.ndarray) -> None:
    """Which colour is which of the classes drawn: a legend below the figure, or of many classes a bar below a panel."""
    classes = _distinct(drawn).tolist()
    if len(classes) <= len(_CLASS_COLOURS):
        handles = [Line2D([], [], linestyle="", marker="o", color=colours(label)) for label in classes]
        texts = [names[label] for label in classes]
        columns = 10 if max(map(len, texts)) < 8 else 5
        figure.legend(handles, texts, loc="outside lower center", ncols=columns, frameon=False, title="class")
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
