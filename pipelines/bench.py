"""Benchmarks: whole runs and their parts beside a bare PyTorch loop doing the same steps, in turn on the same machine.

These machines are noisy: cases alternate, figures are medians, and only ratios are worth quoting.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flcore.config import Config
from flcore.data.dataset import Dataset, Meta, Split
from flcore.data.images import normalise
from flcore.data.partition import Partition, make_partition
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import batch_positions
from flcore.engine.executors import InlineExecutor
from flcore.engine.experiment import Experiment
from flcore.engine.rounds import Observers, PlainSteps, run_rounds, sample_cohort, single_thread
from flcore.messages import Weights
from flcore.models import extract_weights, load_weights
from flcore.rng import torch_stream
from pipelines.files import RunFiles, read_json, write_json

CLIENTS, SAMPLES, COHORT, STEPS, BATCH, ROUNDS = 20, 640, 10, 20, 32, 50

_PARAMS: dict[str, Any] = {
    "data": {"name": "mnist"},
    "partition": {"name": "iid", "num_clients": CLIENTS},
    "model": {"name": "fedgen_cnn"},
    "method": {"name": "fedavg"},
    "federation": {"rounds": ROUNDS, "participation": COHORT / CLIENTS},
    "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05},
    "evaluation": {"every": ROUNDS},
}
_SETTINGS = {
    "clients": CLIENTS,
    "samples_per_client": SAMPLES,
    "cohort": COHORT,
    "steps": STEPS,
    "batch_size": BATCH,
    "rounds": ROUNDS,
    "model": "fedgen_cnn",
    "images": "1x28x28 uint8, synthetic (speed does not depend on what they show)",
}


def overhead(repetitions: int) -> dict[str, Any]:
    """What a run costs beyond its training: 20 clients of 640 samples, 10 per round, 20 steps of 32, 50 rounds.

    Cases: ``bare`` is a plain PyTorch loop with ``torch.optim.SGD`` on the same batches and a weighted average;
    ``loop`` our rounds in this process, with messages, checkpoints and one evaluation, ``loop_training`` the part of
    it that trains clients; ``run`` the whole command ``protofl run`` from start to exit, and ``run_training`` likewise.

    Args:
        repetitions: of every case, in turn.
    """
    single_thread()
    with tempfile.TemporaryDirectory() as folder:
        bench = _Overhead(Path(folder))
        cases: dict[str, Callable[[], Mapping[str, float]]] = {
            "bare": bench.bare,
            "loop": bench.loop,
            "run": bench.command,
        }
        bench.bare(rounds=3)  # warm up allocators and kernels
        bench.loop()
        seconds: dict[str, list[float]] = {}
        for _ in range(repetitions):
            for case in cases.values():
                for name, spent in case().items():
                    seconds.setdefault(name, []).append(spent)
    return _result("overhead", _SETTINGS, seconds, ROUNDS * COHORT * STEPS)


class _Overhead:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = Config.from_mapping(_PARAMS)
        dataset = _synthetic_dataset()
        dataset.save(_made(folder / "prepared"))
        division = make_partition(dataset, self.config.partitioner, num_clients=CLIENTS, seed=0)
        division.save(_made(folder / "partition"))
        self.experiment = Experiment(
            self.config, Dataset.load(folder / "prepared"), Partition.load(folder / "partition")
        )
        self._runs = 0

    def bare(self, rounds: int = ROUNDS) -> dict[str, float]:
        """What one would write by hand: load, loop over batches, average."""
        experiment, meta, data = self.experiment, self.experiment.dataset.meta, self.experiment.dataset.train
        images = normalise(data.images, meta.mean, meta.std)
        module = experiment.new_module()
        server = extract_weights(module)
        begin = time.perf_counter()
        for number in range(1, rounds + 1):
            total: dict[str, torch.Tensor] = {}
            for client in sample_cohort(experiment, number):
                load_weights(module, server)
                module.train()
                optimizer = torch.optim.SGD(module.parameters(), lr=self.config.local.lr)
                indices = experiment.trainers[client]
                generator = torch_stream(0, "batches", number, client, 0)
                for positions in batch_positions(len(indices), BATCH, 1, STEPS, generator):
                    chosen = indices[positions]
                    optimizer.zero_grad()
                    F.cross_entropy(module(images[chosen])[1], data.labels[chosen]).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                for name, tensor in module.state_dict().items():
                    share = tensor.to(torch.float64) / COHORT
                    total[name] = total[name] + share if name in total else share
            server = Weights(
                {n: total[n].float() for n in server.params},
                {n: total[n].to(b.dtype) for n, b in server.buffers.items()},
            )
        return {"bare": time.perf_counter() - begin}

    def loop(self) -> dict[str, float]:
        """The engine in this process: the same batches, with messages, checkpoints and one evaluation."""
        self._runs += 1
        checkpoint = Checkpoint(self.folder / f"loop-{self._runs}")
        begin = time.perf_counter()
        run_rounds(self.experiment, checkpoint, InlineExecutor(self.experiment, checkpoint), PlainSteps(), Observers())
        whole = time.perf_counter() - begin
        training = [record["seconds"]["train-clients"] for record in checkpoint.records("timing.jsonl")]
        return {"loop": whole, "loop_training": sum(training)}

    def command(self) -> dict[str, float]:
        """The whole command, as a user types it, on data that are prepared already."""
        self._runs += 1
        out = self.folder / f"run-{self._runs}"
        self.experiment.dataset.save(_made(out / "prepared"))
        write_json(out / "prepared.request.json", self.config.to_mapping()["data"])
        write_json(self.folder / "params.yaml", _PARAMS)
        command = [sys.executable, "-m", "pipelines.cli", "run", "--json", "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        begin = time.perf_counter()
        subprocess.run(command, cwd=self.folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - begin
        return {"run": whole, "run_training": read_json(RunFiles(out).timing)["seconds"]["train-clients"]}


def _result(name: str, settings: Mapping[str, Any], seconds: Mapping[str, list[float]], steps: int) -> dict[str, Any]:
    """The JSON of a benchmark (CONTRACT, ``protofl bench``)."""
    cases = [
        {
            "case": case,
            "seconds": {"median": statistics.median(times), "min": min(times), "max": max(times)},
            "steps_per_second": steps / statistics.median(times),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        for case, times in seconds.items()
    ]
    # Paired by repetition: what slows the machine for a while slows both.
    ratios = {
        f"{case}/bare": statistics.median(ours / bare for ours, bare in zip(times, seconds["bare"], strict=True))
        for case, times in seconds.items()
        if case != "bare"
    }
    extra = [whole - part for whole, part in zip(seconds["run"], seconds["run_training"], strict=True)]
    ratios["run beyond its training/run"] = statistics.median(
        beyond / whole for beyond, whole in zip(extra, seconds["run"], strict=True)
    )
    return {"name": name, "machine": _machine(), "settings": dict(settings), "cases": cases, "ratios": ratios}


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads_per_process": torch.get_num_threads(),
    }


def _synthetic_dataset() -> Dataset:
    """Random images with MNIST's shape: as many as the setting needs, and 1,000 for the one evaluation."""
    generator = torch_stream(0, "benchmark images")

    def split(size: int) -> Split:
        images = torch.randint(0, 256, (size, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return Split(images, torch.arange(size) % 10)

    train, test = split(CLIENTS * SAMPLES), split(1000)
    meta = Meta(
        name="mnist",
        num_classes=10,
        class_names=tuple(str(digit) for digit in range(10)),
        shape=(1, 28, 28),
        mean=(0.5,),
        std=(0.3,),
        licence="none",
        source="random numbers",
        train_size=len(train),
        test_size=len(test),
        preparation={},
        fingerprint="synthetic",
    )
    return Dataset(train, test, meta)


def describe(result: Mapping[str, Any]) -> str:
    """A result for reading."""
    machine = result["machine"]
    lines = [f"{result['name']}: {machine['cores']} cores, torch {machine['torch']}, {machine['cpu_capability']}"]
    for case in result["cases"]:
        seconds = case["seconds"]
        lines.append(
            f"  {case['case']:14s} {seconds['median']:8.2f} s  ({seconds['min']:.2f} to {seconds['max']:.2f})"
            f"  {case['steps_per_second']:8.0f} steps/s"
        )
    lines += [f"  {name:32s} {ratio:6.3f}" for name, ratio in result["ratios"].items()]
    return "\n".join(lines)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
