"""The soak: a comparison and a study over and over, with faults at random moments, and nothing may be lost.

    python -m tests.soak --faults 200 --seed 0 --out artifacts/soak

A *sequence* is a command with its results in a new folder. While it is under way a fault is thrown; then what the fault
broke is mended and the same command typed again, with the next fault, and at last without one. Then all results must
have the bytes of the undisturbed command, MLflow must hold each run once, finished and with all its metrics, and no
process may be left. Of every fault the table says what became of the command under way:

- *gone on*: it ended well, or it was killed and the same command took its work up;
- *refused*: it ended with a line or two that say what to do, and the same command took its work up;
- *lost*: anything else, such as a traceback, a command that hangs, other bytes, or a run that MLflow lacks.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.soak.faults import FAULTS, Fault, Moment, left_out, mend
from tests.soak.place import ROUNDS, WORKS, Place, Typed, results

SECONDS_PER_COMMAND = 1800.0
SECONDS_TO_LEAVE = 300.0
_SECONDS_BETWEEN_LOOKS = 0.5
_FAULTS_PER_SEQUENCE = 5
_REFUSED = (2, 3, 4)
_MOST_IDLE = 10  # a command may end before its fault, but not always


@dataclass
class Thrown:
    """A fault and what became of it.

    Attributes:
        kind: of fault. work: the command. sequence: its number. after: seconds from the command's begin; 0: before it.
        outcome: ``gone on``, ``refused`` or ``lost``. said: the command's last words. why: of a loss.
    """

    kind: str
    work: str
    sequence: int
    after: float
    outcome: str
    said: str
    why: str


@dataclass
class Soak:
    """All of it.

    Attributes:
        place: folder and servers. faults: how many to throw. seed: of everything that is random.
        thrown: so far. usual: seconds and results of each undisturbed command.
    """

    place: Place
    faults: int
    seed: int
    thrown: list[Thrown] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    undisturbed: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self) -> None:
        """Throw all faults."""
        for work in WORKS:
            self.place.forget_logged()
            out, began = self.place.home / "undisturbed" / work, time.monotonic()
            typed = self.place.type(work, out)
            assert self._ended(typed) == 0, typed.said
            self.seconds[work], self.undisturbed[work] = time.monotonic() - began, results(out)
            problem = self._problem(work, out)
            assert problem is None, problem
        kinds = _Bag(self.seed, [name for name in FAULTS if name not in left_out(self.place)])
        number = idle = 0
        while len(self.thrown) < self.faults:
            before = len(self.thrown)
            self._sequence(number, kinds)
            number, idle = number + 1, idle + 1 if len(self.thrown) == before else 0
            assert idle < _MOST_IDLE, f"{kinds.waiting[0]!r} could not be thrown {idle} times, one after the other"

    def _sequence(self, number: int, kinds: _Bag) -> None:
        work = tuple(WORKS)[number % len(WORKS)]
        out = self.place.home / "disk" / f"{number:04d}" / work
        self.place.forget_logged()
        thrown: list[Thrown] = []
        for _ in range(_FAULTS_PER_SEQUENCE):
            if len(self.thrown) + len(thrown) == self.faults:
                break
            kind = kinds.next(work)
            moment = Moment(self.place, out, random.Random(f"{self.seed} {number} {len(thrown)}"))
            found, ended_well = self._throw(kind, FAULTS[kind], work, number, moment)
            mend(self.place, out)
            if found is None:  # it ended before
                kinds.put_back(kind)
            else:
                thrown.append(found)
            if ended_well or (found is not None and found.outcome == "lost"):
                break
        problem = self._type_again(work, out)
        assert thrown or problem is None, f"{work}, with no fault thrown: {problem}"
        for one in thrown:
            if problem is not None and one.outcome != "lost":
                one.outcome, one.why = "lost", problem
            self.thrown.append(one)
            words = f"{len(self.thrown):4d}  {one.work:8s} {one.kind:26s} {one.after:6.1f} s  {one.outcome:8s}"
            print(words, one.why or one.said, flush=True)
        if problem is None:
            shutil.rmtree(out.parent)  # of a loss it stays, to be looked at
        elif self.place.has_disk:
            shutil.move(out.parent, self.place.home / f"lost-{number:04d}")

    def _throw(self, kind: str, fault: Fault, work: str, number: int, moment: Moment) -> tuple[Thrown | None, bool]:
        """One command with one fault: what became of it, None where it ended before; and whether it ended well."""
        variables = fault.before(moment) if fault.before else {}
        typed, began = self.place.type(work, moment.out, variables), time.monotonic()
        after, is_met = 0.0, True
        if fault.during:
            is_met = _wait(typed, moment.random.uniform(0.3, self.seconds[work])) is None
            after = time.monotonic() - began
            while is_met and not fault.during(moment, typed):  # there is no worker yet, say
                is_met = _wait(typed, _SECONDS_BETWEEN_LOOKS) is None
        code = self._ended(typed)
        outcome, said = _judged(code, typed)
        if fault.has_met is not None:
            is_met = fault.has_met(moment)
        if not is_met and outcome == "gone on":
            return None, code == 0
        why = f"exit code {code}: {said}; {typed.log}" if outcome == "lost" or not is_met else ""
        return Thrown(kind, work, number, after, "lost" if why else outcome, said, why), code == 0

    def _type_again(self, work: str, out: Path) -> str | None:
        """Without a fault; what is wrong then, None: nothing."""
        typed = self.place.type(work, out)
        code = self._ended(typed)
        if code != 0:
            return f"typed again: exit code {code}: {_last_words(typed)}; {typed.log}"
        return self._problem(work, out)

    def _problem(self, work: str, out: Path) -> str | None:
        left = self._left_over()
        if left:
            return f"processes are left: {left}"
        found, expected = results(out), self.undisturbed.get(work, {})
        differing = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))
        if expected and differing:
            return f"{len(differing)} files are not those of the undisturbed command: {', '.join(differing[:5])}"
        return self._not_logged(work, out)

    def _left_over(self) -> list[str]:
        """Processes that no command has any more, followers that are still at work aside."""
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        while (left := self.place.left_over()) and time.monotonic() < deadline:
            time.sleep(0.2)
        words = []
        for process in left:
            try:
                words.append(" ".join(process.cmdline())[-80:])
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return words

    def _not_logged(self, work: str, out: Path) -> str | None:
        """What MLflow lacks, or has twice."""
        logged = self.place.logged()
        pattern = "runs/*/metrics.json" if work == "compare" else "trials/*/metrics.json"
        folders = [path.parent for path in sorted(out.glob(pattern))]
        if len(logged) != len(folders) + 1:
            return f"MLflow has {len(logged)} runs where {len(folders)} and the one above them belong"
        bad = [run["run_name"] for run in logged if run["status"] != "FINISHED"]
        if bad:
            return f"MLflow shows these as not finished: {', '.join(bad)}"
        for folder in folders:
            identity = json.loads((folder / "config.json").read_text())["config_hash"]
            found = [run for run in logged if run["tags"].get("protofl.config_hash") == identity]
            if len(found) != 1:
                return f"{folder.name} is in MLflow {len(found)} times"
            history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
            told = self.place.rounds_of(found[0]["run_id"], "accuracy/mean_local")
            if told != {record["round"]: record["mean_local"] for record in history} or len(told) != ROUNDS:
                return f"{folder.name}: MLflow has {len(told)} of {ROUNDS} rounds, or others"
            final = found[0]["metrics"].get("final/mean_local")
            if final != json.loads((folder / "metrics.json").read_text())["mean_local"]:
                return f"{folder.name}: MLflow's final/mean_local is {final}"
        return None

    def _ended(self, typed: Typed) -> int | None:
        """The exit code; None for a command that hangs, which is ended then."""
        code = _wait(typed, SECONDS_PER_COMMAND)
        if code is None:
            for process in [*typed.children(), psutil.Process(typed.process.pid)]:
                process.kill()
            typed.process.wait()
        return code


def _wait(typed: Typed, seconds: float) -> int | None:
    try:
        return typed.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _judged(code: int | None, typed: Typed) -> tuple[str, str]:
    """What became of a command, and its last words."""
    if code is None:
        return "lost", f"hangs after {SECONDS_PER_COMMAND:.0f} s"
    said, words = typed.said, _last_words(typed)
    if "Traceback" in said or "fault of protofl" in said:
        return "lost", words
    if code in (0, -signal.SIGKILL):
        return "gone on", ""
    is_short = 0 < len(words.splitlines()) <= 2
    return ("refused" if code in _REFUSED and is_short else "lost"), words


def _last_words(typed: Typed) -> str:
    """What it says of the error that has ended it."""
    _, found, words = typed.said.rpartition("protofl: ")
    return words.strip() if found else typed.said.strip()[-300:]


class _Bag:
    """Kinds of faults, each as often as every other, in an order by chance.

    Attributes:
        waiting: those that come next, in order.
    """

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self._random, self._kinds = random.Random(seed), list(kinds)
        self.waiting: list[str] = []

    def next(self, work: str) -> str:
        """One that may be thrown at a command."""
        while True:
            for kind in self.waiting:
                if work in FAULTS[kind].works:
                    self.waiting.remove(kind)
                    return kind
            self.waiting += self._random.sample(self._kinds, len(self._kinds))

    def put_back(self, kind: str) -> None:
        """It could not be thrown."""
        self.waiting.insert(0, kind)


def table(thrown: Sequence[Thrown], missing: Mapping[str, str]) -> str:
    """Faults by kind and what became of them, as Markdown."""
    outcomes = ("gone on", "refused", "lost")
    lines = ["| fault | thrown | gone on | refused with a line | lost |", "| :--- | ---: | ---: | ---: | ---: |"]
    for kind in FAULTS:
        if kind in missing:
            lines.append(f"| {kind} | left out: {missing[kind]} | | | |")
            continue
        counts = [sum(one.kind == kind and one.outcome == outcome for one in thrown) for outcome in outcomes]
        lines.append(f"| {kind} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    sums = [sum(one.outcome == outcome for one in thrown) for outcome in outcomes]
    return "\n".join([*lines, f"| **all** | {len(thrown)} | " + " | ".join(map(str, sums)) + " |"])


def main() -> int:
    """Throw the faults, write ``soak.json`` and ``soak.md``; 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of kinds and moments (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("artifacts/soak"), metavar="DIR", help="made anew")
    asked = parser.parse_args()
    home = asked.out.absolute()
    home.mkdir(parents=True)
    place = Place(home)
    soak = Soak(place, asked.faults, asked.seed)
    try:
        place.open()
        soak.run()
    finally:
        place.close()
        missing = left_out(place)
        about = {"faults": asked.faults, "seed": asked.seed, "seconds": soak.seconds, "left_out": missing}
        text = json.dumps({**about, "thrown": [asdict(one) for one in soak.thrown]}, indent=2, sort_keys=True)
        (home / "soak.json").write_text(text + "\n")
        (home / "soak.md").write_text(table(soak.thrown, missing) + "\n")
        print(table(soak.thrown, missing))
    return int(any(one.outcome == "lost" for one in soak.thrown))


if __name__ == "__main__":
    sys.exit(main())
