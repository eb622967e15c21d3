"""What is carried out again and again: commands of people, on three clients with a few digits each."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL: Mapping[str, Any] = {
    "data": {"limit_per_class": 12},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "model": {"name": "fedgen_cnn", "feature_dim": 8},
    "federation": {"rounds": 2},
    "local": {"lr": 0.05, "batch_size": 16},
    "compare": {"methods": ["local", "fedavg"], "seeds": [0], "baseline": "fedavg"},
    "tracking": {"enabled": False},
}
GFPL = {"name": "gfpl", "first_exchange": 1, "interval": 1}
FEDCSPC = {"name": "fedcspc", "n_aug": 1, "cal_epochs": 2}
PROJECTED = {"name": "fedcspc_cnn", "projection_dim": 8}
INLINE = ("--orchestrator", "inline")


@dataclass(frozen=True)
class Scenario:
    """A command.

    Attributes:
        title: what the table calls it.
        command: arguments of ``protofl``, typed in a folder with ``params.yaml``.
        parameters: what that file says.
        begins_with: commands that were carried out there before, undisturbed.
        counts: the folders whose files have to be the same at the end.
        may_restart: whether the command has ``--restart``.
    """

    title: str
    command: tuple[str, ...]
    counts: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    begins_with: tuple[tuple[str, ...], ...] = (("stage", "prepare", "--out", "stages"),)
    may_restart: bool = True


def _run(title: str, **sections: Any) -> Scenario:
    return Scenario(title, ("run", "--out", "run", *INLINE), ("run",), {**SMALL, **sections})


SCENARIOS = {
    "prepare": Scenario(
        "`stage prepare`", ("stage", "prepare", "--out", "stages"), ("stages",), begins_with=(), may_restart=False
    ),
    "partition": Scenario(
        "`stage partition`", ("stage", "partition", "--out", "stages"), ("stages",), may_restart=False
    ),
    "fedavg": _run("`run`, FedAvg"),
    "gfpl": _run("`run`, GFPL: memories, server stages", method=GFPL),
    "fedcspc": _run("`run`, FedCSPC: calibration, scores before it", method=FEDCSPC, model=PROJECTED),
    "leg": _run("`run`, FedProto, `engine.durability: leg`", method={"name": "fedproto"}, engine={"durability": "leg"}),
    "elsewhere": Scenario(
        "`run` that has finished elsewhere",
        ("run", "--out", "run", *INLINE),
        ("run",),
        begins_with=(("run", "--out", "first", *INLINE),),
    ),
    "compare": Scenario("`compare`, two methods", ("compare", "--out", "compared", *INLINE), ("compared",)),
    "train": Scenario(
        "`stage train` of DVC, two methods",
        ("stage", "train", "--out", "stages"),
        ("stages",),
        begins_with=(("stage", "prepare", "--out", "stages"), ("stage", "partition", "--out", "stages")),
    ),
    "tune": Scenario(
        "`tune`, three trials",
        ("tune", "--method", "fedprox", "--trials", "3", "--at-once", "1", "--out", "study", *INLINE),
        ("study",),
        {**SMALL, "partition": {"name": "iid", "num_clients": 2, "validation": 0.25}},
        may_restart=False,
    ),
    "careless": Scenario("what writes in place, to see that it is found", ("careless",), ("careless",), begins_with=()),
}
"""By name."""

NAMES_A_MOMENT = frozenset({"timing.json", ".running", ".lock", "study.journal", ".study.journal.lock"})
"""Files that hold times, or that are only there to be locked."""


def careless() -> int:
    """Write in place, and take what is there for whole: what this project must never do."""
    from flcore import disk

    folder = Path("careless")
    disk.make_folder(folder)
    if not (folder / "result").exists():
        with disk.create(folder / "result") as file:
            file.write(b"the first half, ")
            file.write(b"and the second")
    return 0


class InThisProcess:
    """A recorder without a process of its own: it writes the tables of comparisons, draws nothing and logs nothing."""

    def __init__(self, tracking: bool, say: Any) -> None:
        self.say = say

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left."""

    def nothing(self, *arguments: Any, **keywords: Any) -> None:
        """What is only shown or logged."""

    configure = watch = stop = trial = leave = close = nothing

    def finish(self, directory: Path) -> Future[dict[str, Any]]:
        return _done({"report": str(directory / "report.html"), "store": None})

    def study(self, study: Path) -> Future[dict[str, Any]]:
        return _done({"store": None})

    def compare(self, kind: str, config: Any, runs: Any, directory: Path, **facts: Any) -> Future[dict[str, Any]]:
        from pipelines.reporting import comparison_files, comparison_report
        from pipelines.reporting.figures.data import curves_table
        from pipelines.reporting.figures.sets import write_csv

        found = comparison_report.collect(config, runs, facts.get("failed"), rows=facts.get("rows", ()))
        comparison_files.write(found, directory)
        write_csv(curves_table(found.runs), directory / "curves.csv")
        return _done({"report": str(directory / "report.html"), "store": None, "table": "", "markdown": ""})


def _done(answer: dict[str, Any]) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    future.set_result(answer)
    return future


def stay_in_this_process() -> None:
    """Carry out runs one after the other here, so that all operations of a command are counted in one order."""
    from pipelines.execution import bodies
    from pipelines.execution.run_pool import ThisProcess
    from pipelines.orchestration import commands
    from pipelines.runs import provenance
    from pipelines.tuning import search

    commands.Recorder = InThisProcess
    bodies.RunPool = lambda size, watcher: ThisProcess(watcher)
    bodies.most_at_once = search.most_at_once = lambda runs: 1
    provenance._git_commit = lambda: None  # asks git, each time anew
