"""Comparisons of runs written by hand; every expected number is derived in the docstring of its test."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flcore.errors import ConfigError, DataError, ProtoflError
from pipelines.reporting.comparison_tables import format_difference, format_summary, markdown, print_table, write
from pipelines.reporting.formats import format_bytes, format_percent
from pipelines.reporting.statistics import (
    PairedDifference,
    Summary,
    compare,
    marks,
    paired_difference,
    pooled_standard_error,
    rounds_to_target,
    summarise,
)
from pipelines.runs.record import RunRecord, load_run


def make_run(root: Path, method: str, seed: int, curve: list[float], **changes: Any) -> RunRecord:
    """A run whose global accuracy follows `curve`, one value per round; local accuracy is 0.1 above it.

    Each round sends 100 bytes up (80 weights, 20 prototypes) and 50 bytes of weights down.
    """
    has_global = changes.pop("has_global", True)
    directory = root / f"{method}-{seed}"
    directory.mkdir(parents=True)
    history = [
        {
            "round": number,
            "participants": ["0000", "0001"],
            "top1_global": accuracy if has_global else None,
            "loss_global": None,
            "mean_local": accuracy + 0.1,
            "pooled_local": accuracy + 0.1,
            "client_std": 0.05,
            "local_accuracy": [accuracy + 0.05, accuracy + 0.15, None],
            "class_accuracy": None,
            "train_loss": {"cross_entropy": 1 / number},
            "bytes_up": {"weights": 80 * number, "prototypes": 20 * number},
            "bytes_down": {"weights": 50 * number},
            "unknown_key": 1,
        }
        for number, accuracy in enumerate(curve, start=1)
    ]
    metrics = {
        "method": method,
        "dataset": "digits",
        "partition": "dirichlet",
        "rounds": len(curve),
        "seed": seed,
        "config_hash": "c0ffee",
        "top1_global": curve[-1] if has_global else None,
        "mean_local": curve[-1] + 0.1,
        "pooled_local": curve[-1] + 0.1,
        "client_std": 0.05,
        "last10_top1_global": sum(curve) / len(curve) if has_global else None,
        "best_top1_global": max(curve) if has_global else None,
        "best_round": curve.index(max(curve)) + 1 if has_global else None,
        "class_acc": [0.5, None],
        "bytes_up": 100 * len(curve),
        "bytes_down": 50 * len(curve),
        "bytes_up_by_kind": {"weights": 80 * len(curve), "prototypes": 20 * len(curve)},
        "bytes_down_by_kind": {"weights": 50 * len(curve)},
        "bytes_up_per_round": 100,
        "bytes_down_per_round": 50,
        "scalars_up_per_round": 25,
        "num_parameters": 20,
        "data_fingerprint": "data",
        "partition_fingerprint": f"partition-{seed}",
        "unknown_key": {},
    } | changes
    (directory / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in history)
    (directory / "history.jsonl").write_text(lines, encoding="utf-8")
    return load_run(directory)


def three_seeds(root: Path) -> list[RunRecord]:
    """Baseline 0.70, 0.71, 0.73 and a method 0.71, 0.73, 0.76 over seeds 0, 1, 2."""
    runs = [make_run(root, "fedavg", seed, [0.5, final]) for seed, final in enumerate((0.70, 0.71, 0.73))]
    return runs + [make_run(root, "moon", seed, [0.69, final]) for seed, final in enumerate((0.71, 0.73, 0.76))]


def test_mean_and_sample_deviation() -> None:
    """70, 71, 73: mean 214/3 = 71.33; deviations -4/3, -1/3, 5/3; (16 + 1 + 25)/9 / 2 = 7/3, root 1.53."""
    summary = summarise([0.70, 0.71, 0.73])
    assert (summary.mean, summary.std, summary.n) == pytest.approx((2.14 / 3, math.sqrt(7 / 3) / 100, 3))
    assert format_summary(summary) == "71.33 ± 1.53"


def test_missing_values_are_not_zero() -> None:
    """None does not count; one value has no spread; no value is a dash."""
    assert summarise([None, 0.7]) == Summary(0.7, None, 1)
    assert format_summary(Summary(0.7, None, 1)) == "70.00"
    assert summarise([None, None]) == Summary(None, None, 0)
    assert format_summary(Summary(None, None, 0)) == format_percent(None) == format_bytes(None) == "\u2013"
    assert format_percent(0.0) == "0.00"


def test_paired_difference() -> None:
    """Differences 1, 2, 3: mean 2, std 1, t(0.975, 2) = 4.302653, half-width 4.302653/√3 = 2.484138."""
    result = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert (result.mean, result.std, result.n) == (2, 1, 3)
    assert result.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert result.high == pytest.approx(2 + 2.484138, abs=1e-6)


def test_paired_difference_uses_common_seeds_only() -> None:
    """Seeds 1 and 2 are common, seed 3 has no score: differences 2, 4; mean 3, std √2, t(0.975, 1) = 12.706205.

    Half-width 12.706205 * √2 / √2 = 12.706205.
    """
    result = paired_difference({0: 9.0, 1: 3.0, 2: 5.0, 3: None}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert (result.mean, result.n) == (3, 2)
    assert result.low == pytest.approx(3 - 12.706205, abs=1e-5)


def test_one_common_seed_has_no_interval() -> None:
    """One difference has a mean but no spread, so no interval; none has neither."""
    one = paired_difference({0: 0.72, 1: 0.7}, {0: 0.70})
    assert (one.low, one.high, one.std, one.n) == (None, None, None, 1)
    assert format_difference(one) == "+2.00 (n = 1, no interval)"
    assert format_difference(paired_difference({1: 0.7}, {0: 0.70})) == "\u2013"
    assert format_difference(PairedDifference(-0.02, 0.01, -0.03, -0.01, 3)) == "\u22122.00 [\u22123.00, \u22121.00]"


def test_pooled_standard_error_and_marks() -> None:
    """Variances 4 (n = 3) and 1 (n = 2): (2*4 + 1*1) / 3 = 3; √(3 * (1/3 + 1/2)) = √2.5 = 1.5811.

    Against a best mean of 10, 8.5 differs by 1.5 < 1.5811 and is tied; 8.4 differs by 1.6 and is not.
    """
    best = Summary(10, 2, 3)
    assert pooled_standard_error(best, Summary(8.5, 1, 2)) == pytest.approx(math.sqrt(2.5))
    assert marks([Summary(8.5, 1, 2), best, Summary(8.4, 1, 2), Summary(None, None, 0)]) == ["tied", "best", "", ""]
    assert marks([Summary(5, None, 1), Summary(6, None, 1)], lower_is_better=True) == ["best", ""]
    assert pooled_standard_error(Summary(5, None, 1), Summary(6, None, 1)) is None
    assert marks([best]) == [""]


def test_rounds_to_target(tmp_path: Path) -> None:
    """Accuracies 10, 30, 28, 41, 39, 45, 44 reach 40 in round 4 and never 50; 0.95 * 0.8 is reached by 0.76."""
    run = make_run(tmp_path, "fedavg", 0, [0.10, 0.30, 0.28, 0.41, 0.39, 0.45, 0.44])
    reached = rounds_to_target(run.history, "top1_global", 0.40)
    assert reached is not None and reached.round == 4
    assert reached.total_bytes == 4 * 150
    assert rounds_to_target(run.history, "top1_global", 0.50) is None
    assert rounds_to_target(make_run(tmp_path, "moon", 0, [0.76]).history, "top1_global", 0.95 * 0.8) is not None


def test_compare_three_seeds(tmp_path: Path) -> None:
    """Differences 1, 2, 3 points as above.

    Targets 0.95 * (0.70, 0.71, 0.73) = 0.665, 0.6745, 0.6935: the baseline (0.5, then final) needs 2 rounds each;
    the method starts at 0.69, so it needs 1, 1, 2 rounds: mean 4/3, bytes 150, 150, 300: mean 200; speedup 2/(4/3).
    """
    comparison = compare(three_seeds(tmp_path))
    baseline, moon = comparison.methods
    assert comparison.seeds == (0, 1, 2) and comparison.notes == ()
    assert format_difference(moon.differences["top1_global"]) == "+2.00 [\u22120.48, +4.48]"
    assert format_difference(moon.differences["mean_local"]) == "+2.00 [\u22120.48, +4.48]"
    assert baseline.differences["top1_global"].mean is None
    assert (baseline.target.rounds.mean, baseline.target.speedup) == (2, 1)
    assert moon.target.rounds.mean == pytest.approx(4 / 3)
    assert moon.target.bytes.mean == 200
    assert moon.target.speedup == pytest.approx(1.5)
    assert moon.communication["bytes_up_per_round"] == 100
    assert moon.bytes_up_by_kind == {"prototypes": 40, "weights": 160}
    assert moon.scores["client_std"].mean == pytest.approx(0.05)


def test_target_that_only_some_seeds_reach(tmp_path: Path) -> None:
    """Target 0.665 for both seeds; the method reaches it with seed 0 only: no mean, 1 of 2 is said."""
    runs = [make_run(tmp_path, "fedavg", seed, [0.7]) for seed in (0, 1)]
    runs += [make_run(tmp_path, "moon", seed, [final]) for seed, final in enumerate((0.7, 0.5))]
    target = compare(runs).methods[1].target
    assert (target.rounds.mean, target.bytes.mean, target.speedup) == (None, None, None)
    assert (target.reached, target.n) == (1, 2)
    assert "\u2013 (1 of 2)" in markdown(compare(runs))


def test_method_without_global_model_is_compared_on_mean_local(tmp_path: Path) -> None:
    """Baseline mean_local 0.8: target 0.76; `local` has mean_local 0.5 + 0.1, then 0.7 + 0.1: round 2.

    Its top1_global cells and differences are missing, not 0.
    """
    runs = [make_run(tmp_path, "fedavg", seed, [0.6, 0.7]) for seed in (0, 1)]
    runs += [make_run(tmp_path, "local", seed, [0.5, 0.7], has_global=False) for seed in (0, 1)]
    comparison = compare(runs)
    local = comparison.methods[1]
    assert local.scores["top1_global"] == Summary(None, None, 0)
    assert local.differences["top1_global"].n == 0
    assert local.differences["mean_local"].mean == pytest.approx(0)
    assert (local.target.metric, local.target.rounds.mean) == ("mean_local", 2)
    assert comparison.notes == ("local has no top1_global, so the target of local is on mean_local.",)


def test_method_that_lacks_a_seed(tmp_path: Path) -> None:
    """Without seed 2 the differences are 1 and 2: mean 1.5 over 2 common seeds; the baseline keeps its 3."""
    runs = [run for run in three_seeds(tmp_path) if (run.method, run.seed) != ("moon", 2)]
    comparison = compare(runs)
    assert comparison.methods[0].scores["top1_global"].n == 3
    assert comparison.methods[1].differences["top1_global"].mean == pytest.approx(0.015)
    assert comparison.methods[1].differences["top1_global"].n == 2
    assert comparison.notes == ("moon has no run for seed 2; its means are over seed 0, 1.",)


def test_one_method_one_seed_and_no_baseline(tmp_path: Path) -> None:
    """Nothing to take a difference from: no target, no interval, no spread, but the accuracy is there."""
    comparison = compare([make_run(tmp_path, "moon", 0, [0.7])])
    assert not comparison.has_baseline
    assert comparison.methods[0].target.n == 0
    assert comparison.notes[0].startswith("No run of the baseline fedavg")
    text = markdown(comparison)
    assert "| moon | 1 | 70.00 | 80.00 |" in text and "**" not in text


def test_seeds_are_sorted_and_methods_keep_their_order(tmp_path: Path) -> None:
    """The same runs in another order of seeds give the same comparison."""
    runs = three_seeds(tmp_path)
    shuffled = [runs[2], runs[5], runs[0], runs[1], runs[4], runs[3]]
    assert compare(shuffled) == compare(runs)
    assert [row.method for row in compare(runs[::-1]).methods] == ["moon", "fedavg"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data_fingerprint": "other"}, "data_fingerprint"),
        ({"data_fingerprint": None}, "data_fingerprint"),
        ({"partition_fingerprint": "other"}, "partition_fingerprint"),
        ({"partition": "iid"}, "partition"),
        ({"dataset": "mnist"}, "dataset"),
    ],
)
def test_refuses_runs_that_do_not_belong_together(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    """The message names both runs and the field."""
    runs = [make_run(tmp_path, "fedavg", 0, [0.7]), make_run(tmp_path, "moon", 0, [0.7], **changes)]
    with pytest.raises(ProtoflError, match=rf"fedavg \(seed 0\) with moon \(seed 0\): '{field}'"):
        compare(runs)


def test_partitions_may_differ_between_seeds_and_be_absent(tmp_path: Path) -> None:
    """Fingerprints differ with the seed by construction; a centralised run has no partition at all."""
    central = make_run(tmp_path, "central", 0, [0.9], partition=None, partition_fingerprint=None)
    comparison = compare([central, *three_seeds(tmp_path)])
    assert comparison.partition == "dirichlet"


def test_refuses_duplicates_nothing_and_wrong_settings(tmp_path: Path) -> None:
    """One run per method and seed, at least one run, a known metric, a fraction in (0, 1]."""
    run = make_run(tmp_path, "fedavg", 0, [0.7])
    with pytest.raises(ProtoflError, match=r"Two runs of fedavg \(seed 0\)"):
        compare([run, run])
    with pytest.raises(ProtoflError, match="Nothing to compare"):
        compare([])
    with pytest.raises(ConfigError, match="metric"):
        compare([run], metric="loss")
    with pytest.raises(ConfigError, match="target_fraction"):
        compare([run], target_fraction=0)


def test_load_run_refuses_damage(tmp_path: Path) -> None:
    """Missing file, broken line, missing key, text for a number: each named with its place. NaN is a missing value."""
    with pytest.raises(DataError, match=r"metrics\.json"):
        load_run(tmp_path)
    make_run(tmp_path, "fedavg", 0, [0.7])
    history = tmp_path / "fedavg-0" / "history.jsonl"
    history.write_text(history.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"history\.jsonl, line 2: damaged"):
        load_run(tmp_path / "fedavg-0")
    with pytest.raises(DataError, match="no 'dataset'"):
        make_run(tmp_path, "moon", 1, [0.7], dataset=None)
    with pytest.raises(DataError, match="top1_global: expected a number"):
        make_run(tmp_path, "fedper", 1, [0.7], top1_global="0.7")
    assert make_run(tmp_path, "fedrep", 1, [0.7], mean_local=float("nan")).mean_local is None


def test_written_files(tmp_path: Path) -> None:
    """CSV has a row per method (fractions, empty where missing), runs.csv one per run, JSON null where missing."""
    runs = [*three_seeds(tmp_path / "runs"), make_run(tmp_path / "runs", "local", 0, [0.6, 0.7], has_global=False)]
    comparison = compare(runs)
    paths = write(comparison, tmp_path / "out")
    assert [path.name for path in paths] == ["comparison.csv", "comparison.json", "comparison.md", "runs.csv"]
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["fedavg", "moon", "local"]
    assert float(rows[0]["top1_global_mean"]) == pytest.approx(2.14 / 3)
    assert float(rows[1]["top1_global_paired_difference_ci95_high"]) == pytest.approx(0.04484138)
    assert rows[2]["top1_global_mean"] == "" and rows[2]["client_std_over_clients_mean"] == "0.05"
    assert len(list(csv.DictReader((tmp_path / "out" / "runs.csv").open(encoding="utf-8")))) == 7
    document = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert document["methods"][2]["top1_global_mean"] is None
    assert document["runs"][6]["rounds_to_target"] == 2
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    # 73.33 against 71.33: 2 points, more than the pooled error √((7/3 + 19/3)/2 * 2/3) = 1.70, so no tie.
    assert "| moon | 3 | **73.33 ± 2.52** |" in text and "| fedavg | 3 | 71.33 ± 1.53 |" in text


def test_writing_twice_gives_the_same_bytes_without_paths(tmp_path: Path) -> None:
    """Runs in two different folders, loaded and written separately."""
    outputs = []
    for name in ("first", "second"):
        paths = write(compare(three_seeds(tmp_path / name)), tmp_path / f"{name}-out")
        outputs.append([path.read_bytes() for path in paths])
    assert outputs[0] == outputs[1]
    assert not any(str(tmp_path).encode() in content for content in outputs[0])


def test_terminal_table(tmp_path: Path) -> None:
    """All three tables and the notes are printed; a missing cell is a dash."""
    stream = io.StringIO()
    runs = [*three_seeds(tmp_path), make_run(tmp_path, "local", 0, [0.6, 0.7], has_global=False)]
    print_table(compare(runs), Console(file=stream, width=160, no_color=True))
    text = stream.getvalue()
    for expected in ("71.33 ± 1.53", "+2.00 [\u22120.48, +4.48]", "1.3 ± 0.6", "200 B", "\u2013", "Note: local"):
        assert expected in text
