"""The round, written once: sample a cohort, train it, let the server work, score, commit.

Who watches is not known here. Each piece of work is handed to a :class:`Steps`, which may simply call it, or show it as
a task of an orchestrator; records of evaluated rounds go to a callback.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

import flcore
from flcore.engine.checkpoint import Checkpoint, RunState, Traffic
from flcore.engine.client import Reply, Worker
from flcore.engine.executors import Executor
from flcore.engine.experiment import Experiment
from flcore.errors import RunError
from flcore.evaluation.scoring import Scorer
from flcore.messages import Record, Size
from flcore.methods.base import Stage
from flcore.rng import numpy_stream

Item = TypeVar("Item")
Result = TypeVar("Result")
RoundRecord = Mapping[str, Any]
Clock = Callable[[], float]


class Steps(Protocol):
    """How the pieces of a round are carried out; results must not depend on it."""

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Carry out one named piece of work."""

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Carry out one named piece of work per item, perhaps at the same time; results in the order of the items."""


class PlainSteps:
    """Calls, in order, in this thread."""

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call it."""
        return function(*arguments)

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call it for each item."""
        return [function(item) for item in items]


@dataclass(frozen=True)
class Observers:
    """Who is told of progress: ``on_round`` after every round (round, its record or None), ``clock`` for durations."""

    on_round: Callable[[int, RoundRecord | None], None] = lambda number, record: None
    clock: Clock = time.perf_counter


def run_rounds(
    experiment: Experiment, checkpoint: Checkpoint, executor: Executor, steps: Steps, observers: Observers
) -> RunState:
    """Run all rounds that are still to do and return the final state.

    Starting again after a kill continues inside the interrupted round; the result is the same to the byte.

    Raises:
        RunError: training failed; names round, client and cause.
    """
    run = run_name(experiment)
    state = checkpoint.load(run)
    if state is None:
        state = RunState(0, experiment.method.start_server(experiment.setting))
        checkpoint.start(state, run)
    scorer = Scorer(Worker(experiment))
    for number in range(state.round + 1, experiment.config.federation.rounds + 1):
        state, record = _run_round(experiment, checkpoint, executor, steps, scorer, state, run, observers.clock)
        observers.on_round(number, record)
    return state


def run_name(experiment: Experiment) -> str:
    """Names what a checkpoint belongs to: the run and the code, since resuming with other code would mix two runs."""
    return f"{experiment.hash}-{code_fingerprint()}"


def code_fingerprint() -> str:
    """SHA-256 over the library's source files, by relative name."""
    root = Path(flcore.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _run_round(
    experiment: Experiment,
    checkpoint: Checkpoint,
    executor: Executor,
    steps: Steps,
    scorer: Scorer,
    state: RunState,
    run: str,
    clock: Clock,
) -> tuple[RunState, RoundRecord | None]:
    number, config, method = state.round + 1, experiment.config, experiment.method
    seconds: dict[str, float] = {}
    mark = clock()
    groups = client_groups(sample_cohort(experiment, number), config.engine.workers, config.engine.clients_per_task)
    replies: dict[int, Reply] = {}
    for group in steps.map("train-clients", partial(executor.train, state), groups):
        replies |= group
    replies = dict(sorted(replies.items()))
    seconds["train-clients"], mark = clock() - mark, clock()

    server = state.server
    messages = {client: reply.message for client, reply in replies.items()}
    for name, stage in method.stages().items() if messages else ():
        server = steps.call(name, partial(_run_stage, stage, name), server, messages, experiment, number)
        seconds[name], mark = clock() - mark, clock()

    after = RunState(
        round=number,
        server=server,
        memories={**state.memories, **{client: number for client, reply in replies.items() if reply.remembers}},
        up=_add(state.up, (reply.up for reply in replies.values())),
        down=_add(state.down, (reply.down for reply in replies.values())),
        steps=state.steps + sum(reply.steps for reply in replies.values()),
    )
    record = None
    if number % config.evaluation.every == 0 or number == config.federation.rounds:
        scores = steps.call("evaluate", scorer.score, server, partial(checkpoint.memory, memories=after.memories))
        record = {"round": number, **scores.to_mapping(), **_round_facts(replies, after)}
        seconds["evaluate"], mark = clock() - mark, clock()
    checkpoint.commit(after, run, record, {"round": number, "seconds": seconds})
    return after, record


def _run_stage(
    stage: Stage, name: str, server: Record, messages: Mapping[int, Record], experiment: Experiment, number: int
) -> Record:
    try:
        return stage(server, messages, experiment.setting, number)
    except (ValueError, ArithmeticError) as error:
        raise RunError(f"round {number}, server stage {name}: {error}") from error


def _round_facts(replies: Mapping[int, Reply], after: RunState) -> dict[str, Any]:
    """Of the round: who took part and their mean losses; since the start: bytes and scalars by direction and kind."""
    names = sorted({name for reply in replies.values() for name in reply.losses})
    losses = {name: [reply.losses[name] for reply in replies.values() if name in reply.losses] for name in names}
    return {
        "participants": list(replies),
        "train_loss": {name: float(np.mean(values)) for name, values in losses.items()},
        "bytes_up": {kind: size.bytes for kind, size in after.up.items()},
        "bytes_down": {kind: size.bytes for kind, size in after.down.items()},
        "scalars_up": sum(size.scalars for size in after.up.values()),
        "steps": after.steps,
    }


def _add(total: Traffic, more: Iterable[Traffic]) -> dict[str, Size]:
    sums = dict(total)
    for traffic in more:
        for kind, size in traffic.items():
            sums[kind] = sums.get(kind, Size()) + size
    return dict(sorted(sums.items()))


def sample_cohort(experiment: Experiment, round_number: int) -> list[int]:
    """The trainers of a round, ascending: a function of (seed, round), the same for every method that samples.

    ``max(1, round(participation · K))`` clients without replacement; simulated drop-out then removes each with its
    probability, from a stream of its own, so that switching it on changes nobody else's sample.
    """
    trainers, federation = sorted(experiment.trainers), experiment.config.federation
    if experiment.method.trains == "all":
        return trainers
    size = max(1, round(federation.participation * len(trainers)))
    chosen = numpy_stream(experiment.config.seed, "cohort", round_number).choice(trainers, size, replace=False)
    cohort = sorted(int(client) for client in chosen)
    if federation.dropout == 0:
        return cohort
    stays = numpy_stream(experiment.config.seed, "client dropout", round_number).random(len(trainers))
    return [client for client in cohort if stays[client] >= federation.dropout]


def client_groups(cohort: Sequence[int], workers: int, clients_per_task: int | None) -> list[list[int]]:
    """Cut a cohort into tasks: of ``clients_per_task``, or one per worker, of nearly equal size."""
    if not cohort:
        return []
    count = min(max(workers, 1), len(cohort)) if clients_per_task is None else -(-len(cohort) // clients_per_task)
    return [part.tolist() for part in np.array_split(np.asarray(cohort), count)]


def single_thread() -> None:
    """Set one intra-op thread in this process: faster for small models, and results do not depend on cores."""
    torch.set_num_threads(1)
