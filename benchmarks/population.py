"""The cost of more clients with the same cohort: seconds per round and peak memory, in one process on the CPU.

Clients of 20 images of 1x28x28 each, 10 a round, 10 steps of 10, `fedgen_cnn`. `N clients` has the seconds of a round
without evaluation; `N clients, process` has the seconds of the whole process, including loading and one evaluation on
1,000 test images. The images grow with the clients: 15.7 kB each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cyclopts import Parameter

from benchmarks.command import report
from benchmarks.federation import Federation
from benchmarks.measuring import Bench, BenchOptions, Measurement, Rounds, Timing, option, paired
from benchmarks.work import Work
from flcore.core.errors import ConfigError
from pipelines.cli.options import Common, Json, Numbers

COHORT = 10


@Parameter(name="*")
@dataclass(frozen=True)
class Options(BenchOptions):
    """Populations to measure, each at least a cohort."""

    rounds: Rounds = option(20, "rounds of every run")
    clients: Numbers = option((100, 1000, 10_000), "numbers of clients")

    def __post_init__(self) -> None:
        if min(self.clients) < COHORT:
            raise ConfigError(f"bench population: --clients {min(self.clients)}: a round needs {COHORT}")


def bench(*, options: Options = Options(), as_json: Json = False, common: Common = Common()) -> int:
    """Print the measurements of this benchmark."""
    return report("population", options, measure, as_json=as_json)


def measure(options: Options, bench: Bench) -> Measurement:
    """Train in a process per population, in turn."""
    federations = {}
    for clients in options.clients:
        bench.say(f"dividing images among {clients} clients")
        work = Work(clients, samples=20, cohort=COHORT, steps=10, batch_size=10, rounds=options.rounds)
        federations[f"{clients} clients"] = Federation(bench, work)

    def case(name: str) -> dict[str, Timing]:
        work, trained = federations[name].work, federations[name].train(name)
        seconds, process = trained.steady(evaluation=False), trained.execution
        return {
            name: Timing(seconds / work.rounds, work.total_steps // work.rounds, process.peak_mb),
            f"{name}, process": Timing(process.seconds, work.total_steps, process.peak_mb),
        }

    series = bench.alternate({name: partial(case, name) for name in federations}, options.repetitions)
    first, *others = federations
    peaks = {name: max(timing.peak_mb for timing in series[name]) for name in federations}
    ratios = {f"seconds per round, {name}/{first}": paired(series, name, first) for name in others}
    ratios |= {f"peak memory, {name}/{first}": peaks[name] / peaks[first] for name in others}
    settings = {"samples_per_client": 20, "cohort": COHORT, "steps": 10, "batch_size": 10, "model": "fedgen_cnn"}
    return Measurement(settings | {"images": "1x28x28 uint8, random", "test_images": 1000}, series, ratios)
