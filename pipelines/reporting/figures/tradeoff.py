"""What accuracy costs: a point per method, final accuracy against all bytes of a run."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipelines.reporting.figures.data import PANEL_TITLES, tradeoff_data
from pipelines.reporting.figures.parts import byte_axis, label_line_ends, panel, panel_height, percent_axis
from pipelines.reporting.figures.style import SILENT, house_style, method_styles
from pipelines.runs.record import RunRecord, group_by_method


def draw_tradeoff(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """Final accuracy against bytes in both directions (log axis): mean over seeds, bars of ± one standard deviation.

    A method that sends nothing has no place on a log axis: it is a horizontal dotted line. A panel for the global model
    and one for the mean over clients; a method without a global model is not in the first.
    """
    table, styles, panels = tradeoff_data(runs), method_styles(list(group_by_method(runs))), {}
    with house_style():
        for metric, title in PANEL_TITLES.items():
            points = table[table["metric"] == metric]
            if points.empty:
                continue
            panels[metric], axes = panel(title, panel_height(list(points["method"])))
            ends, names = {}, {}
            right = points["bytes"].max() or 1.0
            for method, sent, accuracy, std in points[["method", "bytes", "accuracy", "std"]].itertuples(index=False):
                style = styles[method]
                ends[method] = (sent or right, accuracy)
                if sent:
                    bar = std if std > 0 else None
                    axes.errorbar(
                        sent, accuracy, yerr=bar, color=style.colour, fmt=style.marker, elinewidth=1, capsize=2
                    )
                else:
                    axes.axhline(accuracy, color=style.colour, linestyle=SILENT, linewidth=1.2)
                    names[method] = f"{method} (0 B)"
            byte_axis(axes)
            axes.margins(x=0.12, y=0.12)
            axes.set_xlabel("bytes up + down, all clients, whole run")
            axes.set_ylabel("final accuracy")
            percent_axis(axes.yaxis)
            label_line_ends(axes, ends, styles, names)
    return panels
