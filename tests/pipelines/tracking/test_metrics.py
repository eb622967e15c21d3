"""What a run's records become in MLflow: names of the contract, values, and times of day."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from pipelines.runs.folder import RunFolder
from pipelines.tracking.metrics import SUMMARY_FIGURES, Times, points_by_round, round_metrics, summary_metrics, times_of

from .conftest import undocumented

Write = Callable[..., Path]


def test_a_record_becomes_metrics_with_the_contract_names() -> None:
    """bytes_up: 200 of weights + 14 of prototypes = 214 in all; what is null is left out; so are unknown keys."""
    record = {
        "round": 2,
        "top1_global": 0.2,
        "top1_vote": None,
        "loss_global": 1.15,
        "mean_local": 0.7,
        "mean_local_own_classes": 0.8,
        "pooled_local": None,
        "client_std": 0.01,
        "scalars_up": 50,
        "simulated_seconds": 12.5,
        "train_loss": {"cross_entropy": 0.5},
        "alternatives": {"before calibration": {"top1_global": 0.1, "mean_local": None}},
        "server": {"components": 4},
        "bytes_up": {"weights": 200, "prototypes": 14},
        "bytes_down": {"weights": 400},
        "a_key_of_the_future": [1, 2],
    }
    found = round_metrics(record)
    assert found == {
        "accuracy/top1_global": 0.2,
        "accuracy/mean_local": 0.7,
        "accuracy/mean_local_own_classes": 0.8,
        "accuracy/client_std": 0.01,
        "accuracy/before calibration/top1_global": 0.1,
        "loss/global": 1.15,
        "loss/train_cross_entropy": 0.5,
        "server/components": 4.0,
        "clock/simulated_seconds": 12.5,
        "comm/scalars_up": 50.0,
        "comm/bytes_up": 214.0,
        "comm/bytes_up_weights": 200.0,
        "comm/bytes_up_prototypes": 14.0,
        "comm/bytes_down": 400.0,
        "comm/bytes_down_weights": 400.0,
    }
    assert undocumented(found) == []


def test_the_vote_of_clients_is_never_the_accuracy_of_a_model() -> None:
    assert round_metrics({"round": 1, "top1_vote": 0.4, "top1_global": None})["accuracy/top1_vote"] == 0.4
    assert "accuracy/top1_global" not in round_metrics({"round": 1, "top1_vote": 0.4, "top1_global": None})
    summary = summary_metrics({"top1_vote": 0.4, "top1_global": None, "last10_top1_global": None}, {})
    assert summary == {"final/top1_vote": 0.4}


def test_a_stream_of_tasks() -> None:
    tasks = {"a_glo": 0.5, "a_glo_vote": None, "a_loc": 0.4, "by_task": [0.1, None], "by_task_global": [0.2, 0.3]}
    found = round_metrics({"round": 1, "tasks": tasks})
    assert {name: value for name, value in found.items() if name.startswith("tasks/")} == {
        "tasks/a_glo": 0.5,
        "tasks/a_loc": 0.4,
        "tasks/by_task_0": 0.1,
        "tasks/by_task_global_0": 0.2,
        "tasks/by_task_global_1": 0.3,
    }
    summary = summary_metrics({"tasks": {"forgetting": 0.1, "last_epochs": {"a_sel": 0.6}}}, {})
    assert summary == {"tasks/final_forgetting": 0.1, "tasks/final_a_sel": 0.6}
    assert undocumented((*found, *summary, *SUMMARY_FIGURES.values())) == []


def test_a_summary_adds_up_seconds_and_joules() -> None:
    metrics = {
        "top1_global": 0.5,
        "top5_pooled_local": 0.6,
        "mean_local_own_classes": 0.7,
        "bytes_up": 300,
        "privacy": {"epsilon": 19.05, "delta": 1e-5, "noise_multiplier": 1.5, "clip": 0.5, "covers": "models"},
        "poisoned": {"clients": [1], "honest_mean_local": 0.8},
        "alternatives": {"ncm": {"top1_global": 0.4}},
    }
    timing = {"seconds": {"train-clients": 2.0, "evaluate": 0.5}, "joules": {"train-clients": 30.0}}
    found = summary_metrics(metrics, timing)
    assert found == {
        "final/top1_global": 0.5,
        "best/top5_pooled_local": 0.6,
        "final/mean_local_own_classes": 0.7,
        "comm/total_bytes_up": 300.0,
        "privacy/epsilon": 19.05,
        "privacy/delta": 1e-5,
        "privacy/noise_multiplier": 1.5,
        "privacy/clip": 0.5,
        "poisoned/honest_mean_local": 0.8,
        "final/ncm/top1_global": 0.4,
        "time/total": 2.5,
        "time/total_train-clients": 2.0,
        "time/total_evaluate": 0.5,
        "energy/total": 30.0,
        "energy/total_train-clients": 30.0,
    }
    assert undocumented(found) == []


def test_rounds_end_when_their_last_leg_did(tmp_path: Path, write_run: Write) -> None:
    """Two legs in round 1, one in round 2; round 3 was not evaluated yet and counts as ended with the one before."""
    run_dir = write_run(tmp_path / "run", 2)
    legs = [(1, 1000, 1400), (1, 1400, 2000), (2, 2100, 2600)]
    lines = [json.dumps({"round": n, "began_ms": began, "ended_ms": ended}) + "\n" for n, began, ended in legs]
    (run_dir / "checkpoint" / "timing.jsonl").write_text("".join(lines))
    times = times_of(RunFolder(run_dir))
    assert times == Times(1000, 2600, {1: 2000, 2: 2600})
    assert (times.of(1), times.of(3)) == (2000, 2600)


def test_without_times_of_day_a_run_ends_when_its_history_was_written(tmp_path: Path, write_run: Write) -> None:
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    timing = json.loads((run_dir / "timing.json").read_text())
    timing["rounds"] = [{"round": leg["round"], "seconds": leg["seconds"]} for leg in timing["rounds"]]
    (run_dir / "timing.json").write_text(json.dumps(timing))
    os.utime(run_dir / "history.jsonl", (1_000_000, 1_000_000))
    assert times_of(RunFolder(run_dir)) == Times(1_000_000_000, 1_000_000_000, {})


def test_the_cost_of_rounds_that_were_not_evaluated_is_not_lost(tmp_path: Path, write_run: Write) -> None:
    """Evaluated every second round: the first record, of round 2, brings the seconds of rounds 1 and 2."""
    run_dir = write_run(tmp_path / "run", 2)
    history = run_dir / "checkpoint" / "history.jsonl"
    history.write_text(history.read_text().splitlines(keepends=True)[1])
    [(number, points)] = points_by_round(RunFolder(run_dir), after=-1)
    assert number == 2
    assert [(point.step, point.value) for point in points if point.name == "time/train-clients"] == [(1, 0.5), (2, 0.5)]
    assert points[-1].step == 2
    assert points[-1].name.startswith("comm/"), "what marks the round as logged comes last"
