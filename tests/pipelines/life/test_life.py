"""The life of run folders as a state machine: whatever is done to them in whatever order, nothing is lost.

Commands are typed, killed at any moment, typed again, by two processes at once; files and folders are deleted, cut off
and altered; the code changes; the images move away and come back; the cache is cleared. After every step holds:

- a command that ends well leaves the bytes of the undisturbed one;
- one that does not says so in a line or two with a cure, leaves the folder as it was, and has a reason: a kill is none;
- no file is half written, and nothing is locked;
- results that were finished are there, to the byte, unless somebody deleted or altered them, or said ``--restart``.

At the end every folder is brought back to its results by nothing but what the refusals say.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from PIL import Image
from safetensors import SafetensorError, safe_open
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

from flcore.io.disk import LockFile
from flcore.io.locks import take_lock

PROJECT = Path(__file__).resolve().parents[3]
NURSERY = Path(__file__).with_name("nursery.py")
PATIENCE_SECONDS = 600.0

PARAMS: dict[str, Any] = {
    "data": {"name": "imagefolder", "root": "images"},
    "partition": {"name": "iid", "num_clients": 2, "validation": 0.25},
    "method": {"name": "fedproto"},
    "federation": {"rounds": 2},
    "local": {"lr": 0.05, "batch_size": 16},
    "compare": {"seeds": [0]},
    "tracking": {"enabled": False},
}
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": ("run", "--orchestrator", "inline", "--out", "run"),
    # The same run in another folder: taken from the first where that has finished.
    "again": ("run", "--orchestrator", "inline", "--out", "again"),
    "sweep": ("sweep", "--orchestrator", "inline", "--vary", "method.weight=0.5,1", "--out", "sweep"),
    "study": ("tune", "--orchestrator", "inline", "--method", "fedproto", "--trials", "2", "--out", "study"),
}
MAY_RESTART = ("run", "again", "sweep")
REFUSED = (2, 3, 4)
SIDE_FILES = {"config.json", "timing.json", "inputs.json"}
"""What names this machine, this moment or what was asked of Optuna, and is no result."""


def write_images(folder: Path) -> None:
    """Handwritten digits 0, 1 and 2 as files: of each 10 for training, 5 for testing."""
    digits = load_digits()
    for label in range(3):
        of_class = digits.images[digits.target == label][:15]
        for number, image in enumerate(of_class):
            path = folder / ("train" if number < 10 else "test") / str(label) / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(path)


def results(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that has to be the same each time, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not hidden and path.name not in SIDE_FILES and "checkpoint" not in inside.parts:
            found[inside.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def everything(folder: Path) -> dict[str, bytes]:
    """Every file but locks and what a killed process had not put in its place."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Nursery:
    """Starts commands; see `nursery.py`."""

    def __init__(self) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        variables |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._ask({"do": "warm", "params": PARAMS})

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        assert self._process.wait(PATIENCE_SECONDS) == 0

    def start(self, folder: Path, arguments: tuple[str, ...], sends: str | None = None, at: int = 0) -> int:
        variables = {"PROTOFL_CACHE": str(folder / "cache")}
        asked = {"folder": str(folder), "arguments": arguments, "variables": variables, "sends": sends, "at": at}
        return int(self._ask({"do": "start", **asked})["pid"])

    def wait(self, pid: int, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        return self._ask({"do": "wait", "pid": pid, "seconds": seconds})

    def end(self) -> None:
        """All that are under way."""
        self._ask({"do": "end"})

    def send(self, pid: int, name: str) -> None:
        self._ask({"do": "signal", "pid": pid, "signal": name})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        there = self._pipe(self._process.stdin)
        there.write(json.dumps(request) + "\n")
        there.flush()
        return dict(json.loads(self._pipe(self._process.stdout).readline()))

    @staticmethod
    def _pipe(end: IO[str] | None) -> IO[str]:
        assert end is not None
        return end


class World:
    """What all sequences share: who starts commands, the images, and what each command leaves that nobody disturbs."""

    def __init__(self, home: Path) -> None:
        write_images(home / "images")
        (home / "params.yaml").write_text(yaml.safe_dump(PARAMS))
        self.nursery, self.images = Nursery(), home / "images"
        self._home = home
        self.undisturbed = cache(self._undisturbed)

    def _undisturbed(self, work: str) -> tuple[dict[str, str], int]:
        """Digests of the results of a command by itself, and how many functions it calls."""
        shutil.rmtree(self._home / "cache", ignore_errors=True)  # nothing is taken from another one
        ended = self.nursery.wait(self.nursery.start(self._home, COMMANDS[work]))
        assert ended["code"] == 0, ended["said"]
        return results(self._home / work), ended["calls"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("undisturbed"))
    yield made
    made.nursery.close()


@dataclass
class Known:
    """What the test knows of a command's folder.

    Attributes:
        altered: files that somebody deleted or altered since they were as they should be.
        other_code: whether some of it was made by other code, as far as it says.
    """

    altered: set[str] = field(default_factory=set)
    other_code: bool = False

    @property
    def is_as_left(self) -> bool:
        return not self.altered and not self.other_code


works = st.runner().flatmap(lambda life: st.sampled_from(life.works))
moments = st.integers(0, 1000)
"""In thousandths of what the command takes by itself."""


class Life(RuleBasedStateMachine):
    """One folder in which somebody works; who runs it says in what world, and with which commands."""

    world: World
    works: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._place = tempfile.TemporaryDirectory()
        self.home = Path(self._place.name)
        self.known = {work: Known() for work in self.works}

    @initialize()
    def begin(self) -> None:
        shutil.copytree(self.world.images, self.home / "images")
        (self.home / "params.yaml").write_text(yaml.safe_dump(PARAMS))

    def teardown(self) -> None:
        self.world.nursery.end()
        try:
            self._bring_back()
        finally:
            self._place.cleanup()

    # ---- commands ------------------------------------------------------------------------------------------------

    @rule(work=works)
    def type_it(self, work: str) -> None:
        """To its end, whatever that is."""
        self._type(work)

    @rule(work=works, moment=moments)
    def kill_it(self, work: str, moment: int) -> None:
        """SIGKILL, unless it ends before."""
        self._type(work, sends="SIGKILL", moment=moment)

    @rule(work=works.filter(lambda work: work in MAY_RESTART))
    def restart_it(self, work: str) -> None:
        """Throw away what cannot be used."""
        self._type(work, restart=True)

    @rule(work=works, moment=moments)
    def type_it_twice(self, work: str, moment: int) -> None:
        """A second process begins while the first one stands at some moment, and either of them may end first."""
        nursery, before = self.world.nursery, self._before(work)
        first = nursery.start(self.home, COMMANDS[work], "SIGSTOP", self._at(work, moment))
        one = nursery.wait(first)
        second = nursery.start(self.home, COMMANDS[work])
        other = nursery.wait(second, 1.0)
        if one["state"] == "stopped":
            nursery.send(first, "SIGCONT")
            one = nursery.wait(first)
        if other["state"] == "running":
            other = nursery.wait(second)
        for ended in (one, other):
            self._check_words(ended)
            reasons = self._reasons(work)
            if ended["code"] != 0:
                assert reasons or "another process is at work" in ended["said"], ended["said"]
        # Of a sweep each may find another run taken; both then say that the same command tries again.
        is_one_run = work in ("run", "again")
        assert 0 in (one["code"], other["code"]) or self._reasons(work) or not is_one_run, one["said"] + other["said"]
        self._check(work, before, ended_well=0 in (one["code"], other["code"]))

    # ---- accidents -----------------------------------------------------------------------------------------------

    @rule(work=works, number=st.integers(0, 10_000), how=st.sampled_from(("delete", "cut", "empty", "flip", "key")))
    def alter_a_file(self, work: str, number: int, how: str) -> None:
        """Any of those that are there; another file in its place, so that one that shares its bytes stays.

        ``key``: where it is JSON, all is there but one key, which has another name.
        """
        found = sorted(everything(self.home / work))
        if not found:
            return
        name = found[number % len(found)]
        path = self.home / work / name
        content = path.read_bytes()
        path.unlink()
        if how != "delete":
            path.write_bytes(_altered(content, number, how))
        self.known[work].altered.add(name)

    @rule(work=works, part=st.sampled_from(("checkpoint", "clients", "runs", "trials", "")))
    def delete_a_folder(self, work: str, part: str) -> None:
        folder = self.home / work / part
        inside = {(Path(part) / name).as_posix() for name in everything(folder)}
        shutil.rmtree(folder, ignore_errors=True)
        if not part:
            self.known[work] = Known()
        self.known[work].altered |= inside if part else set()

    @rule()
    def clear_the_cache(self) -> None:
        shutil.rmtree(self.home / "cache", ignore_errors=True)

    @rule()
    def move_the_images(self) -> None:
        """Away, or back."""
        here, there = self.home / "images", self.home / "elsewhere"
        here, there = (here, there) if here.exists() else (there, here)
        here.rename(there)

    @rule(work=works)
    def edit_the_code(self, work: str) -> None:
        """Since then: what is there was left by other sources than those that carry it out now."""
        for name in ("config.json", "checkpoint/state.json", "checkpoint/durable.json"):
            for path in (self.home / work).rglob(name):
                try:
                    content = json.loads(path.read_text())
                    if "code" not in content:
                        continue
                    content["code"] = {**content["code"], "flcore.core.rng": "other"} if "/" in name else "other"
                except (ValueError, TypeError):
                    continue  # altered before
                path.write_text(json.dumps(content))
                self.known[work].other_code = True

    # ---- what has to hold ----------------------------------------------------------------------------------------

    def _type(self, work: str, *, sends: str | None = None, moment: int = 0, restart: bool = False) -> dict[str, Any]:
        before = self._before(work)
        command = (*COMMANDS[work], *(["--restart"] if restart else []))
        nursery = self.world.nursery
        ended = nursery.wait(nursery.start(self.home, command, sends, self._at(work, moment)))
        assert ended["state"] == "ended", f"{command} hangs"
        if ended["code"] == -9:
            self._check(work, None if restart else before, ended_well=False)
            return ended
        self._check_words(ended)
        if ended["code"] != 0:
            assert self._reasons(work), f"{command} was refused without reason: {ended['said']}"
            if work in ("run", "again"):
                assert everything(self.home / work) == before.files, "a refused action has changed something"
        self._check(work, None if restart else before, ended_well=ended["code"] == 0)
        return ended

    def _at(self, work: str, moment: int) -> int:
        return 1 + self.world.undisturbed(work)[1] * moment // 1000

    def _before(self, work: str) -> Before:
        return Before(everything(self.home / work), results(self.home / work))

    def _reasons(self, work: str) -> bool:
        """Whether somebody has given a command reason to refuse."""
        return not self.known[work].is_as_left or not (self.home / "images").exists()

    def _check_words(self, ended: Mapping[str, Any]) -> None:
        """A line or two and no traceback."""
        said, code = ended["said"], ended["code"]
        assert code in (0, *REFUSED), said
        assert "Traceback" not in said and "fault of protofl" not in said, said
        if code != 0:
            error = said[said.rindex("protofl: ") :].splitlines()
            assert len(error) <= 2, said

    def _check(self, work: str, before: Before | None, *, ended_well: bool) -> None:
        folder, known = self.home / work, self.known[work]
        self._check_files(folder, known)
        self._check_locks(folder)
        now, expected = results(folder), self.world.undisturbed(work)[0]
        if ended_well:
            differing = {name for name in expected if now.get(name) != expected[name]}
            assert differing <= known.altered, f"other results than the undisturbed command's: {differing}"
            known.altered = {name for name in known.altered if name in differing or Path(name).name in SIDE_FILES}
            known.other_code = False
            assert not list(folder.rglob(".running"))
        if before is not None:
            gone = {name for name in self._finished(work, before) if now.get(name) != expected[name]}
            assert not gone, f"finished results are gone: {gone}"

    def _finished(self, work: str, before: Before) -> set[str]:
        """The results that have to stay: of runs that say they have finished, and as long as nobody altered them.

        A trial that other code carried out is carried out again where its study does not know yet how it ended.
        """
        known, expected = self.known[work], self.world.undisturbed(work)[0]
        whole = {name for name, digest in before.results.items() if expected.get(name) == digest}
        runs = {Path(name).parent for name in whole if Path(name).name == "history.jsonl"}
        runs -= {Path(name).parent for name in known.altered} | {Path("study")}
        if work == "study" and known.other_code:
            return set()
        return {name for name in whole if {Path(name).parent, Path(name).parent.parent} & runs}

    def _check_files(self, folder: Path, known: Known) -> None:
        """Every file is whole that nobody altered; of a checkpoint's records those that count."""
        for name in everything(folder).keys() - known.altered:
            path = folder / name
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl" and "checkpoint" not in path.parts:
                assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
            elif path.suffix == ".safetensors":
                try:
                    with safe_open(path, framework="np") as file:
                        file.keys()
                except SafetensorError as error:
                    raise AssertionError(f"{path} is half written") from error

    def _check_locks(self, folder: Path) -> None:
        locks = [*folder.rglob(".running"), *folder.rglob("*lock"), *folder.rglob(".claims/*")]
        for path in [*locks, *(self.home / "cache").rglob("*.lock")]:
            with LockFile(path, "a") as file:
                assert take_lock(file, wait=False), f"{path} is still locked"

    def _bring_back(self) -> None:
        """By what refusals say alone."""
        if (self.home / "elsewhere").exists():
            (self.home / "elsewhere").rename(self.home / "images")
        for work, known in self.known.items():
            ended = self._type(work)
            if ended["code"] != 0 and "--restart" in ended["said"] and work in MAY_RESTART:
                ended = self._type(work, restart=True)
                assert ended["code"] == 0, f"--restart did not help: {ended['said']}"
            if ended["code"] != 0 or known.altered:
                shutil.rmtree(self.home / work)
                self.known[work] = Known()
                ended = self._type(work)
            assert ended["code"] == 0, ended["said"]


@dataclass(frozen=True)
class Before:
    """A folder before a command: its files, and the digests of its results."""

    files: Mapping[str, bytes]
    results: Mapping[str, str]


def _altered(content: bytes, number: int, how: str) -> bytes:
    if how == "flip" and content:
        at = number % len(content)
        return content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :]
    if how == "key":
        with suppress(ValueError):  # else it is no JSON
            said = json.loads(content)
            if isinstance(said, dict) and said:
                name = sorted(said)[number % len(said)]
                return json.dumps({f"{name}?" if key == name else key: value for key, value in said.items()}).encode()
    return content[: number % len(content)] if how == "cut" and content else b""


def live(world: World, works: tuple[str, ...], sequences: int, steps: int, number: int) -> None:
    """As many sequences of as many steps, the same ones each time for the same ``number``."""
    machine = seed(number)(type("Lived", (Life,), {"world": world, "works": works}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )


@pytest.mark.slow
def test_nothing_is_lost_whatever_is_done_in_whatever_order(world: World) -> None:
    live(world, ("run", "again"), sequences=1, steps=6, number=0)


@pytest.mark.slow
def test_nothing_is_lost_in_hundreds_of_steps(world: World) -> None:
    sequences, number = (int(os.environ.get(name, default)) for name, default in (("LIFE", "40"), ("SEED", "0")))
    live(world, tuple(COMMANDS), sequences, steps=20, number=number)
