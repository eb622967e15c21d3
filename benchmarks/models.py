"""Rounds of every model at its paper's batch size, and of a bare PyTorch loop with the same steps.

FedAvg on random images, on the CPU, one thread per process. Cases of each model:

bare               rounds of a plain PyTorch loop, in one process
serial, N workers  ours with engine.stack=false engine.compile=none; 0 workers: in one process
compiled, N workers  ours with engine.stack=false engine.compile=default
compiled, first    the process of a first run of one round, which compiles for the others; not one of the repetitions.
                   If the compiler fails, there are no compiled cases, and `not_compiled` of the settings has the reason

Seconds cover the rounds after the first, without evaluation, scaled to all rounds. Ratios are rounds per second
relative to the bare loop.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from cyclopts import Parameter

from benchmarks.command import report
from benchmarks.federation import Federation, TrainedRun, compiled_code_in
from benchmarks.measuring import Bench, BenchOptions, Case, Measurement, Timing, option, paired
from benchmarks.peers.roster import start
from benchmarks.work import Work
from flcore.core.errors import ConfigError, RunError
from flcore.models import MODELS
from pipelines.cli.options import Common, Json, Names, Numbers

LR = 0.01
ENGINES = {
    "serial": ("engine.stack=false", "engine.compile=none"),
    "compiled": ("engine.stack=false", "engine.compile=default"),
}


@dataclass(frozen=True)
class Paper:
    """The setting of a model.

    Attributes:
        data: the data set with images of this ``shape`` (C, H, W).
        batch_size: of the paper that ``source`` names.
        steps: per client and round, one batch of its images each. clients: all participate in every round.
    """

    data: str
    shape: tuple[int, int, int]
    batch_size: int
    source: str
    steps: int = 20
    clients: int = 10

    def work(self, model: str, rounds: int) -> Work:
        """Return the work of a run."""
        samples = self.steps * self.batch_size
        return Work(self.clients, samples, self.clients, self.steps, self.batch_size, LR, rounds, 1, model)


_MNIST, _CIFAR = ("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))

PAPERS: Mapping[str, Paper] = {
    "fedgen_cnn": Paper(*_MNIST, 32, "FedGen and FedPA on MNIST: 20 steps of 32"),
    "fedproto_cnn": Paper(*_MNIST, 4, "FedProto and GFPL on MNIST: batches of 4, 3 classes of 100 images", steps=75),
    "fedmlp_cnn": Paper(*_MNIST, 32, "FedMLP: batches of 32"),
    "fedcspc_cnn": Paper(*_CIFAR, 64, "FedCSPC on CIFAR-10: batches of 64"),
    "pfl_cnn": Paper(*_CIFAR, 10, "pfl-research on CIFAR-10: 50 images in batches of 10", steps=5),
    # Seconds per step: fewer steps, and fewer clients.
    "resnet18": Paper(*_CIFAR, 32, "FedMLP and GFPL on CIFAR-10: batches of 32 (FedPG: 64)", steps=2, clients=4),
    "resnet50": Paper("cifar100", (3, 32, 32), 64, "FedPG on CIFAR-100: batches of 64", steps=1, clients=2),
    "convnet5": Paper("femnist", (1, 64, 64), 64, "FedPG on FEMNIST: batches of 64", steps=2, clients=4),
    "fedpg_cnn": Paper(*_MNIST, 64, "our figures of FedPG on MNIST: batches of 64"),
    "celeba_cnn": Paper("celeba", (3, 84, 84), 32, "FedGen and FedPA on CelebA: 20 steps of 32"),
    "femnist_cnn": Paper("femnist", (1, 128, 128), 4, "FedProto and GFPL on FEMNIST: batches of 4", steps=75),
}
"""The setting of each model in its paper."""


@Parameter(name="*")
@dataclass(frozen=True)
class Options(BenchOptions):
    """Models and worker processes."""

    models: Names | None = option(None, "default: those that a paper trains")
    workers: Numbers = option((0, 2), "numbers of worker processes")

    def __post_init__(self) -> None:
        for name in self.models or ():
            if name not in PAPERS:
                raise ConfigError(f"bench models: --models {name}: expected some of {', '.join(PAPERS)}")

    @property
    def named(self) -> tuple[str, ...]:
        """Models to measure."""
        return self.models or tuple(name for name in MODELS if name in PAPERS)


def bench(*, options: Options = Options(), as_json: Json = False, common: Common = Common()) -> int:
    """Print the measurements of this benchmark."""
    return report("models", options, measure, as_json=as_json)


def measure(options: Options, bench: Bench) -> Measurement:
    """Run the first runs, then all cases of all models in turn."""
    measured = {name: ModelCases(name, options.rounds, bench) for name in options.named}
    first = {case: [timing] for own in measured.values() for case, timing in own.first().items()}
    cases: dict[str, Case] = {}
    for name, own in measured.items():
        cases[f"{name}, bare"] = own.bare
        for engine in [engine for engine in ENGINES if engine != "compiled" or own.failed is None]:
            for workers in options.workers:
                cases[f"{name}, {engine}, {workers} workers"] = partial(own.ours, engine, workers)
    series = bench.alternate(cases, options.repetitions)
    ratios = {
        f"rounds per second, {case}/bare": paired(series, f"{case.split(', ')[0]}, bare", case)
        for case in series
        if not case.endswith(", bare")
    }
    models = {
        name: {**dataclasses.asdict(PAPERS[name]), "shape": list(PAPERS[name].shape), "not_compiled": own.failed}
        for name, own in measured.items()
    }
    settings = {"method": "fedavg", "images": "uint8, random", "lr": LR, "workers": list(options.workers)}
    return Measurement(settings | {"models": models}, {**series, **first}, ratios)


class ModelCases:
    """The cases of one model; each does the whole work once."""

    def __init__(self, name: str, rounds: int, bench: Bench) -> None:
        self._name, self._bench, self._paper = name, bench, PAPERS[name]
        self._work = self._paper.work(name, rounds)
        self.federation = Federation(bench, self._work, self._paper.data, self._paper.shape, test_size=200)
        self.failed: str | None = None
        """The first run's error."""

    def first(self) -> dict[str, Timing]:
        """Time a round that compiles its code; empty if the compiler failed."""
        case = f"{self._name}, compiled, first"
        self._bench.say(f"{case}, which is not one of the repetitions")
        try:
            trained = self._train(case, "federation.rounds=1", *ENGINES["compiled"])
        except RunError as error:
            self.failed = str(error)
            self._bench.say(self.failed)
            return {}
        steps = self._work.total_steps // self._work.rounds
        return {case: Timing(trained.execution.seconds, steps, trained.execution.peak_mb)}

    def bare(self) -> dict[str, Timing]:
        """Time the plain loop, in our own environment."""
        case, shape = f"{self._name}, bare", json.dumps(self._paper.shape)
        done = start(self._bench, case, "model_loop", self._work, inputs=shape, with_library=True)
        return {case: done.timings(self._work, "", case)[case]}

    def ours(self, engine: str, workers: int) -> dict[str, Timing]:
        """Time a training of the library."""
        case = f"{self._name}, {engine}, {workers} workers"
        trained = self._train(case, *ENGINES[engine], f"engine.workers={workers}")
        return {case: trained.timing(self._work.total_steps)}

    def _train(self, case: str, *assignments: str) -> TrainedRun:
        """Train with this benchmark's own folder of compiled code."""
        return self.federation.train(case, *assignments, environment=compiled_code_in(self._bench.folder))
