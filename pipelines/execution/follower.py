"""The follower: a subprocess that logs run folders to MLflow and draws their figures and pages.

It starts first, so that it imports MLflow and matplotlib while torch is imported and data are prepared; the training
process imports neither. It reads the folders, and the store's address, which may contain a password, from its standard
input. It sends no answer: results are files, warnings are printed, and the command waits for the exit code.

At the end of its input, when the command has ended, it completes its folders, marks unfinished runs as stopped and
exits. The same command or ``protofl track`` completes later what it could not do.
`pipelines/orchestration/follow.py` is the subprocess.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.core.host import python
from flcore.io import disk

EXIT_CODES: Mapping[int, type[Exception]] = {2: ConfigError, 3: DataError, 4: RunError, 1: RuntimeError}
"""Exit code of the subprocess → the error of its last folder."""

_LOG = Path(".protofl") / "logs" / "follower.log"


class Follower:
    """The subprocess and the folders that it follows; every method may be called from any thread."""

    def __init__(self, tracking: bool, say: Callable[[str], None]) -> None:
        """Start the subprocess, which imports MLflow if ``tracking``; ``say`` receives its warnings."""
        self._tracking, self.say = tracking, say
        self._settings: dict[str, Any] = {}
        self._lines: list[dict[str, Any]] = []
        self._open: set[Path] = set()
        self._reports: dict[str, str] = {}
        self._errors: list[str] = []
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the subprocess; unfinished runs are marked as failed after an error, as stopped after Ctrl-C."""
        if kind is not None and issubclass(kind, Exception):
            for folder in sorted(self._open):
                self.stop(folder)
        self.close()

    # ---- the folders ---------------------------------------------------------------------------------------------

    def configure(self, tracking: Mapping[str, Any]) -> None:
        """Set the section ``tracking``; call it before any folder is followed."""
        from pipelines.runs.provenance import source

        self._settings = {"tracking": dict(tracking), "source": source(sys.argv, os.environ)["name"]}
        self._send(self._settings)

    def follow(self, folder: Path) -> None:
        """Log a run's rounds, or a study's trials, while they are written."""
        with self._lock:
            if folder not in self._open:
                self._open.add(folder)
                self._send({"folder": str(folder.absolute())})

    def finish(self, folder: Path) -> None:
        with self._lock:
            self._open.discard(folder)
        self._send({"folder": str(folder.absolute()), "finished": True})

    def stop(self, folder: Path, reason: str | None = None) -> None:
        with self._lock:
            self._open.discard(folder)
        self._send({"folder": str(folder.absolute()), "stopped": "FAILED", "reason": reason})

    def compare(
        self, kind: str, config: Mapping[str, Any], runs: Sequence[Path], directory: Path, **facts: Any
    ) -> None:
        """Write tables, figures and page of finished runs, and log them below a run of their own.

        ``kind`` is ``comparison`` or ``sweep``; ``facts`` are further JSON values that it needs.
        """
        compared = {"kind": kind, "config": dict(config), "runs": [str(run.absolute()) for run in runs]}
        self._send({"folder": str(directory.absolute()), "compared": compared | facts})

    def wait(self) -> Mapping[str, str]:
        """Wait until all folders are drawn and logged and the subprocess has exited; a later folder starts another.

        Returns:
            What it printed: ``table``, of a comparison, for a terminal; ``store``, where runs are logged, if they are.

        Raises:
            ConfigError, DataError, RunError: the last folder could not be drawn.
        """
        with self._lock:
            if self._process is None and self._failure is not None:  # called again: try again
                self._start()
            if self._process is not None:
                self._failure = self._finished()
            if self._failure is not None:
                raise self._failure
            return dict(self._reports)

    def leave(self) -> None:
        """Let the subprocess complete its folders after this process has exited."""
        with self._lock:
            if self._process is not None:
                if self._process.poll() is not None:
                    self._start()
                self._end_input()
                self._process = None

    def close(self) -> None:
        """Wait as :meth:`wait` does; errors are printed."""
        with self._lock:
            if self._process is None:
                return
            if not self._settings:  # the configuration is wrong: its imports are not needed
                self._process.kill()
                self._process.wait()
                return
            failure = self._finished()
        if failure is not None:
            self.say(str(failure))

    # ---- the subprocess ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the subprocess with the folders that it has not completed."""
        disk.make_folder(_LOG.parent)
        arguments = python("-m", "pipelines.orchestration.follow", *(["--tracking"] if self._tracking else []))
        with _LOG.open("ab") as log:
            # A separate session: Ctrl-C is for the training process, and its exit ends the input.
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
            )
        self._reports, self._errors, self._failure = {}, [], None
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()
        for line in ([self._settings] if self._settings else []) + self._lines:
            self._write(line)

    def _send(self, line: dict[str, Any]) -> None:
        with self._lock:
            if self._process is None:
                self._lines = []
                self._start()
            if line is not self._settings:
                self._lines.append(line)
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it was killed: `wait` starts another one
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Receive what the subprocess prints: lines ``[kind, text]``."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                kind, text = json.loads(line)
            except ValueError:  # killed within a line
                return
            if kind == "say":
                with suppress(Exception):  # the terminal is closed; the folders are still followed
                    self.say(text)
            elif kind == "error":
                self._errors.append(text)
            else:
                self._reports[kind] = text

    def _finished(self) -> Exception | None:
        """End the input, wait for the exit, and return the error of the last folder; restart a killed subprocess."""
        code = self._exit_code()
        if code < 0:
            self._start()
            code = self._exit_code()
        self._process, self._open = None, set()
        failure: Exception | None = None
        if code != 0 and self._errors:
            failure = EXIT_CODES.get(code, RunError)(self._errors.pop())
        elif code != 0:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}, see {_LOG}"
            failure = RunError(f"the follower failed ({how}); results are on disk, run the same command to draw them")
        for text in self._errors:
            self.say(text)
        return failure

    def _exit_code(self) -> int:
        assert self._process is not None
        self._end_input()
        self._listener.join()
        return self._process.wait()

    def _end_input(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
