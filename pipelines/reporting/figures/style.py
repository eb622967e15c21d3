"""How figures look, and how they become bytes: the same figure gives the same bytes on every machine.

Nothing here touches pyplot, so no figure survives its caller. A method keeps its colour, dashes and marker through all
figures: they follow from its place in the list of methods. Figures are drawn for a light ground; in dark mode the page
inverts their lightness.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from flcore.io.files import replace_file
from pipelines.runs.layout import write_text

# Inches at 72 points: a whole line of the page, and a panel, of which two stand side by side or, on a narrow screen,
# one below the other.
WIDTH = 9.4
PANEL = 4.55
PANEL_HEIGHT = 3.4
SMALL_PANEL = 2.95

INK, MUTED, FAINT, GRID = "#333333", "#767676", "#999999", "#e4e4e4"

# Okabe and Ito's palette without its yellow (invisible on white), plus a wine red and a grey; told apart by people with
# any of the common colour-vision deficiencies. A second and third round of methods changes the dashes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#666666")
_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
# Of what sends nothing, where bytes are an axis.
SILENT = (0, (1, 2))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")

COUNTS = LinearSegmentedColormap.from_list("counts", ["#ffffff", "#dcd6ee", "#a596cf", "#6a51a3", "#3a0f70"])
ACCURACIES = LinearSegmentedColormap.from_list("accuracy", ["#ffffff", "#cfe3f2", "#7fb6d9", "#2f7ebc", "#08376b"])
# A path per cell or point is crisp, thousands of them make a page heavy: from here on they become one picture.
MOST_SHAPES = 2500

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same outlines
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.titley": 1.0,  # else every drawing looks whether ticks stand in its way
    "axes.labelsize": 8.5,
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
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelspacing": 0.3,
    "legend.handlelength": 1.7,
    "legend.borderaxespad": 0.3,
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
    """Colour, dashes and marker of a method."""

    colour: str
    dashes: Any
    marker: str = "o"


def method_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Give each method its colour, dashes and marker by its place in the list; the first eight are solid.

    A colour that returns has another marker, too: points have no dashes.
    """
    return {
        method: LineStyle(
            _COLOURS[index % len(_COLOURS)],
            _DASHES[index // len(_COLOURS) % len(_DASHES)],
            _MARKERS[(index + index // len(_COLOURS)) % len(_MARKERS)],
        )
        for index, method in enumerate(methods)
    }


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


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the same figure gives the same bytes."""
    content = io.BytesIO()
    with house_style():
        figure.savefig(content, format="png", metadata={"Software": None})
    replace_file(path, lambda file: file.write(content.getvalue()))
