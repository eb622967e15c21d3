"""What a run's records become in MLflow: names, values, rounds and times of day.

:data:`METRICS` is the whole vocabulary; nothing else is ever logged as a metric. Fractions are in [0, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from flcore.evaluation.continual import ACCURACIES
from flcore.experiment.run_folder import RunFiles
from pipelines.runs.folder import RunFolder

_OF_A_ROUND = {
    "top1_global": ("accuracy/top1_global", "accuracy of the global model on the whole test set"),
    "top1_vote": ("accuracy/top1_vote", "likewise of the majority vote of the clients, if there is no global model"),
    "mean_local": ("accuracy/mean_local", "mean over clients of each client's accuracy on its own test data"),
    "mean_local_own_classes": ("accuracy/mean_local_own_classes", "likewise among the client's training classes"),
    "pooled_local": ("accuracy/pooled_local", "right answers of all clients over all their test images"),
    "client_std": ("accuracy/client_std", "standard deviation of the clients' accuracies, over clients"),
    "loss_global": ("loss/global", "cross-entropy of the global answers on the test set"),
    "scalars_up": ("comm/scalars_up", "numbers from clients to server since the start"),
    "simulated_seconds": ("clock/simulated_seconds", "simulated seconds since the start"),
}
"""Key of a history record, and name and meaning of its metric."""

ROUND_METRICS: Mapping[str, str] = dict(_OF_A_ROUND.values()) | {
    "accuracy/<way>/top1_global": "global accuracy of another way to answer: by another head, or before a calibration",
    "accuracy/<way>/mean_local": "mean over clients of another way to answer",
    "accuracy/<way>/pooled_local": "pooled over clients of another way to answer",
    "loss/train_<term>": "a term of the local loss, mean over a client's steps, then over the clients of the round",
    "tasks/<accuracy>": "an accuracy on a stream of tasks (flcore/evaluation/continual.py); a_glo_vote: of the vote",
    "tasks/by_task_<number>": "mean over clients of their own models' accuracy on the classes of a task",
    "tasks/by_task_global_<number>": "accuracy of the global model on the classes of a task",
    "server/<fact>": "what a server step measured in this round",
    "comm/bytes_up": "bytes from clients to server since the start",
    "comm/bytes_down": "bytes from server to clients since the start",
    "comm/bytes_up_<kind>": "of these, those of a kind of message",
    "comm/bytes_down_<kind>": "of these, those of a kind of message",
    "comm/bytes_eval_up": "bytes from clients to server for scoring alone, since the start",
    "comm/bytes_eval_down": "bytes from server to clients for scoring alone, since the start",
    "time/<phase>": "seconds of this round that a phase took",
    "energy/<phase>": "joules of this round that a phase took",
    "system/<quantity>": "load of the machine while the run is trained, as MLflow measures it (step: seconds)",
}
"""Logged for a round, with the round as step and the moment at which it ended as time."""

_LAST = [key for key in _OF_A_ROUND if key not in ("scalars_up", "simulated_seconds")]
_OF_A_RUN = {key: (f"final/{key}", f"{_OF_A_ROUND[key][0]} after the last round") for key in _LAST} | {
    "last10_top1_global": ("final/last10_top1_global", "mean of accuracy/top1_global over the last ten evaluations"),
    "best_top1_global": ("best/top1_global", "highest accuracy/top1_global; selected on test data, so not for claims"),
    "best_round": ("best/round", "the round of it"),
    "top5_pooled_local": (
        "best/top5_pooled_local",
        "mean of the five highest accuracy/pooled_local; selected likewise",
    ),
    "top5_mean_local": ("best/top5_mean_local", "mean of the five highest accuracy/mean_local; selected likewise"),
    "bytes_up": ("comm/total_bytes_up", "comm/bytes_up after the last round"),
    "bytes_down": ("comm/total_bytes_down", "comm/bytes_down after the last round"),
    "bytes_eval_up": ("comm/total_bytes_eval_up", "comm/bytes_eval_up after the last round"),
    "bytes_eval_down": ("comm/total_bytes_eval_down", "comm/bytes_eval_down after the last round"),
    "bytes_up_per_round": ("comm/bytes_up_per_round", "comm/total_bytes_up over the rounds"),
    "bytes_down_per_round": ("comm/bytes_down_per_round", "comm/total_bytes_down over the rounds"),
    "scalars_up_per_round": ("comm/scalars_up_per_round", "comm/scalars_up over the rounds"),
    "num_parameters": ("model/num_parameters", "trainable numbers of a client's model"),
}
"""Key of ``metrics.json``, and name and meaning of its metric."""

SUMMARY_METRICS: Mapping[str, str] = dict(_OF_A_RUN.values()) | {
    "final/<way>/top1_global": "accuracy/<way>/top1_global after the last round",
    "final/<way>/mean_local": "accuracy/<way>/mean_local after the last round",
    "final/<way>/pooled_local": "accuracy/<way>/pooled_local after the last round",
    "tasks/final_<accuracy>": "tasks/<accuracy> as mean over the last ten epochs, or a figure of the whole run",
    "privacy/epsilon": "epsilon of the differentially private part of the messages, after all rounds",
    "privacy/delta": "its delta",
    "privacy/noise_multiplier": "of noisy averages: standard deviation of the noise over the clipping norm",
    "privacy/clip": "of noisy averages: the clipping norm",
    "poisoned/honest_mean_local": "with simulated poisoned clients, final/mean_local over the others",
    "time/total": "seconds of all phases of all rounds",
    "time/total_<phase>": "seconds of a phase in all rounds",
    "time/steps_per_second": "mini-batches trained on, by all clients together, per second of training",
    "energy/total": "joules of all phases of all rounds",
    "energy/total_<phase>": "joules of a phase in all rounds",
}
"""Logged once, when a run has finished."""

SUMMARY_FIGURES: Mapping[str, str] = {key: name for key, (name, _) in _OF_A_RUN.items()}

PARENT_METRICS: Mapping[str, str] = {
    "comparison/runs": "runs compared",
    "trial/<figure>": "the study's figure of a finished trial, with the trial's number as step",
    "trial/bytes": "bytes that a trial sent in both directions",
    "study/best_<figure>": "that figure of the best trial",
    "study/best_trial": "its number",
}
"""Logged for the parent of compared runs, or of a study's trials."""

METRICS: Mapping[str, str] = {**ROUND_METRICS, **SUMMARY_METRICS, **PARENT_METRICS}

_TASK_FIGURES = (
    *("forgetting", "backward_transfer", "roundwise_forgetting"),
    *("forgetting_global", "backward_transfer_global"),
)


@dataclass(frozen=True)
class Times:
    """When a run's first round began, its last one ended, and each round ended, in milliseconds since 1970."""

    began: int
    ended: int
    rounds: Mapping[int, int]

    def of(self, number: int) -> int:
        """The end of a round; where nothing says when, that of the last one before it which is known."""
        known = [round_number for round_number in self.rounds if round_number <= number]
        return self.rounds[max(known)] if known else self.ended


class Point(NamedTuple):
    """A value of a metric."""

    name: str
    value: float
    time_ms: int
    step: int


def meaning(name: str) -> str | None:
    """What a logged metric says, by :data:`METRICS`; None for a name that is not in it."""
    if name in METRICS:
        return METRICS[name]
    found = [pattern for pattern in METRICS if "<" in pattern and _pattern(pattern).fullmatch(name)]
    return METRICS[max(found, key=len)] if found else None


def is_summary(name: str) -> bool:
    """Whether a metric is one that a finished run has once."""
    return name in SUMMARY_METRICS or any("<" in known and _pattern(known).fullmatch(name) for known in SUMMARY_METRICS)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def metric_name(name: str) -> str:
    """A name with what MLflow does not allow in one replaced by spaces."""
    return re.sub(r"[^/\w.\- :]", " ", name)


# ---- a round -----------------------------------------------------------------------------------------------------


def round_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """One history record as MLflow metrics; what a method does not have (null) is left out."""
    tasks, ways = record.get("tasks") or {}, record.get("alternatives") or {}
    found = {name: record.get(key) for key, (name, _) in _OF_A_ROUND.items()}
    found |= {f"accuracy/{way}/{key}": value for way, scores in ways.items() for key, value in scores.items()}
    found |= {f"loss/train_{term}": value for term, value in (record.get("train_loss") or {}).items()}
    found |= {f"server/{fact}": value for fact, value in (record.get("server") or {}).items()}
    found |= {f"tasks/{name}": tasks.get(name) for name in ACCURACIES}
    for key in ("by_task", "by_task_global"):
        found |= {f"tasks/{key}_{task}": value for task, value in enumerate(tasks.get(key) or ())}
    for direction in ("bytes_up", "bytes_down", "bytes_eval_up", "bytes_eval_down"):
        by_kind = record.get(direction) or {}
        found[f"comm/{direction}"] = sum(by_kind.values()) if direction in record else None
        if "eval" not in direction:
            found |= {f"comm/{direction}_{kind}": count for kind, count in by_kind.items()}
    return _numbers(found)


def trial_metrics(metric: str, record: Mapping[str, Any]) -> dict[str, float]:
    """A record of a study's history, in which a trial stands for a round.

    Args:
        metric: what the study optimises, any figure of ``metrics.json``.
        record: of studies by earlier versions the value stands under the metric's name, where that was free.
    """
    sent = sum(sum((record.get(direction) or {}).values()) for direction in ("bytes_up", "bytes_down"))
    value = record.get("value", record.get(metric))
    return _numbers({f"trial/{metric}": None if isinstance(value, Mapping) else value, "trial/bytes": sent})


def metrics_of(run: RunFolder, record: Mapping[str, Any]) -> dict[str, float]:
    """A history record of a run, or of a study, as MLflow metrics."""
    return round_metrics(record) if run.study is None else trial_metrics(_studied(run), record)


def _studied(run: RunFolder) -> str:
    """What a study optimises."""
    return str(run.identity.get("metric", "accuracy"))


def marker(run: RunFolder) -> str:
    """A metric that every record has, whose history says which rounds a store holds."""
    return "comm/bytes_up" if run.study is None else "trial/bytes"


def cost_metrics(legs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds and joules of one round by phase; a phase that stands in several of its legs is one sum."""
    sums: dict[str, float] = {}
    for leg in legs:
        for group, kind in (("time", "seconds"), ("energy", "joules")):
            for phase, spent in (leg.get(kind) or {}).items():
                name = metric_name(f"{group}/{phase}")
                sums[name] = sums.get(name, 0.0) + spent
    return sums


def points_by_round(run: RunFolder, after: int) -> Iterator[tuple[int, list[Point]]]:
    """For each evaluated round behind ``after`` all that is to be logged: also the costs of rounds since the last one.

    Yields:
        The round, and its points; those of the record last, which mark it as logged.
    """
    times, legs = times_of(run), _by_round(run.legs)
    before = after
    for record in run.history:
        if record["round"] <= after:
            continue
        number = record["round"]
        points = list[Point]()
        for passed in range(before + 1, number + 1):
            costs = cost_metrics(legs.get(passed, ()))
            points += [Point(name, value, times.of(passed), passed) for name, value in costs.items()]
        values = sorted(metrics_of(run, record).items(), key=lambda entry: entry[0] == marker(run))
        points += [Point(name, value, times.of(number), number) for name, value in values]
        yield number, points
        before = number


def _by_round(legs: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for leg in legs:
        found.setdefault(leg["round"], []).append(leg)
    return found


# ---- the end -----------------------------------------------------------------------------------------------------


def summary_metrics(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, float]:
    """What a finished run says once, from ``metrics.json`` and ``timing.json``."""
    tasks, ways, privacy = (metrics.get(key) or {} for key in ("tasks", "alternatives", "privacy"))
    found = {name: metrics.get(key) for key, name in SUMMARY_FIGURES.items()}
    found |= {f"final/{way}/{key}": value for way, scores in ways.items() for key, value in scores.items()}
    found |= {f"privacy/{key}": privacy.get(key) for key in ("epsilon", "delta", "noise_multiplier", "clip")}
    found["poisoned/honest_mean_local"] = (metrics.get("poisoned") or {}).get("honest_mean_local")
    of_all = {name: tasks.get(name) for name in _TASK_FIGURES}
    found |= {f"tasks/final_{name}": value for name, value in {**of_all, **(tasks.get("last_epochs") or {})}.items()}
    for group, kind in (("time", "seconds"), ("energy", "joules")):
        spent = timing.get(kind) or {}
        found |= {f"{group}/total_{phase}": value for phase, value in spent.items()}
        found[f"{group}/total"] = sum(spent.values()) if spent else None
    found["time/steps_per_second"] = timing.get("steps_per_second")
    return _numbers(found)


def summary_points(run: RunFolder) -> list[Point]:
    """What is logged once of a finished run, at the end of its last round; nothing of a run that is not finished."""
    if run.metrics is None:
        return []
    times, last = times_of(run), max((record["round"] for record in run.history), default=0)
    if run.study is None:
        found = summary_metrics(run.metrics, run.timing)
    else:
        metric = _studied(run)
        best = {f"study/best_{metric}": run.metrics.get(metric), "study/best_trial": run.metrics.get("best_round")}
        found = _numbers(best)
    return [Point(name, value, times.ended, last) for name, value in found.items()]


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {metric_name(name): float(value) for name, value in found.items() if value is not None}


# ---- time --------------------------------------------------------------------------------------------------------


def times_of(run: RunFolder) -> Times:
    """When a run took place, from its files alone: whoever asks again gets the same answer.

    A run without times of day, such as one from DVC without ``timing.json``, has the time of its history.
    """
    legs = _by_round(run.legs)
    if legs and all("ended_ms" in leg for leg in run.legs):
        rounds = {number: max(leg["ended_ms"] for leg in found) for number, found in legs.items()}
        return Times(run.legs[0]["began_ms"], rounds[max(rounds)], rounds)
    written = _written(run)
    return Times(written, written, {})


def _written(run: RunFolder) -> int:
    """When the history was written last; of a run without one, when it was begun."""
    files = RunFiles(run.directory)
    places = (files.history, files.checkpoint / files.history.name, files.config)
    return next((place.stat().st_mtime_ns // 1_000_000 for place in places if place.exists()), 0)
