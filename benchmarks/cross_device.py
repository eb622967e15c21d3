"""``cifar10-cross-device``: pfl-research's published setting, on random images (speed does not depend on them).

From the configuration of its CIFAR-10 benchmark (IID, without privacy; Granqvist et al., NeurIPS 2024): 1,000 clients
of 50 images of 3×32×32, 50 clients a round, batches of 10, one local epoch, SGD with 0.1 locally and 1.0 at the server
(plain averaging, all clients alike: they have equally many images), ``simple_cnn`` (here ``pfl_cnn``, 1,626,442
parameters), the 10,000 test images after every tenth round, 1,500 rounds. We run fewer rounds and say what 1,500 take
at that pace. Differences: pfl draws clients with replacement, we without; it also scores each client of an evaluated
round on its own data before and after training, we score the global model on the clients' test images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.common import Bench, BenchOptions, Federation, Measurement, Timing, paired, synthetic_dataset
from flcore.core.errors import ConfigError

CLIENTS, SAMPLES, COHORT, BATCH, TEST_SIZE = 1000, 50, 50, 10, 10_000
PUBLISHED_ROUNDS, EVERY = 1500, 10
STEPS, LR = SAMPLES // BATCH, 0.1


@dataclass(frozen=True)
class Options(BenchOptions):
    """Which cases: each device with each number of workers, serial and stacked; None: the devices of this machine.

    ``rounds`` that are multiples of 10 keep evaluation in proportion. ``scale`` is the share of the clients, of the
    cohort and of the test images; less than 1 is for trying out.
    """

    rounds: int = 20
    repetitions: int = 1
    workers: tuple[int, ...] = (0,)
    devices: tuple[str, ...] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse scales that leave no cohort."""
        super().__post_init__()
        if not 1 / COHORT <= self.scale <= 1:
            raise ConfigError(f"bench cifar10-cross-device: --scale {self.scale:g}: must be from {1 / COHORT} to 1")


def measure(options: Options, bench: Bench) -> Measurement:
    """Training processes in turn; evaluation is part of the rounds, as in the published times."""
    clients, cohort, test_size = (round(options.scale * number) for number in (CLIENTS, COHORT, TEST_SIZE))
    federation = federation_of(bench, options.rounds, options.scale)
    names = {
        f"{device}, {workers} workers{', stacked' if stacked == 'true' else ''}": (device, workers, stacked)
        for device in options.devices or available_devices()
        for workers in options.workers
        for stacked in ("false", "true")
    }
    steps = options.rounds * cohort * STEPS

    def case(name: str) -> dict[str, Timing]:
        device, workers, stacked = names[name]
        trained = federation.train(
            name, f"engine.device={device}", f"engine.workers={workers}", f"engine.stack={stacked}"
        )
        peak = trained.execution.peak_mb
        return {
            name: Timing(trained.steady(evaluation=True), steps, peak),
            f"{name}, process": Timing(trained.execution.seconds, steps, peak),
        }

    series = bench.alternate({name: partial(case, name) for name in names}, options.repetitions)
    settings = {
        **{"clients": clients, "samples_per_client": SAMPLES, "cohort": cohort, "batch_size": BATCH, "epochs": 1},
        **{"lr": LR, "model": "pfl_cnn", "test_images": test_size, "evaluation_every": EVERY},
        "images": "3x32x32 uint8, random",
    }
    first = next(iter(names))
    ratios = {f"{name}/{first}": paired(series, name, first) for name in names if name != first}
    longer = PUBLISHED_ROUNDS / options.rounds
    published = names if options.scale == 1 else ()
    rates = {name: lambda median: {"seconds_of_1500_rounds": median * longer} for name in published}
    return Measurement(settings, series, ratios, rates)


def federation_of(bench: Bench, rounds: int, scale: float = 1.0) -> Federation:
    """The setting, divided and on disk; ``scale`` as in :class:`Options`."""
    clients, cohort, test_size = (round(scale * number) for number in (CLIENTS, COHORT, TEST_SIZE))
    params = {
        "data": {"name": "cifar10"},
        "partition": {"name": "iid", "num_clients": clients},
        "model": {"name": "pfl_cnn"},
        "method": {"name": "fedavg"},
        "federation": {"rounds": rounds, "participation": cohort / clients},
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
        "evaluation": {"every": EVERY},
    }
    return Federation(bench, params, synthetic_dataset("cifar10", (3, 32, 32), clients * SAMPLES, test_size))


def available_devices() -> tuple[str, ...]:
    """The CPU, and a GPU where there is one."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
