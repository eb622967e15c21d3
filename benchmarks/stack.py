"""``stack``: clients per second, one after the other against stacked, over sizes of the stack, per device.

As many clients as the largest stack, 32 at least, all of them in every round, each 10 steps of 32 on images of
1×28×28, in one process. Seconds are those of the rounds without evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.common import Bench, BenchOptions, Federation, Measurement, Timing, paired, synthetic_dataset
from benchmarks.cross_device import available_devices

SAMPLES, STEPS, BATCH, FEWEST_CLIENTS = 320, 10, 32, 32


@dataclass(frozen=True)
class Options(BenchOptions):
    """``group_sizes``: clients in a stack. ``devices``: None: those of this machine. ``model``: by name."""

    rounds: int = 6
    group_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
    devices: tuple[str, ...] | None = None
    model: str = "fedgen_cnn"


def measure(options: Options, bench: Bench) -> Measurement:
    """One training per size and device, in turn."""
    clients = max(FEWEST_CLIENTS, *options.group_sizes)
    params = {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": clients},
        "model": {"name": options.model},
        "method": {"name": "fedavg"},
        "federation": {"rounds": options.rounds},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05},
        "evaluation": {"every": options.rounds},
    }
    federation = Federation(bench, params, synthetic_dataset("mnist", (1, 28, 28), clients * SAMPLES, 1000))
    devices = options.devices or available_devices()
    names = {f"{device}, serial": (device, 0) for device in devices}
    names |= {f"{device}, {size} stacked": (device, size) for device in devices for size in options.group_sizes}

    def case(name: str) -> dict[str, Timing]:
        device, size = names[name]
        stacked = ("engine.stack=false",) if size == 0 else ("engine.stack=true", f"engine.stack_size={size}")
        trained = federation.train(name, f"engine.device={device}", *stacked)
        steps = options.rounds * clients * STEPS
        return {name: Timing(trained.steady(evaluation=False), steps, trained.execution.peak_mb)}

    series = bench.alternate({name: partial(case, name) for name in names}, options.repetitions)
    settings = {
        **{"clients": clients, "cohort": clients, "samples_per_client": SAMPLES, "steps": STEPS, "batch_size": BATCH},
        **{"model": options.model, "images": "1x28x28 uint8, random", "workers": 0},
    }
    ratios = {
        f"speed-up of {name}": paired(series, f"{device}, serial", name)
        for name, (device, size) in names.items()
        if size > 0
    }
    trained_clients = options.rounds * clients
    rates = {name: lambda median: {"clients_per_second": trained_clients / median} for name in names}
    return Measurement(settings, series, ratios, rates)
