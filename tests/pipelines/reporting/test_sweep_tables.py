"""Sweeps: what is planned and refused, the table by hand, the figure, and one for real that is killed and goes on."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from flcore.config import Config
from flcore.errors import ConfigError
from pipelines import stages
from pipelines.cli import app as cli
from pipelines.config.grid import Point, describe_federation, plan, short_names
from pipelines.config.params import for_entry, override
from pipelines.reporting import sweep_tables as sweeping
from pipelines.reporting.figures.sweeps import draw_sweep, lines_of, numeric_key, scale_of, write_figure
from pipelines.reporting.sweep_tables import Sweep, markdown, summarise, write
from pipelines.runs.layout import RunFiles
from pipelines.runs.record import RunRecord

PROJECT = Path(__file__).resolve().parents[3]
PROX = {"method": {"name": "fedprox"}}
SUBJECT = "fedprox on digits"


# ------------------------------------------------------------------------------------------------------------- plans


def test_all_combinations_in_the_order_given_each_with_every_seed() -> None:
    planned = plan(PROX, ["method.mu=0.1,1", "local.epochs=1,2"], seeds=[3, 4])
    assert [tuple(point.values.values()) for point in planned.points] == [(0.1, 1), (0.1, 2), (1.0, 1), (1.0, 2)]
    assert [run.config.seed for run in planned.runs] == [3, 4] * 4
    assert [run.config.method.mu for run in planned.runs] == [0.1] * 4 + [1.0] * 4  # type: ignore[attr-defined]
    assert planned.runs[2].label == "method.mu = 0.1, local.epochs = 2"


def test_values_are_yaml_and_are_told_as_the_configuration_reads_them() -> None:
    """1e-3 is text in YAML, and 1 is no float: both come back as what the run has."""
    planned = plan({}, ["local.lr=1e-3,1", "local.clip=null,5"], seeds=[0])
    assert [point.values["local.lr"] for point in planned.points] == [0.001, 0.001, 1.0, 1.0]
    assert [point.label for point in planned.points][:2] == [
        "local.lr = 0.001, local.clip = null",
        "local.lr = 0.001, local.clip = 5",
    ]


def test_the_configured_point_is_known_wherever_it_stands() -> None:
    """fedprox's own default is 0.01; what a file or ``compare.settings`` says comes first."""
    vary = ["method.mu=0.01,0.5,2"]
    settings = {"compare": {"settings": {"fedprox": {"method.mu": 2}}}}
    for raw, expected in ((PROX, 0.01), (override(PROX, ["method.mu=0.5"]), 0.5), (PROX | settings, 2.0)):
        planned = plan(raw, vary, seeds=[0])
        assert planned.configured == {"method.mu": expected}
        assert [point.values["method.mu"] for point in planned.points if point.is_configured] == [expected]
    assert not any(point.is_configured for point in plan(PROX, ["method.mu=1,3"], seeds=[0]).points)


def test_a_point_and_the_run_of_a_comparison_are_the_same_run() -> None:
    raw = {"method": {"name": "fedavg"}, "compare": {"settings": {"fedprox": {"method.mu": 2, "local.lr": 0.5}}}}
    planned = plan(override(raw, ["method.name=fedprox"]), ["method.mu=1,2"], seeds=[1], baselines=["fedavg"])
    same = [run.config.identity() for run in planned.runs[1:]]
    assert same == [Config.from_mapping(for_entry(raw, method, 1)).identity() for method in ("fedprox", "fedavg")]


def test_seeds_are_those_of_the_comparison_unless_named() -> None:
    assert plan({"compare": {"seeds": [7, 8]}}, ["local.lr=0.1"]).seeds == (7, 8)


def test_baselines_take_over_what_is_varied_outside_the_method_and_nothing_else() -> None:
    alone = plan(PROX, ["method.mu=1,2"], seeds=[0, 1], baselines=["local", "fedavg"])
    assert [(p.method, dict(p.values)) for p in alone.points if p.is_baseline] == [("local", {}), ("fedavg", {})]
    beside = plan(PROX, ["method.mu=1,2", "local.epochs=1,3"], seeds=[0], baselines=["fedavg"])
    assert [p.values for p in beside.points if p.is_baseline] == [{"local.epochs": 1}, {"local.epochs": 3}]
    assert [run.config.local.epochs for run in beside.runs] == [1, 3, 1, 3, 1, 3]
    assert not any(point.is_configured for point in alone.points[2:])


def test_methods_can_be_varied_each_with_its_own_parameters() -> None:
    planned = plan(override(PROX, ["method.mu=0.5"]), ["method.name=fedprox,fedavg"], seeds=[0])
    assert [run.config.method.name for run in planned.runs] == ["fedprox", "fedavg"]
    assert [point.name for point in planned.points] == ["fedprox", "fedavg"]
    assert [point.is_configured for point in planned.points] == [True, False]


def test_partitions_that_differ_have_folders_that_differ() -> None:
    """Their names follow from the partition alone, so that a later sweep finds them again."""
    first = plan({}, ["partition.alpha=0.1,1"], seeds=[0, 1])
    folders = [run.division for run in first.runs]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert plan({}, ["partition.alpha=1,0.5"], seeds=[5]).runs[0].division == folders[2]
    assert {run.division for run in plan({}, ["local.lr=0.1,1", "partition.seed=0,1"], seeds=[0]).runs} == {""}


def test_the_federation_is_told_without_what_varies() -> None:
    raw = {"partition": {"name": "dirichlet", "alpha": 0.3, "num_clients": 1, "min_size": 5}}
    base = Config.from_mapping(raw)
    assert describe_federation(base, ()) == "digits, dirichlet partition (alpha 0.3, min_size 5), 1 client"
    assert describe_federation(base, ("partition.alpha",)) == "digits, dirichlet partition (min_size 5), 1 client"
    assert describe_federation(base, ("partition.name", "partition.num_clients")) == "digits"
    names = short_names(["method.mu", "method.name", "local.lr"])
    assert names == {"method.mu": "mu", "method.name": "method.name", "local.lr": "lr"}


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ([], "--vary: name at least one key"),
        (["local.lr"], "--vary local.lr: expected KEY=VALUE,VALUE"),
        (["local.lr="], "--vary local.lr=: expected KEY=VALUE,VALUE"),
        (["local.lr=0.1,,1"], "expected KEY=VALUE,VALUE"),
        (["lokal.lr=1"], "--vary lokal.lr: lokal: unknown key; did you mean 'local'"),
        (["local.learning=1"], "local.learning: unknown key"),
        (["local=1"], "--vary local: expected a section and one key of it"),
        (["seed=0,1"], "--vary seed: every point is run with every seed; name them with --seeds"),
        (["compare.baseline=local,fedavg"], "--vary compare.baseline: changes no result"),
        (["data.name=mnist,digits"], "--vary data.name: a sweep is on one set of images"),
        (["local.lr=0.1", "local.lr=1"], "--vary local.lr: stands twice"),
        (["local.lr=1,0.1,1.0"], "'fedprox, local.lr = 1' and 'fedprox, local.lr = 1' are the same run"),
        (["engine.workers=1,2"], "are the same run"),
        (["method.mu=0.1,-1"], "method.mu = -1.0: must be >= 0"),
        (["local.epochs=1,two"], "local.epochs = two: expected >= 1"),
        (["method.weight=1"], "method.weight: fedprox has no such parameter; it belongs to fedproto"),
        (["method.name=fedprox,fedpro"], "method.name = fedpro: must be one of"),
        (
            ["engine.compile=none,default", "engine.stack=false,true"],
            "use engine.stack=false or engine.compile=none",
        ),
        (
            ["evaluation.split=test,validation", "local.lr=0.1"],
            "needs partition.validation above 0, for example 0.2",
        ),
    ],
)
def test_what_cannot_be_varied_is_refused_with_key_value_and_cure(vary: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(PROX, vary, seeds=[0])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rule_about_several_keys_is_told_with_the_point_that_breaks_it() -> None:
    vary = ["method.head=linear,etf", "method.use_dcs=true,false"]
    with pytest.raises(ConfigError, match=r"needs use_dcs .*\(with method\.head = etf, method\.use_dcs = false\)"):
        plan({"method": {"name": "gfpl"}}, vary, seeds=[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "--seeds: name at least one seed"),
        ({"seeds": [1, 0, 1]}, "--seeds 1,0,1: a seed stands twice"),
        ({"seeds": [-1]}, "seed = -1: expected a whole number >= 0"),
        ({"baselines": ["fedavgg"]}, "--baselines: fedavgg: unknown method; did you mean 'fedavg'"),
        ({"baselines": ["local", "local"]}, "--baselines local,local: a method stands twice"),
    ],
)
def test_seeds_and_baselines_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(PROX, ["local.lr=0.1"], **({"seeds": [0]} | changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("setting", ["partition.alpha", "data.size"])
def test_a_baseline_on_other_data_is_refused(setting: str) -> None:
    raw = PROX | {"compare": {"settings": {"local": {setting: 9}}}}
    with pytest.raises(ConfigError, match=rf"compare\.settings\.local: {setting.split('.')[0]} must be the same"):
        plan(raw, ["method.mu=1"], seeds=[0], baselines=["local"])
    assert plan(raw, ["method.mu=1"], seeds=[0]).runs


def test_the_command_refuses_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Prefect server configured none is started, and none is asked: it is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for arguments, named in (
        (["--vary", "local.lr=0.1,-1"], "local.lr = -1.0: must be > 0"),
        (["--vary", "local.lr=0.1", "--metric", "loss"], "metric: 'loss' is unknown; choose from top1_global"),
    ):
        assert cli.main(["sweep", *arguments, "--out", "s"]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


# ------------------------------------------------------------------------------------------------------------- table


def run(seed: int, accuracy: float | None, method: str = "fedprox", **changes: Any) -> RunRecord:
    """A run of 4 rounds with 100 scalars, 400 bytes up and 800 bytes down in each."""
    values: dict[str, Any] = {
        **dict.fromkeys(set(RunRecord.__dataclass_fields__) - {"directory", "history", "tasks", "block_ends"}),
        "method": method,
        "dataset": "digits",
        "partition": "iid",
        "seed": seed,
        "rounds": 4,
        "class_acc": (),
        "bytes_up_by_kind": {},
        "bytes_down_by_kind": {},
        "mean_local": accuracy,
        "client_std": 0.05,
        "scalars_up_per_round": 100,
        "bytes_up_per_round": 400,
        "bytes_down_per_round": 800,
        "bytes_up": 1600,
        "bytes_down": 3200,
    }
    return RunRecord(**(values | changes))


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

    Best is 73.33; pooled errors to the others are 1.70 (71.33 is 2 below) and more than that is missing elsewhere.
    """
    header, _, *rows = table(markdown(three_values()))
    assert header[:5] == ["method", "mu", "n", "mean_local", "client_std"]
    assert rows[0][:6] == ["fedprox", "0.1", "3", "71.33 ± 1.53", "5.00", "reference"]
    assert rows[1][1:6] == ["1", "3", "**73.33 ± 2.52**", "5.00", "+2.00 [−0.48, +4.48]"]
    assert rows[2][1:6] == ["10", "2", "61.00 ± 1.41", "5.00", "−9.50 [−15.85, −3.15]"]
    assert rows[3][:6] == ["fedavg", "–", "3", "50.00 ± 0.00", "5.00", "−21.33 [−25.13, −17.54]"]
    assert rows[0][6:] == ["100", "1.60 kB", "3.20 kB"]
    assert rows[3][6] == "1\N{NARROW NO-BREAK SPACE}000"


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
    planned = plan({"method": {"name": "gfpl"}}, [f"{key}=false,true" for key in switches], seeds=[0])
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


# ------------------------------------------------------------------------------------------------------------ figure


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
    planned = plan(
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
    [
        {"method__weight": [0.0, 0.1, 10.0]},
        {"method__components": list(range(1, 16))},
        {"method__components": [1]},
        {"method__head": ["linear", "etf", "sum"], "method__retrain_source": ["global", "own"]},
        {"method__components": [1, 2], "local__epochs": [1, 2], "partition__alpha": [0.1, 1.0, 2.0]},
    ],
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


# ---------------------------------------------------------------------------------------------------------- for real

REAL = (
    "method.name=fedprox",
    "data.limit_per_class=20",
    "data.size=28",
    "partition.num_clients=2",
    "partition.min_size=5",
    "federation.rounds=2",
    "local.lr=0.05",
    "tracking.enabled=false",
)


def command(*arguments: str) -> list[str]:
    assignments = [part for assignment in REAL for part in ("--set", assignment)]
    return [
        sys.executable,
        "-m",
        "pipelines.cli",
        "sweep",
        *assignments,
        "--seeds",
        "0",
        "--out",
        "s",
        *arguments,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """A folder in which a sweep of two points was killed in the second and then finished by the same command.

    Also what that printed, and when the first point's history was written.
    """
    folder = tmp_path_factory.mktemp("sweep")
    call = command("--vary", "method.mu=0.01,10")
    process = subprocess.Popen(
        call, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while len(list(folder.glob("s/runs/*/config.json"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, "the sweep ended before it was killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (first,) = folder.glob("s/runs/*/metrics.json")
    stamp = (first.parent / "history.jsonl").stat().st_mtime_ns
    done = subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (first.parent / "history.jsonl").stat().st_mtime_ns == stamp, "a finished run was repeated"
    return folder, done.stdout, stamp


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_ends_as_stages_run_inline(
    killed_and_resumed: tuple[Path, str, int], tmp_path: Path
) -> None:
    folder, printed, _ = killed_and_resumed
    assert "table: s/sweep.md" in printed and "figure: s/sweep.png" in printed
    planned = plan(override({}, REAL), ["method.mu=0.01,10"], seeds=[0])
    stages.prepare(planned.base, tmp_path / "prepared")
    stages.partition(planned.base, tmp_path / "prepared", tmp_path / "partition")
    directories = [tmp_path / f"run-{number}" for number in range(2)]
    for planned_run, directory in zip(planned.runs, directories, strict=True):
        stages.train(planned_run.config, tmp_path / "prepared", tmp_path / "partition", directory)
        stages.evaluate(planned_run.config, tmp_path / "prepared", tmp_path / "partition", directory)
    sweep = sweeping.collect(planned, directories, "mean_local")
    for path in (*write(sweep, tmp_path), write_figure(sweep, tmp_path)):
        assert (folder / "s" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_another_sweep_finds_the_runs_it_shares_and_outlives_one_that_fails(
    killed_and_resumed: tuple[Path, str, int],
) -> None:
    """lr 0.05 with the default mu was a point of the first sweep; with 1e30 training diverges."""
    folder, _, stamp = killed_and_resumed
    call = command("--vary", "local.lr=1e30,0.05", "--baselines", "local")
    done = subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 4
    assert "fedprox seed 0, local.lr = 1e+30 failed: round 1" in done.stderr
    assert "protofl: 2 of 4 runs failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert stamp in [path.stat().st_mtime_ns for path in folder.glob("s/runs/*/history.jsonl")]
    assert len(list(folder.glob("s/runs/fedprox-*/history.jsonl"))) == 2
    rows = json.loads((folder / "s" / "sweep.json").read_text())["rows"]
    assert [(row["method"], row["values"]["local.lr"], row["seeds"]) for row in rows] == [
        ("fedprox", 1e30, []),
        ("fedprox", 0.05, [0]),
        ("local", 1e30, []),
        ("local", 0.05, [0]),
    ]
    assert RunFiles(next(folder.glob("s/runs/local-*"))).config.exists()
