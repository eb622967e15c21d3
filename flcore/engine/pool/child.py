"""Python processes that call one function of the package.

Not `multiprocessing`: its processes import the parent's main module. A script that calls :func:`flcore.run` at its top
would call it again in each. These import the function's module, with the parent's search path.
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
    """A started process.

    Attributes:
        pipe: to the process; closed when this process ends in any way.
        pid: of the process.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start ``function(its end of the pipe, *arguments)``, a function at the top of a module."""
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        name = f"{function.__module__}:{function.__qualname__}"
        command = python("-c", _BEGIN, json.dumps(sys.path), name, str(theirs.fileno()))
        with theirs, _without_ctrl_c():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        _started.add(self)
        with suppress(OSError):  # it has exited already, which the first read reports
            self.pipe.send((loaded_code.digests(), arguments))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_status(self, seconds: float) -> str:
        """Wait for the exit: ``by SIGKILL``, ``with exit code 1``; after a timeout ``without closing``."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "without closing"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        """Kill the process; do not wait."""
        self._process.kill()

    def join(self, *, terminate: bool = False) -> None:
        """Wait until the process exits, by ``terminate`` or because its pipe is closed; kill it after some seconds."""
        if terminate:
            self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def alive() -> list[WorkerProcess]:
    """Return the started processes that are running."""
    return [child for child in _started if child.is_alive]


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in processes that this thread starts, also while they load Python; their parent stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the process ----------------------------------------------------------------------------------------------


def begin() -> None:
    """Call the function that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, _, function, descriptor = sys.argv
    sys.argv[1:] = []
    module, _, name = function.partition(":")
    pipe = Connection(int(descriptor))
    try:
        parent, arguments = pipe.recv()
    except (EOFError, OSError):
        return  # the parent has exited
    loaded_code.compare_with_parent(parent)  # this process has read the files later
    getattr(importlib.import_module(module), name)(pipe, *arguments)


def end_with_parent(pipe: Connection) -> None:
    """Exit at once when the other end of the pipe is closed."""

    def wait() -> None:
        watched = select.poll()
        watched.register(pipe.fileno(), 0)  # only hang-up
        while not watched.poll():
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
