"""Labels of points: beside their points, on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reporting.figures.style import text_width

_RINGS = 9
_NOTHING = 1e-6
# In points of the page, like all boxes here.
_LINE = 10.5
_MARK = 4.5
_DISTANCE = 6.0  # between an anchor and its label


@dataclass(frozen=True)
class Box:
    """A rectangle; all in one unit, such as points of a figure."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place_labels(
    anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], within: Box, taken: Sequence[Box] = ()
) -> list[Box]:
    """Put a label beside each anchor, as near as it stands free, within some bounds.

    Args:
        anchors: points. sizes: width and height of each one's label.
        within: where labels may stand; they leave it only where nothing else is possible.
        taken: what labels must not cover, such as the marks of all points.

    Returns:
        A box per label, in the order given. The same input gives the same places.
    """
    candidates = [list(_candidates(*pair)) for pair in zip(anchors, sizes, strict=True)]

    def first_free(place: int) -> int:
        boxes = enumerate(candidates[place])
        return next(
            (number for number, box in boxes if _badness(box, taken, within) < _NOTHING), len(candidates[place])
        )

    placed: dict[int, Box] = {}
    # Who has room at its right takes it first; among equals from the top down, so that a pile moves one way.
    for place in sorted(range(len(anchors)), key=lambda place: (first_free(place), -anchors[place][1], place)):
        others = [*taken, *placed.values()]
        free = (box for box in candidates[place] if _badness(box, others, within) < _NOTHING)
        placed[place] = next(free, None) or min(candidates[place], key=lambda box: _badness(box, others, within))
    return [placed[place] for place in range(len(anchors))]


def _badness(box: Box, others: Sequence[Box], within: Box) -> float:
    return sum(box.overlap(other) for other in others) + 2 * (box.area - box.overlap(within))


def _candidates(anchor: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes around an anchor, the nearest first: right, left, above and below, then the same further up and down."""
    (x, y), (width, height) = anchor, size
    for ring in range(_RINGS):
        for shift in (ring * 0.75 * height, -ring * 0.75 * height)[: 1 if ring == 0 else 2]:
            reach = _DISTANCE if ring < 2 else 2 * _DISTANCE
            for left in (x + reach, x - reach - width):
                yield Box(left, y + shift - height / 2, left + width, y + shift + height / 2)
        if ring < 3:
            away = _DISTANCE + ring * height
            for bottom in (y + away, y - away - height):
                yield Box(x - width / 2, bottom, x + width / 2, bottom + height)


@dataclass(frozen=True)
class Label:
    """A text for a point of a panel, in data coordinates; ``colour`` is that of the line that leads to it."""

    text: str
    x: float
    y: float
    colour: str


def write_labels(
    figure: Figure,
    axes: Axes,
    labels: Sequence[Label],
    marks: Mapping[tuple[float, float], float] | None = None,
    levels: Sequence[Label] = (),
) -> None:
    """Write texts beside their points, so that no two touch. The figure's layout is settled by it: call it last.

    Args:
        figure: of one panel. axes: the panel.
        labels: of points.
        marks: further points that no text may cover, with how far (in data) their bars reach up and down.
        levels: of horizontal lines; their texts stand on the lines' left ends.
    """
    engine = figure.get_layout_engine()
    assert engine is not None  # the house style has one
    engine.execute(figure)  # now the panel has its size
    figure.set_layout_engine("none")
    unit, frame = 72 / figure.dpi, axes.get_window_extent()
    panel = Box(frame.x0 * unit, frame.y0 * unit, frame.x1 * unit, frame.y1 * unit)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across) * unit, float(up) * unit

    taken = []
    for (x, y), reach in (dict.fromkeys(((label.x, label.y) for label in labels), 0.0) | dict(marks or {})).items():
        (across, up), (_, top) = place(x, y), place(x, y + reach)
        taken += [
            Box(across - _MARK, up - _MARK, across + _MARK, up + _MARK),
            Box(across - 2.5, 2 * up - top, across + 2.5, top),
        ]
    anchors = [place(label.x, label.y) for label in labels]
    for level in levels:
        anchors.append((panel.left, place(axes.get_xlim()[0], level.y)[1]))
        taken.append(Box(panel.left, anchors[-1][1] - 1, panel.right, anchors[-1][1] + 1))
    everything = [*labels, *levels]
    widths = [text_width(label.text) + 2 for label in everything]
    boxes = place_labels(anchors, [(width, _LINE) for width in widths], panel, taken)
    for number, (label, anchor, box) in enumerate(zip(everything, anchors, boxes, strict=True)):
        middle, is_left = (box.bottom + box.top) / 2, box.right < anchor[0]
        is_beside = abs(middle - anchor[1]) < 0.6 * _LINE
        # Above and below its point a text needs no line either.
        is_near = is_beside or (box.left < anchor[0] < box.right and abs(middle - anchor[1]) < 1.3 * _LINE)
        line = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            label.text,
            xy=anchor,
            xycoords="figure points",
            xytext=(box.left + 1, middle),
            textcoords="figure points",
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops=None if is_near or number >= len(labels) else {**line, "relpos": (1 if is_left else 0, 0.5)},
        )
