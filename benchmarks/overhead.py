"""``overhead``: what a run costs beyond its training, and what others take for the same work.

20 clients of 640 samples, 10 per round, 20 steps of 32, 50 rounds of FedAvg with a network of 26,434 parameters, on the
CPU, one thread per process. Cases:

- ``bare``: rounds of a plain PyTorch loop; ``bare_process``: the whole process that holds it.
- ``train``: the library alone (`benchmarks/training.py`) from start to exit; ``run``: ``protofl run``, on data
  that are prepared already, from start to exit; ``run_2_workers``: likewise with two worker processes. Each with
  ``..._rounds``, the phases of the rounds, one evaluation included, and ``..._training``, the part of them that trains
  clients.
- ``run_engine``, ``run_2_workers_engine`` (with ``--engine``): the same two with those assignments. One run of each
  comes before all that is measured, with an empty cache of compiled code: ``..._first`` is what it took.
- With ``--peers``, the others (`benchmarks/peers/environment.py`), each in an environment of its own: the whole
  process, and ``..._rounds``. They evaluate nothing. Flower and BlazeFL may train two clients at once, the rest train
  in one process. One that cannot be had or fails stops nobody else: the settings say of each how it went.

``bits`` of a case: whether the final weights are the same when it is repeated (over the repetitions, so with two or
more), with one worker or core instead of two (one more run of those that have any; ours: ``run`` beside
``run_2_workers``), and after SIGKILL and the same command again (ours: `benchmarks/training.py`, which stands for
all of ours with its engine; the others' scripts keep nothing that they could go on from). Each is tried once.

All ``rounds`` are those after the first, scaled to all: what has to start first is seen in the processes' times. Part
of that is PyTorch's own: ``torch.optim``, which all use but we, imports its compiler at first use, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bits import ONE_PROCESS, STARTS_OVER, Bits, Verdict, compared, kill_and_start_again, run_digest
from benchmarks.common import (
    Bench,
    BenchOptions,
    Case,
    Federation,
    Measurement,
    Series,
    Timing,
    TrainedRun,
    compiled_code_in,
    engine_assignments,
    made,
    paired,
    protofl,
    read_rounds,
    synthetic_dataset,
    write_images,
)
from benchmarks.peers.environment import PEERS
from benchmarks.peers.process import Done, Processes
from benchmarks.peers.roster import Roster
from benchmarks.work import MEAN, SHAPE, STD, Work
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, RunError
from pipelines.config.params import override
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, Cache
from pipelines.runs.layout import write_json

TEST_SIZE = 1000
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Options(BenchOptions):
    """What ``overhead`` can be told.

    Attributes:
        peers: measure the other simulators too, in environments that are made when they are not there.
        only_peers: some of them, by name.
        engine: assignments such as ``engine.stack=true`` (or ``stack=true``), for our cases beside those without.
        cases: some of our whole commands, beside the bare loop alone and without a look at bits; None: all.
    """

    rounds: int = Work.rounds
    peers: bool = False
    only_peers: tuple[str, ...] | None = None
    engine: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse assignments that the engine refuses, and cases that there are not."""
        super().__post_init__()
        for case in self.cases or ():
            if case not in self.own:
                known = ", ".join(self.own)
                raise ConfigError(
                    f"bench overhead: --cases {case}: expected some of {known}; with --engine also its own"
                )
        if any(assignment.startswith("engine.workers=") for assignment in self.assignments):
            raise ConfigError("bench overhead: --engine workers: the cases have their own; leave it out")
        Config.from_mapping(override(_params(Work()), self.assignments))

    @property
    def assignments(self) -> tuple[str, ...]:
        """What ``engine`` says, with full keys; none where it says nothing."""
        return engine_assignments(self.engine)

    @property
    def own(self) -> dict[str, int]:
        """Our whole commands, by number of workers: all, those with ``engine`` behind the others."""
        engine = {f"{case}_engine": workers for case, workers in OWN.items()} if self.assignments else {}
        return {**OWN, **engine}

    @property
    def named_peers(self) -> list[str]:
        return list(self.only_peers or (PEERS if self.peers else ()))


OWN = {"run": 0, "run_2_workers": 2}
"""The whole command, by number of workers."""


def measure(options: Options, bench: Bench) -> Measurement:
    """All cases in turn, then what is tried once."""
    work = Work(rounds=options.rounds)
    # Before anything is measured: making their environments may take minutes.
    roster = Roster(options.named_peers, bench.say)
    measured = Overhead(bench, work)
    own = {case: workers for case, workers in options.own.items() if options.cases is None or case in options.cases}
    engine = {case: workers for case, workers in own.items() if case not in OWN}
    first = {f"{case}_first": [measured.first(case, workers, options.assignments)] for case, workers in engine.items()}
    cases: dict[str, Case] = {
        "bare": measured.bare,
        **({"train": measured.train} if options.cases is None else {}),
        **{case: partial(measured.run, case, workers) for case, workers in own.items() if case in OWN},
        **{case: partial(measured.run, case, workers, options.assignments) for case, workers in engine.items()},
        **{
            name: partial(roster.attempt, name, partial(measured.peer, name, python))
            for name, python in roster.pythons.items()
        },
    }
    series = bench.alternate(cases, options.repetitions)
    bits: dict[str, Bits] = {}
    if options.cases is None:
        bits = measured.peers_bits(roster) | measured.own_bits(options.assignments)
    left_out = set(roster.pythons) - set(roster.measured)
    kept = {case: timings for case, timings in series.items() if case.removesuffix("_rounds") not in left_out}
    settings = {
        **dataclasses.asdict(work),
        "images": "1x28x28 uint8, random",
        "engine": list(options.assignments),
        "peers": roster.settings(),
    }
    facts = {case: found.fact() for case, found in bits.items() if case in kept}
    return Measurement(settings, {**kept, **first}, _ratios(kept, list(own), roster.measured), facts=facts)


def _ratios(series: Series, own: list[str], peers: list[str]) -> dict[str, float]:
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
    """The cases, each of which does all of the work once."""

    def __init__(self, bench: Bench, work: Work) -> None:
        self._bench, self._work = bench, work
        self._params = _params(work)
        self._dataset = synthetic_dataset("mnist", SHAPE, work.clients * work.samples, TEST_SIZE)
        self._federation = Federation(bench, self._params, self._dataset)
        self._processes = Processes(bench, work)
        self.digests: dict[str, list[str]] = {}
        """By case, of the final weights of every repetition."""

    def bare(self) -> dict[str, Timing]:
        done = self._processes.start("bare", "benchmarks.workload", sys.executable, _NO_GPU)
        return self._noted("bare", done, "bare_process", "bare")

    def peer(self, name: str, python: str, cores: int = Work.cores) -> dict[str, Timing]:
        """Another simulator, with the interpreter of its environment.

        Raises:
            RunError: it failed, or has not done what was asked of it.
        """
        case = name if cores == self._work.cores else f"{name}, {cores} core"
        return self._noted(case, self._processes.peer(name, python, case, cores), case, f"{case}_rounds")

    def _noted(self, case: str, done: Done, process: str, rounds: str) -> dict[str, Timing]:
        self.digests.setdefault(case, []).append(done.digest)
        return done.timings(self._work, process, rounds)

    def train(self) -> dict[str, Timing]:
        trained = self._federation.train("train", environment=self._environment("train"))
        return self._parts("train", trained, self._federation.out)

    def run(self, case: str, workers: int, engine: Sequence[str] = ()) -> dict[str, Timing]:
        """The whole command, as a user types it, on data that are prepared already; ``engine`` as for ``--set``.

        The first one of a benchmark also makes MLflow's database, as a user's first run does.
        """
        folder = self._bench.folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        files = made(folder / "files")
        write_images(self._dataset, files)
        data = {"name": "imagefolder", "layout": "csv", "mean": MEAN, "std": STD, "root": str(files)}
        params = override({**self._params, "data": data, "engine": {"workers": workers}}, engine)
        write_json(folder / "params.yaml", params)
        cache = folder / "cache"
        Cache(cache).prepared(Config.from_mapping(params))
        command = protofl("run", "--json", "--params", str(folder / "params.yaml"), "--out", str(folder / "out"))
        done = self._bench.execute(case, command, self._environment(case) | {ENVIRONMENT_VARIABLE: str(cache)})
        return self._parts(case, TrainedRun(done, read_rounds(folder / "out")), folder / "out")

    def first(self, case: str, workers: int, engine: Sequence[str]) -> Timing:
        """A run with no compiled code in the cache, which it leaves there for the others of its case."""
        self._bench.say(f"first run of {case}, which is not one of its repetitions")
        return self.run(f"{case}_first", workers, engine)[f"{case}_first"]

    def _environment(self, case: str) -> dict[str, str]:
        """Variables of our cases; those of ``--engine`` have compiled code of their own, and first runs find none."""
        own = compiled_code_in(self._bench.folder / "compiled" / case.removesuffix("_first"))
        return _NO_GPU | (own if "_engine" in case else {})

    def own_bits(self, engine: Sequence[str]) -> dict[str, Bits]:
        """Of the bare loop and our cases; kills a training, and one with ``engine``, and has them go on."""
        cases, others = list(OWN), [f"{case}_engine" for case in OWN]
        found = {"bare": Bits(compared(self.digests["bare"]), ONE_PROCESS, STARTS_OVER)}
        found |= self._alike(["train", *cases], cases, self._killed(()))
        if engine:
            found |= self._alike(others, others, self._killed(engine))
        return found

    def _alike(self, cases: Sequence[str], by_workers: Sequence[str], killed: str | None) -> dict[str, Bits]:
        workers = compared([self.digests[case][0] for case in by_workers])
        return {case: Bits(compared(self.digests[case]), workers, killed) for case in cases}

    def _killed(self, engine: Sequence[str]) -> str | None:
        """What a kill does to a training; a failure is an answer too, and costs nothing that has been measured."""
        variables = self._environment("run_engine" if engine else "run")
        try:
            undisturbed = self.digests["train"][0]
            if engine:
                self._bench.say("a training with other engine settings, which nobody kills")
                self._federation.train("train_engine", *engine, environment=variables)
                undisturbed = run_digest(self._federation.out)
            killed = kill_and_start_again(self._bench, self._federation, self._work.rounds, engine, variables)
        except RunError as error:
            self._bench.say(str(error))
            return "failed"
        return None if killed is None else killed.verdict(undisturbed)

    def peers_bits(self, roster: Roster) -> dict[str, Bits]:
        """Of the peers that were measured; runs those again, with one core, that can use more."""
        found = {}
        for name in roster.measured:
            workers: str | None = ONE_PROCESS
            if PEERS[name].several:
                workers = self._with_one_core(name, roster.pythons[name])
            found[name] = Bits(compared(self.digests[name]), workers, STARTS_OVER)
        return found

    def _with_one_core(self, name: str, python: str) -> Verdict | None:
        self._bench.say(f"{name}, with one core")
        try:
            self.peer(name, python, 1)
        except RunError as error:
            self._bench.say(f"not to be compared: {error}")
        return compared([self.digests[name][0], *self.digests.get(f"{name}, 1 core", ())])

    def _parts(self, case: str, trained: TrainedRun, run: Path) -> dict[str, Timing]:
        self.digests.setdefault(case, []).append(run_digest(run))
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
