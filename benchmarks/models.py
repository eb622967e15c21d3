"""``models``: rounds of every model at its paper's batch size, beside a bare PyTorch loop that does the same steps.

FedAvg on random images, on the CPU, one thread per process, each client :data:`PAPERS`' steps of the batch size there.
Cases of each model:

- ``bare``: rounds of a plain PyTorch loop (`benchmarks/model_loop.py`), in one process.
- ``serial, N workers``: ours with ``engine.stack=false engine.compile=none``; 0 workers: in one process.
- ``auto, N workers``: ours with ``engine.stack=auto engine.compile=auto``. What was taken, and why, is its
  ``decision``. It is made once per model and remembered, as on a user's machine.
- ``auto, first``: the whole first run of a model, one round with ``engine.compile=default``, which finds no compiled
  code and leaves it there for the others; none of the repetitions. Where the compiler fails there is none, and
  ``not_compiled`` of the model's settings says why. (A run as short as these would not repay a minute of
  compiling, so that ``auto`` would not compile; one of hundreds of rounds does.)

Seconds are those of the rounds after the first, without evaluation, scaled to all. Ratios are rounds per second: how
many times as fast as the bare loop.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.common import (
    Bench,
    BenchOptions,
    Case,
    Federation,
    Measurement,
    Timing,
    TrainedRun,
    compiled_code_in,
    paired,
    steady,
    synthetic_dataset,
)
from benchmarks.work import Work
from flcore.core.errors import ConfigError, RunError
from flcore.core.host import python
from flcore.models import MODELS
from pipelines.runs.layout import RunFiles, read_json

LR, TEST_SIZE = 0.01, 200
ENGINES = {
    "serial": ("engine.stack=false", "engine.compile=none"),
    "auto": ("engine.stack=auto", "engine.compile=auto"),
}


@dataclass(frozen=True)
class Paper:
    """How a model is used.

    Attributes:
        data: whose images have this ``shape`` (C, H, W).
        batch_size: of the paper. source: which, and where that is said of it.
        steps: a client's in a round; it has so many batches of images. clients: all of them in every round.
    """

    data: str
    shape: tuple[int, int, int]
    batch_size: int
    source: str
    steps: int = 20
    clients: int = 10

    def work(self, rounds: int) -> Work:
        samples = self.steps * self.batch_size
        return Work(self.clients, samples, self.clients, self.steps, self.batch_size, LR, rounds, cores=1)

    def setting(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


_MNIST, _CIFAR = ("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))

PAPERS: Mapping[str, Paper] = {
    "fedgen_cnn": Paper(*_MNIST, 32, "FedGen and FedPA on MNIST: 20 steps of 32"),
    "fedproto_cnn": Paper(*_MNIST, 4, "FedProto and GFPL on MNIST: batches of 4, 3 classes of 100 images", steps=75),
    "fedmlp_cnn": Paper(*_MNIST, 32, "FedMLP: batches of 32"),
    "fedcspc_cnn": Paper(*_CIFAR, 64, "FedCSPC on CIFAR-10: batches of 64"),
    "pfl_cnn": Paper(*_CIFAR, 10, "pfl-research on CIFAR-10: 50 images in batches of 10", steps=5),
    # Seconds a step: fewer of them, and of clients.
    "resnet18": Paper(*_CIFAR, 32, "FedMLP and GFPL on CIFAR-10: batches of 32 (FedPG: 64)", steps=2, clients=4),
    "resnet50": Paper("cifar100", (3, 32, 32), 64, "FedPG on CIFAR-100: batches of 64", steps=1, clients=2),
    "convnet5": Paper("femnist", (1, 64, 64), 64, "FedPG on FEMNIST: batches of 64", steps=2, clients=4),
    "fedpg_cnn": Paper(*_MNIST, 64, "our figures of FedPG on MNIST: batches of 64"),
    "celeba_cnn": Paper("celeba", (3, 84, 84), 32, "FedGen and FedPA on CelebA: 20 steps of 32"),
    "femnist_cnn": Paper("femnist", (1, 128, 128), 4, "FedProto and GFPL on FEMNIST: batches of 4", steps=75),
}
"""Model → how its paper uses it."""


@dataclass(frozen=True)
class Options(BenchOptions):
    """``models``: by name; None: all of the registry. ``workers``: numbers of worker processes."""

    rounds: int = 6
    models: tuple[str, ...] | None = None
    workers: tuple[int, ...] = (0, 2)

    def __post_init__(self) -> None:
        """Refuse models of which no paper's use is known."""
        super().__post_init__()
        for name in self.models or ():
            if name not in PAPERS:
                raise ConfigError(f"bench models: --models {name}: expected some of {', '.join(PAPERS)}")

    @property
    def named(self) -> tuple[str, ...]:
        """Models that are asked for."""
        return self.models or tuple(name for name in MODELS if name in PAPERS)


def measure(options: Options, bench: Bench) -> Measurement:
    """First runs, then all cases of all models in turn."""
    measured = {name: ModelCases(name, options.rounds, bench) for name in options.named}
    first = {case: [timing] for own in measured.values() for case, timing in own.first().items()}
    cases: dict[str, Case] = {}
    for name, own in measured.items():
        cases[f"{name}, bare"] = own.bare
        for engine in ENGINES:
            cases |= {
                f"{name}, {engine}, {workers} workers": partial(own.ours, engine, workers)
                for workers in options.workers
            }
    series = bench.alternate(cases, options.repetitions)
    ratios = {
        f"rounds per second, {case}/bare": paired(series, f"{case.split(', ')[0]}, bare", case)
        for case in series
        if not case.endswith(", bare")
    }
    settings = {
        **{"method": "fedavg", "images": "uint8, random", "lr": LR, "workers": list(options.workers)},
        "models": {name: PAPERS[name].setting() | {"not_compiled": own.failed} for name, own in measured.items()},
    }
    facts = {case: {"decision": found} for own in measured.values() for case, found in own.decisions.items()}
    return Measurement(settings, {**series, **first}, ratios, facts=facts)


class ModelCases:
    """The cases of one model, each of which does all of the work once."""

    def __init__(self, name: str, rounds: int, bench: Bench) -> None:
        self._name, self._bench, self._paper = name, bench, PAPERS[name]
        self._work = self._paper.work(rounds)
        clients, samples = self._work.clients, self._work.samples
        params = {
            "data": {"name": self._paper.data},
            "partition": {"name": "iid", "num_clients": clients},
            "model": {"name": name},
            "method": {"name": "fedavg"},
            "federation": {"rounds": rounds},
            "local": {"steps": self._work.steps, "batch_size": self._work.batch_size, "lr": LR},
            "evaluation": {"every": rounds},
        }
        dataset = synthetic_dataset(self._paper.data, self._paper.shape, clients * samples, TEST_SIZE)
        self._federation = Federation(bench, params, dataset)
        self.decisions: dict[str, dict[str, Any]] = {}
        """By case of ``auto``, what it took, from ``config.json``."""
        self.failed: str | None = None
        """Why the first run failed; None: it did not."""

    def first(self) -> dict[str, Timing]:
        """A round with no compiled code in the cache: what the process took; nothing where the compiler failed.

        That is an answer too: ``auto`` then trains without.
        """
        case = f"{self._name}, auto, first"
        self._bench.say(f"{case}, which is not one of the repetitions")
        try:
            trained = self._train(case, "federation.rounds=1", "engine.stack=false", "engine.compile=default")
        except RunError as error:
            self.failed = str(error)
            self._bench.say(self.failed)
            return {}
        return {case: Timing(trained.execution.seconds, self._paper.work(1).total_steps, trained.execution.peak_mb)}

    def bare(self) -> dict[str, Timing]:
        case = f"{self._name}, bare"
        arguments = [self._name, json.dumps(self._paper.shape), json.dumps(dataclasses.asdict(self._work))]
        done = self._bench.execute(case, python("-m", "benchmarks.model_loop", *arguments))
        return {case: Timing(steady(done.printed["rounds"]), self._work.total_steps, done.peak_mb)}

    def ours(self, engine: str, workers: int) -> dict[str, Timing]:
        """A training of the library."""
        case = f"{self._name}, {engine}, {workers} workers"
        trained = self._train(case, *ENGINES[engine], f"engine.workers={workers}")
        if engine == "auto":
            self.decisions[case] = read_json(RunFiles(self._federation.out).config)["decision"]
        return {case: Timing(trained.steady(evaluation=False), self._work.total_steps, trained.execution.peak_mb)}

    def _train(self, case: str, *assignments: str) -> TrainedRun:
        """With decisions and compiled code of this benchmark's own."""
        return self._federation.train(case, *assignments, environment=compiled_code_in(self._bench.folder))
