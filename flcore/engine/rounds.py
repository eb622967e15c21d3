"""The round, written once: per leg, select a cohort, train it, let the server work, commit; then score.

Who watches is not known here. Each piece of work is handed to a :class:`Steps`, which may simply call it, or show it as
a task of an orchestrator; records of evaluated rounds go to a callback.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

import flcore
from flcore.engine.checkpoint import Checkpoint, RunState, Traffic
from flcore.engine.client import Failure, Reply, Worker, download
from flcore.engine.cohort import Cohort, select_cohort, stacks, tasks
from flcore.engine.energy import Clock, Meter, Stopwatch, no_meter
from flcore.engine.pool.executors import Executor
from flcore.engine.pool.workers import worker_count
from flcore.errors import RunError
from flcore.evaluation.scoring import Scorer
from flcore.experiment import Experiment
from flcore.messages import Size
from flcore.methods.vocabulary import Exchange, Leg, Replies, Stage
from flcore.records import Record

Item = TypeVar("Item")
Result = TypeVar("Result")
RoundRecord = Mapping[str, Any]


class Steps(Protocol):
    """How the pieces of a round are carried out; results must not depend on it."""

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Carry out one named piece of work."""

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Carry out one named piece of work per item, perhaps at the same time; results in the order of the items."""


class PlainSteps:
    """Plain calls; of mapped work as many at the same time as there are workers to wait for."""

    def __init__(self, workers: int = 1) -> None:
        """Say how many workers train."""
        self._workers = workers

    def call(self, name: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call it."""
        return function(*arguments)

    def map(self, name: str, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call it for each item; results in the order of the items."""
        if self._workers <= 1:
            return [function(item) for item in items]
        with ThreadPoolExecutor(self._workers) as threads:
            return list(threads.map(function, items))


@dataclass(frozen=True)
class Observers:
    """Who is told of progress: ``on_round`` after every round (round, its record or None); what measures it."""

    on_round: Callable[[int, RoundRecord | None], None] = lambda number, record: None
    clock: Clock = time.perf_counter
    meter: Meter = no_meter


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
        state = RunState(0, Record(experiment.method.start_server(experiment.setting)), run=run)
        checkpoint.start(state)
    scorer = Scorer(Worker(experiment))
    for number in range(state.round + 1, experiment.config.federation.rounds + 1):
        state, record = _run_round(experiment, checkpoint, executor, steps, scorer, state, observers)
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
    observers: Observers,
) -> tuple[RunState, RoundRecord | None]:
    """The rest of the round under way, leg by leg; each ends with a commit."""
    number = state.round + 1
    legs = experiment.method.legs(number, experiment.setting)
    record: RoundRecord | None = None
    for leg in legs[state.leg :]:
        last = state.leg == len(legs) - 1
        watch = Stopwatch(observers.clock, observers.meter)
        after, done = _run_leg(experiment, executor, steps, state, leg, watch, last=last)
        if last and _is_evaluated(experiment, number):
            memory = partial(checkpoint.memory, memories=after.memories)
            scores = steps.call("evaluate", partial(scorer.score, round_number=number), after.server, memory)
            record = {"round": number, **scores.to_mapping(), **_round_facts(done, after)}
            watch.lap("evaluate")
        checkpoint.commit(after, record, {"round": number, **watch.record()})
        state = after
    return state, record


def _is_evaluated(experiment: Experiment, number: int) -> bool:
    config, stream = experiment.config, experiment.stream
    return number % config.evaluation.every == 0 or number == config.federation.rounds or stream.ends_block(number)


@dataclass(frozen=True)
class _LegDone:
    cohort: Cohort
    replies: Mapping[int, Reply]
    failures: Mapping[int, Failure]
    facts: Mapping[str, float]


def _run_leg(
    experiment: Experiment, executor: Executor, steps: Steps, state: RunState, leg: Leg, watch: Stopwatch, *, last: bool
) -> tuple[RunState, _LegDone]:
    number, config, method = state.round + 1, experiment.config, experiment.method
    cohort = select_cohort(experiment, number, leg)
    groups = tasks(
        stacks(experiment, number, leg, cohort.trainers), worker_count(config.engine), config.engine.clients_per_task
    )
    results: dict[int, Reply | Failure] = {}
    for result in steps.map(leg.name, partial(executor.train, state), groups):
        results |= result
    results = dict(sorted(results.items()))
    replies = {client: result for client, result in results.items() if isinstance(result, Reply)}
    failures = {client: result for client, result in results.items() if isinstance(result, Failure)}
    watch.lap(leg.name)

    server = state.server
    messages = Replies({client: reply.message for client, reply in replies.items()})
    exchange = Exchange(experiment.setting, number, leg.name)
    facts = dict(state.facts)
    stages = method.stages()
    for name in leg.stages if leg.stages is not None else stages:
        if messages:
            server, found = steps.call(name, partial(_run_stage, stages[name], name), server, messages, exchange)
            facts |= found
            watch.lap(name)

    stragglers = [download(state.server, client, experiment, state.place) for client in cohort.stragglers]
    received = [result.down for result in results.values()] + stragglers
    this_leg = state.legs + 1
    after = RunState(
        round=number if last else state.round,
        server=server,
        memories={**state.memories, **{client: this_leg for client, reply in replies.items() if reply.remembers}},
        up=_add(state.up, (reply.up for reply in replies.values())),
        down=_add(state.down, received),
        steps=state.steps + sum(reply.steps for reply in replies.values()),
        leg=0 if last else state.leg + 1,
        legs=this_leg,
        failures=(*state.failures, *((number, client, failure.cause) for client, failure in failures.items())),
        simulated_seconds=state.simulated_seconds + cohort.seconds,
        run=state.run,
        facts={} if last else facts,
    )
    return after, _LegDone(cohort, replies, failures, facts)


def _run_stage(
    stage: Stage, name: str, server: Record, messages: Replies, exchange: Exchange
) -> tuple[Record, dict[str, float]]:
    try:
        after, facts = stage(server, messages, exchange)
    except (ValueError, ArithmeticError) as error:
        raise RunError(f"round {exchange.round}, server stage {name}: {error}") from error
    return Record(after), {fact: float(value) for fact, value in facts.items()}


def _round_facts(done: _LegDone, after: RunState) -> dict[str, Any]:
    """Of the round: who took part and their mean losses; since the start: bytes and scalars by direction and kind."""
    replies = done.replies.values()
    names = sorted({name for reply in replies for name in reply.losses})
    losses = {name: [reply.losses[name] for reply in replies if name in reply.losses] for name in names}
    record: dict[str, Any] = {
        "participants": list(done.replies),
        "train_loss": {name: float(np.mean(values)) for name, values in losses.items()},
        # One client that blows up inside a round is invisible in means.
        "train_loss_max": {name: max(values) for name, values in losses.items()},
        "bytes_up": {kind: size.bytes for kind, size in after.up.items()},
        "bytes_down": {kind: size.bytes for kind, size in after.down.items()},
        "scalars_up": sum(size.scalars for size in after.up.values()),
        "steps": after.steps,
    }
    if done.cohort.stragglers or after.simulated_seconds:
        record |= {"stragglers": list(done.cohort.stragglers), "simulated_seconds": after.simulated_seconds}
    if after.failures:
        record["failures"] = [list(failure) for failure in after.failures]
    if done.facts:
        record["server"] = dict(done.facts)
    return record


def _add(total: Traffic, more: Iterable[Traffic]) -> dict[str, Size]:
    sums = dict(total)
    for traffic in more:
        for kind, size in traffic.items():
            sums[kind] = sums.get(kind, Size()) + size
    return dict(sorted(sums.items()))


def single_thread() -> None:
    """Set one intra-op thread in this process: faster for small models, and results do not depend on cores."""
    torch.set_num_threads(1)
