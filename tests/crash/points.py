"""Every point at which a command can be stopped, or the disk can fail it: tried, and gone on with.

::

    python tests/crash/points.py                        all scenarios, all faults, all points
    python tests/crash/points.py --points 40 --seed 7   of each scenario 40 of them, others for another seed

A command is carried out undisturbed once, and its operations on the disk are counted. Then, for every operation and
every fault that it can have, the command is begun in a new folder, meets the fault there, and is typed again. What it
leaves must be the same files, to the byte; or it must have stopped with a line that says what to do, which is done. All
else is a loss. A process that has imported everything is forked for each, so that thousands are tried in minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faults
import scenarios
from faults import Fault
from scenarios import SCENARIOS

LONGEST_SECONDS = 900
SHARES = (0.0, 0.5, 0.9)
GONE_ON, REFUSED, LOST = "gone on", "refused", "lost"


@dataclass(frozen=True)
class Ended:
    """How a process has ended.

    Attributes:
        code: exit code; below 0: by a signal.
        said: on standard error.
    """

    code: int
    said: str

    @property
    def is_fault_of_ours(self) -> bool:
        """Whether it ended with what is no line for people: a traceback, or what the command calls its own fault."""
        known = self.code in (0, 2, 3, 4, -signal.SIGKILL)
        return not known or "Traceback" in self.said or "fault of protofl" in self.said

    @property
    def line(self) -> str:
        """The last that it said, its cure included."""
        lines = self.said.strip().splitlines()
        begin = next((at for at in reversed(range(len(lines))) if lines[at].startswith("protofl: ")), 0)
        return "\n".join(lines[begin:])


@dataclass(frozen=True)
class Found:
    """What one fault of one scenario came to; ``why`` says of a loss what was lost."""

    scenario: str
    fault: Fault
    operation: str
    outcome: str
    first: str
    why: str = ""


def carried_out(folder: Path, command: Sequence[str], fault: Fault | None = None, log: Path | None = None) -> Ended:
    """Fork, and type a command in a folder.

    Args:
        folder: to be worked in. command: of ``protofl``.
        fault: that the process meets; None: none.
        log: gets the names of its operations and of all modules, as JSON.
    """
    assert threading.active_count() == 1, "a process with threads must not be forked"
    said = folder / "said"
    process = os.fork()
    if process == 0:
        _be(folder, command, said, fault, log)
    status = os.waitpid(process, 0)[1]
    text = said.read_text() if said.exists() else ""
    said.unlink(missing_ok=True)
    return Ended(os.waitstatus_to_exitcode(status), text)


def _be(folder: Path, command: Sequence[str], said: Path, fault: Fault | None, log: Path | None) -> None:
    """The child: carries the command out and ends."""
    code = 99
    try:
        signal.alarm(LONGEST_SECONDS)
        os.chdir(folder)
        os.environ["PROTOFL_CACHE"] = "cache"
        with said.open("w") as error, Path(os.devnull).open("w") as nowhere:
            for stream, number in ((nowhere, 1), (error, 2)):
                os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        faulty = faults.FaultyDisk(fault)
        faulty.install()
        if tuple(command) == ("careless",):
            code = scenarios.careless()
        elif command[0] == "library":
            code = scenarios.library("--restart" in command)
        else:
            from pipelines.cli import app

            scenarios.stay_in_this_process()
            code = app.main(list(command))
        if log is not None:
            log.write_text(json.dumps({"calls": faulty.calls, "modules": sorted(sys.modules)}))
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def results(folder: Path, counts: Sequence[str]) -> dict[str, str]:
    """Digests of all files that count, by name."""
    files = [path for name in counts for path in sorted((folder / name).rglob("*")) if path.is_file()]
    kept = [path for path in files if path.name not in scenarios.NAMES_A_MOMENT and path.parent.name != ".claims"]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def state(folder: Path) -> str:
    """A digest of all that lies in a folder, but for times, numbers of processes, and where the folder is.

    From equal ones a command goes on in the same way: what it does depends on nothing else.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.[0-9a-f]{8}\.\d+\.\d+\.tmp$", ".tmp", path.relative_to(folder).as_posix())
        content = path.read_bytes().replace(str(folder).encode(), b"@") if path.is_file() else b"a folder"
        if path.name in scenarios.TIMES or path.parent.name in scenarios.TIMES:
            content = re.sub(rb"\d+(\.\d+)?(e-\d+)?", b"#", content)
        if path.name == "studies.journal":
            content = re.sub(rb'"(datetime_\w+|worker_id)":"[^"]*"', b"#", content)
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


_CURES = ("--restart", "restart=True")
"""What a refusal advises on the command line, and in Python."""


class Ground:
    """A scenario, as it begins and as it ends undisturbed; all else is set against that."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.scenario, self.root = name, SCENARIOS[name], root
        self.begin, self._states = root / f"{name}-begin", root / f"{name}-states"
        self._states.mkdir()
        self.begin.mkdir()
        # JSON is YAML.
        (self.begin / "params.yaml").write_text(json.dumps(dict(self.scenario.parameters)))
        for command in self.scenario.begins_with:
            self._undisturbed(self.begin, command)
        folder, again = self.new("undisturbed"), self.new("again")
        self.calls = self._undisturbed(folder, self.scenario.command)
        self.expected = results(folder, self.scenario.counts)
        assert self.expected, f"{name}: nothing counts"
        assert self._undisturbed(again, self.scenario.command) == self.calls, f"{name}: other operations each time"
        assert not (differing := self.differing(again)), f"{name}: two undisturbed ones differ in {differing}"
        for each in (folder, again):
            shutil.rmtree(each)

    def _undisturbed(self, folder: Path, command: Sequence[str]) -> list[str]:
        """Carry a command out, and import here what it has imported; returns its operations."""
        log = self.root / "log.json"
        ended = carried_out(folder, command, log=log)
        assert ended.code == 0, f"{command}: {ended.code}: {ended.said}"
        told = json.loads(log.read_text())
        for module in told["modules"]:
            with contextlib.suppress(Exception):  # parts of packages that are no modules
                importlib.import_module(module)
        return list(told["calls"])

    @property
    def states(self) -> int:
        """So many different states of the disk were gone on from."""
        return len(list(self._states.iterdir()))

    def differing(self, folder: Path) -> list[str]:
        """Names of files that count and are not as they have to be in the end."""
        found = results(folder, self.scenario.counts)
        return [name for name in sorted({*found, *self.expected}) if found.get(name) != self.expected.get(name)]

    def new(self, name: str) -> Path:
        """A new folder in which the scenario can begin."""
        folder = self.root / f"{self.name}-{name}"
        shutil.copytree(self.begin, folder)
        return folder

    def faults(self, seed: int) -> Iterator[Fault]:
        """All faults at all operations that can have them; the seed says how much of a file is written or lost."""
        shares = random.Random(f"{self.name} {seed}")
        for kind in faults.KINDS:
            for at, operation in enumerate(self.calls, start=1):
                fault = Fault(kind, at, shares.choice(SHARES))
                if fault.concerns(operation):
                    yield fault

    def tried(self, fault: Fault) -> Found:
        """Meet a fault, and type the command again."""
        folder = self.new(f"{fault.kind}-{fault.at}")
        first = carried_out(folder, self.scenario.command, fault)
        outcome, why = self._judged(folder, first)
        if outcome != LOST:
            shutil.rmtree(folder)
        return Found(self.name, fault, self.calls[fault.at - 1], outcome, first.line, why)

    def _judged(self, folder: Path, first: Ended) -> tuple[str, str]:
        if first.is_fault_of_ours:
            return LOST, f"the first process ended with {first.code}: {first.said}"
        known = self._states / state(folder)
        if not known.exists():
            judged = self._gone_on(folder)
            half = known.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(judged))
            half.rename(known)  # another lane may look
        outcome, why = json.loads(known.read_text())
        return outcome, f"{why}; the first process said: {first.line}" if outcome == LOST else why

    def _gone_on(self, folder: Path) -> tuple[str, str]:
        outcome, second = GONE_ON, carried_out(folder, self.scenario.command)
        if second.code != 0 and not second.is_fault_of_ours and any(cure in second.said for cure in _CURES):
            outcome = REFUSED
            second = carried_out(folder, [*self.scenario.command, "--restart"])
        if second.code != 0:
            return LOST, f"the second process ended with {second.code}: {second.said}"
        if differing := self.differing(folder):
            return LOST, f"different in the end: {', '.join(differing)}"
        return outcome, second.line if outcome == REFUSED else ""


def tried_on(grounds: Sequence[Ground], chosen: Sequence[tuple[int, Fault]], lanes: int, root: Path) -> list[Found]:
    """Try faults, each on one of the grounds, in so many processes side by side; in the order given."""
    files = [root / f"lane-{lane}.json" for lane in range(lanes)]
    children = []
    for lane, file in enumerate(files):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                found = [_said(grounds[ground].tried(fault)) for ground, fault in chosen[lane::lanes]]
                file.write_text(json.dumps([asdict(one) for one in found]))
                code = 0
            finally:
                os._exit(code)
        children.append(process)
    for process in children:
        assert os.waitpid(process, 0)[1] == 0, "a lane has failed"
    by_lane = [json.loads(file.read_text()) for file in files]
    in_order = [by_lane[place % lanes][place // lanes] for place in range(len(chosen))]
    return [Found(**{**values, "fault": Fault(**values["fault"])}) for values in in_order]


def _said(one: Found) -> Found:
    """Say of a loss at once what it is: thousands may follow."""
    if one.outcome == LOST:
        print(f"LOST {one.scenario} {one.fault} at {one.operation}: {one.why}", file=sys.stderr, flush=True)
    return one


def summary(grounds: Sequence[Ground], found: Sequence[Found], seed: int, seconds: float) -> dict[str, Any]:
    """The table, as JSON values."""
    rows = []
    for ground in grounds:
        own = [one for one in found if one.scenario == ground.name]
        for kind in faults.KINDS:
            of_kind = [one for one in own if one.fault.kind == kind]
            outcomes = Counter(one.outcome for one in of_kind)
            rows.append(
                {"scenario": ground.name, "fault": kind, "tried": len(of_kind)}
                | {outcome.replace(" ", "_"): outcomes[outcome] for outcome in (GONE_ON, REFUSED, LOST)}
                | {"stopped_with_a_line": sum(one.first.startswith("protofl: ") for one in of_kind)}
            )
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "calls": {ground.name: dict(sorted(Counter(ground.calls).items())) for ground in grounds},
        "states": {ground.name: ground.states for ground in grounds},
        "rows": rows,
        "tried": len(found),
        "lost": [asdict(one) for one in found if one.outcome == LOST],
        "lines": dict(Counter(_without_places(one.why) for one in found if one.outcome == REFUSED)),
    }


def _without_places(text: str) -> str:
    """A message without the name of its file, so that those of one kind are counted together."""
    return " ".join("..." if "/" in word else word for word in text.split())


def markdown(told: Mapping[str, Any]) -> str:
    """The tables, for people."""
    operations = sorted({name for calls in told["calls"].values() for name in calls})
    lines = [
        f"{told['tried']:,} faults left {sum(told['states'].values()):,} different states of the disk, from each of "
        f"which the command was typed again: {len(told['lost'])} lost (seed {told['seed']}).",
        "",
        "| operations on the disk | " + " | ".join(operations) + " | all |",
        "| :--- |" + " ---: |" * (len(operations) + 1),
    ]
    for name, calls in told["calls"].items():
        cells = [str(calls.get(operation, 0)) for operation in operations]
        lines.append(f"| {SCENARIOS[name].title} | {' | '.join(cells)} | {sum(calls.values())} |")
    lines += [
        "",
        "| command | fault | tried | gone on | refused, with the cure | lost |",
        "| :--- | :--- |" + " ---: |" * 4,
    ]
    for row in told["rows"]:
        if row["tried"]:
            cells = [row[key] for key in ("tried", "gone_on", "refused", "lost")]
            title = SCENARIOS[row["scenario"]].title
            lines.append(f"| {title} | {row['fault']} | {' | '.join(map(str, cells))} |")
    lines += ["", *(f"- **{kind}**: {meaning}" for kind, meaning in faults.KINDS.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try them; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    everything = [name for name in SCENARIOS if name != "careless"]
    parser.add_argument("--scenarios", default=",".join(everything), help="names, separated by commas")
    parser.add_argument("--points", type=int, help="so many of each scenario; default: all")
    parser.add_argument("--seed", type=int, default=0, help="which points, and how much of a file is torn")
    parser.add_argument("--lanes", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--out", type=Path, help="folder for crash-points.json and crash-points.md")
    parser.add_argument("--keep", type=Path, help="folder in which what was lost stays to be looked at")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if asked.keep is None:
            shared = Path("/dev/shm")
            place = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="crash-points-")
            root = Path(stack.enter_context(place))
        else:
            root = asked.keep.absolute()
            root.mkdir(parents=True)
        names = asked.scenarios.split(",")
        for module in {module for name in names for module in SCENARIOS[name].imports}:
            importlib.import_module(module)
        if any(SCENARIOS[name].imports for name in names):
            scenarios.remember_what_stays([SCENARIOS[name] for name in names])
        grounds = [Ground(name, root) for name in names]
        gc.collect()
        gc.freeze()  # what children share with this process is not copied for being looked at
        choice = random.Random(asked.seed)
        chosen: list[tuple[int, Fault]] = []
        for number, ground in enumerate(grounds):
            possible = [(number, fault) for fault in ground.faults(asked.seed)]
            chosen += possible if asked.points is None else choice.sample(possible, min(asked.points, len(possible)))
        choice.shuffle(chosen)  # so that all commands come early, and lanes have as much to do
        found = tried_on(grounds, chosen, max(1, min(asked.lanes, len(chosen))), root)
        told = summary(grounds, found, asked.seed, time.monotonic() - began)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "crash-points.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
        (asked.out / "crash-points.md").write_text(markdown(told))
    print(markdown(told), end="")
    return 1 if told["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
