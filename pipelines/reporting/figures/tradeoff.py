"""What accuracy costs: a point per method, final accuracy against all bytes of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reporting.figures.data import PANEL_TITLES, tradeoff_data
from pipelines.reporting.figures.labels import Label, write_labels
from pipelines.reporting.figures.parts import byte_axis, panel, percent_axis
from pipelines.reporting.figures.style import SILENT, LineStyle, house_style, method_styles
from pipelines.runs.record import RunRecord, group_by_method

# Room beside the outermost points for their names, as shares of what lies between them.
_LEFT, _RIGHT = 0.14, 0.24


def draw_tradeoff(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """Final accuracy against bytes in both directions (log axis): mean over seeds, bars of ± one standard deviation.

    A method that sends nothing has no place on a log axis: it is a horizontal dotted line. A panel for the global model
    and one for the mean over clients; a method without a global model is not in the first.
    """
    table, styles, panels = tradeoff_data(runs), method_styles(list(group_by_method(runs))), {}
    with house_style():
        for metric, title in PANEL_TITLES.items():
            points = [
                _Point(str(method), float(sent), float(mean), float(std) if std > 0 else 0.0)
                for name, method, sent, mean, std in table[["metric", "method", "bytes", "accuracy", "std"]].to_numpy()
                if name == metric
            ]
            if points:
                panels[metric], axes = panel(title, 3.6)
                _draw(panels[metric], axes, points, styles)
    return panels


@dataclass(frozen=True)
class _Point:
    """A method: bytes sent, mean accuracy and its standard deviation over seeds (0 for one seed)."""

    method: str
    sent: float
    accuracy: float
    spread: float


def _draw(figure: Figure, axes: Axes, points: Sequence[_Point], styles: Mapping[str, LineStyle]) -> None:
    sent = [point.sent for point in points if point.sent > 0]
    byte_axis(axes)
    low, high = min(sent, default=1e3), max(sent, default=1e6)
    decades = max(math.log10(high / low), 1.0)
    axes.set_xlim(low / 10 ** (_LEFT * decades), high * 10 ** (_RIGHT * decades))
    for point in points:
        style = styles[point.method]
        if point.sent > 0:
            axes.errorbar(
                [point.sent],
                [point.accuracy],
                yerr=[point.spread],
                color=style.colour,
                marker=style.marker,
                markersize=6,
                elinewidth=1.0,
                capsize=2.5 if point.spread else 0,
            )
        else:
            axes.axhline(point.accuracy, color=style.colour, linestyle=SILENT, linewidth=1.2)
    axes.margins(y=0.12)
    axes.set_xlabel("bytes up + down, all clients, whole run")
    axes.set_ylabel("final accuracy")
    percent_axis(axes.yaxis)

    def label(point: _Point) -> Label:
        text = point.method if point.sent > 0 else f"{point.method} (0 B)"
        return Label(text, point.sent, point.accuracy, styles[point.method].colour)

    sending = [point for point in points if point.sent > 0]
    marks = {(point.sent, point.accuracy): point.spread for point in sending}
    write_labels(figure, axes, list(map(label, sending)), marks, [label(p) for p in points if p not in sending])
