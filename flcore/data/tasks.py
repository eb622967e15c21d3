"""Task streams: which task is met in which round, and which classes a task brings (data.md, 2.5 and 2.6; FedMLP)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from flcore.data.partitioners.base import Indices

Schedule = Literal["cyclic", "blocked"]


def task_of_round(round_number: int, schedule: Schedule, tasks: int, rounds: int) -> int:
    """The task, from 0, that every client works on in a round.

    ``cyclic`` meets all tasks one after the other, again and again: with 5 tasks, round 7 is on task 1. ``blocked``
    stays on a task for rounds/tasks rounds and never returns: with 5 tasks and 250 rounds, rounds 1 to 50 are on
    task 0; block lengths differ by at most one where the division leaves a rest.

    Args:
        round_number: from 1 to ``rounds``.
        schedule: ``cyclic`` or ``blocked``.
        tasks: of each client.
        rounds: of the whole run.

    Raises:
        ValueError: no such round, or fewer rounds than tasks.
    """
    if not 1 <= round_number <= rounds:
        raise ValueError(f"round {round_number}: must be from 1 to {rounds}")
    if not 1 <= tasks <= rounds:
        raise ValueError(f"{rounds} rounds for {tasks} tasks: every task needs a round")
    if schedule == "cyclic":
        return (round_number - 1) % tasks
    return (round_number - 1) * tasks // rounds


def new_classes(task_counts: np.ndarray) -> list[tuple[int, ...]]:
    """The classes that a client meets for the first time in each of its tasks, ascending.

    Args:
        task_counts: int64 [T, C], a client's training samples per task and class.
    """
    present = task_counts > 0
    met = np.logical_or.accumulate(present, axis=0)
    before = np.concatenate([np.zeros_like(met[:1]), met[:-1]])
    return [tuple(int(c) for c in np.flatnonzero(row)) for row in present & ~before]


def cumulative_tests(test: Indices, labels: np.ndarray, task_counts: np.ndarray) -> tuple[Indices, ...]:
    """Per task the client's test samples of all classes met in it or before; each set contains the one before.

    Args:
        test: ascending, the client's test samples.
        labels: int64, of the split that ``test`` indexes.
        task_counts: int64 [T, C], the client's training samples per task and class.
    """
    met = np.logical_or.accumulate(task_counts > 0, axis=0)
    return tuple(test[row[labels[test]]] for row in met)
