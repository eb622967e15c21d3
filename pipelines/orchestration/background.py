"""Background processes: start, find and stop them.

``.protofl/services.json`` lists them. A process is identified by its start in ticks since boot and a mark in its
environment, which children inherit. So stopping finds helpers of a server and flows of a worker, also orphans, and
nothing else.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
"""In the working folder."""
STATE = HOME / "services.json"
LOCK = HOME / "services.lock"
LOGS = HOME / "logs"
PASSWORD = HOME / "prefect-password"
"""File with the password of Prefect's server, for this user only."""

_MARK = "PROTOFL_SERVICE"
_SECONDS_TO_SHOW = 2.0  # until a process shows its environment
_SECONDS_TO_END = 15.0


@dataclass(frozen=True)
class Service:
    """A process that was started in the background.

    Attributes:
        name: of the service. url: its address. pid: its process. log: file of its output.
        started: seconds since 1970, from the operating system.
        ticks: its start in clock ticks since boot; 0 if the system does not say.
        shows: of MLflow, its store without a password.
    """

    name: str
    url: str
    pid: int
    started: float
    log: str
    ticks: int
    shows: str = ""


def recorded() -> list[Service]:
    """Return the services that were started and not stopped; some may have ended. A damaged file counts as none."""
    try:
        return [Service(**entry) for entry in json.loads(STATE.read_text(encoding="utf-8"))["services"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def record(services: Sequence[Service]) -> None:
    """Write the list of services; delete an empty one."""
    if not services:
        disk.remove(STATE, missing_ok=True)
        return
    write_json(STATE, {"services": [asdict(service) for service in services]})


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Make a second command that locks this file wait for the first."""
    disk.make_folder(file.parent)
    with disk.open_lock(file) as lock:
        take_lock(lock, wait=True)
        yield


def password() -> str:
    """Return the password of Prefect's server; create it at the first call, and anew if others could read it."""
    found = known_password()
    if found is None or PASSWORD.stat().st_mode & 0o077:
        found = secrets.token_urlsafe(24)
        disk.make_folder(HOME)
        disk.remove(PASSWORD, missing_ok=True)
        with disk.create_new(PASSWORD, mode=0o600) as file:
            file.write(found.encode() + b"\n")
    return found


def known_password() -> str | None:
    """Return the password of Prefect's server; None if there is none or the file is damaged."""
    try:
        text = PASSWORD.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch(r"[\w-]{16,}", text) else None


def start(name: str, url: str, command: Sequence[str], environment: Mapping[str, str], shows: str = "") -> Service:
    """Start a process that outlives this one, in a session of its own; its output goes to a log."""
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
    except psutil.NoSuchProcess:  # ended at once, which its health check reports
        started = time.time()
    service = Service(name, url, process.pid, started, str(log), _ticks(process.pid), shows)
    # The environment of a new process is readable after a moment; only then can it be identified.
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while process.poll() is None and not is_running(service) and time.monotonic() < deadline:
        time.sleep(0.01)
    return service


def set_log_aside(service: Service) -> Path:
    """Rename the log of a service that has ended, which may contain the reason; return its new path."""
    log, kept = Path(service.log), LOGS / f"{service.name}.before.log"
    if log.exists():
        disk.rename(log, kept)
    return kept


def is_running(service: Service) -> bool:
    """Return whether the process that was started still exists."""
    import psutil

    try:
        process = psutil.Process(service.pid)
        return service.ticks == _ticks(service.pid) and process.environ().get(_MARK) == _mark(service.name)
    except psutil.Error:  # no such process, a zombie, or another user's
        return False


def stop(name: str) -> None:
    """End a service and all that it started, after a while by force."""
    import psutil

    force = False
    while family := _family(name):
        for process in family:
            with suppress(psutil.NoSuchProcess):
                (process.kill if force else process.terminate)()
        psutil.wait_procs(family, timeout=_SECONDS_TO_END)
        force = True  # also for processes that have started meanwhile


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
    # Not the time of `psutil`, which moves with the clock of a Linux machine.
    return int(began_at(pid) or 0)


def _mark(name: str) -> str:
    return f"{name} of {STATE.resolve()}"
