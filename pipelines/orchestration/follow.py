"""The follower's subprocess: reads folders from standard input, a JSON object a line, and prints ``[kind, text]``.

It knows only folders. It draws and logs them in order; between two of them it logs runs that are still trained, every
few seconds. See :class:`pipelines.execution.follower.Follower` for the lines.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ProtoflError
from flcore.experiment.run_folder import RunFiles
from pipelines.addresses import redact
from pipelines.execution.follower import EXIT_CODES
from pipelines.runs.folder import RunFolder
from pipelines.runs.standard_error import console
from pipelines.tuning.log import StudyTracker, is_study

if TYPE_CHECKING:
    from pipelines.tracking.sync import RunTracker

_LIVE_EVERY_SECONDS = 15.0
_NICENESS = 5
"""Of nineteen: drawing waits for training if both need the same core."""
_FAULT = 1
_BEGAN_MS = time.time_ns() // 1_000_000
"""Of this process, before its long imports."""
Report = Callable[[str, str], None]


def main() -> int:
    """Follow folders until the input ends; returns the exit code."""
    # `protofl down` terminates the whole process group of a flow: the end of the input says that it has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to the log

    def report(kind: str, text: str) -> None:
        try:
            out.write(json.dumps([kind, text]) + "\n")
            out.flush()
        except (BrokenPipeError, ValueError):
            pass  # the command did not wait

    _import(tracking="--tracking" in sys.argv)
    return Following(report).run(lines)


def _read(lines: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        lines.put(json.loads(line))
    lines.put(None)


def _import(*, tracking: bool) -> None:
    """Import what takes seconds, while data are prepared."""
    gc.disable()  # nothing of it is ever freed; the collector would take a tenth of the time
    import pipelines.reporting.comparison_report
    import pipelines.reporting.run_report  # noqa: F401 - matplotlib and the tables

    if tracking:
        from pipelines.tracking.store import set_mlflow_environment

        set_mlflow_environment()
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - the default store
        import psutil  # type: ignore[import-untyped]

        psutil.cpu_percent()  # which is since the last call
    gc.freeze()
    gc.enable()


class Following:
    """The folders that are followed."""

    def __init__(self, report: Report) -> None:
        """Follow nothing yet; ``report`` receives ``say``, ``error``, ``table`` and ``store`` with a text."""
        self._report = report
        self._tracking: Mapping[str, Any] = {"enabled": False}
        self._source: str | None = None
        self._open: dict[Path, RunTracker | StudyTracker | None] = {}
        self._monitors: list[Any] = []
        self._code = 0
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: report("say", redact(record.getMessage()))  # type: ignore[method-assign]
        logging.getLogger("pipelines").addHandler(handler)

    def run(self, lines: queue.Queue[dict[str, Any] | None]) -> int:
        """Take lines in order until None; returns the exit code, of the last folder."""
        due = time.monotonic() + _LIVE_EVERY_SECONDS
        while True:
            try:
                line = lines.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                line = {}
            if line is None:
                break
            if line:
                self.take(line)
            if time.monotonic() >= due:  # however many lines there are
                self._log_open()
                due = time.monotonic() + _LIVE_EVERY_SECONDS
        for folder in list(self._open):
            self.take({"folder": str(folder), "stopped": "KILLED", "reason": None})
        return self._code

    def take(self, line: Mapping[str, Any]) -> None:
        """Do what a line says; an error is reported, and the exit code until another folder succeeds."""
        try:
            if "tracking" in line:
                self._tracking, self._source = line["tracking"], line["source"]
                return
            folder = Path(line["folder"])
            if "compared" in line:
                self._compare(folder, line["compared"])
            elif line.get("finished"):
                self._finish(folder)
            elif "stopped" in line:
                self._stop(folder, line["stopped"], line["reason"])
                return
            else:
                self._open.setdefault(folder, None)
                return
            self._code = 0
        except Exception as error:
            if "stopped" in line:  # nothing depends on it
                self._report("say", _text(error))
                return
            other = 4 if isinstance(error, ProtoflError | OSError) else _FAULT
            self._code = next((code for code, kind in EXIT_CODES.items() if isinstance(error, kind)), other)
            self._report("error", _text(error))

    # ---- folders -------------------------------------------------------------------------------------------------

    def _finish(self, folder: Path) -> None:
        tracker = self._open.pop(folder, None)
        if not is_study(folder) and not RunFiles(folder).report.exists():
            from pipelines.reporting.run_report import report

            report(folder)
        tracker = tracker or self._tracker(folder)
        if isinstance(tracker, StudyTracker):
            is_logged = tracker.finish()
        else:
            with_model, register = (bool(self._tracking.get(key)) for key in ("log_model", "register"))
            is_logged = tracker is not None and tracker.finish(with_model=with_model, register=register)
        if tracker is not None and is_logged:
            self._report_store(tracker.run_dir)

    def _stop(self, folder: Path, status: str, reason: str | None) -> None:
        tracker = self._open.pop(folder, None) or self._tracker(folder)
        if tracker is not None:
            tracker.mark_stopped(failed=status == "FAILED", reason=reason)

    def _compare(self, directory: Path, compared: Mapping[str, Any]) -> None:
        runs = [RunFolder(Path(run)) for run in compared["runs"]]
        text = io.StringIO()
        screen = console(file=text, width=compared["width"], force_terminal=compared["terminal"], soft_wrap=False)
        (_sweep if compared["kind"] == "sweep" else _comparison)(directory, runs, compared, screen)
        self._report("table", text.getvalue())
        if self._tracking["enabled"]:
            from pipelines.tracking.comparisons import log_comparison

            finished = [run for run in runs if run.is_whole]
            uri, name = self._tracking["uri"], compared["name"]
            if log_comparison(directory, finished, uri, name=name, began_ms=_BEGAN_MS, source=self._source):
                self._report_store(finished[0].directory)

    # ---- MLflow --------------------------------------------------------------------------------------------------

    def _tracker(self, folder: Path) -> RunTracker | StudyTracker | None:
        """What logs a folder; None if nothing has begun there, or nothing is logged."""
        if not self._tracking["enabled"]:
            return None
        if is_study(folder):
            return StudyTracker(folder, uri=self._tracking["uri"])
        from pipelines.tracking.sync import RunTracker

        return RunTracker(folder, uri=self._tracking["uri"]) if RunFiles(folder).config.exists() else None

    def _log_open(self) -> None:
        """Log the rounds and trials since the last time, and the load of the machine."""
        load: Mapping[str, float] = {}
        for folder in self._open:
            try:
                tracker = self._open[folder] = self._open[folder] or self._tracker(folder)
                if tracker is not None:
                    load = load or self._load()
                    tracker.sync(system=load)
            except Exception as error:
                self._report("say", _text(error))

    def _load(self) -> dict[str, float]:
        """The load of the machine, as MLflow measures and names it."""
        # Not its SystemMetricsMonitor: that opens the default store in the working folder if none is named.
        if not self._monitors:
            from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
            from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
            from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
            from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

            kinds: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor]
            for kind in kinds:
                with suppress(Exception):  # there is no NVIDIA GPU
                    self._monitors.append(kind())
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return values

    def _report_store(self, run: Path) -> None:
        from pipelines.orchestration.pages import runs_page

        self._report("store", runs_page(self._tracking["uri"], run))


def _comparison(directory: Path, runs: list[RunFolder], facts: Mapping[str, Any], screen: Any) -> None:
    """Write a comparison, and print its table to a console."""
    from pipelines.reporting.comparison_files import print_table
    from pipelines.reporting.comparison_report import collect, write_report

    known = ("failed", "rows", "draws", "tuning")
    compared = collect(facts["config"], runs, **{name: facts[name] for name in known if name in facts})
    write_report(compared, directory, with_times=facts.get("with_times", True), command=facts.get("command"))
    print_table(compared, screen)


def _sweep(directory: Path, runs: list[RunFolder], facts: Mapping[str, Any], screen: Any) -> None:
    """Write a sweep, and print its table to a console."""
    from pipelines.plan import grid
    from pipelines.reporting import sweep_tables
    from pipelines.reporting.figures.sweeps import write_figure

    plan = grid.sweep_plan(facts["config"], facts["vary"], facts["seeds"], facts["baselines"], facts["points"])
    swept = sweep_tables.collect(plan, runs, facts["metric"])
    write_figure(swept, directory)
    sweep_tables.write(swept, directory)
    sweep_tables.print_table(swept, screen)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return redact(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if isinstance(error, ProtoflError | OSError):
        return redact(str(error))
    return redact("".join([f"{type(error).__name__}: {error}\n", *traceback.format_exception(error)]))


if __name__ == "__main__":
    _code = main()
    sys.stderr.flush()
    os._exit(_code)  # all is on disk; freeing what was imported would take half a second
