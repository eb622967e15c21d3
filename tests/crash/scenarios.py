"""What is carried out again and again: commands of people, on three clients with a few digits each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
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
    "engine": {"durable_every": 0},  # else it depends on the time how many operations a run has
}
GFPL = {"name": "gfpl", "first_exchange": 1, "interval": 1}
FEDCSPC = {"name": "fedcspc", "n_aug": 1, "cal_epochs": 2}
LARGER = {"limit_per_class": 6, "size": 28}  # its model takes no smaller ones
PROJECTED = {"name": "fedcspc_cnn", "projection_dim": 8}
COMPARED = ({"name": "local"}, {"name": "fedavg"})
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
        methods: whose code its runs use.
        imports: most of what it imports, which is better done once.
    """

    title: str
    command: tuple[str, ...]
    counts: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    begins_with: tuple[tuple[str, ...], ...] = (("stage", "prepare", "--out", "stages"),)
    methods: tuple[Mapping[str, Any], ...] = ({"name": "fedavg"},)
    imports: tuple[str, ...] = ("pipelines.cli.app", "pipelines.execution.bodies", "sklearn.datasets")


def _run(title: str, **sections: Any) -> Scenario:
    parameters = {"method": {"name": "fedavg"}, **SMALL, **sections}
    return Scenario(title, ("run", "--out", "run", *INLINE), ("run",), parameters, methods=(parameters["method"],))


SCENARIOS = {
    "prepare": Scenario(
        "`stage prepare`", ("stage", "prepare", "--out", "stages"), ("stages",), begins_with=(), methods=()
    ),
    "partition": Scenario("`stage partition`", ("stage", "partition", "--out", "stages"), ("stages",), methods=()),
    "fedavg": _run("`run`, FedAvg"),
    "gfpl": _run("`run`, GFPL: memories, server steps", method=GFPL),
    "fedcspc": _run("`run`, FedCSPC: calibration, scores before it", method=FEDCSPC, model=PROJECTED, data=LARGER),
    "fedproto": _run("`run`, FedProto, snapshots", method={"name": "fedproto"}, evaluation={"snapshots": [0, 1]}),
    "spaced": _run(
        "`run`, FedProto, no state but the first is durable",
        method={"name": "fedproto"},
        engine={"durable_every": 1e9},
        evaluation={"snapshots": [0, 1]},
    ),
    "elsewhere": Scenario(
        "`run` that has finished elsewhere",
        ("run", "--out", "run", *INLINE),
        ("run",),
        begins_with=(("run", "--out", "first", *INLINE),),
    ),
    "compare": Scenario(
        "`compare`, two methods", ("compare", "--out", "compared", *INLINE), ("compared",), methods=COMPARED
    ),
    "train": Scenario(
        "`stage train` of DVC, two methods",
        ("stage", "train", "--out", "stages"),
        ("stages",),
        begins_with=(("stage", "prepare", "--out", "stages"), ("stage", "partition", "--out", "stages")),
        methods=COMPARED,
    ),
    "tune": Scenario(
        "`tune`, three trials",
        ("tune", "--method", "fedprox", "--trials", "3", "--at-once", "1", "--out", "study", *INLINE),
        ("study",),
        {**SMALL, "partition": {"name": "iid", "num_clients": 2, "validation": 0.25}},
        methods=({"name": "fedprox"},),
    ),
    "archive": Scenario(
        "`archive` of a run",
        ("archive", "first", "--out", "archived/first.zip"),
        ("archived",),
        begins_with=(("run", "--out", "first", *INLINE),),
    ),
    "library": Scenario("`flcore.run`", ("library",), ("run",), begins_with=()),
    "careless": Scenario(
        "what writes in place, to see that it is found",
        ("careless",),
        ("careless",),
        begins_with=(),
        methods=(),
        imports=(),
    ),
}
"""By name."""

NAMES_A_MOMENT = frozenset({"timing.json", ".running", ".lock"})
"""Files that hold times, or that are only there to be locked."""


TIMES = frozenset({"timing.json", "timing.jsonl", "seconds", "memory"})
"""Files, and folders of them, whose numbers are those of a moment."""


def careless() -> int:
    """Write in place, and take what is there for whole: what this project must never do."""
    from flcore.io import disk

    folder = Path("careless")
    disk.make_folder(folder)
    if not (folder / "result").exists():
        for content in (b"the first half, ", b"and the second"):
            with disk.open_end(folder / "result") as file:
                file.write(content)
    return 0


def library(restart: bool) -> int:
    """A run in plain Python; what it raises is for its caller, so a message is a line."""
    from flcore import run
    from flcore.core.errors import ProtoflError

    parameters = {key: value for key, value in SMALL.items() if key not in ("compare", "tracking")}
    try:
        run(parameters, "run", restart=restart)
    except (ProtoflError, OSError) as error:
        print(f"protofl: {error}", file=sys.stderr)
        return 4
    return 0


class InThisProcess:
    """A follower without a subprocess: it writes the tables of comparisons, draws nothing and logs nothing."""

    def __init__(self, *given: Any) -> None:
        """Ask for nothing."""

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left."""

    def nothing(self, *arguments: Any, **keywords: Any) -> None:
        """What is only shown or logged."""

    configure = follow = finish = stop = leave = close = nothing

    def wait(self) -> dict[str, str]:
        return {}

    def compare(self, kind: str, config: Any, runs: Any, directory: Path, **facts: Any) -> None:
        from pipelines.reporting import comparison_files, comparison_report
        from pipelines.reporting.figures.sets import write_csv
        from pipelines.reporting.frame import curves_table
        from pipelines.runs.folder import RunFolder

        folders = [RunFolder(run) for run in runs]
        found = comparison_report.collect(
            config, folders, facts.get("failed"), rows=facts.get("rows", ()), draws=facts.get("draws", ())
        )
        comparison_files.write(found, directory)
        write_csv(curves_table(found.runs), directory / "curves.csv")


def stay_in_this_process() -> None:
    """Carry out runs one after the other here, so that all operations of a command are counted in one order."""
    from pipelines.execution import bodies
    from pipelines.orchestration import commands
    from pipelines.tuning import search
    from tests.one_process import ThisProcess

    commands.Follower = InThisProcess
    bodies.RunPool = search.RunPool = ThisProcess
    bodies.most_at_once = search.most_at_once = lambda runs: 1


def remember_what_stays(asked: Iterable[Scenario]) -> None:
    """Find out once what is the same for thousands of processes and takes longer than a run: versions, fingerprints."""
    from flcore import running
    from flcore.config.schema import Config
    from flcore.experiment import provenance
    from pipelines.runs import memory
    from pipelines.runs import provenance as ours

    provenance._version = cache(provenance._version)
    running.library_fingerprint = cache(running.library_fingerprint)
    ours.git_commit = cache(ours.git_commit)
    memory.reset_peak = lambda: None  # would look at, and so copy, all that a child shares with its parent
    for scenario in asked:
        for method in scenario.methods:
            config = Config.from_mapping({**scenario.parameters, "method": method})
            provenance.code_modules(config)
            ours.environment(config)
            provenance.preparation_fingerprint(config)
            provenance.division_fingerprint(config)
