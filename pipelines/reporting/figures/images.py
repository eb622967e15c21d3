"""Figures made of images: virtual ones, images rebuilt from features, and where a model looks."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipelines.reporting.figures.embeddings import MADE, as_texts
from pipelines.reporting.figures.parts import percent_axis, whole_line
from pipelines.reporting.figures.style import WIDTH
from pipelines.runs.analyses import StoredAnalysis

_GUESS = "#888888"


def draw_virtual_images(analysis: StoredAnalysis) -> Figure:
    """Draw a sheet with a row per class."""
    sheet, names = analysis.arrays["sheet"], as_texts(analysis.arrays["class_names"])
    figure = whole_line(min(WIDTH * sheet.shape[0] / sheet.shape[1] + 0.5, 16))
    axes = figure.add_subplot()
    _show(axes, sheet.transpose(2, 0, 1))
    axes.set_xticks([])
    step, height = -(-len(names) // 40), sheet.shape[0] / len(names)
    axes.set_yticks([(row + 0.5) * height for row in range(0, len(names), step)], names[::step])
    axes.set_ylabel("class")
    axes.tick_params(length=0)
    return figure


def draw_inversion(analysis: StoredAnalysis) -> Figure:
    """Draw how well images are rebuilt by the number of averaged features, and the best of them."""
    rows = pd.DataFrame(analysis.rows)
    attacks, sizes = (list(dict.fromkeys(rows[key])) for key in ("attack", "m"))
    titles = {
        "mse": "mean squared error (pixels 0 to 1)",
        "ssim": "structural similarity",
        "accuracy": "taken for its class",
    }
    figure = whole_line(8.0)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.75), squeeze=False)[:, 0]
    panels = top.subplots(1, 3)
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for attack, colour in zip(attacks, (MADE, _GUESS), strict=True):
            # Whether the model recognises an image does not depend on what it is compared with.
            for against, dashes in (("closest", "-"), ("class mean", ":"))[: 1 if column == "accuracy" else 2]:
                known = rows[(rows["attack"] == attack) & (rows["against"] == against)]
                label = f"{attack}, against the {'closest member' if against == 'closest' else against}"
                axes.plot(
                    *(known["m"].map(sizes.index), known[column].astype(float)),
                    color=colour,
                    linestyle=dashes,
                    marker="o",
                    markersize=3,
                    label=label,
                )
        axes.set_title(title)
        axes.set_xticks(range(len(sizes)), sizes, rotation=45 if len(sizes) > 6 else 0)
        axes.set_xlabel("features averaged, m")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    percent_axis(panels[2].yaxis)
    panels[2].set_ylim(-0.03, 1.03)
    top.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    _sheet(bottom.add_subplot(), analysis)
    return figure


def _sheet(axes: Axes, analysis: StoredAnalysis, most: int = 5) -> None:
    """Draw two rows per class, the closest image and the rebuilt one, with a column per m and the guess."""
    arrays = analysis.arrays
    labels = [f"class {name}" for name in np.asarray(as_texts(arrays["class_names"]))[arrays["labels"][:most]]]
    if not labels:
        axes.set_axis_off()
        return
    guesses = arrays["guesses"][: len(labels), None]
    truths = np.concatenate([arrays["truths"][: len(labels)], np.full_like(guesses, 255)], axis=1)
    rebuilt = np.concatenate([arrays["rebuilt"][: len(labels)], guesses], axis=1)
    grid = np.stack([truths, rebuilt], axis=1).reshape(-1, *truths.shape[1:])  # rows, columns, channels, height, width
    height, width = grid.shape[-2:]
    gap = max(1, height // 14)
    tiles = np.pad(grid, ((0, 0), (0, 0), (0, 0), (0, gap), (0, gap)), constant_values=255)
    rows, columns, channels, *_ = tiles.shape
    _show(axes, tiles.transpose(2, 0, 3, 1, 4).reshape(channels, rows * (height + gap), columns * (width + gap)))
    axes.set_xticks(
        [column * (width + gap) + width / 2 for column in range(columns)],
        [*as_texts(arrays["sizes"]), "class mean\nimage"],
    )
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("features averaged, m")
    texts = [text for label in labels for text in (f"{label}: closest member", "rebuilt")]
    axes.set_yticks([row * (height + gap) + height / 2 for row in range(rows)], texts)
    axes.tick_params(length=0)


def draw_gradcam(analysis: StoredAnalysis) -> Figure:
    """Draw cases of a calibration: an image, and where the model looked before and after."""
    arrays = analysis.arrays
    names, cases = as_texts(arrays["class_names"]), as_texts(arrays["cases"])
    examples = max((cases.count(row["case"]) for row in analysis.rows), default=1)
    figure = whole_line(1.35 * len(analysis.rows) + 0.5)
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
        for index, example in enumerate(np.flatnonzero(arrays["cases"] == row["case"])):
            image, label = arrays["images"][example], names[arrays["labels"][example]]
            titles = (
                f"true {label}",
                *(f"{when}: {names[arrays[f'predicted_{when}'][example]]}" for when in ("before", "after")),
            )
            maps = (None, arrays["before"][example], arrays["after"][example])
            for axes, title, heat in zip(line[3 * index : 3 * index + 3], titles, maps, strict=True):
                _show(axes, image)
                if heat is not None:
                    shown = axes.imshow(heat, cmap="inferno", alpha=0.6, vmin=0, vmax=1)
                axes.set_title(title, fontsize=7, fontweight="normal", loc="center", pad=2)
    if shown is not None:
        figure.colorbar(shown, ax=grid, label="weight of the place, of its maximum", fraction=0.02, pad=0.01)
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    """Show an image uint8 [C, H, W], every pixel as a square."""
    pixels = image.transpose(1, 2, 0)
    axes.imshow(
        pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest"
    )
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
