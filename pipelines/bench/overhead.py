"""``overhead``: what a run costs beyond its training, and what others take for the same work.

20 clients of 640 samples, 10 per round, 20 steps of 32, 50 rounds of FedAvg with a network of 26,434 parameters, on the
CPU, one thread per process. Cases:

- ``bare``: rounds of a plain PyTorch loop; ``bare_process``: the whole process that holds it.
- ``train``: the library alone (`pipelines/bench/training.py`) from start to exit; ``run``: ``protofl run``, on data
  that are prepared already, from start to exit; ``run_2_workers``: likewise with two worker processes. Each with
  ``..._rounds``, the phases of the rounds, one evaluation included, and ``..._training``, the part of them that trains
  clients.
- ``flower``, ``pfl`` (with ``--peers``): Flower's simulation, which may use two cores, and Apple's pfl, in one process:
  the whole process; ``flower_rounds``, ``pfl_rounds``: the rounds. They evaluate nothing.

All ``rounds`` are those after the first, scaled to all: what has to start first is seen in the processes' times. Part
of that is PyTorch's own: ``torch.optim``, which all use but we, imports its compiler at first use, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.errors import RunError
from pipelines.bench.common import (
    Bench,
    BenchOptions,
    Case,
    Federation,
    Measurement,
    Series,
    Timing,
    TrainedRun,
    made,
    paired,
    protofl,
    read_rounds,
    steady,
    synthetic_dataset,
)
from pipelines.bench.peers.environment import PEERS, copy_scripts, peer_python
from pipelines.bench.workload import SHAPE, Work
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, Cache
from pipelines.runs.layout import write_json

TEST_SIZE = 1000
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # pfl, for one, would take it


@dataclass(frozen=True)
class Options(BenchOptions):
    """``peers``: measure Flower and pfl too, in environments that are made when they are not there."""

    rounds: int = Work.rounds
    peers: bool = False


def measure(options: Options, bench: Bench) -> Measurement:
    """All cases in turn."""
    work = Work(rounds=options.rounds)
    # Before anything is measured: making them may take minutes, or fail.
    pythons = {name: peer_python(name, bench.say) for name in PEERS} if options.peers else {}
    measured = Overhead(bench, work)
    cases: dict[str, Case] = {
        "bare": measured.bare,
        "train": measured.train,
        "run": partial(measured.run, "run", 0),
        "run_2_workers": partial(measured.run, "run_2_workers", 2),
        **{name: partial(measured.peer, name, python) for name, python in pythons.items()},
    }
    series = bench.alternate(cases, options.repetitions)
    settings = {
        **dataclasses.asdict(work),
        "model": "fedgen_cnn",
        "images": "1x28x28 uint8, random",
        "peers": {name: list(PEERS[name].requirements) for name in pythons},
    }
    return Measurement(settings, series, _ratios(series, list(pythons)))


def _ratios(series: Series, peers: list[str]) -> dict[str, float]:
    ratios = {f"{case}/bare": paired(series, case, "bare") for case in series if case != "bare"}
    for case in ("train", "run", "run_2_workers"):
        shares = zip(series[case], series[f"{case}_training"], strict=True)
        ratios[f"{case} beyond its training/{case}"] = statistics.median(
            1 - training.seconds / whole.seconds for whole, training in shares
        )
    for peer in peers:
        for own in ("run", "run_2_workers"):
            ratios[f"{peer}/{own}"] = paired(series, peer, own)
            ratios[f"{peer}_rounds/{own}_rounds"] = paired(series, f"{peer}_rounds", f"{own}_rounds")
    return ratios


class Overhead:
    """The cases, each of which does all of the work once."""

    def __init__(self, bench: Bench, work: Work) -> None:
        """Prepare the data."""
        self._bench, self._work = bench, work
        self._params = _params(work)
        self._dataset = synthetic_dataset("mnist", SHAPE, work.clients * work.samples, TEST_SIZE)
        self._federation = Federation(bench, self._params, self._dataset)
        self._scripts = copy_scripts(bench.folder / "scripts")

    def bare(self) -> dict[str, Timing]:
        """The plain loop."""
        return self._timed("bare", "pipelines.bench.workload", sys.executable, "bare_process", "bare")

    def peer(self, name: str, python: str) -> dict[str, Timing]:
        """Another simulator, with the interpreter of its environment."""
        return self._timed(name, PEERS[name].module, python, name, f"{name}_rounds")

    def _timed(self, case: str, module: str, python: str, process_case: str, rounds_case: str) -> dict[str, Timing]:
        """Run the ``main`` of a module that prints the seconds of its rounds.

        Not with ``-m``: Ray's workers must find the module's functions under the module's own name.
        """
        start = f"from {module} import main; main()"
        places = {"PYTHONPATH": str(self._scripts), "FLWR_HOME": str(self._bench.folder / "flower")}
        command = [python, "-c", start, json.dumps(dataclasses.asdict(self._work))]
        done = self._bench.execute(case, command, _NO_GPU | places)
        printed, steps = done.printed, self._work.total_steps
        if len(printed["rounds"]) != self._work.rounds:
            raise RunError(f"bench overhead, {case}: {len(printed['rounds'])} rounds instead of {self._work.rounds}")
        return {
            rounds_case: Timing(steady(printed["rounds"]), steps, done.peak_mb),
            process_case: Timing(done.seconds, steps, done.peak_mb),
        }

    def train(self) -> dict[str, Timing]:
        """The library alone."""
        return self._parts("train", self._federation.train("train", environment=_NO_GPU))

    def run(self, case: str, workers: int) -> dict[str, Timing]:
        """The whole command, as a user types it, on data that are prepared already.

        The first one of a benchmark also makes MLflow's database, as a user's first run does.
        """
        folder = self._bench.folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        files = made(folder / "files")
        _write_mnist(self._dataset, files)
        data = {**self._params["data"], "root": str(files)}
        params = {**self._params, "data": data, "engine": {"workers": workers}}
        write_json(folder / "params.yaml", params)
        cache = folder / "cache"
        Cache(cache).prepared(Config.from_mapping(params))
        command = protofl("run", "--json", "--params", str(folder / "params.yaml"), "--out", str(folder / "out"))
        done = self._bench.execute(case, command, _NO_GPU | {ENVIRONMENT_VARIABLE: str(cache)})
        return self._parts(case, TrainedRun(done, read_rounds(folder / "out")))

    def _parts(self, case: str, trained: TrainedRun) -> dict[str, Timing]:
        parts: Mapping[str, Callable[[], float]] = {
            case: lambda: trained.execution.seconds,
            f"{case}_rounds": lambda: trained.steady(evaluation=True),
            f"{case}_training": trained.training,
        }
        return {
            name: Timing(seconds(), self._work.total_steps, trained.execution.peak_mb)
            for name, seconds in parts.items()
        }


def _params(work: Work) -> dict[str, Any]:
    return {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": work.clients},
        "model": {"name": "fedgen_cnn"},
        "method": {"name": "fedavg"},
        "federation": {"rounds": work.rounds, "participation": work.cohort / work.clients},
        "local": {"steps": work.steps, "batch_size": work.batch_size, "lr": work.lr},
        "evaluation": {"every": work.rounds},
    }


def _write_mnist(dataset: Dataset, folder: Path) -> None:
    """Images as MNIST's files: a header of big-endian numbers, then bytes."""
    raw = made(folder / "MNIST" / "raw")
    for prefix, split in (("train", dataset.train), ("t10k", dataset.test)):
        images, labels = split.images.squeeze(1).numpy(), split.labels.numpy().astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = np.array([0x800 + array.ndim, *array.shape], dtype=">i4")
            (raw / f"{prefix}-{name}-ubyte").write_bytes(header.tobytes() + np.ascontiguousarray(array).tobytes())
