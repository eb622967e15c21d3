"""``engine.stack: auto`` and ``engine.compile: auto``: how clients are trained fastest here, measured on first steps.

On a CPU stacking helps small models and hurts large convolutions, and compiled steps help nearly always, once they are
compiled, which takes a minute; on a GPU stacks should win by far. So it is measured, per method, model, batch and
device, and remembered. What is compiled already costs nothing, and what comes to the graph of another step some
seconds of tracing; anything else is compiled once the runs that wanted it, this one included, are together long enough
to give that time back (the ski-rental rule: at most twice the optimal cost).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.core.host import user_cache
from flcore.core.text import shorten
from flcore.engine.cohort import leg_steps, participants_of, select_cohort, stacks
from flcore.engine.local.compiled import CompiledTrainer
from flcore.engine.local.compiler import Compiler, compiler_missing
from flcore.engine.local.probe import StepTimer
from flcore.engine.local.program import CacheMissError, default_folder
from flcore.engine.local.serial import SerialTrainer, Trainer
from flcore.engine.local.stacked import StackedTrainer
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.io import disk
from flcore.io.files import read_json, write_json
from flcore.io.locks import take_lock

_WORTH = 1.1  # leave the reference only where that clearly pays
_PROBE_SECONDS = 0.3
_COMPILE_SECONDS = 60.0  # for one program, until this machine has compiled some
_FUSE_SECONDS = 30.0  # that fusing a step's kernels takes on a GPU
_TRACE_SECONDS = 2.0  # that tracing a step takes, which tells whether its graph was compiled for another one
_LEAST_GAIN = 0.4  # share of the training's time that compiled steps save, at least, where they are taken


@dataclass(frozen=True)
class EngineDecision:
    """The chosen way to train, and the reason.

    Attributes:
        stack: in stacks. compile: by programs. fuse: on a GPU, by such as were compiled before they were recorded.
        serial: client steps per second one at a time; ``stacked``: in a stack; ``compiled``: by programs; None where
            it was not measured.
        compile_seconds: what compiling took now; None where nothing was compiled.
        reason: for people.
    """

    stack: bool
    compile: bool
    serial: float | None = None
    stacked: float | None = None
    compiled: float | None = None
    compile_seconds: float | None = None
    reason: str = ""
    fuse: bool = True

    @property
    def choice(self) -> EngineChoice:
        """The choice without its reason."""
        return EngineChoice(self.stack, self.compile, self.fuse)

    @classmethod
    def restored(cls, content: Mapping[str, Any]) -> EngineDecision:
        """A decision from what was written of it.

        Raises:
            DataError: it is none.
        """
        try:
            decision = cls(**content)
        except TypeError as error:
            raise DataError(f"no decision on stack and compile: {shorten(str(error))}") from error
        if not all(type(one) is bool for one in (decision.stack, decision.compile, decision.fuse)):
            raise DataError("no decision on stack and compile: one of them is neither true nor false")
        return decision


def decide(
    experiment: Experiment,
    cache: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
    programs: Path | None = None,
) -> EngineDecision:
    """The decision for a run: what its configuration says, or where that is ``auto`` what is measured or remembered.

    Runs that want the same decided at the same time, such as the seeds of a method, wait for the first one's answer.

    Args:
        experiment: the run.
        cache: folder of earlier decisions; None: this machine's. One that cannot be written to is done without.
        programs: the folder of compiled steps; None: this machine's.
        clock: of the measurements.

    Raises:
        ConfigError: compiled steps are asked for, and there is no compiler on this machine; or this machine's folders
            are wanted, and the user has none.
    """
    engine = experiment.config.engine
    missing = compiler_missing() if engine.compile != "none" and engine.device == "cpu" else None
    if missing and engine.compile == "default":
        raise ConfigError(
            f"engine.compile = default: {missing}; install one, or use engine.compile=auto, which then compiles nothing"
        )
    if engine.stack != "auto" and (engine.compile != "auto" or missing):
        return EngineDecision(engine.stack, engine.compile == "default", reason=missing or "as configured")
    path = (cache or default_cache()) / f"{_key(experiment)}.json"
    try:
        disk.make_folder(path.parent)
        lock = disk.open_lock(path.with_suffix(".lock"))
    except OSError as error:  # such as a read-only home
        decision, _ = measure_speed(experiment, clock, programs)
        return replace(decision, reason=f"{decision.reason}; not remembered ({error.filename}: {error.strerror})")
    with lock as file:
        take_lock(file, wait=True)
        with suppress(DataError):  # not there, or damaged: measured again
            return EngineDecision.restored(read_json(path, ""))
        # Seconds of training that earlier runs of this kind spent without compiled steps.
        spent = path.with_suffix(".spent")
        before = _seconds_in(spent) or 0.0
        decision, waiting = measure_speed(experiment, clock, programs, before)
        if waiting is None:
            write_json(path, vars(decision), durable=True)
            disk.remove(spent, missing_ok=True)
        else:
            write_json(spent, {"seconds": before + waiting}, durable=True)
    return decision


def default_cache() -> Path:
    """Return the folder of this machine's decisions.

    Raises:
        ConfigError: as :func:`flcore.core.host.user_cache`.
    """
    return user_cache() / "engine"


def _key(experiment: Experiment) -> str:
    config, meta = experiment.config, experiment.dataset.meta
    cuda = config.engine.device == "cuda"
    facts: dict[str, Any] = {
        "method": config.to_mapping()["method"],
        "model": config.to_mapping()["model"],
        "shape": list(meta.shape),
        "classes": meta.num_classes,
        "batch_size": config.local.batch_size,
        "augmentation": config.data.augmentation,  # with it frozen models are asked in every step
        "stack_size": [config.engine.stack_size, config.engine.stack_memory_mb],
        "asked": [config.engine.stack, config.engine.compile, compiler_missing()],
        "device": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "code": code_fingerprint(config),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def measure_speed(
    experiment: Experiment,
    clock: Callable[[], float] = time.perf_counter,
    programs: Path | None = None,
    spent: float = 0.0,
) -> tuple[EngineDecision, float | None]:
    """Train a few steps in every way that is open and compare client steps per second.

    Args:
        experiment, clock, programs: as for :func:`decide`.
        spent: seconds that earlier runs of this kind trained for want of compiled steps, on a GPU of fused ones.

    Returns:
        The decision, and None; or where it is not for good, the seconds of training that this run does without.
    """
    engine = experiment.config.engine
    stack, compile_ = engine.stack is True, engine.compile == "default"
    # An exchange before it, such as a report of counts, may have nothing to train.
    exchange = next(
        (exchange for exchange in experiment.method.round_exchanges(1, experiment.setting) if exchange.phases), None
    )
    if exchange is None:
        return EngineDecision(stack, compile_, reason="nothing is trained in the first round"), None
    stacked_run = replace(experiment, choice=EngineChoice(True, False))
    cohort = participants_of(experiment, exchange, select_cohort(experiment, 1), ())
    group = stacks(stacked_run, 1, exchange, cohort)
    if not group:
        return EngineDecision(stack, compile_, reason="no client trains in the first round"), None
    probe = StepTimer(experiment, exchange, group[0], clock)
    serial = SerialTrainer(replace(experiment, choice=EngineChoice(False, False)))
    probe.seconds(serial, 1, 2)
    a_step = max(probe.seconds(serial, 1, 2) / 2, 1e-6)
    steps = max(1, min(50, int(_PROBE_SECONDS / a_step / len(group[0]))))
    trainers: dict[str, Trainer] = {"serial": serial}
    reasons: list[str] = []
    if engine.stack == "auto":
        trainers |= _stacked(stacked_run, probe, reasons)
    compile_seconds: float | None = None
    waiting: float | None = None
    total = sum(leg_steps(experiment, 1, exchange, client) for client in cohort) * experiment.config.federation.rounds
    fuse = True
    if engine.compile == "auto" and engine.device == "cuda":
        found, fuse, waiting = _recorded(experiment, probe, steps, total, spent, reasons)
        trainers |= found
    elif engine.compile == "auto":
        folder = programs or default_folder()
        found, compile_seconds, lasting = _compiled(experiment, probe, folder, total * a_step, spent, reasons)
        trainers |= found
        waiting = None if lasting else total * a_step
    if len(trainers) == 1:
        return EngineDecision(stack, compile_, reason="; ".join(reasons)), waiting
    measured = [[probe.seconds(one, len(group[0]), steps) for one in trainers.values()] for _ in range(3)]
    times = dict(zip(trainers, map(min, zip(*measured, strict=True)), strict=True))
    rates = {name: len(group[0]) * steps / max(seconds, 1e-9) for name, seconds in times.items()}
    best = max(rates, key=lambda name: rates[name])
    taken = best if rates[best] / rates["serial"] > _WORTH else "serial"
    told = {"stacked": f"stacks of {len(group[0])}", "compiled": "compiled steps"}
    compared = [
        f"{told[name]} take {rate / rates['serial']:.2f} times the serial steps per second"
        for name, rate in rates.items()
        if name != "serial"
    ]
    decision = EngineDecision(
        stack or taken == "stacked" or (taken == "compiled" and engine.device == "cuda" and engine.stack is not False),
        compile_ or taken == "compiled",
        rates["serial"],
        rates.get("stacked"),
        rates.get("compiled"),
        compile_seconds,
        "; ".join([*compared, *reasons]),
        fuse,
    )
    return decision, waiting


def _stacked(experiment: Experiment, probe: StepTimer, reasons: list[str]) -> dict[str, Trainer]:
    """The stacked trainer, tried out; nothing where it cannot be, with the reason."""
    if len(probe.clients) < 2:
        reasons.append("no two clients fit into a stack")
        return {}
    trainer = StackedTrainer(experiment)
    try:
        probe.seconds(trainer, len(probe.clients), 1)
    except ConfigError as error:
        reasons.append(str(error))
        return {}
    return {"stacked": trainer}


def _compiled(
    experiment: Experiment, probe: StepTimer, folder: Path, own: float, spent: float, reasons: list[str]
) -> tuple[dict[str, Trainer], float | None, bool]:
    """The trainer by programs, compiled now if the training of this run and those before it gives that back.

    Args:
        own: seconds of training of this run. spent: of those before it.

    Returns:
        The trainer, or nothing; what compiling took; whether all that holds for other lengths of run.
    """
    missing = compiler_missing()
    if missing:
        reasons.append(missing)
        return {}, None, True
    run = replace(experiment, choice=EngineChoice(False, True))
    begin, compiled_now = probe.clock(), False
    try:
        trace = own * _LEAST_GAIN > 2 * _TRACE_SECONDS  # for every second such run, at least, it is in vain
        trainer = CompiledTrainer(run, Compiler(folder, new=False, trace=trace))
        try:
            probe.seconds(trainer, 1, 1)
        except CacheMissError:
            expected, training = _expected_seconds(folder), own + spent
            if training * _LEAST_GAIN < expected:
                reasons.append(
                    f"compiling takes about {expected:.0f} s, which {training:.0f} s of training do not repay"
                )
                return {}, None, False
            compiled_now, trainer = True, CompiledTrainer(run, Compiler(folder))
            probe.seconds(trainer, 1, 1)
    except (RunError, DataError, OSError) as error:  # no compiler that works, no folder, or damage in it
        reasons.append(str(error))
        return {}, None, False
    if trainer.refused:
        reasons.append(f"not compiled: {'; '.join(sorted(trainer.refused))}")
        return {}, None, True
    return {"compiled": trainer}, probe.clock() - begin if compiled_now else None, True


def _recorded(
    experiment: Experiment, probe: StepTimer, steps: int, total: int, spent: float, reasons: list[str]
) -> tuple[dict[str, Trainer], bool, float | None]:
    """The trainer by recorded kernels, which are fused if the run, and those before it, are long enough as they are.

    Args:
        steps: to be measured, of every client. total: client steps of the run.
        spent: seconds that earlier runs trained by kernels that were not fused.

    Returns:
        The trainer, or nothing where there is none, with the reason; whether it fuses; None, or where that is not for
        good, the seconds of this run.
    """
    found = _tried(experiment, probe, fuse=False, reasons=reasons)
    if not found:
        return {}, True, None
    clients = len(probe.clients)
    seconds = total * probe.seconds(found["compiled"], clients, steps) / (clients * steps)
    if spent + seconds <= _FUSE_SECONDS:
        return found, False, seconds
    found.clear()  # a device holds one recording of a stack better than two
    fused = _tried(experiment, probe, fuse=True, reasons=reasons)
    return fused or _tried(experiment, probe, fuse=False, reasons=reasons), bool(fused), None


def _tried(experiment: Experiment, probe: StepTimer, *, fuse: bool, reasons: list[str]) -> dict[str, Trainer]:
    """One way to record; nothing where it cannot be, with the reason."""
    stack = experiment.config.engine.stack is not False
    trainer = CompiledTrainer(replace(experiment, choice=EngineChoice(stack, True, fuse)))
    try:
        probe.seconds(trainer, len(probe.clients), 1)
    except (ConfigError, RunError) as error:
        reasons.append(str(error))
        return {}
    if trainer.refused:
        reasons.append(f"not {'fused' if fuse else 'recorded'}: {'; '.join(sorted(trainer.refused))}")
        return {}
    return {"compiled": trainer}


def _expected_seconds(folder: Path) -> float:
    """Return the seconds that a program takes to compile here, from earlier ones."""
    known = [_seconds_in(path) for path in folder.glob("*.json")]
    return statistics.median([seconds for seconds in known if seconds] or [_COMPILE_SECONDS])


def _seconds_in(path: Path) -> float | None:
    """Return the seconds in a file; None if it is missing or damaged."""
    with suppress(DataError):
        seconds = read_json(path, "").get("seconds")
        return float(seconds) if isinstance(seconds, float | int) else None
    return None
