"""Figures of runs and comparisons: for each a function that gives the data and one that draws them.

`*_data` turns records into a table (that is what tests check, and what `pipelines/reporting/figures/sets.py`
saves beside each figure); `draw_*` turns records into a matplotlib `Figure`; `svg_text` and `save` turn a `Figure` into
bytes. Nothing here touches pyplot, so no figure survives its caller, and the same records give the same bytes.

A method keeps its colour and line through all figures: they follow from its place in the list of methods.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flcore.errors import DataError
from pipelines.reporting.formats import MISSING, format_bytes
from pipelines.runs.record import RoundRecord, RunRecord, group_by_method

PANEL_TITLES: Mapping[str, str] = {
    "top1_global": "Global model on the global test set",
    "mean_local": "Mean over clients, own test data",
}
CURVE_METRICS = tuple(PANEL_TITLES)
_PARTS = ("train", "val", "test")
# 900 px at the 96 dpi of a browser.
WIDTH = 9.4

# Okabe and Ito's palette without its yellow (invisible on white), plus a wine red and a grey; told apart by people with
# any of the common colour-vision deficiencies. A second and third round of methods changes the dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#666666")
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK = "#333333"
_GRID = "#e4e4e4"
_COUNTS = LinearSegmentedColormap.from_list("counts", ["#ffffff", "#dcd6ee", "#a596cf", "#6a51a3", "#3a0f70"])
ACCURACY_COLOURS = LinearSegmentedColormap.from_list(
    "accuracy", ["#ffffff", "#cfe3f2", "#7fb6d9", "#2f7ebc", "#08376b"]
)
# A path per cell or point is crisp, thousands of them make a page heavy: from here on they become one picture.
MOST_SHAPES = 2500

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same outlines
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": 8.5,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.constrained_layout.h_pad": 0.06,
    "savefig.dpi": 150,
    "svg.fonttype": "path",  # outlines look the same in every viewer, with or without the font
    "svg.hashsalt": "protofl",
}


@dataclass(frozen=True)
class LineStyle:
    """How a method is drawn."""

    colour: str
    dashes: Any


@dataclass(frozen=True)
class PartitionTable:
    """Who holds what: `counts` is int64 of shape (clients, classes); `sizes` has the columns train, val and test."""

    client_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    counts: np.ndarray
    sizes: pd.DataFrame
    manifest: Mapping[str, Any]


# ------------------------------------------------------------------------------------------------------------- data


def load_partition(directory: Path) -> PartitionTable:
    """Read `manifest.json` of a partition directory.

    Args:
        directory: holds `manifest.json` with `clients`, each with `id` and `class_counts` (a list, or an object keyed
            by class number); `num_classes`, `class_names` and the sizes are used where they are given.

    Returns:
        The table; clients stay in the manifest's order, absent classes count 0.

    Raises:
        DataError: the manifest is missing or damaged, or names no clients with class counts.
    """
    path = Path(directory) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error.__class__.__name__}); make the partition again.") from error
    clients = manifest.get("clients") if isinstance(manifest, dict) else None
    if not clients or any("class_counts" not in client for client in clients):
        raise DataError(f"{path}: no clients with 'class_counts'; make the partition again.")
    by_class = [_counts_by_class(client["class_counts"]) for client in clients]
    num_classes = max(int(manifest.get("num_classes") or 0), 1 + max(max(row, default=0) for row in by_class))
    counts = np.zeros((len(clients), num_classes), dtype=np.int64)
    for position, row in enumerate(by_class):
        for label, count in row.items():
            counts[position, label] = count
    names = manifest.get("class_names") or []
    return PartitionTable(
        client_ids=tuple(str(client.get("id", position)) for position, client in enumerate(clients)),
        class_names=tuple(str(names[label]) if label < len(names) else str(label) for label in range(num_classes)),
        counts=counts,
        sizes=pd.DataFrame(
            [[client.get("sizes", client).get(part) for part in _PARTS] for client in clients], columns=list(_PARTS)
        ),
        manifest=manifest,
    )


def _counts_by_class(counts: Any) -> dict[int, int]:
    pairs = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return {int(label): int(count) for label, count in pairs}


def curve_data(runs: Iterable[RunRecord], metric: str) -> pd.DataFrame:
    """Accuracy by round, mean and sample standard deviation over seeds.

    Args:
        runs: any methods and seeds.
        metric: field of a round record, such as `top1_global`.

    Returns:
        Columns method, round, mean, std (NaN for one seed), n. Only rounds that every seed of a method evaluated, so
        that a curve never changes its seeds half-way; methods without the metric have no rows.
    """
    return over_seeds(runs, lambda record: getattr(record, metric), "mean")


def bytes_accuracy_data(runs: Iterable[RunRecord], metric: str) -> pd.DataFrame:
    """Accuracy against cumulative traffic (up + down, all clients), mean over seeds at equal rounds.

    Returns:
        Columns method, round, bytes, accuracy, n.
    """
    runs = list(runs)
    accuracy = curve_data(runs, metric).rename(columns={"mean": "accuracy"})
    traffic = over_seeds(runs, lambda record: record.total_bytes, "bytes")
    merged = accuracy.drop(columns="std").merge(traffic[["method", "round", "bytes"]], on=["method", "round"])
    return merged[["method", "round", "bytes", "accuracy", "n"]]


def training_loss_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Training-loss terms by round.

    Returns:
        Columns term, method, round, mean, std, n; terms that most methods have come first, then by name.
    """
    runs = list(runs)
    users: dict[str, set[str]] = {}
    for run in runs:
        for term in (term for record in run.history for term in record.train_loss):
            users.setdefault(term, set()).add(run.method)
    terms = sorted(users, key=lambda term: (-len(users[term]), term))
    tables = [over_seeds(runs, _term_reader(term), "mean").assign(term=term) for term in terms]
    columns = ["term", "method", "round", "mean", "std", "n"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def _term_reader(term: str) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.train_loss.get(term)


def client_accuracy_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Accuracy of every client in the last evaluated round of every run.

    Returns:
        Columns method, seed, client (position, from 0), accuracy; clients without test data have no row.
    """
    rows = [
        {"method": run.method, "seed": run.seed, "client": client, "accuracy": accuracy}
        for method_runs in group_by_method(runs).values()
        for run in method_runs
        if run.history
        for client, accuracy in enumerate(run.history[-1].local_accuracy)
        if accuracy is not None
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "client", "accuracy"])


def class_accuracy_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Class-wise accuracy, mean over the seeds that have a value for the class.

    Returns:
        A row per method that reports class accuracies (index = method), a column per class; NaN where no seed knows.
    """
    rows: dict[str, list[float]] = {}
    for method, method_runs in group_by_method(runs).items():
        width = max(len(run.class_acc) for run in method_runs)
        by_class = [
            [run.class_acc[label] for run in method_runs if label < len(run.class_acc)] for label in range(width)
        ]
        present = [[value for value in values if value is not None] for values in by_class]
        if any(present):
            rows[method] = [fmean(values) if values else math.nan for values in present]
    return pd.DataFrame.from_dict(rows, orient="index")


def partition_data(partition: PartitionTable) -> pd.DataFrame:
    """Samples per client (index = client id) and class (columns = class names)."""
    return pd.DataFrame(partition.counts, index=list(partition.client_ids), columns=list(partition.class_names))


def over_seeds(runs: Iterable[RunRecord], read: Callable[[RoundRecord], float | None], name: str) -> pd.DataFrame:
    """A value of round records by round, mean (column ``name``), sample standard deviation and n over seeds."""
    rows = []
    for method, method_runs in group_by_method(runs).items():
        curves = [
            {record.round: value for record in run.history if (value := read(record)) is not None}
            for run in method_runs
        ]
        curves = [curve for curve in curves if curve]
        common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        for number in sorted(common):
            values = [curve[number] for curve in curves]
            spread = stdev(values) if len(values) > 1 else math.nan
            rows.append({"method": method, "round": number, name: fmean(values), "std": spread, "n": len(values)})
    return pd.DataFrame(rows, columns=["method", "round", name, "std", "n"])


# ---------------------------------------------------------------------------------------------------------- drawing


def method_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Give each method its colour and dashes by its place in the list; the first eight are solid."""
    return {
        method: LineStyle(_COLOURS[position % len(_COLOURS)], _DASHES[position // len(_COLOURS) % len(_DASHES)])
        for position, method in enumerate(methods)
    }


def draw_accuracy_curves(runs: Sequence[RunRecord]) -> Figure:
    """Accuracy against rounds: mean over seeds as a line, ± one sample standard deviation as a band.

    One panel for the global model, one for the mean over clients; a panel no method has values for is left out.
    """
    styles = method_styles(list(group_by_method(runs)))
    tables = {metric: table for metric in CURVE_METRICS if not (table := curve_data(runs, metric)).empty}
    with house_style():
        figure, panels = _panel_row(len(tables), len(styles))
        for axes, (metric, table) in zip(panels, tables.items(), strict=True):
            for method, curve in _by_method(table):
                style, mean, std = styles[method], curve["mean"], curve["std"].fillna(0)
                axes.fill_between(curve["round"], mean - std, mean + std, color=style.colour, alpha=0.15, linewidth=0)
                _draw_line(axes, curve["round"], mean, style)
            axes.set_title(PANEL_TITLES[metric])
            axes.set_xlabel("round")
            axes.set_ylabel("accuracy")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            percent_axis(axes.yaxis)
            ends = {method: _last(curve, "round", "mean") for method, curve in _by_method(table)}
            _label_line_ends(axes, ends, styles, figure.get_figheight())
        return figure


def draw_bytes_against_accuracy(runs: Sequence[RunRecord]) -> Figure:
    """Accuracy against cumulative bytes in both directions (log axis), mean over seeds.

    A method that sends nothing has no place on a log axis: its final accuracy is a horizontal dotted line.
    """
    styles = method_styles(list(group_by_method(runs)))
    tables = {metric: table for metric in CURVE_METRICS if not (table := bytes_accuracy_data(runs, metric)).empty}
    with house_style():
        figure, panels = _panel_row(len(tables), len(styles))
        for axes, (metric, table) in zip(panels, tables.items(), strict=True):
            sent = table[table["bytes"] > 0]
            right = sent["bytes"].max() if not sent.empty else 1.0
            ends, names = {}, {}
            for method, curve in _by_method(table):
                on_axis = curve[curve["bytes"] > 0]
                if on_axis.empty:
                    final = curve["accuracy"].iloc[-1]
                    axes.axhline(final, color=styles[method].colour, linestyle=(0, (1, 2)), linewidth=1.2)
                    ends[method] = (right, final)
                    names[method] = f"{method} (0 B)"
                else:
                    _draw_line(axes, on_axis["bytes"], on_axis["accuracy"], styles[method])
                    ends[method] = _last(on_axis, "bytes", "accuracy")
            axes.set_xscale("log")
            axes.set_title(PANEL_TITLES[metric])
            axes.set_xlabel("bytes up + down, all clients, cumulative")
            axes.set_ylabel("accuracy")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".00", "")))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
            percent_axis(axes.yaxis)
            _label_line_ends(axes, ends, styles, figure.get_figheight(), names)
        return figure


def draw_partition(partition: PartitionTable) -> Figure:
    """Samples per class (rows) and client (columns): white is none, darker is more, one colour bar."""
    clients, classes = partition.counts.shape
    with house_style():
        height = min(max(1.4 + 0.24 * classes, 2.2), 7.5)
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_subplot()
        top = max(int(partition.counts.max()), 1)
        mesh = draw_cells(axes, partition.counts.T, _COUNTS, top)
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        name_cells(axes.xaxis, [_short_id(client) for client in partition.client_ids], 32)
        name_cells(axes.yaxis, partition.class_names, 26)
        figure.colorbar(mesh, ax=axes, label="training samples", pad=0.015, fraction=0.03, aspect=max(15, 6 * height))
        if clients <= 24 and classes <= 20:
            annotate_cells(axes, partition.counts.T, mesh, lambda value: f"{value:.0f}" if value else "")
        return figure


def draw_client_spread(runs: Sequence[RunRecord]) -> Figure:
    """Final accuracy of every client of every seed: a dot each, behind it the box of the quartiles.

    Whiskers reach the outermost clients; the thick bar is the median.
    """
    table = client_accuracy_data(runs)
    methods = list(dict.fromkeys(table["method"]))
    styles = method_styles(list(group_by_method(runs)))
    with house_style():
        figure = Figure(figsize=(WIDTH, 0.9 + 0.36 * max(len(methods), 1)))
        axes = figure.add_subplot()
        for position, method in enumerate(methods):
            values = table.loc[table["method"] == method, "accuracy"].to_numpy()
            colour = styles[method].colour
            axes.boxplot(
                [values],
                positions=[position],
                orientation="horizontal",
                widths=0.62,
                whis=(0, 100),
                showfliers=False,
                patch_artist=True,
                boxprops={"facecolor": colour, "alpha": 0.25, "edgecolor": "none"},
                whiskerprops={"color": colour, "linewidth": 1.0},
                capprops={"color": colour, "linewidth": 1.0},
                medianprops={"color": colour, "linewidth": 2.2},
                manage_ticks=False,
            )
            axes.scatter(
                values,
                position + 0.22 * _jitter(len(values)),
                s=9,
                color=colour,
                alpha=0.65 if len(values) <= 100 else 0.3,
                linewidths=0,
                zorder=3,
                rasterized=len(table) > MOST_SHAPES,
            )
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.set_yticks(range(len(methods)), methods)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(-0.01, 1.01)
        axes.set_xlabel("accuracy of a client on its own test data")
        percent_axis(axes.xaxis)
        return figure


def draw_training_loss(runs: Sequence[RunRecord]) -> Figure:
    """Training-loss terms against rounds: a panel per term, a line per method, mean over seeds."""
    table = training_loss_data(runs)
    styles = method_styles(list(group_by_method(runs)))
    terms = list(dict.fromkeys(table["term"]))
    columns = min(len(terms), 3) or 1
    rows = math.ceil(len(terms) / columns) or 1
    with house_style():
        # The legend stands below all panels: labels at line ends would not fit in a third of the width.
        used = [method for method in styles if method in set(table["method"])]
        legend_rows = math.ceil(len(used) / 7) if len(styles) > 1 else 0
        figure = Figure(figsize=(WIDTH if columns > 1 else WIDTH * 0.6, 2.3 * rows + 0.22 * legend_rows))
        for position, term in enumerate(terms):
            axes = figure.add_subplot(rows, columns, position + 1)
            for method, curve in _by_method(table[table["term"] == term]):
                _draw_line(axes, curve["round"], curve["mean"], styles[method])
            axes.set_title(term)
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if legend_rows:
            handles = [
                matplotlib.lines.Line2D([], [], color=styles[method].colour, linestyle=styles[method].dashes)
                for method in used
            ]
            figure.legend(handles, used, loc="outside lower center", ncols=min(len(used), 7), frameon=False)
        return figure


def draw_class_accuracy(runs: Sequence[RunRecord], class_names: Sequence[str] = ()) -> Figure:
    """Class-wise accuracy of the global model: methods by classes, 0 to 1, grey where there is no value."""
    table = class_accuracy_data(runs)
    methods, classes = table.shape
    with house_style():
        figure = Figure(figsize=(WIDTH, min(max(1.15 + 0.27 * methods, 1.5), 7.5)))
        axes = figure.add_subplot()
        mesh = draw_cells(axes, table.to_numpy(dtype=float), ACCURACY_COLOURS, 1.0)
        names = [class_names[label] if label < len(class_names) else str(label) for label in range(classes)]
        name_cells(axes.xaxis, names, 26)
        name_cells(axes.yaxis, list(table.index), methods)
        axes.set_xlabel("class")
        bar = figure.colorbar(mesh, ax=axes, label="accuracy", pad=0.015, fraction=0.03, aspect=max(4 + 2 * methods, 8))
        bar.set_ticks([0, 0.5, 1] if methods < 4 else [0, 0.25, 0.5, 0.75, 1])
        percent_axis(bar.ax.yaxis, locate=False)
        if classes <= 24:
            annotate_cells(axes, table.to_numpy(dtype=float), mesh, lambda value: f"{100 * value:.0f}")
        return figure


# ----------------------------------------------------------------------------------------------------------- saving


def svg_text(figure: Figure, prefix: str = "figure") -> str:
    """Render a figure as an SVG element; the same figure and prefix give the same text.

    Args:
        figure: what a `draw_*` function returned.
        prefix: put before every id, so that several figures can stand in one page without sharing ids.

    Returns:
        The `<svg>` element alone (no XML declaration, dates or metadata).
    """
    buffer = io.StringIO()
    with house_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    # matplotlib's one style rule is for `*`; inlined, it would reach the whole page.
    text = text.replace('<style type="text/css">*{', f'<style type="text/css">#{prefix} *{{', 1)
    return text.replace("<svg ", f'<svg id="{prefix}" ', 1)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as `.svg` or `.png`, by the suffix of the path; the same figure gives the same bytes.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix == ".svg":
        path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{svg_text(figure)}', encoding="utf-8", newline="")
    elif path.suffix == ".png":
        with house_style():
            figure.savefig(path, format="png", metadata={"Software": None})
    else:
        raise ValueError(f"{path.name}: figures are written as .svg or .png")
    return path


# ------------------------------------------------------------------------------------------------------------ parts


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the project's settings, and with nothing of this machine's.

    Figures made inside keep them; what is saved later must be saved inside as well.
    """
    # From matplotlib's own defaults, so that a matplotlibrc on the machine changes nothing.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _panel_row(panels: int, methods: int) -> tuple[Figure, list[Axes]]:
    height = max(3.1, 1.1 + 0.155 * methods)
    figure = Figure(figsize=(WIDTH if panels > 1 else WIDTH * 0.62, height))
    return figure, [figure.add_subplot(1, panels, position + 1) for position in range(panels)]


def _by_method(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(method), group) for method, group in table.groupby("method", sort=False)]


def _last(table: pd.DataFrame, x: str, y: str) -> tuple[float, float]:
    return float(table[x].iloc[-1]), float(table[y].iloc[-1])


def _draw_line(axes: Axes, x: pd.Series, y: pd.Series, style: LineStyle) -> None:
    # Few points need to be seen as points; one point alone would otherwise be an invisible line.
    marker = "o" if len(x) <= 8 else None
    axes.plot(x, y, color=style.colour, linestyle=style.dashes, marker=marker, markersize=3)


def _label_line_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    styles: Mapping[str, LineStyle],
    figure_height: float,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write each method's name to the right of the panel at the height of its last value, moved apart if needed."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    axes.set_xlim(axes.get_xlim())
    # Height of a line of text (inches) as a fraction of the panel, which takes about 0.78 of the figure.
    gap = 0.14 / (figure_height * 0.78)
    order = sorted(ends, key=lambda method: (ends[method][1], method))
    wanted = [(ends[method][1] - low) / (high - low) for method in order]
    for method, height in zip(order, spread_apart(wanted, gap), strict=True):
        colour = styles[method].colour
        axes.plot(*ends[method], marker="o", markersize=3.2, color=colour)
        axes.annotate(
            (names or {}).get(method, method),
            xy=ends[method],
            xytext=(1.045, height),
            textcoords="axes fraction",
            va="center",
            ha="left",
            annotation_clip=False,
            # Thinner than any curve, so that the way to the name is not read as data.
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "relpos": (0, 0.5)},
        )


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until neighbours keep the gap, with the least sum of squared moves.

    Args:
        wanted: ascending, in [0, 1].
        gap: least distance of neighbours; lowered to 1 / (n - 1) where n of them would not fit into [0, 1].

    Returns:
        Ascending heights in [0, 1].
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, 1 / (count - 1))
    # Without position * gap, "keeps the gap" becomes "does not fall": isotonic regression, by merging what falls.
    groups: list[list[float]] = []
    for position, height in enumerate(wanted):
        groups.append([height - position * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [fmean(group) for group in groups for _ in group]
    return [min(max(value, 0.0), 1 - (count - 1) * gap) + position * gap for position, value in enumerate(level)]


def percent_axis(axis: Any, locate: bool = True) -> None:
    """Show fractions as percentages, with few ticks unless they are set already."""
    if locate:
        axis.set_major_locator(MaxNLocator(nbins=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def draw_cells(axes: Axes, values: np.ndarray, colours: LinearSegmentedColormap, top: float) -> QuadMesh:
    """A cell per value, first row on top, thin white lines between cells that are large enough for them."""
    rows, columns = values.shape
    axes.set_facecolor("#d9d9d9")
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=colours,
        vmin=0,
        vmax=top,
        edgecolors="#eeeeee" if columns <= 60 and rows <= 30 else "none",
        linewidth=0.5,
        rasterized=values.size > MOST_SHAPES,
    )
    axes.set_ylim(rows, 0)
    axes.grid(visible=False)
    return mesh


def name_cells(axis: Any, names: Sequence[str], most: int) -> None:
    """Name every cell, or every second, fifth, tenth, ..., so that at most `most` names stand along the axis."""
    steps = (factor * 10**power for power in range(6) for factor in (1, 2, 5))
    step = next(step for step in steps if len(names) / step <= max(most, 1))
    positions = range(0, len(names), step)
    axis.set_ticks([position + 0.5 for position in positions], [names[position] for position in positions])
    axis.set_tick_params(length=0)
    if (
        axis.axis_name == "x"
        and max((len(names[position]) for position in positions), default=0) * len(positions) > 110
    ):
        for label in axis.get_ticklabels():
            label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")


def annotate_cells(axes: Axes, values: np.ndarray, mesh: QuadMesh, text: Callable[[float], str]) -> None:
    """Write every value into its cell, in white on dark cells; a dash where there is none."""
    for row, column in np.ndindex(*values.shape):
        value = float(values[row, column])
        red, green, blue = mesh.to_rgba(np.array([value]))[0, :3]
        is_dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5 and not math.isnan(value)
        label = MISSING if math.isnan(value) else text(value)
        colour = "white" if is_dark else "#222222"
        axes.text(column + 0.5, row + 0.52, label, ha="center", va="center", fontsize=7, color=colour)


def _short_id(client: str) -> str:
    return str(int(client)) if client.isdigit() else client


def _jitter(count: int) -> np.ndarray:
    """Offsets in [-1, 1) that look scattered and need no random numbers: multiples of the golden ratio."""
    return np.asarray(2 * np.mod(np.arange(1, count + 1) * ((math.sqrt(5) - 1) / 2), 1) - 1)
