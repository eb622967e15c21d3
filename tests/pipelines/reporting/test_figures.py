"""Figures: ids and bytes of the SVG text, axes and files; pixels are for eyes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from flcore.core.errors import DataError
from pipelines.reporting import frame
from pipelines.reporting.comparison import compare
from pipelines.reporting.figures import curves, points
from pipelines.reporting.figures.parts import byte_axis, panel
from pipelines.reporting.figures.sets import (
    Drawing,
    comparison_drawings,
    partition_drawing,
    run_drawings,
    write_drawings,
)
from pipelines.reporting.figures.style import house_style, method_styles, svg_text
from pipelines.reporting.figures.sweeps import set_scale
from pipelines.reporting.partition_table import PartitionTable, load_partition
from pipelines.runs.record import RunRecord
from tests.cases import quick
from tests.pipelines.reporting.records import make_round, make_run, two_seeds


def write_manifest(directory: Path, counts: Sequence[Any], **changes: Any) -> Path:
    """A partition directory whose clients hold `counts`."""
    directory.mkdir(parents=True, exist_ok=True)
    clients = [{"id": f"{number:04d}", "class_counts": row} for number, row in enumerate(counts)]
    document = {"clients": clients, "num_classes": 3, "parameters": {"name": "iid"}} | changes
    (directory / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def accuracy_panels(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    table = frame.over_seeds(frame.rounds_frame(runs), ["top1_global", "mean_local"])
    return curves.draw_accuracy_curves(table, method_styles(list(dict.fromkeys(run.method for run in runs))))


def test_partition_table(tmp_path: Path) -> None:
    """Counts as list or by class; absent classes count 0; names where given."""
    directory = write_manifest(tmp_path, [[1, 2, 3], {"0": 4}])
    partition = load_partition(directory, ("cat", "dog"))
    assert partition.counts.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert partition.class_names == ("cat", "dog", "2")
    assert partition.to_frame().loc["0001", "cat"] == 4


@pytest.mark.parametrize("text", [None, "{broken", "[]", '{"clients": []}', '{"clients": [{"id": "0000"}]}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    """The message names the file."""
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        load_partition(tmp_path)


def test_styles_are_distinct_and_follow_the_order() -> None:
    """26 methods get 26 pairs of colour and dashes, and of colour and marker; further ones change none before."""
    methods = [f"method{number}" for number in range(26)]
    styles = method_styles(methods)
    assert len({(style.colour, str(style.dashes)) for style in styles.values()}) == 26
    assert len({(style.colour, style.marker) for style in styles.values()}) == 26
    assert method_styles(methods[:3]) == {method: styles[method] for method in methods[:3]}


def test_svg_is_deterministic_and_ids_are_prefixed() -> None:
    """Two drawings of the same runs are the same text; no id and no reference is without its prefix; no date."""
    first = svg_text(accuracy_panels(two_seeds())["top1_global"], "plot-a")
    assert first == svg_text(accuracy_panels(two_seeds())["top1_global"], "plot-a")
    second = svg_text(accuracy_panels(two_seeds())["top1_global"], "plot-b")
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in (first, second)]
    assert not set(ids[0]) & set(ids[1]) and len(ids[0]) == len(set(ids[0]))
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', first)
    assert targets and {a or b for a, b in targets} <= set(ids[0])
    assert "<metadata" not in first and "date" not in first
    ElementTree.fromstring(first)


def test_drawing_leaves_global_settings_alone() -> None:
    """Neither pyplot nor a changed setting stays behind."""
    before = dict(matplotlib.rcParams)
    svg_text(accuracy_panels(two_seeds())["mean_local"])
    assert dict(matplotlib.rcParams) == before


def test_all_that_stands_around_a_panel_is_within_its_figure() -> None:
    """Ticks, labels, titles and names of lines, at 72 points an inch; losses of a millionth have long tick labels."""
    tiny = [make_round(number, 0.5, train_loss={"cross_entropy": 1e-6 / number}) for number in (1, 2, 3)]
    many = [make_run(f"method{number}", 0, [make_round(1, 0.5 + 0.0001 * number)]) for number in range(29)]
    styles = method_styles(["fedavg", "local"])
    finals = [replace(run, mean_local=place / 10) for place, run in enumerate(two_seeds())]
    differences = compare(finals, baseline="local")
    losses = frame.training_losses(frame.rounds_frame([make_run("fedavg", 0, tiny)]))
    with house_style():
        titled, axes = panel("\n".join(["Fashion-MNIST, α 0.3"] * 3))
        axes.plot([0, 1], [0, 1])
    panels = [
        titled,
        *accuracy_panels(two_seeds()).values(),
        *accuracy_panels(many).values(),
        *curves.draw_bytes_against_accuracy(
            frame.bytes_accuracy(frame.rounds_frame(two_seeds()), ["mean_local"]), styles
        ).values(),
        *points.draw_differences(differences, frame.differences(differences, ["mean_local"]), styles).values(),
        *points.draw_client_spread(frame.client_accuracy(two_seeds()), styles).values(),
        *curves.draw_training_loss(losses, method_styles(["fedavg"])).values(),
    ]
    assert len(panels) == 9
    for figure in panels:
        svg_text(figure)
        with house_style():
            used, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height
        # The panel has the rest, which is most of it.
        place = figure.axes[0].get_position()
        assert place.width > 0.5 and place.height > 0.4
        assert not figure.axes[0].yaxis.get_offset_text().get_text()  # a power of ten would stand in the title


def test_names_stand_in_the_order_of_the_last_values() -> None:
    runs = [make_run(name, 0, [make_round(1, 0.5), make_round(2, last)]) for name, last in (("a", 0.6), ("b", 0.9))]
    legend = accuracy_panels(runs)["top1_global"].axes[0].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["b", "a"]


def names_in(drawings: dict[str, Drawing]) -> list[str]:
    return [stem for drawing in drawings.values() for stem in drawing.panels]


@pytest.mark.parametrize(("methods", "clients", "classes"), quick([(1, 1, 2), (15, 200, 100)], 1))
def test_small_and_large_comparisons_can_be_drawn(methods: int, clients: int, classes: int) -> None:
    """From one method, one client and one round to the largest sensible size; each SVG stays below 1 MB."""
    rng = np.random.default_rng(0)
    rounds = [make_round(number, 0.5, local_accuracy=tuple(rng.random(clients))) for number in range(1, methods + 1)]
    final = {"top1_global": 0.5, "mean_local": 0.5, "bytes_up": 100.0, "bytes_down": 50.0}
    runs = [make_run(f"fedavg{i}", 0, rounds, class_acc=tuple(rng.random(classes)), **final) for i in range(methods)]
    counts = rng.integers(0, 50, size=(clients, classes))
    partition = PartitionTable(tuple(f"{k:04d}" for k in range(clients)), tuple(map(str, range(classes))), counts, {})
    drawn = comparison_drawings(compare(runs, baseline="fedavg0"), partition)
    differences = ["differences"] if methods > 1 else []
    assert list(drawn) == ["tradeoff", "accuracy", "bytes", *differences, "partition", "clients", "classes", "loss"]
    for drawing in drawn.values():
        assert drawing.data is not None and not drawing.data.empty
        assert all(1000 < len(svg) < 1_000_000 for svg in drawing.svgs)


def test_a_comparison_draws_the_losses_that_methods_share_and_a_run_all_of_its_own() -> None:
    runs = [
        make_run("fedavg", 0, [make_round(1, 0.5, train_loss={"z": 1.0})]),
        make_run("moon", 0, [make_round(1, 0.5, train_loss={"a": 1.0, "z": 2.0})]),
    ]
    assert [name for name in names_in(comparison_drawings(compare(runs))) if "loss" in name] == ["loss-z"]
    assert [name for name in names_in(run_drawings(runs[1])) if "loss" in name] == ["loss-a", "loss-z"]
    assert "bytes" not in run_drawings(runs[1])


@pytest.mark.slow
def test_smoothed_curves_say_so() -> None:
    runs = [make_run("fedavg", 0, [make_round(number, 0.5) for number in (1, 2, 3)])]
    drawn = comparison_drawings(replace(compare(runs), smooth=2))["accuracy"]
    assert "accuracy, moving average of 2" in drawn.svgs[0] and "smoothed" in drawn.data
    assert "moving average" not in comparison_drawings(compare(runs))["accuracy"].svgs[0]


def test_runs_of_a_seed_share_the_picture_of_who_holds_what(tmp_path: Path) -> None:
    """Read from two folders with the same manifest, it is drawn once."""
    first, second = (load_partition(write_manifest(tmp_path / name, [[1, 2, 3], [4, 0, 0]])) for name in "ab")
    assert partition_drawing(first) is partition_drawing(second)
    other = load_partition(write_manifest(tmp_path / "c", [[1, 2, 3], [4, 0, 1]]))
    assert partition_drawing(other) is not partition_drawing(first)


def test_each_figure_is_one_file_beside_its_data(tmp_path: Path) -> None:
    """Without a partition, traffic or losses only what has data is written; bytes repeat; older figures are removed."""
    quiet = make_round(1, 0.5, bytes_up={}, bytes_down={}, train_loss={})
    drawn = run_drawings(make_run("local", 0, [quiet]))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bytes.svg").write_text("of an earlier run")
    first = write_drawings(drawn.values(), tmp_path / "a")
    second = write_drawings(run_drawings(make_run("local", 0, [quiet])).values(), tmp_path / "b")
    assert [path.name for path in first] == ["accuracy.svg", "accuracy.csv", "clients.svg", "clients.csv"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[1].read_text().splitlines()[0] == "metric,method,round,mean,std,n"


@pytest.mark.parametrize("name", ["$a_$", "$x^2$", r"\frac{a}{b} $", "a & b <c> -- |d|"])
def test_a_name_is_drawn_as_it_is_written(name: str, tmp_path: Path) -> None:
    """matplotlib would read what stands between two $ as a formula, and fail where it is none."""
    runs = [make_run(row, 0, [make_round(1, 0.5), make_round(2, 0.5)]) for row in (name, "fedavg")]
    drawn = write_drawings(comparison_drawings(compare(runs)).values(), tmp_path)
    with house_style():
        figure, axes = panel(name)
        axes.plot([0, 1], label=name)
        axes.legend()
        text = svg_text(figure)
    assert ElementTree.fromstring(text) is not None
    told = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("--", "- -")
    assert text.count(f"<!-- {told} -->") == 2
    assert any(f"<!-- {told} -->" in path.read_text() for path in drawn if path.suffix == ".svg")


@pytest.mark.parametrize(
    ("values", "ticks"), [((0.001, 1000.0), {"0.001", "1000"}), ((0.0, 0.01, 100.0), {"0", "100"})]
)
def test_ticks_of_a_logarithmic_axis_are_numbers(values: tuple[float, ...], ticks: set[str]) -> None:
    with house_style():
        figure, axes = panel("x")
        axes.plot(values, values)
        set_scale(axes, "x", values)
        set_scale(axes, "y", values)
        written = re.findall("<!-- (.*) -->", svg_text(figure))
    assert ticks <= set(written)
    assert not any("$" in text for text in written)


def test_nothing_to_draw_gives_no_figures() -> None:
    """A run without history has no figures, and that is no error."""
    assert run_drawings(make_run("fedavg", 0, [])) == {}


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (3e5, 5e6, ["500 kB", "1 MB", "2 MB", "5 MB"]),  # 1.2 decades, with one power of ten
        (1.5e5, 1.5e7, ["1 MB", "10 MB"]),  # two decades: powers of ten say the scale
        (2.13e7, 2.87e7, ["22 MB", "24 MB", "26 MB", "28 MB"]),  # 7.4 MB: in steps of 2, not of 1
        (2.08e6, 2.26e6, ["2.1 MB", "2.2 MB"]),  # 0.18 MB: in steps of 0.1, not of 0.02
    ],
)
def test_an_axis_of_bytes_has_labels_for_which_there_is_room(low: float, high: float, labels: list[str]) -> None:
    figure, axes = panel("")
    axes.set_xlim(low, high)
    byte_axis(axes, "bytes")
    figure.draw_without_rendering()
    ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
    shown = sorted((tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high)
    assert [text for _, text in shown if text] == labels


def test_an_axis_of_accuracies_has_round_ticks_and_ends_at_all() -> None:
    """Of 0.7 to 1.0 in steps of 1, 2 or 5 times a power of ten, none above 100 %."""
    runs = [make_run("fedavg", 0, [make_round(number, 0.7 + 0.1 * number) for number in (1, 2, 3)])]
    for figure in accuracy_panels(runs).values():
        axes = figure.axes[0]
        low, high = axes.get_ylim()
        ticks = [float(tick) for tick in axes.get_yticks() if low <= tick <= high]
        step = round(100 * (ticks[1] - ticks[0]), 6)
        assert max(ticks) <= 1 and high < 1.02 and step in (1, 2, 5, 10, 20)
