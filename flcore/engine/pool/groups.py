"""A group of stacks: what is there is not done again, who fails is dealt with, results go to whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import Memories, TurnRunner
from flcore.engine.failures import LocatedError, TurnError, failed, failure_of, is_the_machines, turn_part
from flcore.engine.replies import Result
from flcore.engine.turns import Failure, LegWork, Reply, leg_of
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

Group = Sequence[Sequence[int]]
"""Stacks of clients that are trained one after the other by the same worker."""

Results = Mapping[int, Result]

Keep = Callable[[int, Result, Record | None], None]
"""Told what became of a client's turn, and what the client remembers; None where that has been written."""


class StoppedError(LocatedError):
    """Work that was broken off, or not begun, because its executor is closed; in whose turn is no matter."""

    def __init__(self) -> None:
        super().__init__("training was stopped")


class Keeper:
    """What came of the turns of a run, as ``engine.durability`` wants it kept; asked from several threads."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        """Keep results in ``checkpoint``: the very object that commits, since it may hold them in memory."""
        self._checkpoint, self._spill = checkpoint, experiment.config.engine.durability == "reply"

    def keep(self, work: LegWork, client: int, result: Result, memory: Record | None) -> None:
        """Keep what came of a client's turn in a leg; for ``memory`` see :data:`Keep`."""
        self._checkpoint.turns.hold(work.number, client, result, memory, work.run, spill=self._spill)

    def found(self, work: LegWork, clients: Sequence[int]) -> dict[int, Result | None]:
        """By client what is there."""
        return self._checkpoint.turns.load_all(work.number, clients, work.run)

    def missing(self, work: LegWork, group: Group) -> list[list[int]]:
        """The stacks with a result missing; these are trained whole: the same bytes again for those that are there."""
        found = self.found(work, [client for stack in group for client in stack])
        return [list(stack) for stack in group if any(found[client] is None for client in stack)]


def train_group(
    runner: TurnRunner, work: LegWork, group: Group, memories: Memories, stopped: Callable[[], bool], keep: Keep
) -> None:
    """Train a group; every stack's results are handed over as soon as they are there.

    Args:
        runner: carries out turns.
        work: the leg, with what these clients are sent.
        group: of stacks.
        memories: client id to what it remembers.
        stopped: whether nobody waits for results any more; asked before and after every stack.
        keep: takes results.

    Raises:
        RunError: a client failed and ``federation.on_client_error`` is ``stop``, or the machine lacks disk or memory.
        StoppedError: nobody waits.
    """
    drop = drops_failures(runner.experiment)
    for stack in group:
        if stopped():
            raise StoppedError
        turns = _turns(runner, work, stack, memories)
        if stopped():  # another run may have begun in this folder
            raise StoppedError
        for client, turn in turns.items():
            result, memory = (turn, Record()) if isinstance(turn, Failure) else turn
            if isinstance(result, Failure) and not drop:
                raise failed(work.place, leg_of(runner.experiment, work.place).name, client, result)
            keep(client, result, memory)


def _turns(
    runner: TurnRunner, work: LegWork, stack: Sequence[int], memories: Memories
) -> dict[int, tuple[Reply, Record] | Failure]:
    """Train a stack.

    An error in a stack has no known client: with ``drop`` its clients are trained one by one, and only those that fail
    alone are left out. The others give the same results as alone, in every kind of executor.
    """
    experiment = runner.experiment
    try:
        with turn_part(work.place, leg_of(experiment, work.place).name, stack, ""):
            return runner.train(work, stack, memories)
    except TurnError as error:
        if not drops_failures(experiment) or is_the_machines(error):
            raise
        if len(stack) == 1:
            return {stack[0]: failure_of(error)}
    return {client: _turns(runner, work, [client], memories)[client] for client in stack}


def drops_failures(experiment: Experiment) -> bool:
    """Whether clients that fail are left out."""
    return experiment.config.federation.on_client_error == "drop"
