"""A group of stacks, as a worker trains it wherever it is: what is there is not done again, who fails is dealt with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import TurnRunner, download
from flcore.engine.failures import LocatedError, TurnError, failed, turn_part
from flcore.engine.run_state import RunState
from flcore.engine.turns import Failure, Reply
from flcore.experiment import Experiment
from flcore.messages import Size
from flcore.records import Record

Group = Sequence[Sequence[int]]
"""Stacks of clients that are trained one after the other by the same worker."""

Results = Mapping[int, Reply | Failure]


class StoppedError(LocatedError):
    """Work that was broken off, or not begun, because its executor is closed; in whose turn is no matter."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("training was stopped")


def train_group(
    runner: TurnRunner,
    checkpoint: Checkpoint,
    state: RunState,
    group: Group,
    stopped: Callable[[], bool],
    *,
    hold: Literal["leg", "reply"] | None = None,
) -> dict[int, Reply | Failure]:
    """Results of a group in the leg after ``state``: those that are there, else trained now and kept.

    Args:
        runner: carries out turns.
        checkpoint: of the run. state: what it says.
        group: of stacks.
        stopped: whether nobody waits for results any more; asked before and after every stack.
        hold: keep results in memory, for a while (``reply``) or until the leg is committed, instead of on the disk.

    Raises:
        RunError: a client failed and ``federation.on_client_error`` is ``stop``, or the system refused a file.
        StoppedError: nobody waits.
    """
    leg, run, drop = state.legs + 1, state.run.digest, drops_failures(runner.experiment)
    results: dict[int, Reply | Failure] = {}
    for stack in group:
        found = {client: checkpoint.load_reply(leg, client, run) for client in stack}
        if all(result is not None for result in found.values()):
            results |= {client: result for client, result in found.items() if result is not None}
            continue
        if stopped():
            raise StoppedError
        memories = partial(checkpoint.memory, memories=state.memories)
        # A stack with a reply missing is trained whole: the same bytes again for those that are there.
        turns = _turns(runner, state, stack, memories)
        if stopped():  # another run may have begun in this folder
            raise StoppedError
        for client, turn in turns.items():
            result, memory = (turn, Record()) if isinstance(turn, Failure) else turn
            if isinstance(result, Failure) and not drop:
                raise failed(state.place, leg_name(runner.experiment, state), client, result)
            if hold is not None:
                checkpoint.hold(leg, client, result, memory, run, spill=hold == "reply")
            else:
                checkpoint.save_result(leg, client, result, memory, run)
            results[client] = result
    return results


def _turns(
    runner: TurnRunner, state: RunState, stack: Sequence[int], memories: Callable[[int], Record]
) -> dict[int, tuple[Reply, Record] | Failure]:
    """The turns of a stack. Whoever's turn raises an error has failed, and the others are trained without it."""
    experiment = runner.experiment
    results: dict[int, tuple[Reply, Record] | Failure] = {}
    waiting = list(stack)
    while waiting:
        try:
            with turn_part(state.place, leg_name(experiment, state), waiting, ""):
                return results | runner.train(state.place, waiting, state.server, memories)
        except TurnError as error:
            if not drops_failures(experiment) or isinstance(error.__cause__, OSError):  # a full disk is no client's
                raise
            blamed = [client for client in waiting if client in error.clients] or waiting
            for client in blamed:
                down = sent_to(state, client, experiment)
                results[client] = Failure(error.cause, down, error.part, error.details)
            waiting = [client for client in waiting if client not in blamed]
    return results


def drops_failures(experiment: Experiment) -> bool:
    """Whether clients that fail are left out."""
    return experiment.config.federation.on_client_error == "drop"


def leg_name(experiment: Experiment, state: RunState) -> str:
    """Name of the leg after a state."""
    return experiment.method.legs(state.place.round, experiment.setting)[state.place.leg].name


def sent_to(state: RunState, client: int, experiment: Experiment) -> dict[str, Size]:
    """What a client that failed had been sent: nothing, where making its message is what failed."""
    try:
        return download(state.server, client, experiment, state.place)
    except Exception:  # the method's own, whatever it raised in the turn; that has been told already
        return {}
