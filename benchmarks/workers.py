"""``workers``: how much faster a round is with 1, 2, ... worker processes than in the main process.

24 clients, all of them in every round, each 20 steps of 32 on images of 1×28×28 with ``fedgen_cnn``, on the CPU, one
thread per process. ``N workers`` are the seconds of the rounds without evaluation, ``N workers, process`` those of the
whole training, which the start of the workers is part of.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from benchmarks.common import Bench, BenchOptions, Federation, Measurement, Timing, paired, synthetic_dataset

CLIENTS, SAMPLES, STEPS, BATCH = 24, 640, 20, 32  # 24 can be shared out evenly among 1, 2, 3, 4, 6, 8, 12


@dataclass(frozen=True)
class Options(BenchOptions):
    """``workers``: numbers of processes to compare with none; None: 1, 2, 4, ... up to the cores of this machine."""

    rounds: int = 10
    workers: tuple[int, ...] | None = None


def measure(options: Options, bench: Bench) -> Measurement:
    """One training per number of workers, in turn; 0, the main process alone, comes first."""
    params = {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": CLIENTS},
        "model": {"name": "fedgen_cnn"},
        "method": {"name": "fedavg"},
        "federation": {"rounds": options.rounds},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05},
        "evaluation": {"every": options.rounds},
    }
    federation = Federation(bench, params, synthetic_dataset("mnist", (1, 28, 28), CLIENTS * SAMPLES, 1000))
    wanted = options.workers or powers_of_two(os.cpu_count() or 1)
    names = {f"{workers} workers": workers for workers in (0, *(n for n in wanted if n > 0))}
    steps = options.rounds * CLIENTS * STEPS

    def case(name: str) -> dict[str, Timing]:
        trained = federation.train(name, f"engine.workers={names[name]}")
        peak = trained.execution.peak_mb
        return {
            name: Timing(trained.steady(evaluation=False), steps, peak),
            f"{name}, process": Timing(trained.execution.seconds, steps, peak),
        }

    series = bench.alternate({name: partial(case, name) for name in names}, options.repetitions)
    settings = {
        **{"clients": CLIENTS, "cohort": CLIENTS, "samples_per_client": SAMPLES, "steps": STEPS, "batch_size": BATCH},
        **{"model": "fedgen_cnn", "images": "1x28x28 uint8, random"},
    }
    ratios = {
        f"speed-up of {name}": paired(series, "0 workers", name) for name, workers in names.items() if workers > 0
    }
    return Measurement(settings, series, ratios)


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``most`` itself."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))
