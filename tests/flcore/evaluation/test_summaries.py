"""Figures of a finished run from its records (evaluation.md section 2.2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore.aggregation.account import client_epsilon
from flcore.core.errors import DataError
from flcore.evaluation.scoring import Scores
from flcore.evaluation.summaries import best_round, check_history, summarise_run


def history(*accuracies: float | None, every: int = 1) -> list[dict[str, Any]]:
    """Cumulative traffic of 10 bytes up and 4 down, 3 scalars and 5 steps per round."""
    records = []
    for number, accuracy in enumerate(accuracies, start=1):
        done = number * every
        records.append(
            {
                "round": done,
                "top1_global": accuracy,
                "pooled_local": None if accuracy is None else accuracy / 2,
                "mean_local": None if accuracy is None else accuracy / 4,
                "bytes_up": {"model": 8 * done, "num_samples": 2 * done},
                "bytes_down": {"model": 4 * done},
                "bytes_eval_up": {"num_samples": number},
                "bytes_eval_down": {"model": 6 * number, "prototypes": number},
                "scalars_up": 3 * done,
                "steps": 5 * done,
            }
        )
    return records


FINAL = Scores(0.75, 0.5, [1.0, None], [0.5, None, 1.0], 0.75, 0.8, 0.25, 0.9)


def test_best_is_the_earliest_maximum() -> None:
    assert best_round(history(0.1, 0.4, 0.3, 0.4), "top1_global")["round"] == 2  # type: ignore[index]
    assert best_round(history(None, 0.2, None), "top1_global")["round"] == 2  # type: ignore[index]
    assert best_round(history(None, None), "top1_global") is None


def test_last_ten_of_twelve(lab: Any) -> None:
    """0.01 ... 0.12: the last ten are 0.03 ... 0.12, mean 0.075."""
    records = history(*(number / 100 for number in range(1, 13)))
    found = summarise_run(lab.experiment(federation__rounds=12), FINAL, records)
    assert found["last10_top1_global"] == pytest.approx(0.075)
    assert (found["last10_rounds"], found["best_round"], found["best_top1_global"]) == (10, 12, 0.12)


def test_mean_of_the_five_best_rounds(lab: Any) -> None:
    """0.9, 0.1, 0.8, 0.3, 0.7, 0.6, 0.5: the five best are 0.9, 0.8, 0.7, 0.6, 0.5, mean 0.7; halves and quarters."""
    found = summarise_run(lab.experiment(federation__rounds=7), FINAL, history(0.9, 0.1, 0.8, 0.3, 0.7, 0.6, 0.5))
    assert found["top5_pooled_local"] == pytest.approx(0.35)
    assert found["top5_mean_local"] == pytest.approx(0.175)


def test_traffic_totals_and_per_round(lab: Any) -> None:
    """After 6 rounds: 60 bytes up, 24 down, 18 scalars; per round 10, 4, 3; 30 steps."""
    found = summarise_run(lab.experiment(federation__rounds=6), FINAL, history(0.2, 0.6, 0.4, every=2))
    assert (found["bytes_up"], found["bytes_down"], found["steps"]) == (60, 24, 30)
    assert (found["bytes_up_per_round"], found["bytes_down_per_round"], found["scalars_up_per_round"]) == (10, 4, 3)
    assert (found["bytes_eval_up"], found["bytes_eval_down"]) == (3, 21), "three evaluated rounds"
    assert found["mean_local_own_classes"] == 0.9
    assert found["bytes_up_by_kind"] == {"model": 48, "num_samples": 12}


def test_without_a_global_model(lab: Any) -> None:
    final = Scores(None, None, None, [0.5, 1.0], 0.75, 0.8, 0.25, 0.9)
    found = summarise_run(lab.experiment(federation__rounds=2, method__name="local"), final, history(None, None))
    assert [found[key] for key in ("top1_global", "best_round", "best_top1_global", "last10_top1_global")] == [None] * 4
    assert found["last10_rounds"] == 0


def test_the_headline_is_the_final_score_never_the_best(lab: Any) -> None:
    found = summarise_run(lab.experiment(federation__rounds=3), FINAL, history(0.9, 0.8, 0.75))
    assert (found["top1_global"], found["mean_local"], found["pooled_local"]) == (0.75, 0.75, 0.8)
    assert found["clients_without_test"] == 1
    assert (found["num_clients"], found["num_parameters"]) == (4, 3094)
    json.dumps(found, allow_nan=False)


def test_a_simulated_attack_is_told_with_how_the_others_fare(lab: Any) -> None:
    """Client 1 has no test data and 0 is poisoned: the mean of the others is client 2's, 1.0."""
    experiment = lab.experiment(federation={"rounds": 1, "poisoned_clients": [0, 3]})
    told = summarise_run(experiment, FINAL, history(0.5))
    assert told["poisoned"] == {
        "attack": "sign_flip", "attack_scale": 10.0, "clients": [0, 3], "honest_mean_local": 1.0
    }  # fmt: skip
    labels = lab.experiment(federation={"rounds": 1, "poisoned_clients": [0, 2], "attack": "random_labels"})
    told = summarise_run(labels, FINAL, history(0.5))
    assert (told["poisoned"]["attack_scale"], told["poisoned"]["honest_mean_local"]) == (None, None)
    assert "poisoned" not in summarise_run(lab.experiment(federation__rounds=1), FINAL, history(0.5))


def test_noise_on_the_average_has_its_account(lab: Any) -> None:
    """Of four clients two are asked in each of three rounds; the method's own account is of prototypes."""
    changes = {"federation": {"rounds": 3, "participation": 0.5}, "model": {"name": "fedcspc_cnn"}}
    told = summarise_run(lab.experiment(**changes, aggregation={"clip": 2, "noise": 8}), FINAL, history(0.1, 0.2, 0.3))
    assert told["privacy"]["epsilon"] == client_epsilon(8.0, 3, 1e-5, cohort=2, clients=4)
    assert (told["privacy"]["noise_multiplier"], told["privacy"]["clip"]) == (8, 2)
    json.dumps(told, allow_nan=False)
    assert summarise_run(lab.experiment(**changes), FINAL, history(0.1, 0.2, 0.3))["privacy"] is None


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda records: records[1].pop("top1_global"), "line 2: damaged, top1_global"),
        (lambda records: records[0].update(mean_local="0.5"), "line 1: damaged, mean_local"),
        (lambda records: records[0].update(bytes_up=[3]), "line 1: damaged, bytes_up"),
        (lambda records: records[1].update(round=True), "line 2: damaged, round"),
        (lambda records: records[0].update(tasks={}), "line 1: damaged, tasks"),
        (lambda records: records[1].pop("bytes_eval_down"), "written by an older protofl, without bytes_eval_down"),
        (lambda records: records.pop(), "round 2 is missing"),
        (lambda records: records.clear(), "round 2 is missing"),
    ],
)
def test_a_history_that_no_run_wrote_is_refused(harm: Callable[[list[dict[str, Any]]], Any], said: str) -> None:
    records = [{**record, "client_std": None, "loss_global": 0.5} for record in history(0.1, 0.2)]
    check_history(records, 2, Path("history.jsonl"), "train again")
    harm(records)
    with pytest.raises(DataError, match=rf"^history\.jsonl.*{said}.*; train again$"):
        check_history(records, 2, Path("history.jsonl"), "train again")


def test_classes_with_names_are_named(lab: Any) -> None:
    """Names such as 0, 1, 2, ... say no more than the place."""
    experiment = lab.experiment(federation__rounds=1)
    meta = experiment.dataset.meta
    assert summarise_run(experiment, FINAL, history(0.5))["class_names"] == list(meta.class_names) == list("abcdef")
    numbers = replace(meta, class_names=tuple("012345"))
    plain = replace(experiment, dataset=replace(experiment.dataset, meta=numbers))
    assert "class_names" not in summarise_run(plain, FINAL, history(0.5))
