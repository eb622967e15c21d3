"""A process that has imported everything and forks a child for every command, which then takes a tenth of a second.

It reads requests on standard input and answers on standard output, a JSON object a line each:

    {"do": "warm", "params"}                                              {}
    {"do": "start", "folder", "arguments", "variables", "sends", "at"}    {"pid"}
    {"do": "wait", "pid", "seconds"}                                      {"state": "running" or "stopped"}, or
                                                                          {"state": "ended", "code", "said", "calls"}
    {"do": "signal", "pid", "signal"}                                     {}
    {"do": "end"}                                                         {}

A command is the real one, from its arguments to its exit code. Two things are not its own here, because each would
start interpreters: the follower, which draws and logs and decides nothing about a run; and the pool of processes of
many runs, in whose place they are carried out one after the other, as with one core.

A child sends itself the signal ``sends`` when it has called ``at`` Python functions: a moment that is the same again,
and finer than any list of places that somebody thought of.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.experiment.provenance import code_fingerprint, division_fingerprint, preparation_fingerprint
from pipelines.cli import app
from pipelines.execution import bodies
from pipelines.orchestration import commands
from pipelines.tuning import search
from tests.following import NoFollower
from tests.one_process import ThisProcess

_SECONDS_BETWEEN_LOOKS = 0.002


def main() -> None:
    """Serve until there are no more requests; children that are left are ended."""
    commands.Follower = NoFollower  # type: ignore[assignment,misc]
    for module in (bodies, search):
        module.RunPool = ThisProcess  # type: ignore[attr-defined]
        module.most_at_once = lambda runs: 1  # type: ignore[attr-defined]
    children: dict[int, Path] = {}
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "warm":
            answer = _warm(**request)
        elif what == "start":
            answer = _start(children, **request)
        elif what == "wait":
            answer = _wait(children, **request)
        elif what == "end":
            answer = _end(children)
        else:
            os.kill(request["pid"], signal.Signals[request["signal"]])
            answer = {}
        print(json.dumps(answer), flush=True)
    _end(children)


def _warm(params: dict[str, Any]) -> dict[str, Any]:
    """Have read which sources such a run uses, and leave what is there out of every child's search for garbage."""
    config = Config.from_mapping(params)
    for fingerprint in (code_fingerprint, division_fingerprint, preparation_fingerprint):
        fingerprint(config)
    gc.collect()
    gc.freeze()
    return {}


def _start(
    children: dict[int, Path], folder: str, arguments: list[str], variables: dict[str, str], sends: str | None, at: int
) -> dict[str, Any]:
    said = Path(folder) / f".said.{time.monotonic_ns()}"
    pid = os.fork()
    if pid:
        children[pid] = said
        return {"pid": pid}
    os.chdir(folder)
    os.environ.update(variables)
    handle, nothing = os.open(said, os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, nothing), (1, handle), (2, handle)):
        os.dup2(target, stream)
    calls = _counted_calls(None if sends is None else signal.Signals[sends], at)
    code = app.main(arguments)
    sys.setprofile(None)
    sys.stdout.flush()
    sys.stderr.flush()
    said.with_suffix(".calls").write_text(str(next(calls)))
    os._exit(code)


def _counted_calls(number: signal.Signals | None, at: int) -> Iterator[int]:
    """Count calls from now on, and send this process a signal at one of them; what is next is how many there were."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if calls == at and number is not None:
                os.kill(os.getpid(), number)

    sys.setprofile(count)
    return iter(lambda: calls, None)


def _end(children: dict[int, Path]) -> dict[str, Any]:
    """End those that are left, as after a test that has failed."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    children.clear()
    return {}


def _wait(children: dict[int, Path], pid: int, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            return {"state": "stopped"}
        if found:
            said = children.pop(pid)
            calls = said.with_suffix(".calls")
            counted = int(calls.read_text()) if calls.exists() else None
            code = os.waitstatus_to_exitcode(status)
            return {"state": "ended", "code": code, "said": said.read_text(), "calls": counted}
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return {"state": "running"}


if __name__ == "__main__":
    main()
