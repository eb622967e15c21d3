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

from pipelines.reporting.figures.parts import whole_line
from pipelines.reporting.figures.style import MOST_SHAPES
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
    """Draw the same test images under one or several models, by true and predicted class, and training samples."""
    arrays = analysis.arrays
    names, models = as_texts(arrays["class_names"]), as_texts(arrays["models"])
    drawn = arrays["labels"], arrays["predictions"]
    colours, tints = _class_colours(len(names), *drawn), _tints(len(models))
    figure = whole_line(4.0)
    panels = figure.subplot_mosaic("abc;abd", width_ratios=(1, 1, 0.8), height_ratios=(3, 1))
    for model in range(len(models)):
        points, marker = arrays["embedding"][model], _MARKERS[model]
        _scatter(panels["a"], points, arrays["labels"], colours, marker)
        _scatter(panels["b"], points, arrays["predictions"][model], colours, marker)
    _bare(panels["a"], "true class")
    _bare(panels["b"], "predicted class")
    scores = [f"{name}: {100 * score:.1f} %" for name, score in zip(models, arrays["accuracies"], strict=True)]
    panels["d"].set_axis_off()
    panels["d"].legend(_marks(tints, _MARKERS), scores, loc="center", title="accuracy on the test set")
    _class_key(figure, panels["a"], names, colours, *drawn)
    bars, width = panels["c"], 0.8 / len(models)
    for model, tint in enumerate(tints):
        offsets = np.arange(len(names)) + (model - (len(models) - 1) / 2) * width
        bars.bar(offsets, arrays["counts"][model], width, color=tint)
    bars.set_title("training samples")
    bars.set_xlabel("class")
    bars.grid(visible=False, axis="x")
    bars.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    ticks = range(0, len(names), -(-len(names) // 12))
    rotation = 0 if max(map(len, names)) <= 2 else 45
    bars.set_xticks(list(ticks), [names[index] for index in ticks], rotation=rotation)
    return figure


def draw_calibration(analysis: StoredAnalysis) -> Figure:
    """Draw the same test images before and after a calibration."""
    arrays = analysis.arrays
    names, models = as_texts(arrays["class_names"]), as_texts(arrays["models"])
    colours, figure = _class_colours(len(names), arrays["labels"]), whole_line(4.6)
    panels = figure.subplots(1, len(models))
    for axes, points, name, score in zip(panels, arrays["embedding"], models, arrays["accuracies"], strict=True):
        _scatter(axes, points, arrays["labels"], colours)
        _bare(axes, f"{name}: {100 * score:.1f} %")
    _class_key(figure, panels[0], names, colours, arrays["labels"])
    return figure


def draw_calibration_trained(analysis: StoredAnalysis) -> Figure:
    """Draw the same test images under clients' models before and after a calibration, by class and client.

    By client, because that is what a calibration is to make disappear, and markers alone do not show it.
    """
    arrays = analysis.arrays
    names, models, states = (as_texts(arrays[key]) for key in ("class_names", "models", "states"))
    colours, tints = _class_colours(len(names), arrays["labels"]), ListedColormap(_CLIENT_COLOURS[: len(models)])
    figure = whole_line(8.2)
    panels = figure.subplots(2, len(states))
    for state, (upper, lower) in enumerate(panels.T):
        for model, points in enumerate(arrays["embedding"][state]):
            _scatter(upper, points, arrays["labels"], colours, _MARKERS[model])
            _scatter(lower, points, np.full(len(points), model), tints, _MARKERS[model])
        _bare(upper, f"{states[state]} (global model: {100 * arrays['global_accuracies'][state]:.1f} %)")
        _bare(lower, "the same, by client")
        scores = [f"{name}: {100 * one:.1f} %" for name, one in zip(models, arrays["accuracies"][state], strict=True)]
        lower.legend(
            *(_marks(_CLIENT_COLOURS[: len(models)], _MARKERS), scores),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.02),
            ncols=2,
        )
    _class_key(figure, panels[0, 0], names, colours, arrays["labels"])
    return figure


def draw_prototypes(analysis: StoredAnalysis) -> Figure:
    """Draw a client's features with the means of their clusters, and the server's prototypes."""
    arrays = analysis.arrays
    names, labels, clusters = as_texts(arrays["class_names"]), arrays["labels"], arrays["clusters"]
    tints = dict(zip(dict.fromkeys(labels.tolist()), (REAL, MADE), strict=False))
    numbers = sorted({int(k) for k in clusters if k > 0})
    figure = whole_line(3.9)
    for axes, k in zip(figure.subplots(1, len(numbers), squeeze=False)[0], numbers, strict=True):
        for label, tint in tints.items():
            for kind, style in (
                (0, {"s": 8, "alpha": 0.35, "linewidths": 0}),
                (k, {"s": 75, "edgecolors": "black", "linewidths": 1.1, "zorder": 3}),
                (-1, {"s": 170, "marker": "*", "edgecolors": "black", "linewidths": 1.1, "zorder": 4}),
            ):
                points = arrays["embedding"][(labels == label) & (clusters == kind)]
                axes.scatter(points[:, 0], points[:, 1], color=tint, **style)
        _bare(axes, "class means" if k == 1 else f"means of {k} clusters")
    handles = _marks(list(tints.values()), "oo")
    texts = [f"class {names[label]}" for label in tints]
    for marker, text in (
        *([("*", "server's prototype")] if (clusters == -1).any() else []),
        ("o", "client's prototype"),
    ):
        handles.append(Line2D([], [], linestyle="", marker=marker, markersize=8, color="white", mec="black"))
        texts.append(text)
    figure.legend(handles, texts, loc="outside lower center", ncols=4)
    return figure


def draw_generated(analysis: StoredAnalysis) -> Figure:
    """Draw real and generated features, by class and by origin."""
    arrays = analysis.arrays
    names, made, labels = as_texts(arrays["class_names"]), arrays["generated"], arrays["labels"]
    colours, origins = _class_colours(len(names), labels), ListedColormap([REAL, MADE])
    figure = whole_line(4.7)
    left, right = figure.subplots(1, 2)
    for which, marker in ((~made, "o"), (made, "x")):
        _scatter(left, arrays["embedding"][which], labels[which], colours, marker)
        _scatter(right, arrays["embedding"][which], made[which].astype(int), origins, marker)
    _bare(left, "by class")
    _bare(right, "by origin")
    right.legend(
        *(_marks([REAL, MADE], "ox"), ["real", "generated"]), loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2
    )
    _class_key(figure, left, names, colours, labels)
    return figure


def as_texts(values: np.ndarray) -> list[str]:
    """Return an array of names as a list."""
    return [str(value) for value in values]


def _marks(colours: Sequence[str], markers: Sequence[str]) -> list[Line2D]:
    """Return the marks of a legend."""
    pairs = zip(colours, markers, strict=False)
    return [Line2D([], [], linestyle="", marker=marker, color=colour) for colour, marker in pairs]


def _class_colours(count: int, *drawn: np.ndarray) -> ListedColormap:
    """Return a colour per class; with more classes than colours, the drawn ones differ most."""
    if count <= len(_CLASS_COLOURS):
        return ListedColormap(list(_CLASS_COLOURS[:count]))
    classes = _distinct(drawn)
    hues = matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, len(classes)))
    some = _CLASS_COLOURS if len(classes) <= len(_CLASS_COLOURS) else hues
    indices = np.searchsorted(classes, np.arange(count)).clip(max=len(classes) - 1)
    return ListedColormap([some[index] for index in indices])


def _distinct(drawn: Iterable[np.ndarray]) -> np.ndarray:
    """Return the class numbers in arrays, ascending."""
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
    """Remove the ticks of a panel: the axes of an embedding have no unit."""
    axes.set(title=title, xticks=[], yticks=[], box_aspect=1)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)


def _class_key(figure: Figure, axes: Axes, names: Sequence[str], colours: ListedColormap, *drawn: np.ndarray) -> None:
    """Add the colours of the drawn classes: a legend below the figure, or a bar below a panel for many classes."""
    classes = _distinct(drawn).tolist()
    if len(classes) > len(_CLASS_COLOURS):
        mappable = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-0.5, len(names) - 0.5), colours)
        figure.colorbar(mappable, ax=axes, label="class number", orientation="horizontal", fraction=0.05, pad=0.04)
        return
    handles = [Line2D([], [], linestyle="", marker="o", color=colours(label)) for label in classes]
    texts = [names[label] for label in classes]
    columns = 10 if max(map(len, texts)) < 8 else 5
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, title="class")


def _tints(count: int) -> list[str]:
    return ["#5b6f8a"] if count == 1 else ["#25364d", "#5b7aa5", "#98b4d4", "#c0894f"][:count]
