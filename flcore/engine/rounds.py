"""The round: per exchange broadcast, train the cohort, call the server steps, commit; then score.

An :class:`~flcore.engine.orchestrator.Orchestrator` calls each part and may show it as a task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flcore.core.errors import DataError, RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.cohort import Cohort, groups, participants_of, select_cohort, stacks
from flcore.engine.exchange import ExchangeWork, Failure, Reply, round_context
from flcore.engine.failures import ClientError, client_step, error_context, part_label
from flcore.engine.orchestrator import Orchestrator
from flcore.engine.pool.executors import Executor
from flcore.engine.run_state import RunName, RunState, exchange_metrics, round_metrics
from flcore.evaluation.scores import Scores
from flcore.evaluation.scoring import EvalRequest, EvalTask, Scorer
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_modules
from flcore.experiment.traffic import added, cost, leaving
from flcore.io.files import finite
from flcore.io.records import Payloads, Record, row_major
from flcore.methods.types import Exchange, Replies, RoundContext, ServerStep

RoundRecord = Mapping[str, Any]

Meter = Callable[[], float | None]
"""A cumulative reading; None if there is none."""

WORTH_SHARING = 4096
"""Forward passes of images from which on sharing a scoring with workers costs less than it saves."""


@dataclass(frozen=True)
class Observers:
    """Callbacks of progress.

    Attributes:
        on_round: called after every round with its number and its record; None if it was not evaluated.
        on_start: called with the number of complete rounds.
        meters: by name, such as ``joules``; read with the clock at the borders of phases, for ``timing.jsonl``.
    """

    on_round: Callable[[int, RoundRecord | None], None] = lambda number, record: None
    on_start: Callable[[int], None] = lambda complete: None
    meters: Mapping[str, Meter] = field(default_factory=dict)


class Laps:
    """Differences of meters between laps, by meter and name of the lap."""

    def __init__(self, meters: Mapping[str, Meter]) -> None:
        self._meters = meters
        self._last = {key: meter() for key, meter in meters.items()}
        self.totals: dict[str, dict[str, float]] = {key: {} for key in meters}

    def lap(self, name: str) -> None:
        """Add the differences since the last lap to ``name``."""
        now = {key: meter() for key, meter in self._meters.items()}
        for key, value in now.items():
            before, totals = self._last[key], self.totals[key]
            if value is not None and before is not None:
                totals[name] = totals.get(name, 0.0) + value - before
        self._last = now


@dataclass
class _Run:
    """Objects that all rounds of a run share; ``state`` is the last committed one, where a retried round resumes."""

    experiment: Experiment
    checkpoint: Checkpoint
    executor: Executor
    orchestrator: Orchestrator
    scorer: Scorer
    meters: Mapping[str, Meter]
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
    """Run all remaining rounds and return the final state.

    A run that was killed resumes inside the interrupted round; the result is the same to the byte.

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
    meters = {"seconds": time.perf_counter, **observers.meters}
    run = _Run(experiment, checkpoint, executor, orchestrator, Scorer(experiment), meters, state)
    for number in range(state.round + 1, experiment.config.federation.rounds + 1):
        pieces = _pieces(experiment, number, run.state.exchange)
        observers.on_round(number, orchestrator.round(number, pieces, partial(_run_round, run)))
    return run.state


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
        names += [exchange.name, *_server_steps(experiment, exchange)]
    return [*names, "evaluate"] if _is_evaluated(experiment, number) else names


def _server_steps(experiment: Experiment, exchange: Exchange) -> Mapping[str, ServerStep]:
    steps = experiment.method.server_steps()
    return steps if exchange.server_steps is None else {name: steps[name] for name in exchange.server_steps}


def _run_round(run: _Run) -> RoundRecord | None:
    """Run the remaining exchanges of the current round; each ends with a commit."""
    state, config = run.state, run.experiment.config
    number = state.round + 1
    cohort = select_cohort(run.experiment, number)
    exchanges = run.experiment.method.round_exchanges(number, run.experiment.setting)
    record: RoundRecord | None = None
    for exchange in exchanges[state.exchange :]:
        last = state.exchange == len(exchanges) - 1
        laps, began = Laps(run.meters), _milliseconds()
        after, replies, steps = _run_exchange(run, state, exchange, cohort, laps)
        if last:
            metrics, seconds = after.metrics, after.simulated_seconds + cohort.seconds
            after = replace(after, round=number, exchange=0, simulated_seconds=seconds, metrics=[])
            if _is_evaluated(run.experiment, number):
                scores = run.orchestrator.call("evaluate", _score, run, after)
                up, down = added(after.eval_up, scores.up), added(after.eval_down, scores.down)
                after = replace(after, eval_up=up, eval_down=down)
                record = finite({"round": number, **scores.to_mapping(), **_round_record(after, cohort, metrics)})
                after = replace(after, evaluated=after.evaluated + 1, failures=())
                laps.lap("evaluate")
            if number in config.evaluation.snapshots:
                run.checkpoint.keep_round(after)  # before the commit: after a kill it is repeated
        timing = {
            **{"round": number, "leg": exchange.name, "steps": steps, **laps.totals},
            "clients": {str(client): reply.seconds for client, reply in replies.items()},
            **{"began_ms": began, "ended_ms": _milliseconds()},
        }
        run.checkpoint.commit(after, record, timing)
        state = run.state = after
    return record


def _milliseconds() -> int:
    return round(time.time() * 1000)


def _is_evaluated(experiment: Experiment, number: int) -> bool:
    config, stream = experiment.config, experiment.stream
    return number % config.evaluation.every == 0 or number == config.federation.rounds or stream.ends_block(number)


def _score(run: _Run, state: RunState) -> Scores:
    """Score the state at the end of a round; share large scorings with the workers, which are idle then."""

    def share(request: EvalRequest, parts: Sequence[EvalTask]) -> Sequence[Record] | None:
        if run.scorer.images_asked(request, parts) < WORTH_SHARING:
            return None
        return run.executor.score(request, parts, state.client_states)

    client_states = partial(run.checkpoint.client_state, client_states=state.client_states)
    with error_context(f"round {state.round}, evaluation"):
        return run.scorer.score(state.server, client_states, round_number=state.round, share=share)


def broadcast(
    experiment: Experiment, state: RunState, clients: Iterable[int]
) -> tuple[ExchangeWork, dict[int, Failure]]:
    """Make all messages of the exchange after a state, before any client trains.

    Returns:
        The work to hand out, and failures by client: an error of the method's where ``on_client_error`` is ``drop``.

    Raises:
        ClientError: it stops the run.
    """
    method, (number, index) = experiment.method, state.place
    exchange = method.round_exchanges(number, experiment.setting)[index]
    ctx = round_context(method, experiment.setting, number, exchange)
    work = ExchangeWork(number, index, exchange.name, state.exchanges + 1, state.run.digest, {}, state.client_states)
    messages: dict[int, Payloads] = {}
    failures: dict[int, Failure] = {}
    for client in clients:
        try:
            with client_step(work, [client], "receive"):
                messages[client] = method.broadcast(state.server, client, ctx)
        except ClientError as error:
            if experiment.config.federation.on_client_error != "drop" or error.is_the_machines:
                raise
            failures[client] = error.failure
    received = dict(zip(messages, leaving(messages.values(), experiment), strict=True))
    return replace(work, received=received), failures


def _run_exchange(
    run: _Run, state: RunState, exchange: Exchange, cohort: Cohort, laps: Laps
) -> tuple[RunState, Mapping[int, Reply], int]:
    """Train the participants of one exchange and call the server steps on their replies.

    Returns:
        The state after it, the replies, and the mini-batches trained on now, without replies from before an
        interruption.
    """
    experiment, (number, index) = run.experiment, state.place
    engine, results_of = experiment.config.engine, run.checkpoint.client_results
    dropped = {client for round_number, client, _ in state.failures if round_number == number}
    participants = participants_of(experiment, exchange, cohort, dropped)
    stragglers = cohort.stragglers if exchange.participants == "cohort" else ()
    work, without_message = broadcast(experiment, state, [*participants, *stragglers])
    whole = stacks(experiment, number, exchange, [client for client in participants if client in work.received])
    missing = {client for stack in results_of.missing(work.number, whole, work.run) for client in stack}
    results: dict[int, Reply | Failure] = {
        client: failure for client, failure in without_message.items() if client in participants
    }
    tasks = groups(whole, engine.worker_count, engine.clients_per_task)
    for of_group in run.orchestrator.map(exchange.name, partial(run.executor.train, work), tasks):
        results |= of_group
    results = dict(sorted(results.items()))
    replies = {client: result for client, result in results.items() if isinstance(result, Reply)}
    failures = {client: result for client, result in results.items() if isinstance(result, Failure)}
    if failures and not replies:
        results_of.discard(work.number)  # so that starting again tries again
        raise _all_failed(number, exchange, failures)
    laps.lap(exchange.name)

    server, by_step = state.server, dict[str, dict[str, float]]()
    ctx = round_context(experiment.method, experiment.setting, number, exchange)
    messages = Replies({client: reply.message for client, reply in replies.items()})
    for name, step in _server_steps(experiment, exchange).items() if replies else ():
        server, by_step[name] = run.orchestrator.call(name, _run_step, step, name, server, messages, ctx)
        laps.lap(name)

    exchanges = experiment.method.round_exchanges(number, experiment.setting)
    training = next((place for place, one in enumerate(exchanges) if one.phases), 0)
    metrics = exchange_metrics(exchange.name, replies, by_step, is_cohort=index in (0, training))
    causes = ((number, client, _cause(exchange, failure)) for client, failure in failures.items())
    after = replace(
        state,
        server=server,
        client_states=run.checkpoint.keep_states(state.client_states, replies, work.number),
        up=added(state.up, cost(messages.values(), experiment)),
        down=added(state.down, cost(work.received.values(), experiment)),
        steps=state.steps + sum(reply.steps for reply in replies.values()),
        exchange=state.exchange + 1,
        exchanges=work.number,
        failures=(*state.failures, *causes),
        metrics=[*state.metrics, metrics],
    )
    return after, replies, sum(reply.steps for client, reply in replies.items() if client in missing)


def _all_failed(number: int, exchange: Exchange, failures: Mapping[int, Failure]) -> RunError:
    client, first = next(iter(failures.items()))
    every = f"all {len(failures)} clients failed; the first of them, " if len(failures) > 1 else ""
    return RunError(f"round {number}: {every}client {client} ({_cause(exchange, first)})", first.details)


def _cause(exchange: Exchange, failure: Failure) -> str:
    return f"{part_label(exchange.name, failure.part)}: {failure.cause}"


def _run_step(
    step: ServerStep, name: str, server: Record, messages: Replies, ctx: RoundContext
) -> tuple[Record, dict[str, float]]:
    with error_context(f"round {ctx.round}, server step {name}"):
        after, metrics = step(server, messages, ctx)
        return row_major(after), {key: float(value) for key, value in metrics.items()}


def _round_record(after: RunState, cohort: Cohort, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a round's metrics, and bytes and scalars since the start by direction and kind."""
    record: dict[str, Any] = {
        **round_metrics(metrics),
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
