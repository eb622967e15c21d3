"""``comparison``: how many runs an hour ``protofl compare`` carries out, from start to exit, with 1, 2, ... cores.

8 methods x 3 seeds on images of MNIST's shape (12,800 for training, 1,000 for tests, random; or MNIST itself, with
``--data-root``) in 10 clients, each 20 steps of 32 a round; every round is scored, all is logged to MLflow, tables,
figures and pages are written, as a user's comparison does. Data and cache are new each time: nothing is found again.
A case sees its cores alone, and so does everything that it starts. A small comparison goes before, so that MLflow's
database is there and files have been read. With ``--engine`` it is one seed of every method, all rounds, so that what
can be compiled is compiled once, in a folder of the benchmark's own, and found by all that is measured; the line
"first" is what that took.

With ``--baseline DIR``, the sources of another version are measured in turn with the same interpreter, parameters and
data: the whole ``compare`` command of that version, by its own code.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Bench,
    BenchOptions,
    Case,
    Measurement,
    Timing,
    compiled_code_in,
    engine_assignments,
    made,
    paired,
    protofl,
    synthetic_dataset,
    write_images,
)
from benchmarks.workload import SHAPE
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.data.sources.mnist import Mnist
from pipelines.config.params import override
from pipelines.runs.cache import ENVIRONMENT_VARIABLE
from pipelines.runs.layout import write_json

METHODS = ("local", "fedavg", "fedproto", "fedpg", "fedcspc", "fedmlp", "fedpa", "gfpl")
TRAIN_SIZE, TEST_SIZE = 12_800, 1_000
CLIENTS, STEPS, BATCH = 10, 20, 32
_CORES = (1, 2)
_ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Options(BenchOptions):
    """What can be told beside rounds and repetitions.

    Attributes:
        methods: to compare. seeds: of each.
        cores: numbers of cores; None: 1 and 2, as far as there are so many.
        data_root: folder or zip with MNIST's files; None: random images.
        engine: assignments such as ``engine.stack=true`` (or ``stack=true``), for this version alone.
        baseline: folder of the sources of another version.
    """

    rounds: int = 10
    repetitions: int = 1
    methods: tuple[str, ...] = METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    cores: tuple[int, ...] | None = None
    data_root: Path | None = None
    engine: tuple[str, ...] | None = None
    baseline: Path | None = None


def measure(options: Options, bench: Bench) -> Measurement:
    """All numbers of cores in turn, of this version and of the other.

    Raises:
        ConfigError: there are not so many cores, or no such folder, or what is compared cannot be.
    """
    assignments = engine_assignments(options.engine)
    params = _params(options, bench.folder / "files")
    Config.from_mapping(override(params, assignments))  # refused before anything is measured
    usable = one_cpu_per_core()
    cores = options.cores or tuple(number for number in _CORES if number <= len(usable))
    for number in cores:
        if not 1 <= number <= len(usable):
            raise ConfigError(f"bench: --cores {number}: this process may use 1 to {len(usable)}")
    if options.baseline is not None and not (options.baseline / "pipelines").is_dir():
        raise ConfigError(f"bench: --baseline {options.baseline}: no sources there; expected a folder with pipelines/")
    root = options.data_root
    if root is not None and not (root.is_file() or all(place.is_dir() for place in Mnist().places(root))):
        raise ConfigError(f"bench: --data-root {root}: no such file, and no folder with MNIST/raw/ in it")
    if root is None:
        write_images(synthetic_dataset("mnist", SHAPE, TRAIN_SIZE, TEST_SIZE), bench.folder / "files")
    write_json(bench.folder / "params.yaml", params)  # JSON is YAML
    given_here = [word for assignment in assignments for word in ("--set", assignment)]
    versions: dict[str, tuple[Path | None, list[str]]] = {"": (None, given_here)}
    if options.baseline is not None:
        versions["baseline, "] = (options.baseline.resolve(), [])
    runs = len(options.methods) * len(options.seeds)
    steps = runs * options.rounds * CLIENTS * STEPS
    cases: dict[str, Case] = {}
    first: dict[str, list[Timing]] = {}
    for version, (sources, given) in versions.items():
        before = options.methods if given else options.methods[:1]
        # Losses of later rounds are other programs (with prototypes, with generated images): one round would leave
        # their compiling to what is measured.
        rounds = options.rounds if given else 1
        small = [f"--methods={','.join(before)}", f"--seeds={options.seeds[0]}", f"--set=federation.rounds={rounds}"]
        bench.say(f"{version}a small comparison first")
        took = _compare(bench, "first", usable, sources, [*given, *small], len(before) * rounds * CLIENTS * STEPS)
        if given:
            first = {"first": [took["first"]]}
        for number in cores:
            name = f"{version}{_cores(number)}"
            cases[name] = partial(_compare, bench, name, usable[:number], sources, given, steps)
    series = bench.alternate(cases, options.repetitions) | first
    settings = {
        **{"methods": list(options.methods), "seeds": list(options.seeds), "runs": runs},
        **{"clients": CLIENTS, "steps": STEPS, "batch_size": BATCH, "model": params["model"]["name"]},
        "images": "MNIST" if options.data_root else f"1x28x28 uint8, random, {TRAIN_SIZE} and {TEST_SIZE}",
        "engine": list(assignments),
    }
    ratios = {
        f"runs per hour, {_cores(number)}/{_cores(cores[0])}": paired(series, _cores(cores[0]), _cores(number))
        for number in cores[1:]
    }
    for number in cores if options.baseline else ():
        name = _cores(number)
        ratios[f"runs per hour, {name}/baseline, {name}"] = paired(series, f"baseline, {name}", name)
    rates = {case: partial(_runs_per_hour, runs) for case in cases}
    return Measurement(settings, series, ratios, rates)


def _cores(number: int) -> str:
    return f"{number} core" + ("s" if number > 1 else "")


def _runs_per_hour(runs: int, seconds: float) -> dict[str, float]:
    return {"runs_per_hour": 3600 * runs / seconds}


def _compare(
    bench: Bench, case: str, cpus: Iterable[int], sources: Path | None, arguments: Iterable[str], steps: int
) -> dict[str, Timing]:
    """The whole command with a new cache, in a version's folder, where its store is."""
    folder = bench.folder / ("this" if sources is None else "other")
    for old in ("out", "cache"):
        shutil.rmtree(folder / old, ignore_errors=True)
    pinned = [sys.executable, "-I", "-S", "-c", _ON_CORES, ",".join(map(str, cpus))]
    command = protofl("compare", "--params", str(bench.folder / "params.yaml"), "--out", str(folder / "out"))
    environment = {"CUDA_VISIBLE_DEVICES": "", ENVIRONMENT_VARIABLE: str(folder / "cache")}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # where it is set, every process compiles all that it imports
    environment |= compiled_code_in(bench.folder / "compiled")
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    done = Bench(bench.name, made(folder)).execute(case, [*pinned, *command, *arguments], environment)
    return {case: Timing(done.seconds, steps, done.peak_mb)}


def one_cpu_per_core() -> list[int]:
    """A logical processor of each physical core that this process may use; all where the machine does not say.

    Raises:
        ConfigError: this system cannot keep a process to some of the cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("bench comparison: this system cannot keep a process to some of the cores; Linux can")
    usable = sorted(os.sched_getaffinity(0))
    cores: dict[Any, int] = {}
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            core = tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
        except OSError:
            return usable
        cores.setdefault(core, cpu)
    return list(cores.values())


def _params(options: Options, files: Path) -> Mapping[str, Any]:
    """Parameters that every version understands; per method, those of the default comparison."""
    settings: dict[str, dict[str, Any]] = {
        "fedpg": {
            **{"method.gen_steps": 100, "method.gen_batch": 32, "method.gen_lr": 0.001, "method.virtual_batch": 32},
        },
        "fedcspc": {
            "model.name": "fedcspc_cnn",
            "model.projection_dim": 32,
            "method.cal_epochs": 30,
            "method.n_aug": 1,
        },
        "gfpl": {"method.first_exchange": 3, "method.interval": 3},
    }
    return {
        "data": {"name": "mnist", "root": str(options.data_root.resolve())}
        if options.data_root
        else {"name": "imagefolder", "root": str(files)},
        "partition": {"name": "dirichlet", "num_clients": CLIENTS, "alpha": 0.3},
        "model": {"name": "fedgen_cnn"},
        "federation": {"rounds": options.rounds},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.05, "momentum": 0.5},
        "compare": {
            "methods": list(options.methods),
            "seeds": list(options.seeds),
            "baseline": "fedavg" if "fedavg" in options.methods else options.methods[0],
            "settings": {method: own for method, own in settings.items() if method in options.methods},
        },
    }
