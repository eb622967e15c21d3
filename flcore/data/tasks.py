"""Task streams: the task of each round, and the classes of each task (data.md, 2.5 and 2.6; FedMLP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flcore.data.partitioners.base import Indices

TaskSchedule = Literal["cyclic", "blocked"]


def task_of_round(round_number: int, schedule: TaskSchedule, tasks: int, rounds: int) -> int:
    """Return the task, from 0, that every client works on in a round (from 1).

    ``cyclic`` visits all tasks in turn, repeatedly: with 5 tasks, round 7 is on task 1. ``blocked`` stays on a task for
    rounds/tasks rounds and never returns: with 5 tasks and 250 rounds, rounds 1 to 50 are on task 0; block lengths
    differ by at most one. Raises ValueError for no such round, or fewer rounds than tasks.
    """
    if not 1 <= round_number <= rounds:
        raise ValueError(f"round {round_number}: must be from 1 to {rounds}")
    if not 1 <= tasks <= rounds:
        raise ValueError(f"{rounds} rounds for {tasks} tasks: every task needs a round")
    if schedule == "cyclic":
        return (round_number - 1) % tasks
    return (round_number - 1) * tasks // rounds


@dataclass(frozen=True)
class TaskStream:
    """The classes of clients' tasks, bool [K, T, C] (T is 1 without tasks), schedule, and minority classes [C]."""

    classes: np.ndarray
    schedule: TaskSchedule | Literal["none"]
    rounds: int
    minority: np.ndarray

    @property
    def num_tasks(self) -> int:
        return int(self.classes.shape[1])

    def task(self, round_number: int) -> int | None:
        """Return the task of a round, from 0; None without tasks."""
        if self.schedule == "none":
            return None
        return task_of_round(round_number, self.schedule, self.num_tasks, self.rounds)

    def task_visit(self, round_number: int) -> int:
        """Return the number of visits to tasks before this round's, from 0; always 0 without tasks."""
        task = self.task(round_number)
        if task is None:
            return 0
        return round_number - 1 if self.schedule == "cyclic" else task

    def begun(self, round_number: int) -> int:
        """Return the number of tasks that clients have met up to and including a round."""
        task = self.task(round_number)
        if task is None:
            return self.num_tasks
        return min(round_number, self.num_tasks) if self.schedule == "cyclic" else task + 1

    def met(self, round_number: int) -> np.ndarray:
        """Return the classes of all tasks met up to and including a round, bool [K, C]."""
        return np.logical_or.reduce(self.classes[:, : self.begun(round_number)], axis=1)

    def ends_block(self, round_number: int) -> bool:
        """Return whether this is the last round on a task that never returns: forgetting is measured then."""
        if self.schedule != "blocked":
            return False
        return round_number == self.rounds or self.task_visit(round_number + 1) != self.task_visit(round_number)


def new_classes(task_counts: np.ndarray) -> list[tuple[int, ...]]:
    """Return the classes that a client meets first in each of its tasks, ascending; ``task_counts`` int64 [T, C]."""
    present = task_counts > 0
    met = np.logical_or.accumulate(present, axis=0)
    before = np.concatenate([np.zeros_like(met[:1]), met[:-1]])
    return [tuple(int(c) for c in np.flatnonzero(row)) for row in present & ~before]


def cumulative_tests(test: Indices, labels: np.ndarray, task_counts: np.ndarray) -> tuple[Indices, ...]:
    """Return per task the client's test samples of all classes met so far; each set contains the one before.

    ``test`` is ascending; ``labels`` int64, of the split that ``test`` indexes; ``task_counts`` int64 [T, C].
    """
    met = np.logical_or.accumulate(task_counts > 0, axis=0)
    return tuple(test[row[labels[test]]] for row in met)
