"""Prepared random images on disk, partitioned among clients, and runs of the library on them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Bench, Execution, Timing, steady
from benchmarks.work import CLASSES, MEAN, SHAPE, STD, Work
from benchmarks.workload import make_images
from flcore.config.schema import Config
from flcore.core.host import python
from flcore.data.dataset import Dataset, Meta, Split
from flcore.data.dividing import make_partition
from pipelines.runs.layout import RunFiles, read_json, write_json


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its process, and the seconds of each phase by round."""

    execution: Execution
    rounds: Sequence[Mapping[str, float]]

    def training(self) -> float:
        """Return the seconds of training clients, including the start of workers."""
        return sum(seconds["train-clients"] for seconds in self.rounds)

    def steady(self, *, evaluation: bool) -> float:
        """Return the seconds of all rounds (see :func:`~benchmarks.measuring.steady`), plus unscaled evaluation."""
        without = [sum(spent for phase, spent in round_.items() if phase != "evaluate") for round_ in self.rounds]
        evaluated = sum(round_.get("evaluate", 0.0) for round_ in self.rounds)
        return steady(without) + (evaluated if evaluation else 0.0)

    def timing(self, steps: int, *, evaluation: bool = False) -> Timing:
        """Return the timing of the rounds."""
        return Timing(self.steady(evaluation=evaluation), steps, self.execution.peak_mb)


def fedavg(work: Work, data: str = "mnist", every: int | None = None) -> dict[str, Any]:
    """Return the parameters of FedAvg on the work, evaluated every ``every`` rounds; None: after the last."""
    return {
        "data": {"name": data},
        "partition": {"name": "iid", "num_clients": work.clients},
        "model": {"name": work.model},
        "method": {"name": "fedavg"},
        "federation": {"rounds": work.rounds, "participation": work.cohort / work.clients},
        "local": {"steps": work.steps, "batch_size": work.batch_size, "lr": work.lr},
        "evaluation": {"every": every or work.rounds},
    }


class Federation:
    """Partitioned data of some work on disk."""

    def __init__(
        self,
        bench: Bench,
        work: Work,
        data: str = "mnist",
        shape: tuple[int, int, int] = SHAPE,
        test_size: int = 1000,
        every: int | None = None,
    ) -> None:
        """Write images, partition and parameters; ``data`` is the data set that they replace."""
        self._bench, self.work = bench, work
        self._folder = Path(tempfile.mkdtemp(dir=bench.folder))
        self.prepared, self._partition = made(self._folder / "prepared"), made(self._folder / "partition")
        self.out = self._folder / "run"
        self.params = fedavg(work, data, every)
        self.dataset = random_dataset(data, shape, work.clients * work.samples, test_size)
        self.dataset.save(self.prepared)
        config = Config.from_mapping(self.params)
        division = make_partition(
            self.dataset, config.partitioner, num_clients=work.clients, seed=config.partition_seed
        )
        division.save(self._partition)
        write_json(self._folder / "params.yaml", self.params)  # JSON is YAML

    def train(self, case: str, *assignments: str, environment: Mapping[str, str] | None = None) -> TrainedRun:
        """Train with the library only, in a process; ``assignments`` are as for ``--set``."""
        shutil.rmtree(self.out, ignore_errors=True)
        places = [str(place) for place in (self._folder / "params.yaml", self.prepared, self._partition, self.out)]
        command = python("-m", "benchmarks.training", *places, *assignments)
        return trained_run(self._bench.execute(case, command, environment), self.out)


def trained_run(execution: Execution, run: Path) -> TrainedRun:
    """Return a finished run with the seconds of its rounds, from its folder."""
    return TrainedRun(execution, [record["seconds"] for record in read_json(RunFiles(run).timing)["rounds"]])


def random_dataset(name: str, shape: tuple[int, int, int], train_size: int, test_size: int) -> Dataset:
    """Return random images in the shape of a known data set, with ten classes in turn."""
    images, labels = make_images(train_size + test_size, shape)
    train, test = (
        Split(*(part.contiguous() for part in parts))
        for parts in zip(*(torch.split(each, [train_size, test_size]) for each in (images, labels)), strict=True)
    )
    meta = Meta(
        name=name,
        num_classes=CLASSES,
        class_names=tuple(map(str, range(CLASSES))),
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
            name = f"{number:06d}.pgm"
            content = b"P5 %d %d 255\n" % (width, height) + image.tobytes()
            (made(folder / part / str(label)) / name).write_bytes(content)
            rows.append(f"{part}/{label}/{name},{label},{part}")
    (folder / "index.csv").write_text("\n".join(rows), encoding="utf-8")


def engine_assignments(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the assignments of ``--engine`` in the form of ``--set``: ``stack=true`` means ``engine.stack=true``."""
    return tuple(text if text.startswith("engine.") else f"engine.{text}" for text in given or ())


def compiled_code_in(folder: Path) -> dict[str, str]:
    """Return environment variables that keep compiled code in a folder, separate from the user's."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def protofl(*arguments: str) -> list[str]:
    """Return the command line of ``protofl`` with this interpreter."""
    return python("-m", "pipelines.cli", *arguments)


def made(folder: Path) -> Path:
    """Create a folder if missing and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
