"""The checks: each returns the problem of a method, in one line, or None."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.process import local_pool
from flcore.engine.rounds import Observers, run_rounds
from flcore.io.records import load_record, save_record, serialise
from flcore.methods import METHODS
from flcore.testing.trial import EQUAL, ROUNDS, Trial, difference
from flcore.testing.watching import Recording

TOLERANCE = 1e-3
"""Largest difference of messages from a stack, relative to the largest value of a payload."""


class NotApplicableError(Exception):
    """A check does not apply to this method; the message gives the reason."""


class _Stop(BaseException):
    """Stops a run as a kill does: no handler catches it."""


def _runs(trial: Trial) -> str | None:
    """Trains with one sample, one class, a class without samples and late clients; all numbers are finite."""
    for owner, record in trial.first.records.items():
        for name, payload in record.items():
            if not all(bool(torch.isfinite(value).all()) for value in payload.arrays().values()):
                return f"{owner} {name} has a value that is not finite"
    for entry in trial.first.history:
        if any(isinstance(value, float) and not math.isfinite(value) for value in _pytree.tree_leaves(entry)):
            return f"the history of round {entry['round']} has a value that is not finite"
    return None


def _repeats(trial: Trial) -> str | None:
    """Gives the same bytes when repeated."""
    torch.rand(3), np.random.rand(3), random.random()
    return trial.first.difference(trial.recorded[0])


def _pure(trial: Trial) -> str | None:
    """Changes no input, draws from no global generator."""
    impure = trial.recorded[1].impure
    return impure[0] if impure else None


def _resumes(trial: Trial) -> str | None:
    """Gives the same bytes when killed after any round and resumed."""

    def stop(number: int, record: Any) -> None:
        raise _Stop

    folder = trial.home / "resumed"
    for _ in range(ROUNDS - 1):
        try:
            trial.run(trial.experiment(trial.method()), folder, on_round=stop)
        except _Stop:
            continue
    return trial.first.difference(trial.run(trial.experiment(trial.method()), folder))


def _state(trial: Trial) -> str | None:
    """Holds state that a file gives back to the bit."""
    path = trial.home / "record.safetensors"
    for owner, record in trial.first.records.items():
        save_record(path, record)
        if (where := difference(record, load_record(path)[0])) is not None:
            return f"{owner} {where} is not what was saved"
    return None


def _traffic(trial: Trial) -> str | None:
    """Counts every byte that travels, in both directions."""
    run, recording = trial.recorded
    for way, messages in (("down", recording.down), ("up", recording.up)):
        sent = sum(len(serialise(message)) for message in messages.values())
        counted = sum(run.history[-1][f"bytes_{way}"].values())
        if sent != counted and trial.method().data_scope == "client":
            return f"{sent} bytes went {way}, {counted} were counted"
    return None


def _stacks(trial: Trial) -> str | None:
    """Trains clients in a stack as one after the other, up to rounding."""
    if not trial.method().trains_locally:
        raise NotApplicableError("it does not train locally")
    sent = []
    for stack in (False, True):
        recording = Recording(purity=False)
        method = recording.watch(trial.method())
        rounds, engine = {"rounds": 2}, {"stack": stack}
        trial.run(trial.experiment(method, EQUAL, engine=engine, local={"steps": 1}, federation=rounds))
        sent.append({key[1:]: message for key, message in recording.up.items() if key[0] == 1})
    one, stacked = sent
    if one.keys() != stacked.keys():
        return "other clients take part"
    for (exchange, client), message in one.items():
        other = stacked[exchange, client]
        if list(message) != list(other):
            return f"client {client} sends {', '.join(other)} instead of {', '.join(message)}"
        for name, payload in message.items():
            ours, theirs = payload.arrays(), other[name].arrays()
            if any(value.shape != theirs[key].shape for key, value in ours.items()):
                return f"client {client}'s {name} has another shape"
            largest = max((float(value.double().abs().max()) for value in ours.values() if value.numel()), default=0.0)
            for key, value in ours.items():
                apart = float((value.double() - theirs[key].double()).abs().max()) if value.numel() else 0.0
                if apart > TOLERANCE * largest:
                    return f"client {client}'s {name} differs by {apart:.1e}, of at most {largest:.1e} ({key})"
    return None


def _switched_off(trial: Trial) -> str | None:
    """Is FedAvg to the bit with the parameters of reduces_to_fedavg."""
    off = vars(trial.cls).get("reduces_to_fedavg")
    if off is None:
        raise NotApplicableError("reduces_to_fedavg is not set")
    method = trial.method(**off)
    own = trial.experiment(method, EQUAL)
    fedavg = dataclasses.replace(own, config=dataclasses.replace(own.config, method=METHODS["fedavg"]()))
    return trial.run(own).difference(trial.run(fedavg))


def _workers(trial: Trial) -> str | None:
    """Gives the same bytes in a worker process."""
    if METHODS.get(trial.cls.name) is not trial.cls:
        raise NotApplicableError("it is not registered")
    experiment = trial.experiment(trial.method(), engine={"workers": 1})
    experiment.dataset.save(trial.home / "prepared")
    experiment.partition.save(trial.home / "partition")
    checkpoint = Checkpoint(trial.home / "workers")
    pool = local_pool(experiment, trial.home / "prepared", trial.home / "partition", checkpoint)
    try:
        state = run_rounds(experiment, checkpoint, pool, InlineOrchestrator(), Observers())
    finally:
        pool.close()
    return trial.first.difference(trial.finished(checkpoint, state))


CHECKS: Mapping[str, Callable[[Trial], str | None]] = {
    check.__name__.strip("_").replace("_", "-"): check
    for check in (_runs, _repeats, _pure, _resumes, _state, _traffic, _stacks, _switched_off, _workers)
}
"""Checks by name, in order. The docstring of each is the guarantee of a method that passes."""
