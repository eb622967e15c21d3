"""What the benchmarks share: cases in processes of their own, in turn; what they took; the JSON that comes out."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.work import CLASSES, MEAN, STD
from benchmarks.workload import make_images
from flcore.config.schema import Config
from flcore.core.cpu_class import processor_class
from flcore.core.errors import ConfigError, RunError
from flcore.core.host import python
from flcore.data.dataset import Dataset, Meta, Split
from flcore.data.dividing import make_partition
from pipelines.runs.layout import RunFiles, read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
_LAUNCHER = Path(__file__).with_name("launch.py")
_NOT_PASSED_ON = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")  # a benchmark is nobody's experiment

GivenOptions = TypeVar("GivenOptions", bound="BenchOptions", contravariant=True)


@dataclass(frozen=True)
class BenchOptions:
    """What every benchmark can be told; each has an ``Options`` that adds its own.

    Attributes:
        rounds: of a run; two at least, since the first one is not counted (see :func:`steady`).
        repetitions: of every case, in turn.
    """

    rounds: int
    repetitions: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name, least in (("rounds", 2), ("repetitions", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"bench: --{name} = {getattr(self, name)}: must be {least} or more")
        for declared in dataclasses.fields(self):
            if getattr(self, declared.name) == ():
                raise ConfigError(f"bench: --{declared.name.replace('_', '-')}: names nothing")


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        seconds: what it took.
        steps: mini-batches trained in them.
        peak_mb: the largest memory of a single process that the case waited for (Ray's workers are none of these).
    """

    seconds: float
    steps: int
    peak_mb: float


Case = Callable[[], Mapping[str, Timing]]
Series = Mapping[str, Sequence[Timing]]


@dataclass(frozen=True)
class Measurement:
    """What a benchmark found.

    Attributes:
        settings: what was the same for all cases.
        series: by case, its timings by repetition.
        ratios: by name, figures of interest.
        rates: by case, further keys of its JSON object, computed from the median of its seconds.
        facts: by case, further keys of its JSON object that seconds have nothing to do with.
    """

    settings: Mapping[str, Any]
    series: Series
    ratios: Mapping[str, float]
    rates: Mapping[str, Callable[[float], Mapping[str, float]]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Bench:
    """A benchmark at work: a folder for its files, and a way to say what it is doing."""

    def __init__(self, name: str, folder: Path) -> None:
        """Work in ``folder``, which may be thrown away afterwards."""
        self.name, self.folder = name, folder

    def say(self, text: str) -> None:
        """Tell of progress, on standard error."""
        print(f"bench {self.name}: {text}", file=sys.stderr, flush=True)

    def alternate(self, cases: Mapping[str, Case], repetitions: int) -> dict[str, list[Timing]]:
        """Each case in turn, again and again: what slows the machine for a while slows all of them."""
        series: dict[str, list[Timing]] = {}
        for repetition in range(1, repetitions + 1):
            for name, case in cases.items():
                self.say(f"repetition {repetition} of {repetitions}: {name}")
                for timed, timing in case().items():
                    series.setdefault(timed, []).append(timing)
        return series

    def environment(self, further: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of a process that finds our packages and has one thread; ``further`` ones win."""
        kept = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(further or {})}

    def execute(self, case: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Execution:
        """Run a command in the benchmark's folder; its processes have one thread each and find our packages.

        Raises:
            RunError: it failed; with the end of what it said.
        """
        report = self.folder / "launched.json"
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(report), *command],
            cwd=self.folder,
            env=self.environment(environment),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise RunError(f"bench {self.name}, {case}: failed with exit code {done.returncode}: {said[-1]}")
        took = json.loads(report.read_text())
        return Execution(took["seconds"], took["peak_mb"], done.stdout)


@dataclass(frozen=True)
class Execution:
    """A command that has run: seconds from start to end, memory of its largest process, what it printed."""

    seconds: float
    peak_mb: float
    output: str

    @property
    def printed(self) -> dict[str, Any]:
        """The JSON object on the last line."""
        return dict(json.loads(self.output.strip().splitlines()[-1]))


@dataclass(frozen=True)
class TrainedRun:
    """A finished training: the process, and by round the seconds of each phase."""

    execution: Execution
    rounds: Sequence[Mapping[str, float]]

    def training(self) -> float:
        """Seconds in which clients were trained, start of workers included."""
        return sum(seconds["train-clients"] for seconds in self.rounds)

    def steady(self, *, evaluation: bool) -> float:
        """Seconds of all rounds (see :func:`steady`); evaluation, which few rounds have, is added as it was."""
        without = [sum(spent for phase, spent in round_.items() if phase != "evaluate") for round_ in self.rounds]
        evaluated = sum(round_.get("evaluate", 0.0) for round_ in self.rounds)
        return steady(without) + (evaluated if evaluation else 0.0)


def steady(rounds: Sequence[float]) -> float:
    """Seconds of all rounds at the pace of those after the first, in which processes start and caches fill."""
    return statistics.fmean(rounds[1:]) * len(rounds)


class Federation:
    """Prepared data, divided, on disk; runs of the library train on them."""

    def __init__(self, bench: Bench, params: Mapping[str, Any], dataset: Dataset) -> None:
        """Write the data, their division as ``params`` asks for, and the parameter file."""
        self._bench, self._params = bench, params
        self._folder = Path(tempfile.mkdtemp(dir=bench.folder))
        config = Config.from_mapping(params)
        self.prepared, self._partition = made(self._folder / "prepared"), made(self._folder / "partition")
        dataset.save(self.prepared)
        clients = config.partition.num_clients
        make_partition(dataset, config.partitioner, num_clients=clients, seed=config.partition_seed).save(
            self._partition
        )
        write_json(self._folder / "params.yaml", params)  # JSON is YAML

        self.out = self._folder / "run"

    def train(
        self, case: str, *assignments: str, environment: Mapping[str, str] | None = None, go_on: bool = False
    ) -> TrainedRun:
        """One training, in a process of its own; ``assignments`` are as for ``--set``.

        It starts anew, or with ``go_on`` from what is in :attr:`out`.
        """
        if not go_on:
            self.clear()
        execution = self._bench.execute(case, self.command(*assignments), environment)
        return TrainedRun(execution, read_rounds(self.out))

    def clear(self) -> None:
        """Throw away what is in :attr:`out`."""
        shutil.rmtree(self.out, ignore_errors=True)

    def command(self, *assignments: str) -> list[str]:
        """What trains into :attr:`out`."""
        places = [str(place) for place in (self._folder / "params.yaml", self.prepared, self._partition, self.out)]
        return python("-m", "benchmarks.training", *places, *assignments)


def read_rounds(run: Path) -> list[Mapping[str, float]]:
    """By round, the seconds of each phase, from a run's own notes."""
    return [record["seconds"] for record in read_json(RunFiles(run).timing)["rounds"]]


def protofl(*arguments: str) -> list[str]:
    """The command line of ``protofl`` with this interpreter."""
    return python("-m", "pipelines.cli", *arguments)


def synthetic_dataset(name: str, shape: tuple[int, int, int], train_size: int, test_size: int) -> Dataset:
    """Random images in the shape of a known dataset, ten classes in turn."""
    images, labels = make_images(train_size + test_size, shape)
    train = Split(images[:train_size].contiguous(), labels[:train_size].contiguous())
    test = Split(images[train_size:].contiguous(), labels[train_size:].contiguous())
    meta = Meta(
        name=name,
        num_classes=CLASSES,
        class_names=tuple(str(number) for number in range(CLASSES)),
        shape=shape,
        mean=(MEAN,) * shape[0],
        std=(STD,) * shape[0],
        licence="none",
        source="random numbers",
        train_size=train_size,
        test_size=test_size,
        preparation={},
        fingerprint="",
    )
    return Dataset.sealed(train, test, meta)


def write_images(dataset: Dataset, folder: Path) -> None:
    """Write grey images as files in ``train/<class>/`` and ``test/<class>/``, and ``index.csv`` with their order."""
    rows = ["file,label,split"]
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        for number, (image, label) in enumerate(zip(split.images[:, 0].numpy(), split.labels.tolist(), strict=True)):
            height, width = image.shape
            file = f"{part}/{label}/{number:06d}.pgm"
            (made((folder / file).parent) / Path(file).name).write_bytes(
                b"P5 %d %d 255\n" % (width, height) + image.tobytes()
            )
            rows.append(f"{file},{label},{part}")
    (folder / "index.csv").write_text("\n".join(rows), encoding="utf-8")


def engine_assignments(given: Sequence[str] | None) -> tuple[str, ...]:
    """What ``--engine`` says, as for ``--set``: ``stack=true`` and ``engine.stack=true`` mean the same."""
    return tuple(text if text.startswith("engine.") else f"engine.{text}" for text in given or ())


def compiled_code_in(folder: Path) -> dict[str, str]:
    """Variables of a process with compiled code and decisions of its own: neither a machine's past nor its future."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def paired(series: Series, case: str, other: str) -> float:
    """The median over repetitions of the seconds of one case over those of another."""
    pairs = zip(series[case], series[other], strict=True)
    return statistics.median(one.seconds / two.seconds for one, two in pairs)


class _Measure(Protocol[GivenOptions]):
    def __call__(self, options: GivenOptions, bench: Bench) -> Measurement: ...


def carry_out(
    name: str, kind: type[GivenOptions], measure: _Measure[GivenOptions], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the options, measure in a temporary folder, and put the findings into the form of the contract.

    Raises:
        ConfigError: an option that this benchmark does not have, or its value.
        RunError: a case failed.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    for option in given:
        if option not in known:
            names = ", ".join(f"--{own.replace('_', '-')}" for own in sorted(known))
            raise ConfigError(f"bench {name}: has no option --{option.replace('_', '-')}; it has {names}")
    options = kind(**given)
    with tempfile.TemporaryDirectory(prefix="protofl-bench-") as folder:
        found = measure(options, Bench(name, Path(folder).resolve()))
    settings = {**found.settings, "repetitions": options.repetitions, "rounds": options.rounds}
    return {
        "name": name,
        "machine": _machine(),
        "settings": settings,
        "cases": [_case(case, timings, found) for case, timings in found.series.items()],
        "ratios": dict(found.ratios),
    }


def _case(name: str, timings: Sequence[Timing], found: Measurement) -> dict[str, Any]:
    seconds = [timing.seconds for timing in timings]
    median = statistics.median(seconds)
    return {
        "case": name,
        "seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "steps_per_second": timings[0].steps / median,
        "peak_mb": max(timing.peak_mb for timing in timings),
        **(found.rates[name](median) if name in found.rates else {}),
        **found.facts.get(name, {}),
    }


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "processor": processor_class(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads_per_process": 1,
    }


def made(folder: Path) -> Path:
    """The folder, which is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
