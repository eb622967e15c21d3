"""Figures: the data behind them by hand, ids and bytes of the SVG text; pixels are for eyes."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest

from flcore.core.errors import DataError
from pipelines.reporting.comparison import compare
from pipelines.reporting.figures import charts, data
from pipelines.reporting.figures.partition import PartitionTable, load_partition, partition_data
from pipelines.reporting.figures.parts import byte_axis, panel, spread_apart
from pipelines.reporting.figures.sets import (
    Drawing,
    comparison_drawings,
    partition_drawing,
    run_drawings,
    write_drawings,
)
from pipelines.reporting.figures.style import house_style, method_styles, save, svg_text
from pipelines.reporting.figures.sweeps import set_scale
from pipelines.reporting.figures.tradeoff import draw_tradeoff
from pipelines.runs.record import RoundRecord, RunRecord
from tests.cases import quick


def make_round(number: int, accuracy: float | None, **changes: Any) -> RoundRecord:
    """A round with the same accuracy everywhere; 100 bytes up and 50 down per round, loss 1/round."""
    values: dict[str, Any] = {
        "round": number,
        "participants": (),
        "top1_global": accuracy,
        "top1_vote": None,
        "loss_global": None,
        "mean_local": accuracy,
        "pooled_local": accuracy,
        "client_std": None,
        "local_accuracy": (accuracy, None, 1.0),
        "class_accuracy": (),
        "train_loss": {"cross_entropy": 1 / number} if number else {},
        "bytes_up": {"weights": 100 * number},
        "bytes_down": {"weights": 50 * number},
    }
    return RoundRecord(**(values | changes))


def make_run(method: str, seed: int, history: Sequence[RoundRecord], **changes: Any) -> RunRecord:
    """A run around a history; what figures do not read is empty."""
    values: dict[str, Any] = {
        "method": method,
        "dataset": "digits",
        "partition": "iid",
        "seed": seed,
        "rounds": len(history),
        "class_acc": (),
        "class_acc_vote": (),
        "tasks": {},
        "figures": {},
        "block_ends": (),
        "bytes_up_by_kind": {},
        "bytes_down_by_kind": {},
        "best_round": None,
        "history": tuple(history),
    }
    empty: dict[str, Any] = dict.fromkeys(set(RunRecord.__dataclass_fields__) - set(values) - {"directory"})
    return RunRecord(**(empty | values | changes))


def two_seeds() -> list[RunRecord]:
    """fedavg: seed 0 has 0.2, 0.4, 0.5 in rounds 0 to 2, seed 1 has 0.6 and 0.7 in rounds 1 and 2."""
    return [
        make_run(
            "fedavg", 0, [make_round(0, 0.2), make_round(1, 0.4), make_round(2, 0.5)], class_acc=(0.2, None, None)
        ),
        make_run("fedavg", 1, [make_round(1, 0.6), make_round(2, 0.7)], class_acc=(0.4, 0.9, None)),
        make_run("local", 0, [make_round(1, 0.3, top1_global=None, bytes_up={}, bytes_down={})]),
    ]


def write_manifest(directory: Path, counts: Sequence[Any], **changes: Any) -> Path:
    """A partition directory whose clients hold `counts`."""
    directory.mkdir(parents=True, exist_ok=True)
    clients = [{"id": f"{number:04d}", "class_counts": row} for number, row in enumerate(counts)]
    document = {"clients": clients, "num_classes": 3, "parameters": {"name": "iid"}} | changes
    (directory / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def test_curves_use_rounds_that_every_seed_has() -> None:
    """Rounds 1 and 2 are common: (0.4 + 0.6)/2 = 0.5, (0.5 + 0.7)/2 = 0.6; std of a pair 0.2 apart: 0.2/√2."""
    table = data.curve_data(two_seeds(), "top1_global")
    assert table["method"].tolist() == ["fedavg", "fedavg"]
    assert table["round"].tolist() == [1, 2]
    assert table["mean"].tolist() == pytest.approx([0.5, 0.6])
    assert table["std"].tolist() == pytest.approx([0.2 / math.sqrt(2)] * 2)
    local = data.curve_data(two_seeds(), "mean_local").query("method == 'local'")
    assert local["n"].tolist() == [1] and local["std"].isna().all()


@pytest.mark.slow
def test_smoothed_curves_say_so_and_stand_beside_what_was_measured() -> None:
    """Two rounds each: 0.2, (0.2 + 0.4) / 2 and (0.4 + 0.9) / 2; of another method from its own first round on."""
    curves = {"fedavg": (0.2, 0.4, 0.9), "fedprox": (0.8, 0.6, 0.6)}
    runs = [
        make_run(method, 0, [make_round(number, value) for number, value in enumerate(values, start=1)])
        for method, values in curves.items()
    ]
    table = data.curve_data(runs, "top1_global", 2)
    assert table["mean"].tolist() == [0.2, 0.4, 0.9, 0.8, 0.6, 0.6]
    assert table["smoothed"].tolist() == pytest.approx([0.2, 0.3, 0.65, 0.8, 0.7, 0.6])
    drawn = comparison_drawings(replace(compare(runs), smooth=2))["accuracy"]
    assert "accuracy, moving average of 2" in drawn.svgs[0] and "smoothed" in drawn.data
    assert "moving average" not in comparison_drawings(compare(runs))["accuracy"].svgs[0]


def test_clients_pooled_have_a_curve_where_they_are_not_the_mean_over_clients() -> None:
    """Equal test sets: one and the same curve, which is drawn once; else it is a panel, and a line of a run."""
    alike, apart = (
        make_run("fedavg", seed, [replace(make_round(1, 0.4), pooled_local=pooled)], pooled_local=pooled)
        for seed, pooled in enumerate((0.4, 0.5))
    )
    assert [list(data.curve_titles([run])) for run in (alike, apart)] == [
        ["top1_global", "mean_local"],
        ["top1_global", "mean_local", "pooled_local"],
    ]
    assert list(charts.draw_accuracy_curves([alike, apart])) == ["top1_global", "mean_local", "pooled_local"]
    one = ["top1_global", "top1_vote", "mean_local"]
    assert [data.run_curves(run) for run in (alike, apart)] == [one, [*one, "pooled_local"]]
    assert data.curves_table([apart])["pooled_local"].tolist() == [0.5]


def test_bytes_against_accuracy() -> None:
    """150 bytes per round: 150 and 300; the silent method stays at 0 bytes."""
    table = data.bytes_accuracy_data(two_seeds(), "mean_local")
    assert table["bytes"].tolist() == [150, 300, 0]
    assert table["accuracy"].tolist() == pytest.approx([0.5, 0.6, 0.3])


def test_client_class_and_loss_tables() -> None:
    """Clients without test data have no row; class 0 is (0.2 + 0.4)/2, class 1 known to one seed, class 2 to none."""
    clients = data.client_accuracy_data(two_seeds())
    assert clients.values.tolist()[:2] == [["fedavg", 0, 0, 0.5], ["fedavg", 0, 2, 1.0]]
    classes = data.class_accuracy_data(two_seeds())
    assert classes.index.tolist() == ["fedavg"]
    assert classes.iloc[0].tolist()[:2] == pytest.approx([0.3, 0.9]) and math.isnan(classes.iloc[0].tolist()[2])
    losses = data.training_loss_data(two_seeds())
    assert losses.query("method == 'fedavg'")["mean"].tolist() == [1.0, 0.5]


def test_loss_terms_that_most_methods_share_come_first() -> None:
    """`a` belongs to one method, `z` to both."""
    runs = [
        make_run("fedavg", 0, [make_round(1, 0.5, train_loss={"z": 1.0})]),
        make_run("moon", 0, [make_round(1, 0.5, train_loss={"a": 1.0, "z": None})]),
        make_run("moon", 1, [make_round(1, 0.5, train_loss={"a": 3.0, "z": 2.0})]),
    ]
    table = data.training_loss_data(runs)
    assert table[["term", "method", "mean"]].values.tolist() == [["z", "fedavg", 1], ["z", "moon", 2], ["a", "moon", 2]]


def test_classes_are_shown_by_name(tmp_path: Path) -> None:
    """In the table of classes and in that of the partition; by number where no run knows names."""
    named = [make_run("fedavg", 0, [make_round(1, 0.5)], class_acc=(0.2, 0.4, None), class_names=("cat", "dog", "2"))]
    assert data.class_accuracy_data(named).columns.tolist() == ["cat", "dog", "2"]
    (panel,) = charts.draw_class_accuracy(named).values()
    assert [label.get_text() for label in panel.axes[0].get_xticklabels()] == ["cat", "dog", "2"]
    plain = [make_run("fedavg", 0, [make_round(1, 0.5)], class_acc=(0.2, 0.4))]
    assert data.class_accuracy_data(plain).columns.tolist() == [0, 1]


def test_partition_table(tmp_path: Path) -> None:
    """Counts as list or by class; absent classes count 0; names and sizes where given."""
    directory = write_manifest(tmp_path, [[1, 2, 3], {"0": 4}])
    partition = load_partition(directory, ("cat", "dog"))
    assert partition.counts.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert partition.class_names == ("cat", "dog", "2")
    assert partition_data(partition).loc["0001", "cat"] == 4
    sized = [{"id": "a", "class_counts": [1], "sizes": {"train": 1, "val": 2, "test": 3}}]
    partition = load_partition(write_manifest(tmp_path / "sizes", [], clients=sized))
    assert partition.sizes.values.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("text", [None, "{broken", "[]", '{"clients": []}', '{"clients": [{"id": "0000"}]}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    """The message names the file."""
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        load_partition(tmp_path)


def test_spread_apart() -> None:
    """0.5 and 0.5 with gap 0.2: 0.4 and 0.6. Far ones stay. At the ceiling both move down: 0.8 and 1.

    Three heights at 0 with gap 0.9 fit only with gap 1/2: 0, 0.5, 1.
    """
    assert spread_apart([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert spread_apart([0.1, 0.9], 0.2) == pytest.approx([0.1, 0.9])
    assert spread_apart([1.0, 1.0], 0.2) == pytest.approx([0.8, 1.0])
    assert spread_apart([0.0, 0.0, 0.0], 0.9) == pytest.approx([0, 0.5, 1])
    assert spread_apart([], 0.2) == []


def test_styles_are_distinct_and_follow_the_order() -> None:
    """26 methods get 26 pairs of colour and dashes, and of colour and marker; further ones change none before."""
    methods = [f"method{number}" for number in range(26)]
    styles = method_styles(methods)
    assert len({(style.colour, str(style.dashes)) for style in styles.values()}) == 26
    assert len({(style.colour, style.marker) for style in styles.values()}) == 26
    assert method_styles(methods[:3]) == {method: styles[method] for method in methods[:3]}


def test_a_row_per_run_and_round_for_plotting_tools() -> None:
    """All rounds of all seeds, also those that one seed alone has; what a method lacks is empty."""
    table = data.curves_table(two_seeds())
    assert list(table.columns) == [
        "method",
        "seed",
        "round",
        "top1_global",
        "top1_vote",
        "mean_local",
        "pooled_local",
        "bytes",
    ]
    assert table[["method", "seed", "round", "bytes"]].values.tolist()[:4] == [
        ["fedavg", 0, 0, 0],
        ["fedavg", 0, 1, 150],
        ["fedavg", 0, 2, 300],
        ["fedavg", 1, 1, 150],
    ]
    local = table[table["method"] == "local"]
    assert local["top1_global"].isna().all() and local["mean_local"].tolist() == [0.3]


def test_final_accuracy_against_all_bytes() -> None:
    """0.5 and 0.7: mean 0.6, std 0.2/√2; bytes (300 + 500)/2 = 400. A method without a global model has one row."""
    runs = [
        make_run("fedavg", seed, [], top1_global=final, mean_local=final, bytes_up=100, bytes_down=200 * (seed + 1))
        for seed, final in enumerate((0.5, 0.7))
    ]
    runs.append(make_run("local", 0, [], mean_local=0.4, bytes_up=0, bytes_down=0))
    table = data.tradeoff_data(runs)
    assert table[["metric", "method", "n"]].values.tolist() == [
        ["top1_global", "fedavg", 2],
        ["mean_local", "fedavg", 2],
        ["mean_local", "local", 1],
    ]
    assert table[["bytes", "accuracy", "std"]].values.tolist()[0] == pytest.approx([400, 0.6, 0.2 / math.sqrt(2)])
    assert table[["bytes", "accuracy"]].values.tolist()[2] == [0, 0.4]


def test_svg_is_deterministic_and_ids_are_prefixed() -> None:
    """Two drawings of the same runs are the same text; no id and no reference is without its prefix; no date."""
    first = svg_text(charts.draw_accuracy_curves(two_seeds())["top1_global"], "plot-a")
    assert first == svg_text(charts.draw_accuracy_curves(two_seeds())["top1_global"], "plot-a")
    second = svg_text(charts.draw_accuracy_curves(two_seeds())["top1_global"], "plot-b")
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in (first, second)]
    assert not set(ids[0]) & set(ids[1]) and len(ids[0]) == len(set(ids[0]))
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', first)
    assert targets and {a or b for a, b in targets} <= set(ids[0])
    assert "<metadata" not in first and "date" not in first
    ElementTree.fromstring(first)


def test_drawing_leaves_global_settings_alone() -> None:
    """Neither pyplot nor a changed setting stays behind."""
    before = dict(matplotlib.rcParams)
    svg_text(charts.draw_client_spread(two_seeds())[""])
    assert dict(matplotlib.rcParams) == before


def test_all_that_stands_around_a_panel_is_within_its_figure() -> None:
    """Ticks, labels, title and names of lines, at 72 points an inch; losses of a millionth have long tick labels."""
    tiny = [make_round(number, 0.5, train_loss={"cross_entropy": 1e-6 / number}) for number in (1, 2, 3)]
    panels = [
        *charts.draw_accuracy_curves(two_seeds()).values(),
        *charts.draw_bytes_against_accuracy(two_seeds()).values(),
        *charts.draw_differences(compare(two_seeds(), baseline="local")).values(),
        *charts.draw_client_spread(two_seeds()).values(),
        *charts.draw_training_loss([make_run("a", 0, tiny)]).values(),
        *draw_tradeoff(two_seeds()).values(),
    ]
    assert len(panels) >= 6
    for figure in panels:
        svg_text(figure)
        with house_style():
            used, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height
        # The panel has the rest, which is most of it.
        place = figure.axes[0].get_position()
        assert place.width > 0.5 and place.height > 0.4
        assert not figure.axes[0].yaxis.get_offset_text().get_text()  # a power of ten would stand in the title


def test_a_title_of_several_lines_is_within_its_figure() -> None:
    for lines in (1, 2, 3):
        with house_style():
            figure, axes = panel("\n".join(["Fashion-MNIST, α 0.3"] * lines))
            axes.plot([0, 1], [0, 1])
            svg_text(figure)
            assert figure.get_tightbbox().y1 <= figure.get_size_inches()[1], lines


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
    partition = PartitionTable(
        tuple(f"{k:04d}" for k in range(clients)), tuple(map(str, range(classes))), counts, pd.DataFrame(), {}
    )
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
    figure = charts.draw_accuracy_of_run(make_run("local", 0, [quiet]))[""]
    assert save(figure, tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"figure\.pdf"):
        save(figure, tmp_path / "figure.pdf")


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
        (2.2e6, 4.4e6, ["2.40 MB", "3 MB", "3.60 MB", "4.20 MB"]),  # 0.3 decades, with none, and no 2 or 5 either
        (1.5e5, 1.5e7, ["1 MB", "10 MB"]),  # two decades: powers of ten say the scale
    ],
)
def test_a_short_axis_of_bytes_has_more_labels_than_powers_of_ten(low: float, high: float, labels: list[str]) -> None:
    figure, axes = panel("")
    byte_axis(axes)
    axes.set_xlim(low, high)
    figure.draw_without_rendering()
    ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
    shown = sorted((tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high)
    assert [text.replace("\u202f", " ").replace("\xa0", " ") for _, text in shown if text] == labels


def test_an_axis_of_accuracies_has_round_ticks_and_ends_at_all(tmp_path: Path) -> None:
    """Of 0.7 to 1.0 in steps of 1, 2 or 5 times a power of ten, none above 100 %."""
    runs = [make_run("fedavg", 0, [make_round(number, 0.7 + 0.1 * number) for number in (1, 2, 3)])]
    for figure in (*charts.draw_accuracy_curves(runs).values(), *draw_tradeoff(runs).values()):
        axes = figure.axes[0]
        low, high = axes.get_ylim()
        ticks = [float(tick) for tick in axes.get_yticks() if low <= tick <= high]
        step = round(100 * (ticks[1] - ticks[0]), 6)
        assert max(ticks) <= 1 and high < 1.02 and step in (1, 2, 5, 10, 20)


def test_names_of_many_methods_do_not_touch() -> None:
    """Of 29 methods of nearly one accuracy and the same bytes, names at the right are a line of text apart."""
    runs = [make_run(f"method{number}", 0, [make_round(1, 0.5 + 0.0001 * number)]) for number in range(29)]
    for figure in (*draw_tradeoff(runs).values(), *charts.draw_accuracy_curves(runs).values()):
        svg_text(figure)
        heights = sorted(text.get_window_extent().y0 for text in figure.axes[0].texts)
        assert len(heights) == 29
        assert min(b - a for a, b in pairwise(heights)) * 72 / figure.dpi >= 8.5
