"""The result of a sweep: its table by hand, and its figure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from pipelines.plan.grid import Point, sweep_plan
from pipelines.reporting import sweep_tables as sweeping
from pipelines.reporting.figures.sweeps import draw_sweep, lines_of, numeric_key, scale_of, write_figure
from pipelines.reporting.sweep_tables import Sweep, markdown, summarise, write
from pipelines.runs.record import RunRecord
from tests.cases import quick
from tests.pipelines.reporting.records import make_run

SUBJECT = "fedprox on digits"


def run(seed: int, accuracy: float | None, method: str = "fedprox", **changes: Any) -> RunRecord:
    """A run of 4 rounds with 100 scalars, 400 bytes up and 800 bytes down in each."""
    per_round = {"scalars_up_per_round": 100, "bytes_up_per_round": 400, "bytes_down_per_round": 800}
    whole = {"rounds": 4, "bytes_up": 1600, "bytes_down": 3200, "mean_local": accuracy, "client_std": 0.05}
    return make_run(method, seed, [], **(per_round | whole | changes))


def runs(*accuracies: float, method: str = "fedprox", **changes: Any) -> list[RunRecord]:
    return [run(seed, accuracy, method, **changes) for seed, accuracy in enumerate(accuracies)]


def points_of(key: str, values: Sequence[Any], configured: Any, **more: Any) -> list[Point]:
    return [Point("fedprox", {key: value}, is_configured=value == configured, **more) for value in values]


def three_values() -> Sweep:
    """mu 0.1 is configured; 1 gains 1, 2 and 3 points; 10 lacks a seed; fedavg is fixed and sends ten times as much."""
    small, medium, large = points_of("method.mu", (0.1, 1.0, 10.0), 0.1)
    rows = [
        (small, runs(0.70, 0.71, 0.73)),
        (medium, runs(0.71, 0.73, 0.76)),
        (large, runs(0.60, 0.62)),
        (Point("fedavg", {}, is_baseline=True), runs(0.5, 0.5, 0.5, method="fedavg", scalars_up_per_round=1000)),
    ]
    return summarise(rows, {"method.mu": 0.1}, (0, 1, 2), "mean_local", SUBJECT)


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_means_spreads_differences_and_costs() -> None:
    """70, 71, 73: 71.33 ± 1.53 and 71, 73, 76: 73.33 ± 2.52, as derived for comparisons, where the differences 1, 2, 3
    have the interval 2 ± 4.303 · 1 / √3 = [-0.48, 4.48]. 60, 62: 61 ± 1.41; differences -10, -9: -9.5 with standard
    deviation 0.707, 12.706 · 0.707 / √2 = 6.353. fedavg: -20, -21, -23: mean -21.33, deviations 4/3, 1/3, -5/3, so
    1.528 and 4.303 · 1.528 / √3 = 3.795.

    Ties are by pairs: 73.33 is best, 71.33 tied with it. 10 lacks a seed and is not ranked; fedavg is 21, 23, 26 below.
    """
    header, _, *rows = table(markdown(three_values()))
    assert header[:5] == ["method", "mu", "n", "mean over clients", "std over clients"]
    assert rows[0][:6] == ["fedprox", "0.1", "3", "71.33 ± 1.53 ≈", "5.00", "reference"]
    assert rows[1][1:6] == ["1", "3", "**73.33 ± 2.52**", "5.00", "+2.00 [−0.48, +4.48], p 0.074"]
    assert rows[2][1:6] == ["10", "2", "61.00 ± 1.41", "5.00", "−9.50 [−15.85, −3.15], p 0.067"]
    assert rows[3][:6] == ["fedavg", "–", "3", "50.00 ± 0.00", "5.00", "−21.33 [−25.13, −17.54], p 0.0051"]
    assert rows[0][6:] == ["100", "1.60 kB", "3.20 kB"]
    assert rows[3][6] == "1\N{NARROW NO-BREAK SPACE}000"


def test_any_number_of_a_run_can_be_the_metric_and_of_costs_less_is_best() -> None:
    """Seconds 10, 12 against 4, 4: 11 ± 1.414 and 4 ± 0; differences -6 and -8, mean -7, half-width
    12.706 · √2 / √2 = 12.71.
    """
    slow, fast = points_of("method.mu", (0.1, 1.0), 0.1)
    seconds = [
        [run(seed, 0.5, figures={"timing.seconds": value}) for seed, value in enumerate(each)]
        for each in ((10.0, 12.0), (4.0, 4.0))
    ]
    sweep = summarise([(slow, seconds[0]), (fast, seconds[1])], {"method.mu": 0.1}, (0, 1), "timing.seconds", SUBJECT)
    header, _, first, second = table(markdown(sweep))
    assert header[2:5] == ["timing.seconds", "std over clients", "Δ timing.seconds"]
    assert (first[2], first[4]) == ("11 ± 1.41 ≈", "reference")  # the interval below holds 0
    assert (second[2], second[4]) == ("**4 ± 0**", "-7 [-19.7, +5.71], p 0.09")
    draw_sweep(sweep)
    assert "timing.seconds, mean ± std over n seeds" in sweeping.sweep_table(sweep).title


def test_a_figure_without_a_direction_has_no_best() -> None:
    """Of error_rate 0.5 and 0.1 nobody has said which is better."""
    both = zip(points_of("method.mu", (0.1, 1.0), 0.1), (0.5, 0.1), strict=True)
    rows = [(point, [run(seed, 0.5, figures={"error_rate": value}) for seed in (0, 1)]) for point, value in both]
    sweep = summarise(rows, {"method.mu": 0.1}, (0, 1), "error_rate", SUBJECT)
    assert [row[2] for row in table(markdown(sweep))[2:]] == ["0.5 ± 0", "0.1 ± 0"]
    assert "error_rate is better is not declared" in sweep.notes[0]


def test_what_is_missing_or_uneven_is_said() -> None:
    sweep = three_values()
    assert sweep.notes == ("fedprox, method.mu = 10: no finished run with seed 2.",)
    assert sweep.subject == "fedprox on digits, 4 rounds, seeds 0, 1, 2"
    rows = [(point, runs(0.5)) for point in points_of("method.mu", (1.0, 2.0), None)]
    rows[1] = (rows[1][0], [run(0, None, rounds=5)])
    sweep = summarise(rows, {"method.mu": 7.0}, (0,), "mean_local", SUBJECT)
    assert sweep.notes == (
        "The configured point (method.mu = 7) is not among these: no differences.",
        "fedprox, method.mu = 2: has no mean_local.",
        "The runs differ in length (4, 5 rounds).",
    )
    assert [row[2:5] for row in table(markdown(sweep))[2:]] == [["50.00", "5.00", "–"], ["–", "5.00", "–"]]
    empty = summarise([(rows[0][0], [])], {"method.mu": 1.0}, (0,), "mean_local", SUBJECT)
    assert table(markdown(empty))[2] == ["1", "0", "–", "–", "reference", "–", "–", "–"]


def test_switches_are_check_marks_in_the_order_given() -> None:
    """GFPL's ablation table: none, PFG alone, DCS alone, both (evaluation.md 5.4)."""
    switches = ("method.use_dcs", "method.use_pfg")
    planned = sweep_plan({"method": {"name": "gfpl"}}, [f"{key}=false,true" for key in switches], seeds=[0])
    rows = [(point, [run(0, 0.5, "gfpl")]) for point in planned.points]
    sweep = summarise(rows, planned.configured, (0,), "mean_local", "gfpl")
    header, _, *body = table(markdown(sweep))
    assert header[:2] == ["use_dcs", "use_pfg"]
    assert [row[:2] for row in body] == [["✗", "✗"], ["✗", "✓"], ["✓", "✗"], ["✓", "✓"]]
    assert [row[5] for row in body] == ["+0.00 (n = 1, no interval)"] * 3 + ["reference"]


def test_differences_are_within_a_partition() -> None:
    """mu 1 is configured: at alpha 0.1 it has 50, mu 2 has 53 (+3); at alpha 9, 70 and 69 (-1). fedavg: 52 and 60."""
    accuracies = {(1.0, 0.1): 0.50, (1.0, 9.0): 0.70, (2.0, 0.1): 0.53, (2.0, 9.0): 0.69}
    rows = [
        (Point("fedprox", {"method.mu": mu, "partition.alpha": alpha}), runs(accuracy))
        for (mu, alpha), accuracy in accuracies.items()
    ]
    rows += [
        (Point("fedavg", {"partition.alpha": alpha}, is_baseline=True), runs(accuracy, method="fedavg"))
        for alpha, accuracy in ((0.1, 0.52), (9.0, 0.60))
    ]
    sweep = summarise(rows, {"method.mu": 1.0, "partition.alpha": 0.5}, (0,), "mean_local", SUBJECT)
    assert [row.is_reference for row in sweep.rows] == [True, True, False, False, False, False]
    found = [row.differences["mean_local"].mean for row in sweep.rows]
    assert found[:2] == [None, None]
    assert found[2:] == pytest.approx([0.03, -0.01, 0.02, -0.10])


def test_files_are_long_and_the_same_for_the_same_runs(tmp_path: Path) -> None:
    sweep = three_values()
    first = [path.read_bytes() for path in write(sweep, tmp_path / "a")]
    assert first == [path.read_bytes() for path in write(three_values(), tmp_path / "b")]
    rows = list(csv.DictReader(io.StringIO(first[0].decode())))
    assert [(row["method.mu"], row["seed"]) for row in rows] == [
        *(("0.1", str(seed)) for seed in (0, 1, 2)),
        *(("1", str(seed)) for seed in (0, 1, 2)),
        *(("10", str(seed)) for seed in (0, 1)),
        *(("", str(seed)) for seed in (0, 1, 2)),
    ]
    assert rows[0]["mean_local"] == "0.7" and rows[0]["top1_global"] == "" and rows[0]["is_configured"] == "true"
    document = json.loads(first[1])
    assert document["configured"] == {"method.mu": 0.1} and document["keys"] == ["method.mu"]
    assert [row["values"] for row in document["rows"]] == [{"method.mu": mu} for mu in (0.1, 1, 10)] + [{}]
    assert document["rows"][1]["mean_local_paired_difference_mean"] == pytest.approx(0.02)
    assert document["rows"][1]["top1_global_mean"] is None
    assert len(document["runs"]) == 11


def test_the_terminal_shows_the_table_and_the_notes() -> None:
    out = io.StringIO()
    sweeping.print_table(three_values(), Console(file=out, width=200))
    text = out.getvalue()
    assert "73.33 ± 2.52" in text and "Note: fedprox, method.mu = 10: no finished run with seed 2." in text


def test_a_narrow_terminal_cuts_nothing() -> None:
    """Cells are folded: without line breaks and borders all signs of a row are there."""
    out = io.StringIO()
    sweeping.print_table(three_values(), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    start = next(number for number, line in enumerate(lines) if line.startswith("│ fedprox │  10 │"))
    cells = zip(*(line.strip("│").split("│") for line in lines[start : start + 2]), strict=True)
    assert "61.00±1.41" in ["".join(parts).replace(" ", "") for parts in cells]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1, 10], "linear"),
        ([1, 10.5], "log"),
        ([0, 1, 10], "linear"),
        ([0, 1, 11], "symlog"),
        ([-1, 1, 100], "linear"),
        ([0, 0], "linear"),
        ([5], "linear"),
    ],
)
def test_axes_are_logarithmic_above_a_factor_of_ten(values: list[float], scale: str) -> None:
    assert scale_of(values) == scale


def grid_of(**values: Sequence[Any]) -> Sweep:
    """Every combination; keys are named after their section, as ``local__epochs``."""
    names = {name.replace("__", "."): list(options) for name, options in values.items()}
    planned = sweep_plan(
        {"method": {"name": "gfpl"}},
        [f"{name}={json.dumps(options)[1:-1]}" for name, options in names.items()],
        seeds=[0, 1],
        baselines=["local"],
    )
    rows = [(point, runs(0.5, 0.6, method=point.method)) for point in planned.points]
    return summarise(rows, planned.configured, (0, 1), "mean_local", "gfpl on digits")


def test_one_numeric_key_is_the_axis_and_the_others_make_lines() -> None:
    sweep = grid_of(method__use_dcs=[False, True], method__components=[4, 1, 2])
    assert numeric_key(sweep) == "method.components"
    lines = lines_of(sweep, "method.components")
    assert [line.label for line in lines] == ["use_dcs = false", "use_dcs = true", "local"]
    assert [row.point.values["method.components"] for row in lines[0].rows] == [1, 2, 4]
    assert numeric_key(grid_of(method__weight=[1, 2], method__components=[1, 2, 3])) == "method.components"
    assert numeric_key(grid_of(method__use_dcs=[False, True])) is None
    methods = lines_of(grid_of(method__name=["gfpl", "fedavg"], local__epochs=[1, 2]), "local.epochs")
    assert [line.label for line in methods] == ["gfpl", "fedavg", "local"]
    assert numeric_key(grid_of(method__projection_dim=[None, 50])) is None


def horizontal(axes: Any) -> list[float]:
    """Heights of the lines that go all the way across."""
    return [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]


def test_accuracy_and_traffic_over_a_value_with_baselines_across() -> None:
    """fedavg has 0.5 with every seed; its 1000 scalars are ten times the others' 100, no more: a linear axis."""
    figure = draw_sweep(three_values())
    accuracy, scalars, traffic = figure.axes
    assert accuracy.get_xscale() == "log"  # 0.1 to 10
    assert [label.get_text() for label in accuracy.get_xticklabels()] == ["0.1\n(configured)", "1", "10"]
    assert horizontal(accuracy) == [0.5]
    assert scalars.get_yscale() == "linear" and horizontal(scalars) == [1000]
    assert horizontal(traffic) == [1200]
    means = [container.lines[0].get_ydata() for container in accuracy.containers]
    assert list(means[0]) == pytest.approx([2.14 / 3, 2.2 / 3, 0.61])
    # Dots: three, three and two seeds.
    assert [len(dots.get_offsets()) for dots in accuracy.collections if len(dots.get_offsets())][-3:] == [3, 3, 2]
    title = figure.get_suptitle()
    for stated in ("fedprox on digits", "4 rounds", "seeds 0, 1, 2"):
        assert stated in title


def test_switches_are_rows() -> None:
    figure = draw_sweep(grid_of(method__use_dcs=[False, True], method__use_pfg=[True]))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["use_dcs ✗   use_pfg ✓", "configured:   use_dcs ✓   use_pfg ✓", "local"]


@pytest.mark.parametrize(
    "values",
    quick(
        [
            {"method__weight": [0.0, 0.1, 10.0]},
            {"method__components": list(range(1, 16))},
            {"method__components": [1]},
            {"method__head": ["linear", "etf", "sum"], "method__retrain_source": ["global", "own"]},
            {"method__components": [1, 2], "local__epochs": [1, 2], "partition__alpha": [0.1, 1.0, 2.0]},
        ],
        2,
    ),
)
def test_every_kind_of_grid_can_be_drawn(tmp_path: Path, values: Mapping[str, Sequence[Any]]) -> None:
    assert write_figure(grid_of(**values), tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_same_runs_give_the_same_picture(tmp_path: Path) -> None:
    first = write_figure(three_values(), tmp_path).read_bytes()
    assert write_figure(three_values(), tmp_path).read_bytes() == first


def test_nothing_to_show_is_said_in_the_figure() -> None:
    rows = [(point, [run(0, None)]) for point in points_of("method.mu", (1.0, 2.0), None)]
    figure: Figure = draw_sweep(summarise(rows, {"method.mu": 7.0}, (0,), "mean_local", SUBJECT))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no values"]
