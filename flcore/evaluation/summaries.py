"""Metrics of a finished run, from its records (evaluation.md sections 2.2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.evaluation.continual import ACCURACIES, summarise_tasks
from flcore.evaluation.scores import Scores
from flcore.experiment.experiment import Experiment


def summarise_run(experiment: Experiment, final: Scores, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of ``metrics.json``.

    Args:
        experiment: the run. final: scores of its last state.
        history: records of evaluated rounds, oldest first, the last of the last round (:func:`check_history`).
    """
    config, meta, last = experiment.config, experiment.dataset.meta, history[-1]
    rounds = config.federation.rounds
    up, down = sum(last["bytes_up"].values()), sum(last["bytes_down"].values())
    best = best_round(history, "top1_global")
    recent = [record["top1_global"] for record in history[-10:] if record["top1_global"] is not None]
    tasks = {"tasks": summarise_tasks(experiment.stream, history)} if "tasks" in last else {}
    is_named = meta.class_names != tuple(map(str, range(meta.num_classes)))
    names = {"class_names": list(meta.class_names)} if is_named else {}
    return {
        **tasks,
        **names,
        **experiment.poisoning.metrics(final.local_accuracy),
        **{name: getattr(final, name) for name in _SCORES},
        "method": experiment.method.name,
        "dataset": meta.name,
        "partition": config.partitioner.name,
        "rounds": rounds,
        "seed": config.seed,
        "config_hash": experiment.hash,
        "data_fingerprint": meta.fingerprint,
        "partition_fingerprint": experiment.partition.fingerprint,
        "num_clients": experiment.setting.num_clients,
        "num_parameters": experiment.setting.initial.num_parameters,
        "class_acc": final.class_accuracy,
        "class_acc_vote": final.class_accuracy_vote,
        "clients_without_test": sum(accuracy is None for accuracy in final.local_accuracy),
        "last10_top1_global": sum(recent) / len(recent) if recent else None,
        "last10_rounds": len(recent),
        "top5_pooled_local": mean_of_best(history, "pooled_local"),
        "top5_mean_local": mean_of_best(history, "mean_local"),
        # The worst case: a client uploads at most once a round.
        "privacy": experiment.privacy(rounds),
        "alternatives": {**last.get("alternatives", {}), **final.alternatives} or None,
        "best_top1_global": None if best is None else best["top1_global"],
        "best_round": None if best is None else best["round"],
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_by_kind": last["bytes_up"],
        "bytes_down_by_kind": last["bytes_down"],
        "bytes_up_per_round": up / rounds,
        "bytes_down_per_round": down / rounds,
        "bytes_eval_up": sum(last["bytes_eval_up"].values()),
        "bytes_eval_down": sum(last["bytes_eval_down"].values()),
        "scalars_up_per_round": last["scalars_up"] / rounds,
        "steps": last["steps"],
    }


_FIGURES = ("top1_global", "mean_local", "pooled_local", "client_std", "loss_global")
_SCORES = (*_FIGURES, "mean_local_own_classes", "top1_vote", "local_accuracy")
_COUNTS = ("round", "scalars_up", "steps")
_NEWER = ("bytes_eval_up", "bytes_eval_down")  # missing in histories of older versions
_TRAFFIC = ("bytes_up", "bytes_down", *_NEWER)
_OF_TASKS = (*ACCURACIES, "by_task", "by_task_global")


def check_history(history: Sequence[Mapping[str, Any]], rounds: int, path: Path, cure: str) -> None:
    """Refuse records that no run writes.

    Args:
        history: as read from ``path``. rounds: of the run.
        path: for the error. cure: its end.

    Raises:
        DataError: names the first such line; or the last round is missing.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def wrong(record: Mapping[str, Any]) -> str | None:
        for name in _COUNTS:
            if not isinstance(record.get(name), int) or isinstance(record[name], bool):
                return name
        for name in _FIGURES:
            if name not in record or not (record[name] is None or is_number(record[name])):
                return name
        for name in _TRAFFIC:
            kinds = record.get(name)
            if not isinstance(kinds, Mapping) or not all(isinstance(size, int) for size in kinds.values()):
                return name
        tasks = record.get("tasks", dict.fromkeys(_OF_TASKS))
        is_stream = isinstance(tasks, Mapping) and all(name in tasks for name in _OF_TASKS)
        return None if is_stream and ("tasks" in record) == ("tasks" in history[-1]) else "tasks"

    for number, record in enumerate(history, start=1):
        name = wrong(record)
        if name in _NEWER and name not in record:
            raise DataError(f"{path}: written by an older protofl, without {name}; {cure}")
        if name is not None:
            raise DataError(f"{path}, line {number}: damaged, {name} is missing or not what a round writes; {cure}")
    if not history or history[-1]["round"] != rounds:
        raise DataError(f"{path}: damaged, round {rounds} is missing; {cure}")


def best_round(history: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any] | None:
    """Return the record with the highest value, the earliest of equals; selected on test data, so never a headline."""
    known = [record for record in history if record[metric] is not None]
    return max(known, key=lambda record: (record[metric], -record["round"]), default=None)


def mean_of_best(history: Sequence[Mapping[str, Any]], metric: str, count: int = 5) -> float | None:
    """Return the mean of the ``count`` highest values, of all if there are fewer; None without any.

    FedPA prints it (fedpa.md section 6). Selected on test data: compare it with printed figures only.
    """
    values = sorted((record[metric] for record in history if record[metric] is not None), reverse=True)[:count]
    return sum(values) / len(values) if values else None
