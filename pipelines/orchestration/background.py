"""Processes that go on when the command that started them has ended, and how they are found again and stopped.

``.protofl/services.json`` says what was started here. A process is identified by its start in ticks since boot and a
mark in its environment; children inherit the mark. So stopping finds a server's helpers and a worker's flows too, also
those whose parent has died, and nothing else.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.core.host import began_at, safe_environment
from flcore.io import disk
from flcore.io.files import write_json
from flcore.io.locks import take_lock

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]

HOME = Path(".protofl")
"""Seen from the folder in which commands are typed."""
STATE = HOME / "services.json"
LOGS = HOME / "logs"
PASSWORD = HOME / "prefect-password"
"""What Prefect's server here asks for; only this user can read it."""

_MARK = "PROTOFL_SERVICE"
_SECONDS_TO_SHOW = 2.0  # until a process shows its environment
_SECONDS_TO_END = 15.0


@dataclass(frozen=True)
class Service:
    """A process that was started in the background.

    Attributes:
        name: what it is.
        url: where it answers.
        pid: its process.
        started: seconds since 1970, as the operating system tells it of the process.
        log: where it writes what it has to say.
        shows: what it was started on, where that is not the same for all: of MLflow the store, without a password.
        ticks: its start in clock ticks since boot; 0 where the system does not say. None: started by an earlier
            version.
    """

    name: str
    url: str
    pid: int
    started: float
    log: str
    shows: str = ""
    ticks: int | None = None


def recorded() -> list[Service]:
    """What was started here and not stopped since; some of it may have ended by itself. A damaged file is no file."""
    try:
        return [Service(**entry) for entry in json.loads(STATE.read_text(encoding="utf-8"))["services"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def record(services: Sequence[Service]) -> None:
    """Write what runs; nothing leaves no file."""
    if not services:
        disk.remove(STATE, missing_ok=True)
        return
    write_json(STATE, {"services": [asdict(service) for service in services]})


@contextmanager
def one_command_at_a_time() -> Iterator[None]:
    """Let a second ``up`` or ``down`` wait for the first."""
    disk.make_folder(HOME)
    with disk.open_lock(HOME / "services.lock") as lock:
        take_lock(lock, wait=True)
        yield


def password() -> str:
    """Return what Prefect's server here asks for; made at the first call.

    A file that others could read gets another one.
    """
    found = known_password()
    if found is None or PASSWORD.stat().st_mode & 0o077:
        found = secrets.token_urlsafe(24)
        disk.make_folder(HOME)
        disk.remove(PASSWORD, missing_ok=True)
        with disk.create_new(PASSWORD, mode=0o600) as file:
            file.write(found.encode() + b"\n")
    return found


def known_password() -> str | None:
    """Return what Prefect's server here asks for; None where none was started, or the file is damaged."""
    try:
        text = PASSWORD.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch(r"[\w-]{16,}", text) else None


def start(name: str, url: str, command: Sequence[str], environment: Mapping[str, str], shows: str = "") -> Service:
    """Start a process that outlives this one: its own session, no terminal, its output in a log of its own."""
    import psutil

    disk.make_folder(LOGS)
    log = LOGS / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=safe_environment({**environment, _MARK: _mark(name)}),
            start_new_session=True,
        )
    try:
        started = psutil.Process(process.pid).create_time()
    except psutil.NoSuchProcess:  # ended at once; whoever waits for its health will see
        started = time.time()
    service = Service(name, url, process.pid, started, str(log), shows, _ticks(process.pid))
    # A process shows its environment a moment after it has begun; without it, it is not told from somebody else's.
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while process.poll() is None and not is_running(service) and time.monotonic() < deadline:
        time.sleep(0.01)
    return service


def set_log_aside(service: Service) -> Path:
    """Keep the log of a service that has ended, which may say why, from being written over; returns where it is."""
    log, kept = Path(service.log), LOGS / f"{service.name}.before.log"
    if log.exists():
        disk.rename(log, kept)
    return kept


def is_running(service: Service) -> bool:
    """Whether the very process that was started is still there."""
    import psutil

    try:
        process = psutil.Process(service.pid)
        return service.ticks in (None, _ticks(service.pid)) and process.environ().get(_MARK) == _mark(service.name)
    except psutil.Error:  # no such process, one that has ended and waits for its parent, or somebody else's
        return False


def stop(name: str) -> None:
    """End a service and everything that came of it: politely, and after a while by force."""
    import psutil

    force = False
    while family := _family(name):
        for process in family:
            try:
                if force:
                    process.kill()
                else:
                    process.terminate()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(family, timeout=_SECONDS_TO_END)
        force = True  # also for what began between the look and the signal


def _family(name: str) -> list[psutil.Process]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == _mark(name):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _ticks(pid: int) -> int:
    # Not the time of day that `psutil` gives, which moves when the clock of a Linux machine is set.
    return int(began_at(pid) or 0)


def _mark(name: str) -> str:
    """The same name in another folder is another service."""
    return f"{name} of {STATE.resolve()}"
