"""How figures look, and how they become bytes: the same figure gives the same bytes on every machine.

Nothing here touches pyplot, so no figure survives its caller. A method keeps its colour, dashes and marker through all
figures: they follow from its place in the list of methods. :data:`DARK` says what a page that is read on a dark ground
puts in the place of each colour; figures themselves are drawn for a light one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import LayoutEngine
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

from flcore.io.files import replace_file
from pipelines.runs.layout import write_text

# Inches at 72 points: a whole line of the page, and a panel, of which two stand side by side or, on a narrow screen,
# one below the other.
WIDTH = 9.4
PANEL = 4.55
PANEL_HEIGHT = 3.4
SMALL_PANEL = 2.95

# Around everything, in inches.
_PAD_ACROSS, _PAD_UP = 0.07, 0.06
# In points: texts, a line of them, a tick with the gap to its label, an axis' label and a title with their gaps.
TEXT_SIZE = 8.5
_LINE = 10.0
_TICK, _LABEL, _TITLE = 7.0, 4.0 + _LINE, 8.0 + 11.1
_TITLE_SIZE = 9.5
_FURTHER_LINE = 1.2 * _TITLE_SIZE  # of a title

INK, MUTED, FAINT, GRID = "#333333", "#767676", "#999999", "#e4e4e4"

# Okabe and Ito's palette without its yellow (invisible on white), plus a wine red and a grey; told apart by people with
# any of the common colour-vision deficiencies. A second and third round of methods changes the dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#666666")
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
# Of what sends nothing, where bytes are an axis.
SILENT = (0, (1, 2))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")

DARK: Mapping[str, str] = {
    INK: "#d9dcde",
    MUTED: "#a3a9af",
    FAINT: "#70767c",
    GRID: "#363a3f",
    "#0072b2": "#4496d8",
    "#d55e00": "#f07c2e",
    "#009e73": "#2dbd92",
    "#cc79a7": "#e6a3c8",
    "#e69f00": "#f2b93f",
    "#56b4e9": "#9ad7fa",
    "#882255": "#cf5f94",
    "#666666": "#b3b8bd",
}

COUNTS = LinearSegmentedColormap.from_list("counts", ["#ffffff", "#dcd6ee", "#a596cf", "#6a51a3", "#3a0f70"])
ACCURACIES = LinearSegmentedColormap.from_list("accuracy", ["#ffffff", "#cfe3f2", "#7fb6d9", "#2f7ebc", "#08376b"])
# A path per cell or point is crisp, thousands of them make a page heavy: from here on they become one picture.
MOST_SHAPES = 2500

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same outlines
    "font.size": TEXT_SIZE,
    "axes.titlesize": _TITLE_SIZE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.titley": 1.0,  # else every drawing looks whether ticks stand in its way
    "axes.labelsize": TEXT_SIZE,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,  # names of classes and rows are others'; a $ in them is a $
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": _PAD_ACROSS,
    "figure.constrained_layout.h_pad": _PAD_UP,
    "savefig.dpi": 150,
    "svg.fonttype": "path",  # outlines look the same in every viewer, with or without the font
    "svg.hashsalt": "protofl",
}


@dataclass(frozen=True)
class LineStyle:
    """How a method is drawn."""

    colour: str
    dashes: Any
    marker: str = "o"


def method_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Give each method its colour, dashes and marker by its place in the list; the first eight are solid.

    A colour that returns has another marker, too: points have no dashes.
    """
    return {
        method: LineStyle(
            _COLOURS[place % len(_COLOURS)],
            _DASHES[place // len(_COLOURS) % len(_DASHES)],
            _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)],
        )
        for place, method in enumerate(methods)
    }


class _AroundOnePanel(LayoutEngine):
    """Gives the only panel of a figure the room that its ticks, labels, title and texts leave.

    Constrained layout comes to the same; it measures all texts four times, which takes longer than to draw them. Here
    ticks are measured by their texts, of which most return in other figures.
    """

    _adjust_compatible = False
    _colorbar_gridspec = False

    def execute(self, fig: FigureBase) -> None:
        """Measure what stands around the panel, and place it."""
        assert isinstance(fig, Figure)  # what `one_panel` makes
        (axes,) = fig.axes
        unit, frame = 72 / fig.dpi, axes.get_window_extent()
        across, up = _tick_labels(axes.xaxis), _tick_labels(axes.yaxis)
        left = _TICK + max((text_width(label) for _, label in up), default=0.0)
        bottom = _TICK + (_LINE if across else 0.0)
        # Half of what stands at the very end of an axis reaches beyond it.
        beyond = (text_width(label) / 2 - (1 - place) * frame.width * unit for place, label in across)
        right = max(0.0, *beyond) if across else 0.0
        top = _LINE / 2 if up else 0.0
        left += _LABEL if axes.get_ylabel() else 0.0
        bottom += _LABEL if axes.get_xlabel() else 0.0
        title = axes.get_title(loc="left")
        top = _TITLE + _FURTHER_LINE * title.count("\n") if title else top
        for text in axes.texts:
            box = text.get_window_extent()
            left, right = max(left, (frame.x0 - box.x0) * unit), max(right, (box.x1 - frame.x1) * unit)
            bottom, top = max(bottom, (frame.y0 - box.y0) * unit), max(top, (box.y1 - frame.y1) * unit)
        width, height = fig.get_size_inches() * 72
        axes.set_position(
            Bbox.from_extents(
                left / width + _PAD_ACROSS * 72 / width,
                bottom / height + _PAD_UP * 72 / height,
                1 - right / width - _PAD_ACROSS * 72 / width,
                1 - top / height - _PAD_UP * 72 / height,
            )
        )


def _tick_labels(axis: Axis) -> list[tuple[float, str]]:
    """The labels at an axis, with their places from 0 to 1."""
    low, high = sorted(axis.get_view_interval())
    ticks = list(axis.get_majorticklocs())
    shown = [
        (tick, label)
        for tick, label in zip(ticks, axis.get_major_formatter().format_ticks(ticks), strict=True)
        if low <= tick <= high and label
    ]
    begin, end, *places = axis.get_transform().transform(np.array([low, high, *(tick for tick, _ in shown)]))
    return [((place - begin) / (end - begin), label) for place, (_, label) in zip(places, shown, strict=True)]


@lru_cache(maxsize=4096)
def text_width(text: str) -> float:
    """Of a line of text in the figures' common size, in points."""
    with house_style():
        return float(TextPath((0, 0), text, size=TEXT_SIZE).get_extents().width)


def one_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one panel and nothing beside it: no colour bar, no legend outside, no heading above.

    Args:
        width: inches. height: inches.
    """
    figure = Figure(figsize=(width, height), layout=_AroundOnePanel())
    return figure, figure.add_subplot()


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the project's settings, and with nothing of this machine's.

    Figures made inside keep them; what is saved later must be saved inside as well.
    """
    if matplotlib.rcParams["svg.hashsalt"] == _SETTINGS["svg.hashsalt"]:  # inside already
        yield
        return
    # From matplotlib's own defaults, so that a matplotlibrc on the machine changes nothing.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def svg_text(figure: Figure, prefix: str = "figure") -> str:
    """Render a figure as an SVG element; the same figure and prefix give the same text.

    Args:
        figure: what a `draw_*` function returned.
        prefix: put before every id, so that several figures can stand in one page without sharing ids.

    Returns:
        The `<svg>` element alone (no XML declaration, dates or metadata).
    """
    buffer, dpi = io.StringIO(), figure.dpi
    with house_style():
        figure.dpi = matplotlib.rcParams["savefig.dpi"]  # of what is a picture inside
        # Not by `savefig`, which draws everything once more beforehand, to no end.
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        figure.dpi = dpi
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    # matplotlib's one style rule is for `*`; inlined, it would reach the whole page.
    text = text.replace('<style type="text/css">*{', f'<style type="text/css">#{prefix} *{{', 1)
    return text.replace("<svg ", f'<svg id="{prefix}" ', 1)


def write_svg(svg: str, path: Path) -> Path:
    """Write an `<svg>` element as a file of its own."""
    write_text(path, f'<?xml version="1.0" encoding="utf-8"?>\n{svg}')
    return path


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as `.svg` or `.png`, by the suffix of the path; the same figure gives the same bytes.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix == ".svg":
        return write_svg(svg_text(figure), path)
    if path.suffix != ".png":
        raise ValueError(f"{path.name}: figures are written as .svg or .png")
    content = io.BytesIO()
    with house_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    replace_file(path, lambda file: file.write(content.getvalue()))
    return path
