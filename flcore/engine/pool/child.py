"""Python processes that call one function of the package.

Not `multiprocessing`: its processes import the parent's main module, so that a script which calls :func:`flcore.run` at
its top would call it again in each, and a command would load modules that only it needs. These import
the function's module, with the parent's search path.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from flcore.core import loaded_code
from flcore.core.host import python

_BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flcore.engine.pool.child import begin; begin()"
_SECONDS_TO_DIE = 5

_started: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


class WorkerProcess:
    """A process that was started, and this end of the pipe to it.

    Attributes:
        pipe: to the process; it is closed when this process ends, however that comes.
        pid: of the process.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start ``function(its end of the pipe, *arguments)``, a function at the top of a module."""
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        place = f"{function.__module__}:{function.__qualname__}"
        command = python("-c", _BEGIN, json.dumps(sys.path), place, str(theirs.fileno()))
        with theirs, _deaf_children():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        _started.add(self)
        with suppress(OSError):  # it has exited already, which the first read reports
            self.pipe.send((loaded_code.digests(), arguments))

    @property
    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def ended(self, seconds: float) -> str:
        """Wait for the exit and say how: ``by SIGKILL``, ``with exit code 1``; after a timeout ``without closing``."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "without closing"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        """End it at once, and do not wait."""
        self._process.kill()

    def end(self, *, terminate: bool = False) -> None:
        """Wait for it to leave; told to, or by itself since its pipe is closed. After some seconds it is killed."""
        if terminate:
            self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def alive() -> list[WorkerProcess]:
    """Processes that this one has started and that have not ended."""
    return [child for child in _started if child.is_alive]


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that this thread starts do not hear Ctrl-C, not even while they are still loading Python.

    It reaches every process of a terminal; what becomes of the workers is for their parent to decide.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the process ----------------------------------------------------------------------------------------------


def begin() -> None:
    """Do what the command line says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, _, place, descriptor = sys.argv
    sys.argv[1:] = []
    module, _, name = place.partition(":")
    pipe = Connection(int(descriptor))
    try:
        parent, arguments = pipe.recv()
    except (EOFError, OSError):
        return  # the parent has exited
    loaded_code.compare_with_parent(parent)  # this process has read the files later
    getattr(importlib.import_module(module), name)(pipe, *arguments)


def end_with_parent(pipe: Connection) -> None:
    """Leave at once when the other end of the pipe is closed, in the middle of anything too."""

    def wait() -> None:
        watched = select.poll()
        watched.register(pipe.fileno(), 0)  # nothing but that it was hung up
        while not watched.poll():
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
