"""``gpu``: client steps per second on a CUDA device: one client after the other, stacked, and stacked and recorded.

100 clients, all of them in every round, each 20 steps of 32 on images of 1×28×28 with ``fedgen_cnn``; seconds are those
of the rounds after the first, without evaluation. ``recorded`` launches a step as one CUDA graph
(``engine.compile=default``); ``tf32`` and ``bf16`` are recorded too. Beside them the same work on one core of the CPU,
by compiled steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from flcore.errors import ConfigError
from pipelines.bench.common import Bench, BenchOptions, Federation, Measurement, Timing, paired, synthetic_dataset

SAMPLES, STEPS, BATCH = 640, 20, 32

CASES = {
    "cuda, serial": ("device=cuda",),
    "cuda, stacked": ("device=cuda", "stack=true"),
    "cuda, recorded": ("device=cuda", "stack=true", "compile=default"),
    "cuda, recorded, tf32": ("device=cuda", "stack=true", "compile=default", "precision=tf32"),
    "cuda, recorded, bf16": ("device=cuda", "stack=true", "compile=default", "precision=bf16"),
    "cpu, compiled": ("device=cpu", "compile=default"),
}


@dataclass(frozen=True)
class Options(BenchOptions):
    """``gpu``: how many clients are trained in a round, and by what model."""

    rounds: int = 6
    clients: tuple[int, ...] = (100,)
    model: str = "fedgen_cnn"


def measure(options: Options, bench: Bench) -> Measurement:
    """One training per case and number of clients, in turn.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: no CUDA device on this machine; `protofl bench models` measures the CPU")
    federations = {clients: _federation(clients, options, bench) for clients in options.clients}
    names = {f"{case}, {clients} clients": (case, clients) for clients in options.clients for case in CASES}

    def case(name: str) -> dict[str, Timing]:
        kind, clients = names[name]
        engine = [f"engine.{assignment}" for assignment in CASES[kind]]
        if "engine.stack=true" in engine:
            engine.append(f"engine.stack_size={clients}")
        trained = federations[clients].train(name, *engine)
        steps = options.rounds * clients * STEPS
        return {name: Timing(trained.steady(evaluation=False), steps, trained.execution.peak_mb)}

    series = bench.alternate({name: partial(case, name) for name in names}, options.repetitions)
    settings = {
        **{"clients": list(options.clients), "samples_per_client": SAMPLES, "steps": STEPS, "batch_size": BATCH},
        **{"model": options.model, "images": "1x28x28 uint8, random", "workers": 0},
    }
    ratios = {
        f"speed-up of {name}": paired(series, f"cuda, serial, {clients} clients", name)
        for name, (kind, clients) in names.items()
        if kind != "cuda, serial"
    }
    return Measurement(settings, series, ratios)


def _federation(clients: int, options: Options, bench: Bench) -> Federation:
    params = {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": clients},
        "model": {"name": options.model},
        "method": {"name": "fedavg"},
        "federation": {"rounds": options.rounds},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05},
        "evaluation": {"every": options.rounds},
    }
    return Federation(bench, params, synthetic_dataset("mnist", (1, 28, 28), clients * SAMPLES, 1000))
