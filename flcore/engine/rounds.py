"""The round, written once: per exchange, train the cohort, let the server work, commit; then score.

Each part is called by an :class:`~flcore.engine.orchestrator.Orchestrator`, which may show it as a task; records of
evaluated rounds go to a callback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flcore.core.errors import DataError, RunError
from flcore.engine.broadcast import broadcast
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.cohort import Cohort, groups, participants_of, select_cohort, stacks
from flcore.engine.energy import Clock, Meter, Stopwatch, no_meter
from flcore.engine.failures import error_context, part_label
from flcore.engine.orchestrator import Orchestrator
from flcore.engine.pool.executors import Executor
from flcore.engine.pool.groups import ReplyStore
from flcore.engine.pool.workers import worker_count
from flcore.engine.round_scores import RoundScorer
from flcore.engine.run_state import RunName, RunState, leg_facts, round_facts
from flcore.engine.turns import Failure, Reply, round_context
from flcore.evaluation.scores import Scores
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_modules
from flcore.experiment.traffic import added, cost
from flcore.io.files import finite
from flcore.io.records import Record, row_major
from flcore.methods.types import Exchange, Replies, RoundContext, ServerStep

RoundRecord = Mapping[str, Any]


@dataclass(frozen=True)
class Observers:
    """Callbacks of progress, and clocks and meters.

    Attributes:
        on_round: called after every round with its number and its record, or None where it was not evaluated.
        clock: of the timing. meter: of the energy.
        on_start: called with the number of rounds that are complete already.
        wall_clock: of the time of day, in seconds since 1970; it says when an exchange began and ended.
    """

    on_round: Callable[[int, RoundRecord | None], None] = lambda number, record: None
    clock: Clock = time.perf_counter
    meter: Meter = no_meter
    on_start: Callable[[int], None] = lambda complete: None
    wall_clock: Clock = time.time


@dataclass(frozen=True)
class _Run:
    """Objects that all rounds of a run share."""

    experiment: Experiment
    checkpoint: Checkpoint
    executor: Executor
    orchestrator: Orchestrator
    observers: Observers
    scorer: RoundScorer


@dataclass
class _Latest:
    """Last committed state; a retried round resumes here."""

    state: RunState


def run_rounds(
    experiment: Experiment,
    checkpoint: Checkpoint,
    executor: Executor,
    orchestrator: Orchestrator,
    observers: Observers,
    *,
    restart: bool = False,
) -> RunState:
    """Run all rounds that are still to do and return the final state.

    Starting again after a kill continues inside the interrupted round; the result is the same to the byte.

    Args:
        experiment: the run. checkpoint: its folder. executor: of training. orchestrator: of the parts.
        observers: of progress.
        restart: discard an unusable checkpoint; a usable one gives the same result sooner.

    Raises:
        RunError: training failed; names round, client and cause. Or the checkpoint is of another run or other code.
        DataError: the checkpoint is damaged.
    """
    name = run_name(experiment)
    try:
        state = checkpoint.load(name)
    except (DataError, RunError):
        if not restart:
            raise
        state = None
    if state is None:
        state = RunState(0, row_major(experiment.method.start_server(experiment.setting)), run=name)
        checkpoint.start(state, replace=restart)
    if state.exchanges == 0 and 0 in experiment.config.evaluation.snapshots:
        checkpoint.keep_round(state)
    observers.on_start(state.round)
    scorer = RoundScorer(experiment, checkpoint, executor)
    run = _Run(experiment, checkpoint, executor, orchestrator, observers, scorer)
    latest = _Latest(state)
    for number in range(state.round + 1, experiment.config.federation.rounds + 1):
        pieces = _pieces(experiment, number, latest.state.exchange)
        record = orchestrator.round(number, pieces, partial(_run_round, run, latest))
        observers.on_round(number, record)
    return latest.state


def run_name(experiment: Experiment) -> RunName:
    """Return the name of the run and its code."""
    return RunName(experiment.hash, code_modules(experiment.config))


def _pieces(experiment: Experiment, number: int, done: int) -> list[str]:
    """Return the names of a round's remaining parts; ``done`` of its exchanges are complete."""
    names: list[str] = []
    exchanges = experiment.method.round_exchanges(number, experiment.setting)
    twice = [name for name, count in Counter(exchange.name for exchange in exchanges).items() if count > 1]
    if twice:
        raise RunError(f"round {number}: {experiment.method.name} has two legs called {twice[0]}; names must differ")
    for exchange in exchanges[done:]:
        names += [
            exchange.name,
            *(experiment.method.server_steps() if exchange.server_steps is None else exchange.server_steps),
        ]
    return [*names, "evaluate"] if _is_evaluated(experiment, number) else names


def _run_round(run: _Run, latest: _Latest) -> RoundRecord | None:
    """Run the remaining exchanges of the current round; each ends with a commit."""
    state = latest.state
    number = state.round + 1
    cohort = select_cohort(run.experiment, number)
    exchanges = run.experiment.method.round_exchanges(number, run.experiment.setting)
    record: RoundRecord | None = None
    for exchange in exchanges[state.exchange :]:
        last = state.exchange == len(exchanges) - 1
        watch, began = Stopwatch(run.observers.clock, run.observers.meter), run.observers.wall_clock()
        after, replies, steps = _run_leg(run, state, exchange, cohort, watch)
        told = after.told
        if last:
            seconds = after.simulated_seconds + cohort.seconds
            after = replace(after, round=number, exchange=0, simulated_seconds=seconds, told=[])
        if last and _is_evaluated(run.experiment, number):
            scores = run.orchestrator.call("evaluate", _scores, run, after)
            up, down = added(after.eval_up, scores.up), added(after.eval_down, scores.down)
            after = replace(after, eval_up=up, eval_down=down)
            record = finite({"round": number, **scores.to_mapping(), **_round_facts(after, cohort, told)})
            after = replace(after, evaluated=after.evaluated + 1, failures=())
            watch.lap("evaluate")
        if last and number in run.experiment.config.evaluation.snapshots:
            run.checkpoint.keep_round(after)  # before the commit: after a kill it is repeated
        clients = {str(client): reply.seconds for client, reply in replies.items()}
        timing = {"round": number, "leg": exchange.name, "steps": steps, **watch.record()}
        times = {"began_ms": _milliseconds(began), "ended_ms": _milliseconds(run.observers.wall_clock())}
        run.checkpoint.commit(after, record, {**timing, "clients": clients, **times})
        state = latest.state = after
    return record


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _is_evaluated(experiment: Experiment, number: int) -> bool:
    config, stream = experiment.config, experiment.stream
    return number % config.evaluation.every == 0 or number == config.federation.rounds or stream.ends_block(number)


def _scores(run: _Run, state: RunState) -> Scores:
    with error_context(f"round {state.round}, evaluation"):
        return run.scorer.score(state)


def _run_leg(
    run: _Run, state: RunState, exchange: Exchange, cohort: Cohort, watch: Stopwatch
) -> tuple[RunState, Mapping[int, Reply], int]:
    """Run one exchange: train its participants, then call the server's steps on their replies.

    Returns:
        The state after it, the replies, and the mini-batches that were trained on now, without replies from before an
        interruption.
    """
    experiment, place = run.experiment, state.place
    failed = {client for number, client, _ in state.failures if number == place.round}
    asked = participants_of(experiment, exchange, cohort, failed)
    stragglers = cohort.stragglers if exchange.participants == "cohort" else ()
    work, without_message = broadcast(experiment, state, [*asked, *stragglers])
    whole = stacks(experiment, place.round, exchange, [client for client in asked if client in work.received])
    missing = {client for stack in ReplyStore(experiment, run.checkpoint).missing(work, whole) for client in stack}
    results: dict[int, Reply | Failure] = {client: why for client, why in without_message.items() if client in asked}
    engine = experiment.config.engine
    handed_out = groups(whole, worker_count(engine), engine.clients_per_task)
    for of_group in run.orchestrator.map(exchange.name, partial(run.executor.train, work), handed_out):
        results |= of_group
    results = dict(sorted(results.items()))
    replies = {client: result for client, result in results.items() if isinstance(result, Reply)}
    failures = {client: result for client, result in results.items() if isinstance(result, Failure)}
    if failures and not replies:
        run.checkpoint.client_results.forget(work.number)  # so that starting again tries again
        raise _all_failed(place.round, exchange, failures)
    watch.lap(exchange.name)

    server, facts = state.server, dict[str, dict[str, float]]()
    ctx = round_context(experiment.method, experiment.setting, place.round, exchange)
    messages = Replies({client: reply.message for client, reply in replies.items()})
    stages = experiment.method.server_steps()
    for name in (stages if exchange.server_steps is None else exchange.server_steps) if replies else ():
        server, facts[name] = run.orchestrator.call(name, _run_stage, stages[name], name, server, messages, ctx)
        watch.lap(name)

    exchanges = experiment.method.round_exchanges(place.round, experiment.setting)
    training = next((index for index, one in enumerate(exchanges) if one.phases), 0)
    told = [*state.told, leg_facts(exchange.name, replies, facts, is_cohort=place.exchange in (0, training))]
    after = replace(
        state,
        server=server,
        client_states=_remembered(state.client_states, replies, work.number),
        up=added(state.up, cost(messages.values(), experiment)),
        down=added(state.down, cost(work.received.values(), experiment)),
        steps=state.steps + sum(reply.steps for reply in replies.values()),
        exchange=state.exchange + 1,
        exchanges=work.number,
        failures=(
            *state.failures,
            *((place.round, client, _why(exchange, found)) for client, found in failures.items()),
        ),
        told=told,
    )
    return after, replies, sum(reply.steps for client, reply in replies.items() if client in missing)


def _remembered(client_states: Mapping[int, int], replies: Mapping[int, Reply], exchange: int) -> dict[int, int]:
    """Return the exchange that left each client's state; a reply replaces or drops it."""
    kept = {client: own for client, own in client_states.items() if client not in replies}
    return kept | {client: exchange for client, reply in replies.items() if reply.has_state}


def _all_failed(number: int, exchange: Exchange, failures: Mapping[int, Failure]) -> RunError:
    client, first = next(iter(failures.items()))
    every = f"all {len(failures)} clients failed; the first of them, " if len(failures) > 1 else ""
    return RunError(f"round {number}: {every}client {client} ({_why(exchange, first)})", first.details)


def _why(exchange: Exchange, failure: Failure) -> str:
    return f"{part_label(exchange.name, failure.part)}: {failure.cause}"


def _run_stage(
    stage: ServerStep, name: str, server: Record, messages: Replies, ctx: RoundContext
) -> tuple[Record, dict[str, float]]:
    with error_context(f"round {ctx.round}, server step {name}"):
        after, facts = stage(server, messages, ctx)
        return row_major(after), {fact: float(value) for fact, value in facts.items()}


def _round_facts(after: RunState, cohort: Cohort, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a round's facts, and bytes and scalars since the start by direction and kind."""
    record: dict[str, Any] = {
        **round_facts(told),
        "bytes_up": {kind: size.bytes for kind, size in after.up.items()},
        "bytes_down": {kind: size.bytes for kind, size in after.down.items()},
        "bytes_eval_up": {kind: size.bytes for kind, size in after.eval_up.items()},
        "bytes_eval_down": {kind: size.bytes for kind, size in after.eval_down.items()},
        "scalars_up": sum(size.scalars for size in after.up.values()),
        "steps": after.steps,
    }
    if cohort.stragglers or after.simulated_seconds:
        record |= {"stragglers": list(cohort.stragglers), "simulated_seconds": after.simulated_seconds}
    if after.failures:
        record["failures"] = [list(failure) for failure in after.failures]
    return record
