"""Scores on a stream of tasks (evaluation.md sections 2 and 2.1; FedMLP, FedNTD).

All figures follow from two counts per evaluated round: correct test images by class of the global model, and of each
client's own model after local training and before aggregation. ``a_glo``: the global model on the whole (balanced) test
set; ``a_loc``: mean over all clients of their own models there; ``a_sel``: likewise on the classes that the client has
met so far. ``…_minority``: on the half of the classes with the fewest training samples. A client that was never sampled
has the initial model; one without such a class is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flcore.data.tasks import TaskStream

NUM_LAST_EPOCHS = 10
"""FedMLP's figures are means over the last ten passes over all tasks."""

ACCURACIES = (
    "a_glo",
    "a_loc",
    "a_sel",
    "a_glo_minority",
    "a_loc_minority",
    "a_sel_minority",
    "a_glo_vote",
    "a_glo_vote_minority",
)


def task_scores(
    stream: TaskStream,
    round_number: int,
    tested: np.ndarray,
    private: np.ndarray,
    shared: np.ndarray | None,
    vote: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the accuracies of one evaluated round, fractions or None.

    Args:
        stream: the tasks.
        round_number: 1-based.
        tested: test images per class, int64 [C].
        private: correct ones of each client's own model, int64 [K, C].
        shared, vote: of the global model, and of the majority vote of clients' models, int64 [C]; None where there is
            none.

    Returns:
        :data:`ACCURACIES`, and per task, in the order they are met, the mean over clients of the accuracy on the
        classes of that task: ``by_task`` of clients' own models, ``by_task_global`` of the global one; None for a task
        not yet begun.
    """
    met, few, begun = stream.met(round_number), stream.minority, stream.begun(round_number)
    every = np.ones_like(met)

    def by_task(right: np.ndarray) -> list[float | None]:
        classes = [stream.classes[:, task] if task < begun else None for task in range(stream.num_tasks)]
        return [None if chosen is None else _mean_accuracy(right, tested, chosen) for chosen in classes]

    return {
        "a_glo": _mean_accuracy(shared, tested, every[:1]),
        "a_loc": _mean_accuracy(private, tested, every),
        "a_sel": _mean_accuracy(private, tested, met),
        "a_glo_minority": _mean_accuracy(shared, tested, few[None]),
        "a_loc_minority": _mean_accuracy(private, tested, every & few),
        "a_sel_minority": _mean_accuracy(private, tested, met & few),
        "a_glo_vote": _mean_accuracy(vote, tested, every[:1]),
        "a_glo_vote_minority": _mean_accuracy(vote, tested, few[None]),
        "by_task": by_task(private),
        "by_task_global": None if shared is None else by_task(shared),
    }


def _mean_accuracy(right: np.ndarray | None, tested: np.ndarray, chosen: np.ndarray) -> float | None:
    """Return the mean over rows of right / tested, both summed over the chosen classes, bool [rows, C].

    Rows without a test image are left out. ``right``: by row, or of all rows; None: there is no such model.
    """
    images = (tested * chosen).sum(axis=1)
    known = images > 0
    if right is None or not known.any():
        return None
    return float(((right * chosen).sum(axis=1)[known] / images[known]).mean())


def forgetting(after: Sequence[Sequence[float]]) -> float | None:
    """Return F = (1/(T-1)) Σ_{j<T} (max_{j≤l<T} a[l][j] - a[T][j]), the mean fall from the best accuracy (section 2.1).

    Args:
        after: a[t][j], the accuracy on task j at the end of task t, for j ≤ t; fewer than two tasks give None.
    """
    last = len(after) - 1
    if last < 1:
        return None
    return sum(max(after[t][j] for t in range(j, last)) - after[last][j] for j in range(last)) / last


def backward_transfer(after: Sequence[Sequence[float]]) -> float | None:
    """Return BWT = (1/(T-1)) Σ_{j<T} (a[T][j] - a[j][j]), the effect of later tasks on earlier ones."""
    last = len(after) - 1
    if last < 1:
        return None
    return sum(after[last][j] - after[j][j] for j in range(last)) / last


def roundwise_forgetting(class_accuracy: Sequence[Sequence[float | None]], *, clip: bool = False) -> float | None:
    """Return (1/C) Σ_c (max_{t<R} acc_c^t - acc_c^R) over the classes with test images (FedNTD; section 2.1).

    Args:
        class_accuracy: per evaluated round the accuracies by class, None for classes without test images.
        clip: count a class that is now at its best as 0, not as negative.
    """
    if len(class_accuracy) < 2:
        return None
    *earlier, last = class_accuracy
    losses = []
    for c, now in enumerate(last):
        before = [value for value in (record[c] for record in earlier) if value is not None]
        if now is not None and before:
            loss = max(before) - now
            losses.append(max(loss, 0.0) if clip else loss)
    return sum(losses) / len(losses) if losses else None


def summarise_tasks(stream: TaskStream, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a whole run.

    ``last_epochs``: means of :data:`ACCURACIES` over the last ten epochs (an epoch is T rounds), of each its last
    evaluated round; ``num_last_epochs``: the number evaluated among these ten.
    ``a_loc_participants`` has only the clients of that round. ``stage_ends``: the values at the end of each task of a
    blocked schedule, from which ``forgetting`` and ``backward_transfer`` follow; both None otherwise, since a cyclic
    schedule visits every task again.

    Args:
        stream: the tasks.
        history: records with ``tasks`` (:func:`task_scores`), ``private_correct`` and ``tested``, oldest first.
    """
    epochs = {(record["round"] - 1) // stream.num_tasks: record for record in history}
    recent = [record for epoch, record in sorted(epochs.items()) if epoch > max(epochs) - NUM_LAST_EPOCHS]
    ends = [record for record in history if stream.ends_block(record["round"])]
    complete = len(ends) == stream.num_tasks

    def at_ends(name: str) -> list[list[float]] | None:
        rows = [record["tasks"][name] for record in ends]
        known = all(row is not None and None not in row[: t + 1] for t, row in enumerate(rows))
        return rows if complete and known else None

    private, shared = at_ends("by_task"), at_ends("by_task_global")
    by_class = [record["class_accuracy"] for record in history if record["class_accuracy"] is not None]
    return {
        "schedule": stream.schedule,
        "num_tasks": stream.num_tasks,
        "minority_classes": np.flatnonzero(stream.minority).tolist(),
        "num_last_epochs": len(recent),
        "last_epochs": {
            **{name: _mean([record["tasks"][name] for record in recent]) for name in ACCURACIES},
            "a_loc_participants": _mean([_of_participants(record) for record in recent]),
        },
        "stage_ends": [{"round": record["round"], **record["tasks"]} for record in ends],
        "forgetting": None if private is None else forgetting(private),
        "backward_transfer": None if private is None else backward_transfer(private),
        "forgetting_global": None if shared is None else forgetting(shared),
        "backward_transfer_global": None if shared is None else backward_transfer(shared),
        "roundwise_forgetting": roundwise_forgetting(by_class),
        "roundwise_forgetting_clipped": roundwise_forgetting(by_class, clip=True),
        "untrained_clients": history[-1]["untrained_clients"],
    }


def _of_participants(record: Mapping[str, Any]) -> float | None:
    right, tested = np.array(record["private_correct"]), np.array(record["tested"])
    chosen = right[record["participants"]]
    return _mean_accuracy(chosen, tested, np.ones_like(chosen)) if len(chosen) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
