"""Training of a group of stacks: skips existing results, handles failures, passes results on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.failures import ClientError, LocatedError, client_step, failed, failure_of, is_the_machines
from flcore.engine.turns import ClientResult, Failure, LegWork, leg_of
from flcore.evaluation.model_selection import ClientStates
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

Group = Sequence[Sequence[int]]
"""Stacks of clients that are trained one after the other by the same worker."""

Results = Mapping[int, ClientResult]

Keep = Callable[[int, ClientResult, Record | None], None]
"""Takes a client's result and its state; the state is None if it was written already."""


class StoppedError(LocatedError):
    """Work that was stopped or not started because its executor is closed."""

    def __init__(self) -> None:
        super().__init__("training was stopped")


class ReplyStore:
    """The results of clients, kept as ``engine.durability`` says; safe for several threads."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        """Keep results in ``checkpoint``: the very object that commits, since it may hold them in memory."""
        self._checkpoint, self._spill = checkpoint, experiment.config.engine.durability == "reply"

    def keep(self, work: LegWork, client: int, result: ClientResult, client_state: Record | None) -> None:
        """Keep a client's result of an exchange; for ``client_state`` see :data:`Keep`."""
        self._checkpoint.client_results.hold(work.number, client, result, client_state, work.run, spill=self._spill)

    def found(self, work: LegWork, clients: Sequence[int]) -> dict[int, ClientResult | None]:
        """Return the existing results by client."""
        return self._checkpoint.client_results.load_all(work.number, clients, work.run)

    def missing(self, work: LegWork, group: Group) -> list[list[int]]:
        """Return the stacks with a missing result, which are trained whole; existing results get the same bytes."""
        found = self.found(work, [client for stack in group for client in stack])
        return [list(stack) for stack in group if any(found[client] is None for client in stack)]


def train_group(
    runner: ClientRunner,
    work: LegWork,
    group: Group,
    client_states: ClientStates,
    stopped: Callable[[], bool],
    keep: Keep,
) -> None:
    """Train a group and hand over every stack's results as soon as they exist.

    Clients of a stack that fails are trained one by one where ``federation.on_client_error`` is ``drop``.

    Args:
        runner: trains stacks.
        work: the exchange, with what these clients are sent.
        group: of stacks.
        client_states: client id to its state.
        stopped: whether the caller has stopped waiting; called before and after every stack.
        keep: takes results.

    Raises:
        RunError: a client failed and ``federation.on_client_error`` is ``stop``, or the machine lacks disk or memory.
        StoppedError: the caller has stopped waiting.
    """
    drop, leg_name = drops_failures(runner.experiment), leg_of(runner.experiment, work.place).name
    stacks = deque(list(stack) for stack in group)
    while stacks:
        stack = stacks.popleft()
        if stopped():
            raise StoppedError
        try:
            with client_step(work.place, leg_name, stack, ""):
                outcomes = runner.train(work, stack, client_states)
        except ClientError as error:
            if not drop or is_the_machines(error):
                raise
            if len(stack) > 1:  # an error of a stack is of no known client, and each gives the same bytes alone
                stacks.extendleft([client] for client in reversed(stack))
                continue
            outcomes = {stack[0]: failure_of(error)}
        if stopped():  # another run may have begun in this folder
            raise StoppedError
        for client, outcome in outcomes.items():
            result, client_state = (outcome, Record()) if isinstance(outcome, Failure) else outcome
            if isinstance(result, Failure) and not drop:
                raise failed(work.place, leg_name, client, result)
            keep(client, result, client_state)


def drops_failures(experiment: Experiment) -> bool:
    """Return whether failing clients are left out."""
    return experiment.config.federation.on_client_error == "drop"
