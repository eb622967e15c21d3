"""``engine.stack: auto``: whether stacked clients are trained faster here, measured on the run's own first steps.

On a CPU stacking helps small models and hurts large convolutions; on a GPU it should win by far for small models. So it
is measured, per method, model, batch and device, and remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flcore.engine.client import TurnRunner
from flcore.engine.client_data import ClientData
from flcore.engine.cohort import select_cohort, stacks, taking_part
from flcore.engine.local.serial import SerialTrainer, Trainer
from flcore.engine.local.stacked import StackedTrainer
from flcore.errors import ConfigError
from flcore.experiment import Experiment
from flcore.files import write_json
from flcore.provenance import code_fingerprint
from flcore.records import Record

_WORTH = 1.1  # stack only where it clearly pays
_PROBE_SECONDS = 0.3


@dataclass(frozen=True)
class StackDecision:
    """Whether to stack, and why.

    Attributes:
        stack: the decision.
        serial: client steps per second one at a time; ``stacked``: in a stack; None where it was not measured.
        reason: for people.
    """

    stack: bool
    serial: float | None
    stacked: float | None
    reason: str


def decide(experiment: Experiment, cache: Path, clock: Callable[[], float] = time.perf_counter) -> StackDecision:
    """The decision for a run with ``engine.stack: auto``, measured now or found in ``cache`` (a JSON file)."""
    key = _key(experiment)
    known = json.loads(cache.read_text()) if cache.exists() else {}
    if key in known:
        return StackDecision(**known[key])
    decision = measure(experiment, clock)
    write_json(cache, known | {key: vars(decision)})
    return decision


def default_cache() -> Path:
    """Where decisions of this machine are kept: ``protofl/stack.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "protofl" / "stack.json"


def _key(experiment: Experiment) -> str:
    config, meta = experiment.config, experiment.dataset.meta
    cuda = config.engine.device == "cuda"
    facts: dict[str, Any] = {
        "method": config.to_mapping()["method"],
        "model": config.to_mapping()["model"],
        "shape": list(meta.shape),
        "classes": meta.num_classes,
        "batch_size": config.local.batch_size,
        "stack_size": [config.engine.stack_size, config.engine.stack_memory_mb],
        "device": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "code": code_fingerprint(config),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def measure(experiment: Experiment, clock: Callable[[], float] = time.perf_counter) -> StackDecision:
    """Train a few steps both ways and compare client steps per second; nothing of it enters the run."""
    stacked_run, serial_run = replace(experiment, stack=True), replace(experiment, stack=False)
    # A leg before it, such as a report of counts, may have nothing to train.
    leg = next((leg for leg in experiment.method.legs(1, experiment.setting) if leg.phases), None)
    if leg is None:
        return StackDecision(False, None, None, "nothing is trained in the first round")
    group = stacks(stacked_run, 1, leg, taking_part(experiment, leg, select_cohort(experiment, 1), ()))
    if not group or len(group[0]) < 2:
        return StackDecision(False, None, None, "no two clients fit into a stack")
    runner = TurnRunner(serial_run)
    server = Record(experiment.method.start_server(experiment.setting))
    turns = [runner.receive(1, leg, client, server, Record()) for client in group[0]]
    starts = [turn.with_statistics(experiment.method.begin(turn)) for turn in turns]
    data = ClientData.of(experiment, group[0], 1)

    def seconds(trainer: Trainer, count: int, steps: int) -> float:
        phases = [replace(leg.phases[0], steps=steps, epochs=None)]
        begin = clock()
        trainer.train(turns[:count], data[:count], starts[:count], phases, 0, {})
        return clock() - begin

    serial, stacked = SerialTrainer(serial_run), StackedTrainer(stacked_run)
    seconds(serial, 1, 2)
    steps = max(1, min(50, int(_PROBE_SECONDS / max(seconds(serial, 1, 2) / 2, 1e-6) / len(turns))))
    try:
        seconds(stacked, len(turns), 1)
    except ConfigError as error:
        return StackDecision(False, None, None, str(error))
    pairs = [(seconds(serial, len(turns), steps), seconds(stacked, len(turns), steps)) for _ in range(3)]
    rates = [len(turns) * steps / min(times) for times in zip(*pairs, strict=True)]
    faster = rates[1] / rates[0]
    reason = f"stacks of {len(turns)} take {faster:.2f} times the serial steps per second"
    return StackDecision(faster > _WORTH, rates[0], rates[1], reason)
