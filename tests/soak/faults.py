"""What can go wrong around a command, and how it is mended afterwards: by typing it again, nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.soak.harmed import HARMS
from tests.soak.place import PARAMS, ROUNDS, Place, Typed, is_alive

_HANG_SECONDS = (1.0, 6.0)
_FULL_SECONDS = (1.0, 6.0)
_BALLAST = ".ballast"


@dataclass(frozen=True)
class Moment:
    """What a fault has before it.

    Attributes:
        place: the servers. out: the folder of the command's results.
        random: of this fault alone.
    """

    place: Place
    out: Path
    random: random.Random


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        before: done before the command is typed; gives variables of its environment.
        has_met: whether what was done before came to anything; None: it always does.
        during: done at some moment while it is under way; False where there was nothing to do it to.
        works: commands that it is thrown at.
    """

    before: Callable[[Moment], Mapping[str, str]] | None = None
    has_met: Callable[[Moment], bool] | None = None
    during: Callable[[Moment, Typed], bool] | None = None
    works: tuple[str, ...] = ("compare", "tune")


def _kill(found: list[psutil.Process]) -> bool:
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    while any(is_alive(process) for process in found):  # else it is still found when it is looked for next
        time.sleep(0.01)
    return bool(found)


def _kill_command(moment: Moment, typed: Typed) -> bool:
    return _kill([psutil.Process(typed.process.pid)]) if typed.process.poll() is None else False


def _kill_worker(moment: Moment, typed: Typed) -> bool:
    workers = typed.workers()
    return _kill([moment.random.choice(workers)]) if workers else False


def _kill_follower(moment: Moment, typed: Typed) -> bool:
    return _kill(typed.follower())


def _kill_server(name: str) -> Callable[[Moment, Typed], bool]:
    return lambda moment, typed: _kill(moment.place.server(name))


def _kill_database(moment: Moment, typed: Typed) -> bool:
    database = moment.place.database
    return database is not None and _kill(database.process())


def _hang(find: Callable[[Moment, Typed], list[psutil.Process]]) -> Callable[[Moment, Typed], bool]:
    """Stopped for some seconds; then it goes on, or somebody loses patience and kills it."""

    def hang(moment: Moment, typed: Typed) -> bool:
        found = find(moment, typed)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(moment.random.uniform(*_HANG_SECONDS))
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return _kill(found) if moment.random.random() < 0.5 else bool(found)

    return hang


def _a_worker(moment: Moment, typed: Typed) -> list[psutil.Process]:
    workers = typed.workers()
    return [moment.random.choice(workers)] if workers else []


def _away(name: str) -> Callable[[Moment], Mapping[str, str]]:
    def away(moment: Moment) -> Mapping[str, str]:
        _kill(moment.place.server(name))
        return {}

    return away


def _fill(moment: Moment) -> None:
    with suppress(OSError), (moment.place.home / "disk" / _BALLAST).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))


def _full_before(moment: Moment) -> Mapping[str, str]:
    _fill(moment)
    return {}


def _full(moment: Moment, typed: Typed) -> bool:
    """For some seconds, or until the command has ended."""
    _fill(moment)
    with suppress(Exception):
        typed.process.wait(moment.random.uniform(*_FULL_SECONDS))
    (moment.place.home / "disk" / _BALLAST).unlink(missing_ok=True)
    return True


def _forbid(moment: Moment) -> None:
    moment.out.mkdir(parents=True, exist_ok=True)
    for path in [moment.out, *moment.out.rglob("*")]:
        with suppress(FileNotFoundError):
            if path.is_dir():
                path.chmod(0o555)


def _forbid_before(moment: Moment) -> Mapping[str, str]:
    _forbid(moment)
    return {}


def _forbid_during(moment: Moment, typed: Typed) -> bool:
    _forbid(moment)
    with suppress(Exception):
        typed.process.wait(moment.random.uniform(*_FULL_SECONDS))
    allow(moment.out)
    return True


def allow(out: Path) -> None:
    """Let the folder be written to again."""
    for path in [out, *out.rglob("*")]:
        with suppress(FileNotFoundError):
            if path.is_dir():
                path.chmod(0o755)


def _harm(kind: str) -> Callable[[Moment], Mapping[str, str]]:
    def harm(moment: Moment) -> Mapping[str, str]:
        number, client = (
            1 + moment.random.randrange(ROUNDS),
            moment.random.randrange(PARAMS["partition"]["num_clients"]),
        )
        _mark(moment).unlink(missing_ok=True)
        return {"SOAK_HARM": f"{kind},{number},{client},{_mark(moment)}"}

    return harm


def _mark(moment: Moment) -> Path:
    return moment.place.home / "harmed"


FAULTS: Mapping[str, Fault] = {
    "command killed": Fault(during=_kill_command),
    "worker killed": Fault(during=_kill_worker),
    "worker hangs": Fault(during=_hang(_a_worker)),
    "follower killed": Fault(during=_kill_follower),
    "follower hangs": Fault(during=_hang(lambda moment, typed: typed.follower())),
    "Prefect killed": Fault(during=_kill_server("prefect")),
    "Prefect hangs": Fault(during=_hang(lambda moment, typed: moment.place.server("prefect"))),
    "Prefect away": Fault(before=_away("prefect")),
    "MLflow killed": Fault(during=_kill_server("mlflow")),
    "MLflow hangs": Fault(during=_hang(lambda moment, typed: moment.place.server("mlflow"))),
    "MLflow away": Fault(before=_away("mlflow")),
    "PostgreSQL killed": Fault(during=_kill_database),
    "disk full": Fault(during=_full),
    "disk full before": Fault(before=_full_before),
    "folder read-only": Fault(during=_forbid_during),
    "folder read-only before": Fault(before=_forbid_before),
    # In a study a trial with such a client fails, which is its result: only a comparison can be tried again.
    **{
        f"client: {kind}": Fault(_harm(kind), has_met=lambda moment: _mark(moment).exists(), works=("compare",))
        for kind in HARMS
    },
}


def left_out(place: Place) -> Mapping[str, str]:
    """The kinds that cannot be thrown on this machine, and why."""
    found = {}
    if not place.has_disk:
        found |= {name: "no small file system may be mounted here" for name in FAULTS if name.startswith("disk full")}
    if place.database is None:
        found["PostgreSQL killed"] = "PostgreSQL is not installed (no initdb)"
    return found


def mend(place: Place, out: Path) -> None:
    """Undo what a fault has left, as a person would before typing the command again: space, rights, servers."""
    (place.home / "disk" / _BALLAST).unlink(missing_ok=True)
    allow(out)
    if not place.is_up():
        place.up()
