"""The recorder: a process beside training that logs to MLflow, draws figures and writes pages, from run folders alone.

It is started before anything else, so that the seconds in which MLflow and matplotlib are imported pass while torch is
imported and data are prepared; the process that trains imports neither. What it is told goes through a pipe, one JSON
object a line; so does the address of the store, which may hold a password and is in no file, argument or environment.
This is its end of the pipe in the process that trains; the other end is `pipelines/orchestration/recorder_process.py`.

A recorder that dies, at whatever moment, is started again, once, and told again what it has not answered; after its
second death all that is asked of it is answered with an error. One whose client dies marks the runs it watched as
stopped and ends: what it left undone, the same command or ``protofl track`` does.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from flcore.core.host import python
from flcore.io import disk

_KINDS: Mapping[str, type[ProtoflError]] = {"ConfigError": ConfigError, "DataError": DataError, "RunError": RunError}
_LOG = Path(".protofl") / "logs" / "recorder.log"


class Recorder:
    """The recorder as its client sees it; every method may be called from any thread."""

    def __init__(self, tracking: bool, say: Callable[[str], None]) -> None:
        """Start the process, which begins to import.

        Args:
            tracking: whether MLflow will be needed.
            say: is told what a person should know, such as a store that is away.
        """
        self._tracking, self.say = tracking, say
        self._settings: dict[str, Any] = {}
        self._watched: dict[str, dict[str, Any]] = {}
        self._asked: dict[int, tuple[dict[str, Any], Future[Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._starts = 0
        self._closing = False
        self._lost: RunError | None = None
        """Why nobody answers any more."""
        self._start()

    def __enter__(self) -> Recorder:
        """Use it until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; runs that are still watched are marked as failed after an error, and as stopped after Ctrl-C."""
        self.close(failed=kind is not None and issubclass(kind, Exception))

    # ---- what it is told -----------------------------------------------------------------------------------------

    def configure(self, tracking: Mapping[str, Any]) -> None:
        """Tell it the section ``tracking``; before anything else."""
        self._settings = {"do": "configure", "tracking": dict(tracking)}
        self._send(self._settings)

    def watch(self, directory: Path) -> None:
        """Log a run's rounds while it grows."""
        told = {"do": "watch", "run": str(directory.absolute())}
        with self._lock:
            self._watched[told["run"]] = told
        self._send(told)

    def finish(self, directory: Path) -> Future[dict[str, Any]]:
        """Draw, write and log a finished run.

        Returns:
            To be asked for ``{"report": path, "store": where it is logged, or null}``.
        """
        with self._lock:
            self._watched.pop(str(directory.absolute()), None)
        return self._ask({"do": "finish", "run": str(directory.absolute())})

    def log(self, directory: Path) -> Future[dict[str, Any]]:
        """Log a finished run whose page is there; as :meth:`finish`."""
        return self._ask({"do": "log", "run": str(directory.absolute())})

    def compare(
        self, kind: str, config: Mapping[str, Any], runs: Sequence[Path], directory: Path, **facts: Any
    ) -> Future[dict[str, Any]]:
        """Set finished runs against each other: tables, figures, a page, and a run in MLflow above them.

        Args:
            kind: ``comparison`` or ``sweep``.
            config: of the comparison, as a mapping.
            runs: their folders, in order.
            directory: where the results go.
            facts: what else this kind needs, as JSON values.

        Returns:
            To be asked for ``{"report": path, "table": text for a terminal, "store": ..., "markdown": ...}``.
        """
        folders = [str(run.absolute()) for run in runs]
        asked = {"do": kind, "config": dict(config), "runs": folders, "directory": str(directory.absolute())}
        return self._ask(asked | {"facts": facts})

    def trial(self, study: Path) -> None:
        """Log the trials of a study that ended, whose results are on disk."""
        self._send({"do": "trial", "study": str(study.absolute())})

    def study(self, study: Path) -> Future[dict[str, Any]]:
        """Log a study, whose results are on disk.

        Returns:
            To be asked for ``{"store": where it is logged, or null}``.
        """
        return self._ask({"do": "study", "study": str(study.absolute())})

    def stop(self, directory: Path, reason: str, *, failed: bool = True) -> None:
        """Say that a watched run has failed, or that somebody has ended it, and why."""
        with self._lock:
            self._watched.pop(str(directory.absolute()), None)
        self._send({"do": "stop", "run": str(directory.absolute()), "reason": reason, "failed": failed})

    def leave(self) -> None:
        """Let it finish what it was told by itself, after this process has ended."""
        self._closing = True
        self._send({"do": "leave"})

    def close(self, *, failed: bool = False) -> None:
        """Wait until it has done what it was told, and end it."""
        if self._closing:
            return
        self._closing = True
        if not self._settings:  # what was asked for could not be begun: nobody waits for its imports
            self._process.terminate()
        self._send({"do": "close", "failed": failed})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        self._process.wait()

    # ---- the pipe ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        disk.make_folder(_LOG.parent)
        arguments = python(
            "-m", "pipelines.orchestration.recorder_process", *(["--tracking"] if self._tracking else [])
        )
        with _LOG.open("ab") as log:
            # A session of its own: Ctrl-C is for the process that trains, which says what is to become of the runs.
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
            )
        self._starts += 1
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                pass  # it has died: whoever listens to it starts it again

    def _ask(self, message: dict[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            number = next(self._numbers)
            self._asked[number] = ({**message, "number": number}, answer)
            self._send(self._asked[number][0])
        return answer

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Hand answers to whoever waits for them, until the process ends."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # it died in the middle of a line, which is its last one
                break
            if "say" in message:
                with suppress(Exception):  # answers come behind it, for which somebody waits
                    self.say(message["say"])
                continue
            with self._lock:
                _, answer = self._asked.pop(message["number"], (None, None))
            if answer is None:  # asked anew after a death, and answered by both processes
                continue
            if "error" in message:
                answer.set_exception(_error_of(message["error"]))
            else:
                answer.set_result(message["answer"])
        self._ended(process.wait())

    def _ended(self, code: int) -> None:
        with self._lock:
            if self._closing and not self._asked:
                return
            if self._starts < 2:
                self._start()
                told = [self._settings] if self._settings else []
                for message in [*told, *self._watched.values(), *(message for message, _ in self._asked.values())]:
                    self._send(message)
                return
            reason = f"signal {-code}" if code < 0 else f"exit code {code}, see {_LOG}"
            self._lost = RunError(
                f"the recorder ended ({reason}): results are on disk, the same command draws and logs them"
            )
            unanswered, self._asked = list(self._asked.values()), {}
        for _, answer in unanswered:
            answer.set_exception(self._lost)


def _error_of(described: Mapping[str, Any]) -> Exception:
    kind = _KINDS.get(described["kind"])
    if kind is not None:
        return kind(described["text"])
    if "system" in described:
        return OSError(*described["system"])
    return RuntimeError(f"{described['kind']}: {described['text']}\n{described['trace']}")
