"""The rule for ``auto`` in ``engine.stack`` and ``engine.compile``, and for ``engine.workers: null``.

It is a function of the configuration and the data; workers depend on the machine's cores too, and change no byte.

Compiled and stacked training end with other last bits than serial training, so no clock, cache or installed program may
decide between them. An experiment replaces ``auto`` by the rule's answer before anything is trained, and its hash names
the answer: one hash, one way to compute.

On a CPU one client trains at a time; steps are compiled if

- the run has :data:`MANY_STEPS` or more client steps, on average over the phases of a round. A compiled step saves 1 to
  2.5 ms, whatever the network, so such a run saves half of what compiling takes (20 to 50 s, once on a machine) or
  more, and the next ones with the same step save all of it;
- one step has at most :data:`LARGE_STEP` multiply-adds. Above, PyTorch's own kernels take nearly all of the time, and
  compiling gains nothing.

On a GPU clients train in stacks, with the kernels of a step in a CUDA graph. The kernels are compiled if the stacks
have :data:`MANY_STEPS` or more steps. Measurements: docs/benchmarks.md.

A run on a CPU has a worker per physical core if it has :data:`MANY_STEPS` or more client steps, or
:data:`MUCH_WORK` multiply-adds or more. Starting workers takes some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from flcore.config.schema import Config
from flcore.config.sections import EngineConfig, LocalConfig
from flcore.methods.types import Exchange, Phase

MANY_STEPS = 10_000
LARGE_STEP = 100_000_000
MUCH_WORK = 10**12
Compile = Literal["none", "graph", "default"]
_MOST_ON_GPU = 128  # clients in a stack, where engine.stack_size does not say


@dataclass(frozen=True)
class EngineChoice:
    """The way clients are trained: ``engine.stack`` and ``engine.compile`` without ``auto``, and the reason."""

    stack: bool
    compile: Compile
    reason: str


def rule(engine: EngineConfig, steps: Callable[[], int], clients: int, size: Callable[[], int]) -> EngineChoice:
    """Return the choice for a run; values that are not ``auto`` stay.

    Args:
        engine: the configuration.
        steps: of all clients in all rounds, by phase.
        clients: of a round.
        size: multiply-adds of a client's step.
    """
    if engine.stack != "auto" and engine.compile != "auto":
        return EngineChoice(engine.stack, engine.compile, "as configured")
    on_gpu = engine.device == "cuda"
    stack = on_gpu if engine.stack == "auto" else engine.stack
    if engine.compile != "auto":
        return EngineChoice(stack, engine.compile, f"{'stacks' if stack else 'no stacks'} on device {engine.device}")
    if on_gpu:
        at_once = min(clients, engine.stack_size or _MOST_ON_GPU) if stack else 1
        launches = -(-steps() // at_once)
        few = launches < MANY_STEPS
        reason = f"{launches:,} steps of {f'stacks of {at_once}' if stack else 'clients'}, {_compared(few)}"
        return EngineChoice(stack, "graph" if few else "default", reason)
    if stack:
        return EngineChoice(stack, "none", "stacks are not compiled on a CPU")
    if (total := steps()) < MANY_STEPS:
        return EngineChoice(stack, "none", f"{total:,} client steps, {_compared(True)}")
    if (each := size()) > LARGE_STEP:
        large = f"{each / 1e6:,.0f} million multiply-adds a step, more than the {LARGE_STEP / 1e6:,.0f} million"
        return EngineChoice(stack, "none", f"{large} from which compiling gains nothing")
    return EngineChoice(stack, "default", f"{total:,} client steps, {_compared(False)}")


def workers(engine: EngineConfig, steps: Callable[[], int], clients: int, size: Callable[[], int]) -> int:
    """Return the number of workers of a run; arguments as of :func:`rule`."""
    if engine.workers is not None or engine.name == "ray":
        return engine.worker_count
    count = min(engine.worker_count, clients)
    if count < 2 or engine.device == "cuda":
        return 0
    total = steps()
    return count if total >= MANY_STEPS or total * size() >= MUCH_WORK else 0


def _compared(few: bool) -> str:
    if few:
        return f"fewer than the {MANY_STEPS:,} that repay compiling"
    return f"at least the {MANY_STEPS:,} that repay compiling"


def client_steps(exchanges: Sequence[Exchange], config: Config, sizes: Sequence[int], clients: int) -> int:
    """Return the mini-batches of all clients in a run by phase.

    Args:
        exchanges: of a round. config: of the run.
        sizes: samples of each client. clients: number of them in a round.
    """
    steps, phases = 0.0, 0
    for exchange in exchanges:
        share = clients / len(sizes) if exchange.participants == "cohort" else 1.0
        own_images = [phase for phase in exchange.phases if phase.source is None]
        steps += share * sum(_steps(size, config.local, phase) for phase in own_images for size in sizes if size)
        phases += len(own_images)
    return round(steps * config.federation.rounds / max(phases, 1))


def _steps(size: int, local: LocalConfig, phase: Phase) -> int:
    is_own = phase.epochs is not None or phase.steps is not None
    steps, epochs = (phase.steps, phase.epochs or 1) if is_own else (local.steps, local.epochs)
    return epochs * -(-size // local.batch_size) if steps is None else steps


def multiply_adds(module: nn.Module, images: Tensor) -> int:
    """Return the multiply-adds of a model's convolutions and linear layers in a forward pass."""
    counted = 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal counted
        weight = cast(Tensor, layer.weight)  # [outputs, inputs of each, ...]
        counted += output.numel() * math.prod(weight.shape[1:])

    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            layer.register_forward_hook(count)
    with torch.no_grad(), suppress(Exception):  # a model that fails says so when it trains
        module.eval()(images)
    return counted
