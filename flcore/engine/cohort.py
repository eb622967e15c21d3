"""Participants of a round and their stacks and groups, as functions of (seed, round)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from flcore.core.errors import RunError
from flcore.core.rng import numpy_stream
from flcore.engine.local.plan import planned_steps
from flcore.experiment.experiment import Experiment
from flcore.methods.types import Exchange

DEFAULT_STACK = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True)
class Cohort:
    """Participants of a round's exchanges that are for the cohort; ids ascending.

    Attributes:
        trainers: clients that answer.
        stragglers: clients that were sent messages but answer too late.
        seconds: simulated, from the first broadcast to the last reply that counts.
    """

    trainers: tuple[int, ...]
    stragglers: tuple[int, ...] = ()
    seconds: float = 0.0


def select_cohort(experiment: Experiment, round_number: int) -> Cohort:
    """Return the cohort of a round; empty if none of its exchanges is for a cohort.

    ``max(1, round(participation · K))`` clients as ``federation.sampler`` chooses, or ``oversampling`` times as many,
    and the fastest of these are taken, if they finish before the ``deadline``. A client's time covers its work in all
    exchanges of the round. Simulated drop-out removes each with its probability before that. Each influence has its
    own random stream, so that switching one on changes no other draw.
    """
    trainers, federation, seed = sorted(experiment.trainers), experiment.config.federation, experiment.config.seed
    exchanges = [
        exchange
        for exchange in experiment.method.round_exchanges(round_number, experiment.setting)
        if exchange.participants == "cohort"
    ]
    if not exchanges:
        return Cohort(())
    wanted = experiment.cohort_size
    invited = min(len(trainers), max(wanted, math.ceil(wanted * federation.oversampling - 1e-9)))
    cohort = _sampled(experiment, invited, round_number)
    if federation.dropout > 0:
        stays = numpy_stream(seed, "client dropout", round_number).random(len(trainers))
        cohort = [client for client in cohort if stays[client] >= federation.dropout]
    speeds = federation.speed_spread > 0 or federation.speed_jitter > 0
    if not (speeds or federation.deadline is not None or federation.oversampling > 1):
        return Cohort(tuple(cohort))
    return _fastest(cohort, _seconds(experiment, round_number, exchanges, cohort), wanted, federation.deadline)


def _sampled(experiment: Experiment, count: int, round_number: int) -> list[int]:
    """Ids of the clients that the sampler chooses, ascending; the centralised trainer is not sampled.

    Raises:
        RunError: the sampler chooses more than were asked for, one twice, or one that there is not.
    """
    if experiment.method.data_scope == "union":
        return sorted(experiment.trainers)
    sampler, sizes = experiment.config.sampler, experiment.client_sizes
    chosen = sorted(map(int, sampler.sample(count, sizes, round_number, experiment.config.seed)))
    if len(chosen) > count or len(set(chosen)) < len(chosen) or not set(chosen) <= sizes.keys():
        raise RunError(
            f"round {round_number}: federation.sampler = {sampler.name} chose {chosen}; expected at most {count} "
            f"different clients from 0 to {len(sizes) - 1}"
        )
    return chosen


def participants_of(
    experiment: Experiment, exchange: Exchange, cohort: Cohort, failed: Collection[int]
) -> tuple[int, ...]:
    """Return the participants of an exchange: all clients, or the cohort without earlier failures of the round."""
    if exchange.participants == "all":
        return tuple(sorted(experiment.trainers))
    return tuple(client for client in cohort.trainers if client not in failed)


def _fastest(cohort: Sequence[int], seconds: Sequence[float], wanted: int, deadline: float | None) -> Cohort:
    """The first ``wanted`` to finish, none of them after the deadline; ties go to the smaller id."""
    finish = sorted(zip(seconds, cohort, strict=True))
    taken = [(time, client) for time, client in finish[:wanted] if deadline is None or time <= deadline]
    trainers = sorted(client for _, client in taken)
    waited = deadline if deadline is not None and len(taken) < wanted else max((time for time, _ in taken), default=0.0)
    return Cohort(tuple(trainers), tuple(client for client in cohort if client not in trainers), waited)


def _seconds(
    experiment: Experiment, round_number: int, exchanges: Sequence[Exchange], cohort: Sequence[int]
) -> list[float]:
    """Simulated seconds of each client's round: steps × ``step_seconds`` × its speed × the round's jitter."""
    federation, seed = experiment.config.federation, experiment.config.seed
    count = len(experiment.trainers)
    speeds = numpy_stream(seed, "client speed").normal(0.0, 1.0, count) * federation.speed_spread
    jitters = numpy_stream(seed, "client jitter", round_number).normal(0.0, 1.0, count) * federation.speed_jitter
    return [
        sum(leg_steps(experiment, round_number, exchange, client) for exchange in exchanges)
        * federation.step_seconds
        * float(np.exp(speeds[client] + jitters[client]))
        for client in cohort
    ]


def leg_steps(experiment: Experiment, round_number: int, exchange: Exchange, client: int) -> int:
    """Mini-batches of a client's turn over its own images, as planned."""
    size = len(experiment.training_indices(client, round_number))
    local = experiment.config.local
    return sum(planned_steps(size, local, phase) for phase in exchange.phases if phase.source is None)


def stacks(experiment: Experiment, round_number: int, exchange: Exchange, trainers: Sequence[int]) -> list[list[int]]:
    """Return the stacks: single clients, or stacks of nearly equal size with similar step counts.

    A function of the cohort alone: workers get whole stacks, so that no result depends on them.
    """
    if not experiment.stacked:
        return [[client] for client in trainers]
    if not trainers:
        return []
    ordered = sorted(trainers, key=lambda client: (-leg_steps(experiment, round_number, exchange, client), client))
    return [part.tolist() for part in np.array_split(np.asarray(ordered), -(-len(ordered) // stack_limit(experiment)))]


def program_stack(experiment: Experiment, clients: int) -> int:
    """Return the stack size of the program that trains a stack of so many clients.

    Sizes of stacks follow who drops out, and each size would be compiled: all stacks up to those of a whole cohort
    share one program, larger ones (of a leg for all clients) another.
    """
    limit, cohort = stack_limit(experiment), experiment.cohort_size
    whole = -(-cohort // -(-cohort // limit))
    return whole if clients <= whole else limit


def stack_limit(experiment: Experiment) -> int:
    """The most clients that a stack may have: as configured, and as memory allows."""
    engine = experiment.config.engine
    limit = engine.stack_size or DEFAULT_STACK[engine.device]
    return min(limit, max(1, engine.stack_memory_mb * 2**20 // _bytes_per_client(experiment)))


def _bytes_per_client(experiment: Experiment) -> int:
    """Return the bytes of a client in a stack: weights, gradients, two moments and estimated activations.

    Activations are taken as what the first layers yield at most: 64 values per input value and sample.
    """
    initial, meta = experiment.setting.initial, experiment.dataset.meta
    weights = sum(tensor.numel() * 4 for tensor in initial.params.values())
    activations = 64 * 4 * experiment.config.local.batch_size * math.prod(meta.shape)
    return 4 * weights + activations


def groups(whole: Sequence[Sequence[int]], workers: int, clients_per_task: int | None) -> list[list[list[int]]]:
    """Put stacks into groups that are handed out: of about ``clients_per_task`` clients, or one per worker.

    They are of nearly equal size, in the order of the stacks.
    """
    if not whole:
        return []
    clients = sum(len(stack) for stack in whole)
    count = max(workers, 1) if clients_per_task is None else -(-clients // clients_per_task)
    parts = np.array_split(np.arange(len(whole)), min(count, len(whole)))
    return [[list(whole[int(index)]) for index in part] for part in parts]
