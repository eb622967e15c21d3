"""Runs per hour of `protofl compare`, from start to exit, with 1, 2, ... cores.

8 methods x 3 seeds on random images of MNIST's shape (12,800 for training, 1,000 for tests) in 10 clients, each 20
steps of 32 a round; every round is scored, all is logged to MLflow, and tables, figures and pages are written. Data and
cache are new each time. A case and its processes see its cores alone. A small comparison comes first, so that MLflow's
database exists and files have been read; with --engine it has one seed of every method and all rounds, so that all is
compiled, and the line "first" is what that took. With --baseline, the sources of another version are measured in turn,
with the same interpreter, parameters and data.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from benchmarks.command import report
from benchmarks.federation import compiled_code_in, engine_assignments, made, protofl, random_dataset, write_images
from benchmarks.measuring import Bench, BenchOptions, Case, Measurement, Rounds, Settings, Timing, option, paired
from benchmarks.work import SHAPE
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from pipelines.cli.options import Common, Count, Folder, Json, Names, Numbers
from pipelines.plan.params import override
from pipelines.runs.cache import ENVIRONMENT_VARIABLE
from pipelines.runs.layout import write_json

METHODS = ("local", "fedavg", "fedproto", "fedpg", "fedcspc", "fedmlp", "fedpa", "gfpl")
TRAIN_SIZE, TEST_SIZE = 12_800, 1_000
CLIENTS, STEPS, BATCH = 10, 20, 32
_ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)


@Parameter(name="*")
@dataclass(frozen=True)
class Options(BenchOptions):
    """Runs of the comparison, cores, and another version."""

    rounds: Rounds = option(10, "rounds of every run")
    repetitions: Count = option(1, "repetitions of every case, in turn")
    methods: Names = option(METHODS, "methods to compare")
    seeds: Numbers = option((0, 1, 2), "seeds of each method")
    cores: Numbers | None = option(None, "numbers of cores (default: 1 and 2)")
    engine: Settings | None = option(None, "keys of the section engine, such as stack=true, for this version alone")
    baseline: Folder | None = option(None, "sources of another version")


def bench(*, options: Options = Options(), as_json: Json = False, common: Common = Common()) -> int:
    """Print the measurements of this benchmark."""
    return report("comparison", options, measure, as_json=as_json)


def measure(options: Options, bench: Bench) -> Measurement:
    """Measure all numbers of cores in turn, with this version and the other.

    Raises:
        ConfigError: a wrong number of cores, a missing folder, or an invalid comparison.
    """
    assignments = engine_assignments(options.engine)
    params = comparison_params(options, bench.folder / "files")
    Config.from_mapping(override(params, assignments))  # checked before any measurement
    usable = one_cpu_per_core()
    cores = options.cores or tuple(number for number in (1, 2) if number <= len(usable))
    for number in cores:
        if not 1 <= number <= len(usable):
            raise ConfigError(f"bench: --cores {number}: this process may use 1 to {len(usable)}")
    baseline = options.baseline
    if baseline is not None and not (baseline / "pipelines").is_dir():
        raise ConfigError(f"bench: --baseline {baseline}: no sources there; expected a folder with pipelines/")
    write_images(random_dataset("mnist", SHAPE, TRAIN_SIZE, TEST_SIZE), bench.folder / "files")
    write_json(bench.folder / "params.yaml", params)  # JSON is YAML
    here = [word for assignment in assignments for word in ("--set", assignment)]
    versions: dict[str, tuple[Path | None, list[str]]] = {"": (None, here)}
    if baseline is not None:
        versions["baseline, "] = (baseline.resolve(), [])
    runs = len(options.methods) * len(options.seeds)
    steps_of_a_round = CLIENTS * STEPS
    cases: dict[str, Case] = {}
    first: dict[str, list[Timing]] = {}
    for version, (sources, given) in versions.items():
        before = options.methods if given else options.methods[:1]
        # Losses of later rounds are other programs (prototypes, generated images): compile all of them first.
        rounds = options.rounds if given else 1
        small = [f"--methods={','.join(before)}", f"--seeds={options.seeds[0]}", f"--set=federation.rounds={rounds}"]
        bench.say(f"{version}a small comparison first")
        took = _compare(bench, "first", usable, sources, [*given, *small], len(before) * rounds * steps_of_a_round)
        if given:
            first = {"first": [took["first"]]}
        for number in cores:
            name, steps = f"{version}{_cores(number)}", runs * options.rounds * steps_of_a_round
            cases[name] = partial(_compare, bench, name, usable[:number], sources, given, steps)
    series = bench.alternate(cases, options.repetitions)
    one, *more = map(_cores, cores)
    ratios = {f"runs per hour, {name}/{one}": paired(series, one, name) for name in more}
    for name in (one, *more) if baseline else ():
        ratios[f"runs per hour, {name}/baseline, {name}"] = paired(series, f"baseline, {name}", name)
    facts = {
        case: {"runs_per_hour": 3600 * runs / statistics.median(timing.seconds for timing in timings)}
        for case, timings in series.items()
    }
    settings = {
        **{"methods": list(options.methods), "seeds": list(options.seeds), "runs": runs},
        **{"clients": CLIENTS, "steps": STEPS, "batch_size": BATCH, "model": params["model"]["name"]},
        "images": f"1x28x28 uint8, random, {TRAIN_SIZE} and {TEST_SIZE}",
        "engine": list(assignments),
    }
    return Measurement(settings, series | first, ratios, facts)


def _cores(number: int) -> str:
    return f"{number} core" + ("s" if number > 1 else "")


def _compare(
    bench: Bench, case: str, cpus: Sequence[int], sources: Path | None, arguments: Sequence[str], steps: int
) -> dict[str, Timing]:
    """Time the whole command with a new cache, in the folder of a version, which keeps its MLflow store."""
    folder = bench.folder / ("this" if sources is None else "other")
    for old in ("out", "cache"):
        shutil.rmtree(folder / old, ignore_errors=True)
    pinned = [sys.executable, "-I", "-S", "-c", _ON_CORES, ",".join(map(str, cpus))]
    command = protofl("compare", "--params", str(bench.folder / "params.yaml"), "--out", str(folder / "out"))
    environment = {"CUDA_VISIBLE_DEVICES": "", ENVIRONMENT_VARIABLE: str(folder / "cache")}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # if set, every process compiles all its imports
    environment |= compiled_code_in(bench.folder / "compiled")
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    done = Bench(bench.name, made(folder)).execute(case, [*pinned, *command, *arguments], environment)
    return {case: Timing(done.seconds, steps, done.peak_mb)}


def one_cpu_per_core() -> list[int]:
    """Return a logical processor of each physical core that this process may use; all if the topology is unknown.

    Raises:
        ConfigError: this system cannot pin a process to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("bench comparison: this system cannot pin a process to cores; Linux can")
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


def comparison_params(options: Options, files: Path) -> Mapping[str, Any]:
    """Return parameters that every version understands, with the default comparison's settings of each method."""
    settings: dict[str, dict[str, Any]] = {
        "fedpg": {"method.gen_steps": 100, "method.gen_batch": 32, "method.gen_lr": 0.001, "method.virtual_batch": 32},
        "fedcspc": {
            **{"model.name": "fedcspc_cnn", "model.projection_dim": 32},
            **{"method.cal_epochs": 30, "method.n_aug": 1},
        },
        "gfpl": {"method.first_exchange": 3, "method.interval": 3},
    }
    return {
        "data": {"name": "imagefolder", "root": str(files)},
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
