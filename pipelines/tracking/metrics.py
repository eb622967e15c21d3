"""What a run's records become in MLflow: names, values, rounds and times of day.

``docs/reference/mlflow-names.md`` has all names with their meanings. Fractions are in [0, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flcore.evaluation.continual import ACCURACIES
from pipelines.runs.folder import RunFolder

_OF_A_ROUND = {
    "top1_global": "accuracy/top1_global",
    "top1_vote": "accuracy/top1_vote",
    "mean_local": "accuracy/mean_local",
    "mean_local_own_classes": "accuracy/mean_local_own_classes",
    "pooled_local": "accuracy/pooled_local",
    "client_std": "accuracy/client_std",
    "loss_global": "loss/global",
    "scalars_up": "comm/scalars_up",
    "simulated_seconds": "clock/simulated_seconds",
}
"""Key of a history record, and its metric."""

_LAST = [key for key, name in _OF_A_ROUND.items() if name.startswith(("accuracy/", "loss/"))]
SUMMARY_FIGURES: Mapping[str, str] = {
    **{key: f"final/{key}" for key in (*_LAST, "last10_top1_global")},
    "best_top1_global": "best/top1_global",
    "best_round": "best/round",
    "top5_pooled_local": "best/top5_pooled_local",
    "top5_mean_local": "best/top5_mean_local",
    **{f"bytes_{way}": f"comm/total_bytes_{way}" for way in ("up", "down", "eval_up", "eval_down")},
    **{f"{what}_per_round": f"comm/{what}_per_round" for what in ("bytes_up", "bytes_down", "scalars_up")},
    "num_parameters": "model/num_parameters",
}
"""Key of ``metrics.json``, and its metric."""

_FURTHER = re.compile(
    r"final/.+|tasks/final_.+|privacy/\w+|poisoned/\w+|(time|energy)/total(_.+)?|time/steps_per_second"
)
"""Other metrics that a finished run has once."""

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
        """Return the end of a round; if unknown, that of the last known round before it."""
        known = [round_number for round_number in self.rounds if round_number <= number]
        return self.rounds[max(known)] if known else self.ended


class Point(NamedTuple):
    """A value of a metric."""

    name: str
    value: float
    time_ms: int
    step: int


def is_summary(name: str) -> bool:
    """Return whether a metric is one that a finished run has once."""
    return name in SUMMARY_FIGURES.values() or _FURTHER.fullmatch(name) is not None


def metric_name(name: str) -> str:
    """Return a name with spaces for characters that MLflow does not allow."""
    return re.sub(r"[^/\w.\- :]", " ", name)


# ---- a round -----------------------------------------------------------------------------------------------------


def round_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a history record as MLflow metrics, without nulls."""
    tasks, ways = record.get("tasks") or {}, record.get("alternatives") or {}
    metrics = {name: record.get(key) for key, name in _OF_A_ROUND.items()}
    metrics |= {f"accuracy/{way}/{key}": value for way, scores in ways.items() for key, value in scores.items()}
    metrics |= {f"loss/train_{term}": value for term, value in (record.get("train_loss") or {}).items()}
    metrics |= {f"server/{fact}": value for fact, value in (record.get("server") or {}).items()}
    metrics |= {f"tasks/{name}": tasks.get(name) for name in ACCURACIES}
    for key in ("by_task", "by_task_global"):
        metrics |= {f"tasks/{key}_{task}": value for task, value in enumerate(tasks.get(key) or ())}
    for direction in ("bytes_up", "bytes_down", "bytes_eval_up", "bytes_eval_down"):
        by_kind = record.get(direction) or {}
        metrics[f"comm/{direction}"] = sum(by_kind.values()) if direction in record else None
        if "eval" not in direction:
            metrics |= {f"comm/{direction}_{kind}": count for kind, count in by_kind.items()}
    return _numbers(metrics)


def metrics_of(run: RunFolder, record: Mapping[str, Any]) -> dict[str, float]:
    """Return a history record of a run as MLflow metrics, or of a study, whose rounds are trials."""
    if run.study is None:
        return round_metrics(record)
    return _numbers({f"trial/{_studied(run)}": record.get("value"), "trial/bytes": sum(record["bytes_up"].values())})


def _studied(run: RunFolder) -> str:
    return str(run.identity.get("metric", "accuracy"))


def marker(run: RunFolder) -> str:
    """Return a metric that every record has: its history shows which rounds a store holds."""
    return "comm/bytes_up" if run.study is None else "trial/bytes"


def cost_metrics(legs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return seconds and joules of a round by phase, summed over its legs."""
    sums: dict[str, float] = {}
    for leg in legs:
        for group, kind in (("time", "seconds"), ("energy", "joules")):
            for phase, spent in (leg.get(kind) or {}).items():
                name = metric_name(f"{group}/{phase}")
                sums[name] = sums.get(name, 0.0) + spent
    return sums


def points_by_round(run: RunFolder, after: int) -> Iterator[tuple[int, list[Point]]]:
    """Yield each evaluated round after ``after``, and its points, with the costs of the rounds since the one before.

    The points of the record are last: they mark it as logged.
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
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for leg in legs:
        by_round.setdefault(leg["round"], []).append(leg)
    return by_round


# ---- the end -----------------------------------------------------------------------------------------------------


def summary_metrics(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a finished run as a whole, from ``metrics.json`` and ``timing.json``."""
    tasks, ways, privacy = (metrics.get(key) or {} for key in ("tasks", "alternatives", "privacy"))
    summary = {name: metrics.get(key) for key, name in SUMMARY_FIGURES.items()}
    summary |= {f"final/{way}/{key}": value for way, scores in ways.items() for key, value in scores.items()}
    summary |= {f"privacy/{key}": privacy.get(key) for key in ("epsilon", "delta", "noise_multiplier", "clip")}
    summary["poisoned/honest_mean_local"] = (metrics.get("poisoned") or {}).get("honest_mean_local")
    of_all = {name: tasks.get(name) for name in _TASK_FIGURES}
    summary |= {f"tasks/final_{name}": value for name, value in {**of_all, **(tasks.get("last_epochs") or {})}.items()}
    for group, kind in (("time", "seconds"), ("energy", "joules")):
        spent = timing.get(kind) or {}
        summary |= {f"{group}/total_{phase}": value for phase, value in spent.items()}
        summary[f"{group}/total"] = sum(spent.values()) if spent else None
    summary["time/steps_per_second"] = timing.get("steps_per_second")
    return _numbers(summary)


def summary_points(run: RunFolder) -> list[Point]:
    """Return the points of a finished run as a whole, at the end of its last round; none for an unfinished run."""
    if not run.is_finished:
        return []
    times, last = times_of(run), max((record["round"] for record in run.history), default=0)
    if run.study is None:
        values = summary_metrics(run.metrics, run.timing)
    else:
        metric = _studied(run)
        best = {f"study/best_{metric}": run.metrics.get(metric), "study/best_trial": run.metrics.get("best_round")}
        values = _numbers(best)
    return [Point(name, value, times.ended, last) for name, value in values.items()]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {metric_name(name): float(value) for name, value in values.items() if value is not None}


# ---- time --------------------------------------------------------------------------------------------------------


def times_of(run: RunFolder) -> Times:
    """Return when a run took place, from its files alone, so repeated calls agree.

    A run without times of day, such as one from DVC without ``timing.json``, has the time of its history.
    """
    legs = _by_round(run.legs)
    if legs and all("ended_ms" in leg for leg in run.legs):
        rounds = {number: max(leg["ended_ms"] for leg in of_round) for number, of_round in legs.items()}
        return Times(run.legs[0]["began_ms"], rounds[max(rounds)], rounds)
    written = _written(run)
    return Times(written, written, {})


def _written(run: RunFolder) -> int:
    """Return when the history was written last; without one, when the run began."""
    files = run.files
    candidates = (files.history, files.checkpoint / files.history.name, files.config)
    return next((path.stat().st_mtime_ns // 1_000_000 for path in candidates if path.exists()), 0)
