"""``population``: what more clients cost when as many take part in a round: seconds per round and peak memory.

Clients of 20 images of 1×28×28 each, 10 a round, 10 steps of 10, ``fedgen_cnn``, in one process on the CPU.
``N clients`` are the seconds of a round without evaluation; ``N clients, process`` those of the whole training from
start to exit, loading and one evaluation of the last model on 1,000 test images included. The memory of both is that of
the process. The images grow with the clients: 15.7 kB each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.common import Bench, BenchOptions, Federation, Measurement, Timing, paired, synthetic_dataset
from flcore.core.errors import ConfigError

SAMPLES, COHORT, STEPS, BATCH, TEST_SIZE = 20, 10, 10, 10, 1000


@dataclass(frozen=True)
class Options(BenchOptions):
    """``clients``: the populations."""

    rounds: int = 20
    clients: tuple[int, ...] = (100, 1000, 10_000)

    def __post_init__(self) -> None:
        """Refuse populations that are smaller than a cohort."""
        super().__post_init__()
        if min(self.clients) < COHORT:
            raise ConfigError(f"bench population: --clients {min(self.clients)}: a round needs {COHORT}")


def measure(options: Options, bench: Bench) -> Measurement:
    """One training process per population, in turn."""
    names = {f"{clients} clients": _federation(clients, options, bench) for clients in options.clients}

    def case(name: str) -> dict[str, Timing]:
        trained = names[name].train(name)
        peak, per_round = trained.execution.peak_mb, trained.steady(evaluation=False) / options.rounds
        return {
            name: Timing(per_round, COHORT * STEPS, peak),
            f"{name}, process": Timing(trained.execution.seconds, options.rounds * COHORT * STEPS, peak),
        }

    series = bench.alternate({name: partial(case, name) for name in names}, options.repetitions)
    settings = {
        **{"samples_per_client": SAMPLES, "cohort": COHORT, "steps": STEPS, "batch_size": BATCH},
        **{"model": "fedgen_cnn", "images": "1x28x28 uint8, random", "test_images": TEST_SIZE, "workers": 0},
    }
    first = next(iter(names))
    ratios = {}
    for name in list(names)[1:]:
        ratios[f"seconds per round, {name}/{first}"] = paired(series, name, first)
        most, least = (max(timing.peak_mb for timing in series[case]) for case in (name, first))
        ratios[f"peak memory, {name}/{first}"] = most / least
    return Measurement(settings, series, ratios)


def _federation(clients: int, options: Options, bench: Bench) -> Federation:
    params = {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": clients},
        "model": {"name": "fedgen_cnn"},
        "method": {"name": "fedavg"},
        "federation": {"rounds": options.rounds, "participation": COHORT / clients},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05},
        "evaluation": {"every": options.rounds},
    }
    bench.say(f"dividing {clients * SAMPLES} images among {clients} clients")
    return Federation(bench, params, synthetic_dataset("mnist", (1, 28, 28), clients * SAMPLES, TEST_SIZE))
