"""The cost of a run beyond its training, and of other simulators for the same work.

20 clients of 640 samples, 10 a round, 20 steps of 32, 50 rounds of FedAvg with a network of 26,434 parameters, on the
CPU, one thread per process. Cases:

bare           rounds of a plain PyTorch loop; bare_process: its process
train          the library alone, from start to exit
run            `protofl run` on prepared data, from start to exit; run_1_process: without worker processes
run_engine     likewise with the assignments of --engine
..._first      a run before all others, without compiled code: of each case that may compile, by --engine or because the
               work has the steps from which engine.compile: auto compiles
a peer         with --peers: its process, in an environment of its own; peers evaluate nothing

Of train and run, ..._rounds are the rounds with one evaluation, ..._training is the part that trains clients; of peers,
..._rounds are the rounds. Rounds are those after the first, scaled to all. `bits` says whether the final weights are
the same when a case is repeated, and with one worker or core instead of two.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from safetensors.numpy import load_file

from benchmarks.command import report
from benchmarks.federation import (
    Federation,
    TrainedRun,
    compiled_code_in,
    engine_assignments,
    fedavg,
    made,
    protofl,
    trained_run,
    write_images,
)
from benchmarks.measuring import (
    Bench,
    BenchOptions,
    Case,
    Measurement,
    Rounds,
    Series,
    Settings,
    Timing,
    option,
    paired,
)
from benchmarks.peers.roster import PEERS, Peers, start
from benchmarks.work import MEAN, STD, Work, digest
from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.experiment.engine_rule import MANY_STEPS
from pipelines.cli.options import Common, Json, Names
from pipelines.plan.params import override
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, Cache
from pipelines.runs.layout import RunFiles, write_json

OWN: Mapping[str, int | None] = {"run": None, "run_1_process": 0}
"""Number of worker processes by case of the whole command; None: as by default."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@Parameter(name="*")
@dataclass(frozen=True)
class Options(BenchOptions):
    """Peers, and settings of the engine."""

    rounds: Rounds = option(Work.rounds, "rounds of every run")
    peers: bool = option(False, "also other simulators, in environments that are made in the cache folder")
    only_peers: Names | None = option(None, "some of them, by name")
    engine: Settings | None = option(None, "also cases with these keys of the section engine, such as stack=true")
    cases: Names | None = option(
        None, "some of our commands, such as run_1_process, and the bare loop; bits are not compared"
    )

    def __post_init__(self) -> None:
        for case in self.cases or ():
            if case not in self.own:
                raise ConfigError(f"bench overhead: --cases {case}: expected some of {', '.join(self.own)}")
        if any(assignment.startswith("engine.workers=") for assignment in self.assignments):
            raise ConfigError("bench overhead: --engine workers: each case has its own; leave it out")
        Config.from_mapping(override(fedavg(Work()), self.assignments))

    @property
    def assignments(self) -> tuple[str, ...]:
        """The assignments of ``engine``, with full keys."""
        return engine_assignments(self.engine)

    @property
    def own(self) -> dict[str, int | None]:
        """Our whole commands by number of workers, those with ``engine`` last."""
        return {**OWN} | ({f"{case}_engine": workers for case, workers in OWN.items()} if self.assignments else {})

    @property
    def named_peers(self) -> tuple[str, ...]:
        """Peers to measure."""
        return self.only_peers or (tuple(PEERS) if self.peers else ())


def bench(*, options: Options = Options(), as_json: Json = False, common: Common = Common()) -> int:
    """Print the measurements of this benchmark."""
    return report("overhead", options, measure, as_json=as_json)


def measure(options: Options, bench: Bench) -> Measurement:
    """Measure all cases in turn, then run multi-core peers on one core."""
    work = Work(rounds=options.rounds)
    peers = Peers(options.named_peers, bench)
    measured = Overhead(bench, work)
    own = {case: workers for case, workers in options.own.items() if options.cases is None or case in options.cases}
    engine = {case: options.assignments if case.endswith("_engine") else () for case in own}
    first: dict[str, list[Timing]] = {}
    for case in (case for case in own if engine[case] or work.total_steps >= MANY_STEPS):
        bench.say(f"{case}_first, not one of the repetitions")
        first[f"{case}_first"] = [measured.run(f"{case}_first", own[case], engine[case])[f"{case}_first"]]
    cases: dict[str, Case] = {
        "bare": measured.bare,
        **({"train": measured.train} if options.cases is None else {}),
        **{case: partial(measured.run, case, workers, engine[case]) for case, workers in own.items()},
        **{name: partial(peers.attempt, name, work, name, f"{name}_rounds") for name in peers.measured},
    }
    series = bench.alternate(cases, options.repetitions)
    facts = {}
    if options.cases is None:
        facts = measured.bits() | peers_bits(peers, work)
    left_out = {name for name in options.named_peers if name not in peers.measured}
    series = {case: timings for case, timings in series.items() if case.removesuffix("_rounds") not in left_out}
    settings = {**dataclasses.asdict(work), "images": "1x28x28 uint8, random", "engine": list(options.assignments)}
    ratios = _ratios(series, list(own), peers.measured)
    return Measurement(settings | {"peers": peers.settings()}, {**series, **first}, ratios, facts)


def _ratios(series: Series, own: Sequence[str], peers: Sequence[str]) -> dict[str, float]:
    ratios = {f"{case}/bare": paired(series, case, "bare") for case in series if case != "bare"}
    for case in (case for case in ("train", *own) if case in series):
        shares = zip(series[case], series[f"{case}_training"], strict=True)
        ratios[f"{case} beyond its training/{case}"] = statistics.median(
            1 - training.seconds / whole.seconds for whole, training in shares
        )
    for peer in peers:
        for case in own:
            ratios[f"{peer}/{case}"] = paired(series, peer, case)
            ratios[f"{peer}_rounds/{case}_rounds"] = paired(series, f"{peer}_rounds", f"{case}_rounds")
    return ratios


class Overhead:
    """Our cases; each does the whole work once."""

    def __init__(self, bench: Bench, work: Work) -> None:
        self._bench, self._work = bench, work
        self._federation = Federation(bench, work)
        self.digests: dict[str, list[str]] = {}
        """Digests of the final weights of every repetition, by case."""

    def bare(self) -> dict[str, Timing]:
        """Time the plain loop."""
        done = start(self._bench, "bare", "workload", self._work, variables=_NO_GPU)
        self.digests.setdefault("bare", []).append(done.digest)
        return done.timings(self._work, "bare_process", "bare")

    def train(self) -> dict[str, Timing]:
        """Time training with the library only."""
        trained = self._federation.train("train", environment=_NO_GPU | self._compiled("run"))
        return self._parts("train", trained, self._federation.out)

    def _compiled(self, case: str) -> dict[str, str]:
        return compiled_code_in(self._bench.folder / "compiled" / case.removesuffix("_first"))

    def run(self, case: str, workers: int | None, engine: Sequence[str] = ()) -> dict[str, Timing]:
        """Time the whole command on prepared data; ``engine`` is as for ``--set``.

        The first call of a benchmark also creates MLflow's database, as a user's first run does.
        """
        folder = self._bench.folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        write_images(self._federation.dataset, made(folder / "files"))
        data = {"name": "imagefolder", "layout": "csv", "mean": MEAN, "std": STD, "root": str(folder / "files")}
        workers_of_case = {} if workers is None else {"engine": {"workers": workers}}
        params = override({**self._federation.params, "data": data, **workers_of_case}, engine)
        write_json(folder / "params.yaml", params)
        Cache(folder / "cache").prepared(Config.from_mapping(params))
        environment = _NO_GPU | {ENVIRONMENT_VARIABLE: str(folder / "cache")} | self._compiled(case)
        command = protofl("run", "--json", "--params", str(folder / "params.yaml"), "--out", str(folder / "out"))
        done = self._bench.execute(case, command, environment)
        return self._parts(case, trained_run(done, folder / "out"), folder / "out")

    def bits(self) -> dict[str, dict[str, Any]]:
        """Return the facts of our cases, which compare runs with one and with two processes."""
        facts = {"bare": _bits(self.digests["bare"], "one process")}
        for engine in ("", "_engine"):
            runs = [f"{case}{engine}" for case in OWN if f"{case}{engine}" in self.digests]
            workers = compared([self.digests[case][0] for case in runs])
            facts |= {case: _bits(self.digests[case], workers) for case in (*runs, *([] if engine else ["train"]))}
        return facts

    def _parts(self, case: str, trained: TrainedRun, run: Path) -> dict[str, Timing]:
        self.digests.setdefault(case, []).append(digest(load_file(RunFiles(run).model)))
        whole, peak = trained.execution.seconds, trained.execution.peak_mb
        parts = {"": whole, "_rounds": trained.steady(evaluation=True), "_training": trained.training()}
        return {f"{case}{part}": Timing(seconds, self._work.total_steps, peak) for part, seconds in parts.items()}


def peers_bits(peers: Peers, work: Work) -> dict[str, dict[str, Any]]:
    """Return the facts of the measured peers; peers on several cores run once more on one core."""
    facts = {}
    for name in peers.measured:
        repeated: list[str] = peers.digests[name]
        workers: str | None = "one process"
        if PEERS[name].several:
            one_core = f"{name}, 1 core"
            peers.attempt(name, dataclasses.replace(work, cores=1), one_core, one_core)
            workers = compared([repeated[0], *peers.digests.get(one_core, ())])
        facts[name] = _bits(repeated, workers)
    return facts


def compared(digests: Sequence[str]) -> str | None:
    """Return whether all digests are the same; None for fewer than two."""
    if len(digests) < 2:
        return None
    return "same" if len(set(digests)) == 1 else "differ"


def _bits(repetitions: Sequence[str], workers: str | None) -> dict[str, Any]:
    return {"bits": {"repeated": compared(repetitions), "workers": workers}}
