"""Run cases in processes of their own, in turn; measure them; make the JSON to print."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from flcore.core.cpu_class import processor_class
from flcore.core.errors import RunError
from pipelines.cli.options import Count, names, read_by, whole_number

ROOT = Path(__file__).resolve().parents[1]
_LAUNCHER = Path(__file__).with_name("launch.py")
_NOT_PASSED_ON = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")  # measurements are not reported to servers


Rounds = Annotated[int, read_by(whole_number(2), "N")]
"""Rounds of a run; at least two, since the first does not count (see :func:`steady`)."""

Settings = Annotated[tuple[str, ...], read_by(names, "KEY=VALUE,...")]
"""Keys of the section engine."""


def option(default: Any, about: str) -> Any:
    """Declare an option of a benchmark as a field."""
    return field(default=default, metadata={"help": about})


# Cyclopts reads inherited fields in the module that inherits them: no annotation here may be a mere name.
@Parameter(name="*")
@dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark; each extends them by an ``Options`` of its own."""

    rounds: Rounds = option(6, "rounds of every run")
    repetitions: Count = option(3, "repetitions of every case, in turn")


@dataclass(frozen=True)
class Timing:
    """One measurement: its seconds, the mini-batches trained in them, and the memory of its largest process."""

    seconds: float
    steps: int
    peak_mb: float


Case = Callable[[], Mapping[str, Timing]]
Series = Mapping[str, Sequence[Timing]]


@dataclass(frozen=True)
class Measurement:
    """The results of a benchmark.

    Attributes:
        settings: common to all cases.
        series: by case, its timings by repetition.
        ratios: figures of interest by name.
        facts: by case, further keys of its JSON object.
    """

    settings: Mapping[str, Any]
    series: Series
    ratios: Mapping[str, float]
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """A finished command: seconds from start to end, memory of its largest process, its output."""

    seconds: float
    peak_mb: float
    output: str


class Bench:
    """A folder for the files of a benchmark, processes that run there, and progress on standard error."""

    def __init__(self, name: str, folder: Path) -> None:
        """Work in ``folder``, which the caller may delete afterwards."""
        self.name, self.folder = name, folder

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"bench {self.name}: {text}", file=sys.stderr, flush=True)

    def alternate(self, cases: Mapping[str, Case], repetitions: int) -> dict[str, list[Timing]]:
        """Run all cases in turn, so a temporary slowdown of the machine affects all of them."""
        series: dict[str, list[Timing]] = {}
        for repetition in range(1, repetitions + 1):
            for name, case in cases.items():
                self.say(f"repetition {repetition} of {repetitions}: {name}")
                for timed, timing in case().items():
                    series.setdefault(timed, []).append(timing)
        return series

    def execute(self, case: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Execution:
        """Run a command in the benchmark's folder, with our packages on its path and one thread per process.

        Raises:
            RunError: it failed; the message ends with the last line of its output.
        """
        report = self.folder / "launched.json"
        variables = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(report), *command],
            cwd=self.folder,
            env=variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise RunError(f"bench {self.name}, {case}: failed with exit code {done.returncode}: {output[-1]}")
        took = json.loads(report.read_text())
        return Execution(took["seconds"], took["peak_mb"], done.stdout)


def steady(seconds: Sequence[float]) -> float:
    """Return the seconds of all rounds at the pace after the first round, which fills caches and pools."""
    return statistics.fmean(seconds[1:]) * len(seconds)


def paired(series: Series, case: str, other: str) -> float:
    """Return the median over repetitions of the seconds of one case divided by the other's."""
    pairs = zip(series[case], series[other], strict=True)
    return statistics.median(one.seconds / two.seconds for one, two in pairs)


def result_of(name: str, options: Any, measure: Callable[[Any, Bench], Measurement]) -> dict[str, Any]:
    """Measure in a temporary folder and return the JSON of CONTRACT.

    Raises:
        ConfigError: an option has a wrong value. RunError: a case failed.
    """
    with tempfile.TemporaryDirectory(prefix="protofl-bench-") as folder:
        found = measure(options, Bench(name, Path(folder).resolve()))
    return {
        "name": name,
        "machine": {
            "system": platform.system(),
            "processor": processor_class(),
            "cores": os.cpu_count(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "threads_per_process": 1,
        },
        "settings": {**found.settings, "repetitions": options.repetitions, "rounds": options.rounds},
        "cases": [{**_case(case, timings), **found.facts.get(case, {})} for case, timings in found.series.items()],
        "ratios": dict(found.ratios),
    }


def _case(name: str, timings: Sequence[Timing]) -> dict[str, Any]:
    seconds = [timing.seconds for timing in timings]
    median = statistics.median(seconds)
    return {
        "case": name,
        "seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "steps_per_second": timings[0].steps / median,
        "peak_mb": max(timing.peak_mb for timing in timings),
    }
