"""Comparisons of runs written by hand, as numbers, files and words; every expectation is derived where it stands."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from flcore.core.errors import ConfigError, DataError, ProtoflError
from pipelines.reporting.claims import claims_of, judge
from pipelines.reporting.comparison import compare
from pipelines.reporting.comparison_files import markdown, print_table, write
from pipelines.reporting.comparison_tables import comparison_tables
from pipelines.reporting.formats import format_difference
from pipelines.reporting.statements import statements
from pipelines.reporting.statistics import Summary, first_round_reaching
from pipelines.reporting.targets import RunTarget, run_target
from pipelines.runs.folder import RunFolder
from pipelines.runs.record import RunRecord, record_of
from tests.pipelines.reporting.records import write_run


def make_run(root: Path, method: str, seed: int, curve: list[float], **changes: Any) -> RunRecord:
    """A run whose global accuracy follows `curve`, one value per round; local accuracy is 0.1 above it.

    Each round sends 100 bytes up (80 weights, 20 prototypes) and 50 bytes of weights down. ``top1_vote`` is after the
    last round alone.
    """
    has_global = changes.pop("has_global", True)
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
    return write_run(root / f"{method}-{seed}", history, **metrics)


def three_seeds(root: Path) -> list[RunRecord]:
    """Baseline 0.70, 0.71, 0.73 and a method 0.71, 0.73, 0.76 over seeds 0, 1, 2."""
    runs = [make_run(root, "fedavg", seed, [0.5, final]) for seed, final in enumerate((0.70, 0.71, 0.73))]
    return runs + [make_run(root, "moon", seed, [0.69, final]) for seed, final in enumerate((0.71, 0.73, 0.76))]


def test_rounds_to_a_target(tmp_path: Path) -> None:
    """Accuracies 10, 30, 28, 41, 39 reach 40 in round 4, with 4 times 150 bytes, and never 50.

    Half of the baseline's 80 is 40. 0.95 * 0.8 is reached by 0.76.
    """
    run = make_run(tmp_path, "moon", 0, [0.10, 0.30, 0.28, 0.41, 0.39])
    baseline = make_run(tmp_path, "fedavg", 0, [0.80])
    assert run_target(run, baseline, "top1_global", 0.5) == RunTarget(0.4, 4, 600)
    assert run_target(run, baseline, "top1_global", 0.625) == RunTarget(0.5)
    assert first_round_reaching([(1, 0.76)], 0.95 * 0.8) == 1


def test_compare_three_seeds(tmp_path: Path) -> None:
    """Differences 1, 2, 3 points as above.

    Targets 0.95 * (0.70, 0.71, 0.73) = 0.665, 0.6745, 0.6935: the baseline (0.5, then final) needs 2 rounds each;
    the method starts at 0.69, so it needs 1, 1, 2 rounds: mean 4/3, bytes 150, 150, 300: mean 200; speedup 2/(4/3).
    Of 0.99 * (0.70, 0.71, 0.73) = 0.693, 0.7029, 0.7227 none is reached by 0.69: two rounds and 300 bytes.
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
    strict = moon.strict_targets["top1_global"]
    assert (strict.rounds.mean, strict.bytes.mean, strict.speedup) == (2, 300, 1)
    strict_table = comparison_tables(comparison)["strict_target"]
    assert strict_table.title == "Rounds and bytes to 99 % of the final accuracy of fedavg, seed by seed"
    assert "strict_target" not in comparison_tables(compare(comparison.runs, target_fraction=0.99))
    assert moon.communication["bytes_up_per_round"].mean == 100
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


def test_a_vote_is_not_a_global_model(tmp_path: Path) -> None:
    """fedproto answers by a vote, after the last round alone: no global model, no difference and no target on it.

    Baseline mean_local 0.8: target 0.76; fedproto has 0.5 + 0.1, then 0.7 + 0.1 over its clients: round 2, 300 bytes.
    """
    runs = [make_run(tmp_path, "fedavg", seed, [0.6, 0.7]) for seed in (0, 1)]
    runs += [make_run(tmp_path, "fedproto", seed, [0.5, 0.7], has_global=False, top1_vote=0.75) for seed in (0, 1)]
    comparison = compare(runs)
    fedavg, fedproto = comparison.methods
    assert fedproto.scores["top1_global"] == Summary(None, None, 0)
    assert fedproto.scores["top1_vote"].mean == 0.75 and fedavg.scores["top1_vote"].n == 0
    assert fedproto.differences["top1_global"].n == 0 and "top1_vote" not in fedproto.differences
    assert fedproto.differences["mean_local"].mean == pytest.approx(0)
    assert fedproto.targets["top1_global"].n == 0
    assert (fedproto.target.metric, fedproto.target.rounds.mean, fedproto.target.bytes.mean) == ("mean_local", 2, 300)
    header = next(line for line in markdown(comparison).splitlines() if line.startswith("| method"))
    assert header.startswith("| method | n | global model | vote of clients' models | mean over clients |")
    assert "| fedproto | 2 | \u2013 | 75.00 ± 0.00 | **80.00 ± 0.00** |" in markdown(comparison)
    # To the target: a dash alone on the global model, where nothing was measured; never "0 of 2".
    assert "| fedproto | \u2013 | **2.0 ± 0.0** | \u2013 | **300 B** |" in markdown(comparison)


def test_method_that_lacks_a_seed(tmp_path: Path) -> None:
    """Without seed 2 the differences are 1 and 2: mean 1.5 over 2 common seeds; the baseline keeps its 3."""
    runs = [run for run in three_seeds(tmp_path) if (run.method, run.seed) != ("moon", 2)]
    comparison = compare(runs)
    assert comparison.methods[0].scores["top1_global"].n == 3
    assert comparison.methods[1].differences["top1_global"].mean == pytest.approx(0.015)
    assert comparison.methods[1].differences["top1_global"].n == 2
    assert comparison.notes == ("moon has no run for seed 2; its means are over seed 0, 1.",)


def test_why_there_is_no_interval_is_said_once(tmp_path: Path) -> None:
    """One seed: of every method alike. And of one whose seed is another, none is in common."""
    runs = [make_run(tmp_path, method, 0, [0.7]) for method in ("fedavg", "moon", "fedprox")]
    assert compare(runs).notes == ("1 seed in common with fedavg: no interval, two seeds are needed (moon, fedprox).",)
    notes = compare([*runs[:2], make_run(tmp_path, "fedprox", 1, [0.7])]).notes
    assert "0 seeds in common with fedavg: no interval, two seeds are needed (fedprox)." in notes


def test_a_method_that_sent_nothing_is_named(tmp_path: Path) -> None:
    """Where its first exchange lies behind the last round; Local is meant to send nothing."""
    runs = [make_run(tmp_path, "fedavg", seed, [0.7]) for seed in (0, 1)]
    runs += [make_run(tmp_path, "local", seed, [0.7], bytes_up=0, bytes_down=0) for seed in (0, 1)]
    runs += [make_run(tmp_path, "gfpl", seed, [0.7], bytes_up=100 * seed, bytes_down=0) for seed in (0, 1)]
    assert compare(runs).notes == (
        "gfpl sent nothing with seed 0: clients trained by themselves, as those of local do.",
    )
    # The row of a tuned method has another name.
    tuned = [replace(run, method=f"{run.method} tuned") for run in runs if run.method == "local" or run.seed == 0]
    said = compare([*runs[:2], *tuned]).notes
    assert "gfpl tuned sent nothing: clients trained by themselves, as those of local do." in said
    assert not any(note.startswith("local tuned sent") for note in said)


def test_one_method_one_seed_and_no_baseline(tmp_path: Path) -> None:
    """Nothing to take a difference from: no target, no interval, no spread, but the accuracy is there."""
    comparison = compare([make_run(tmp_path, "moon", 0, [0.7])])
    assert comparison.methods[0].target.n == 0
    assert comparison.notes[0].startswith("No run of the baseline fedavg")
    text = markdown(comparison)
    assert "| moon | 1 | 70.00 | 80.00 |" in text and "| **" not in text


@given(order=st.permutations(range(6)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_figure_of_a_method_depends_on_where_its_runs_stand(order: list[int], tmp_path: Path) -> None:
    """Three methods with two seeds, as ``--methods`` and ``--seeds`` may name them in any order: equal to the bit."""
    if not tmp_path.joinpath("a-0").exists():
        for method, start in (("fedavg", 0.1), ("a", 0.3), ("b", 0.7)):
            for seed in (0, 1):
                make_run(tmp_path, method, seed, [start, start / 3 + seed / 7])
    runs = [record_of(RunFolder(tmp_path / f"{method}-{seed}")) for method in ("fedavg", "a", "b") for seed in (0, 1)]
    expected = {row.method: row for row in compare(runs).methods}
    found = compare([runs[place] for place in order])
    assert {row.method: row for row in found.methods} == expected
    assert [row.method for row in found.methods] == list(dict.fromkeys(runs[place].method for place in order))


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


def test_a_damaged_run_has_no_record(tmp_path: Path) -> None:
    """Missing file, broken line, missing key, text for a number: each named with its place. NaN is a missing value."""
    with pytest.raises(DataError, match=r"metrics\.json"):
        record_of(RunFolder(tmp_path))
    make_run(tmp_path, "fedavg", 0, [0.7])
    history = tmp_path / "fedavg-0" / "history.jsonl"
    history.write_text(history.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"history\.jsonl, line 2: damaged"):
        record_of(RunFolder(tmp_path / "fedavg-0"))
    with pytest.raises(DataError, match="no 'dataset'"):
        make_run(tmp_path, "moon", 1, [0.7], dataset=None)
    with pytest.raises(DataError, match="top1_global: damaged"):
        make_run(tmp_path, "fedper", 1, [0.7], top1_global="0.7")
    assert make_run(tmp_path, "fedrep", 1, [0.7], mean_local=float("nan")).mean_local is None


def test_statements_say_who_differs(tmp_path: Path) -> None:
    """moon gains 1, 2, 3 points: [-0.48, +4.48] holds 0. best gains 5 with every seed, worst loses 5: no spread."""
    runs = three_seeds(tmp_path)
    for method, change in (("best", 0.05), ("worst", -0.05)):
        runs += [
            make_run(tmp_path, method, seed, [0.5, final + change]) for seed, final in enumerate((0.70, 0.71, 0.73))
        ]
    said = statements(compare(runs))
    assert said[0] == (
        "Global model, percentage points with 95 % interval, 3 seeds. Above fedavg: best +5.00 [+5.00, +5.00]; "
        "below fedavg: worst \u22125.00 [\u22125.00, \u22125.00]; no difference to fedavg shown: moon."
    )
    assert [sentence.partition(",")[0] for sentence in said] == ["Global model", "Mean over clients"]
    assert statements(compare(runs[:1])) == ()


def test_claims_are_judged_by_their_runs(tmp_path: Path) -> None:
    """moon leads by 1, 2, 3 points, and p is of the claimed lead.

    For -3 and 7, t = 5 sqrt(3), p = 1 - sqrt(75 / 77) = 0.0131; for 0 and 4, t = 2 sqrt(3), p = 0.0742. Of four tests
    the two smallest become 4 / 2 * 0.0131 = 0.0261 by Benjamini-Hochberg, 4 * 0.0131 = 0.0523 by Holm.

    moon and fedavg send the same 200 bytes with every seed: neither sends less, without a test. fedpa was not run.
    """
    entries = {
        "close": {"better": "moon", "than": "fedavg", "by": -3, "says": "moon is not much worse"},
        "far": {"better": "moon", "than": "fedavg", "by": 7.0},
        "ahead": {"better": "moon", "than": ["fedavg", "fedpa"]},
        "clients": {"better": "moon", "than": "fedavg", "metric": "mean_local", "by": 4},
        "cheap": {"better": "moon", "than": "fedavg", "metric": "bytes_up"},
        "cheaper": {"better": "moon", "than": "fedavg", "metric": "bytes_up", "by": 1},
    }
    comparison = compare(three_seeds(tmp_path), claims=claims_of(entries))
    assert {one.claim.name: (one.metric, one.verdict) for one in comparison.claims} == {
        "close": ("top1_global", "holds"),
        "far": ("top1_global", "does not hold"),
        "ahead.fedavg": ("top1_global", "undecided"),
        "ahead.fedpa": ("mean_local", "not run"),
        "clients": ("mean_local", "undecided"),
        "cheap": ("bytes_up", "does not hold"),
        "cheaper": ("bytes_up", "does not hold"),
    }
    text = markdown(comparison)
    assert "| moon is not much worse | top1_global | +2.00 [\u22120.48, +4.48] | 0.026 | 0.052 | 2 | holds |" in text
    assert "| moon has less than fedavg by 1 | bytes_up | +0 B | \u2013 | \u2013 | \u2013 | does not hold |" in text
    write(comparison, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert document["claims"][1]["verdict"] == "does not hold" and document["claims"][1]["by"] == 7
    assert "claims" not in comparison_tables(compare(three_seeds(tmp_path / "without")))


def test_a_claim_over_seeds_of_one_division_says_so(tmp_path: Path) -> None:
    """2 ± 2.48 as above, whether the division was asked for by partition.seed or by compare.partition_seeds."""
    entries = {name: {"better": "moon", "than": "fedavg", "by": by} for name, by in (("close", -1), ("far", 5))}
    fixed = [replace(run, partition_fingerprint="one") for run in three_seeds(tmp_path)]
    asked = [replace(run, draw=7) for run in fixed]
    for runs in (fixed, asked):
        found = judge(claims_of(entries), runs)
        assert [one.verdict for one in found] == ["holds on one division", "does not hold on one division"]
        assert found[0].difference.low == pytest.approx(0.02 - 0.02484138)


def test_written_files(tmp_path: Path) -> None:
    """CSV has a row per method (fractions, empty where missing), runs.csv one per run, JSON null where missing.

    Ties are by pairs: moon 71, 73, 76 is 1, 2, 3 above fedavg, and 0 lies within 2 ± 2.48.
    """
    runs = [*three_seeds(tmp_path / "runs"), make_run(tmp_path / "runs", "local", 0, [0.6, 0.7], has_global=False)]
    comparison = compare(runs, failed={"fedpa seed 0": "round 3: diverged"})
    paths = write(comparison, tmp_path / "out")
    names = ["comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "runs.csv", "metrics.json"]
    assert [path.name for path in paths] == names
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["fedavg", "moon", "local"]
    assert float(rows[0]["top1_global_mean"]) == pytest.approx(2.14 / 3)
    assert float(rows[1]["top1_global_paired_difference_ci95_high"]) == pytest.approx(0.04484138)
    assert rows[2]["top1_global_mean"] == "" and rows[2]["client_std_over_clients_mean"] == "0.05"
    assert len(list(csv.DictReader((tmp_path / "out" / "runs.csv").open(encoding="utf-8")))) == 7
    document = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert document["methods"][2]["top1_global_mean"] is None
    assert document["runs"][6]["mean_local_rounds_to_target"] == 2
    assert document["failed"] == {"fedpa seed 0": "round 3: diverged"} and len(document["statements"]) == 2
    means = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))
    assert means["fedavg"]["bytes_up"] == 200 and "top1_global" not in means["local"]
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    assert "| moon | 3 | **73.33 ± 2.52** |" in text and "| fedavg | 3 | 71.33 ± 1.53 ≈ |" in text
    assert "- fedpa seed 0: round 3: diverged" in text
    tex = (tmp_path / "out" / "comparison.tex").read_text(encoding="utf-8")
    assert r"moon & 3 & \textbf{73.33 $\pm$ 2.52}" in tex and r"\underline{71.33 $\pm$ 1.53}" in tex


@pytest.mark.parametrize("width", [80, 120, 160])
def test_ten_methods_fit_the_terminal(tmp_path: Path, width: int) -> None:
    """No line is longer than the terminal, no cell is torn; statements, failures and notes stand below."""
    runs = [make_run(tmp_path, f"fedmethod{i}", seed, [0.5, 0.7 + i / 100]) for i in range(9) for seed in (0, 1)]
    runs += [make_run(tmp_path, "fedavg", seed, [0.5, final]) for seed, final in enumerate((0.70, 0.71))]
    stream = io.StringIO()
    failed = {"local seed 0": "round 1: [diverged]"}
    print_table(compare(runs, failed=failed), Console(file=stream, width=width, no_color=True))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = stream.getvalue()
    for whole in ("70.50 ± 0.71", "+7.50 [+1.15, +13.85]", "200 B", "Failed: local seed 0: round 1: [diverged]"):
        assert whole in text, whole
    assert "Mean over clients, percentage points" in text
