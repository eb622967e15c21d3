"""The recorder's own end: reads requests from standard input, a JSON object a line, and answers on standard output.

It knows nothing but run folders. One request is carried out at a time; between requests the runs that are watched are
logged, every few seconds. See :class:`pipelines.execution.recorder.Recorder` for what it can be asked.
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
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flcore.core.errors import ProtoflError
from flcore.experiment.run_folder import RunFiles
from pipelines.addresses import redact
from pipelines.runs.standard_error import console

_LIVE_EVERY_SECONDS = 15.0
_PRIORITY = 5
"""Of nineteen: drawing waits for training, where both want the same core."""
Answers = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Serve until told to close, or until whoever asks is gone."""
    # `protofl down` asks the whole family of a flow to end: the flow then tells this process what is to be marked.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_PRIORITY)
    requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints goes to the log

    def answer(message: Mapping[str, Any]) -> None:
        try:
            out.write(json.dumps(message) + "\n")
            out.flush()
        except (BrokenPipeError, ValueError):
            pass  # nobody waits for it any more

    _import(tracking="--tracking" in sys.argv)
    return _Desk(answer).serve(requests)


def _read(requests: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)


def _import(*, tracking: bool) -> None:
    """Load what takes seconds, while others prepare data."""
    gc.disable()  # nothing of what is loaded is ever thrown away: looking for it takes a tenth of the time
    import pipelines.reporting.comparison_report
    import pipelines.reporting.run_report  # noqa: F401 - matplotlib and the tables

    if tracking:
        from pipelines.tracking.store import set_mlflow_environment

        set_mlflow_environment()
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - of the store that is there where none is named
    gc.freeze()
    gc.enable()


class _Desk:
    """What is watched, and how each request is carried out."""

    def __init__(self, answer: Answers) -> None:
        self._answer = answer
        self._tracking: dict[str, Any] = {"enabled": False}
        self._trackers: dict[str, Any] = {}
        self._studies: dict[str, Any] = {}
        self._carry_out: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "configure": self._configure,
            "watch": self._watch,
            "stop": self._stop,
            "finish": self._finish,
            "log": self._log,
            "comparison": self._comparison,
            "sweep": self._sweep,
            "trial": self._trial,
            "study": self._study,
        }
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: answer({"say": redact(record.getMessage())})  # type: ignore[method-assign]
        logging.getLogger("pipelines").addHandler(handler)

    def serve(self, requests: queue.Queue[dict[str, Any] | None]) -> int:
        """Carry out requests in order until there are no more to come."""
        leaving = False
        while True:
            try:
                request = requests.get(timeout=_LIVE_EVERY_SECONDS)
            except queue.Empty:
                self._log_live()
                continue
            if request is None:  # whoever asks is gone
                if not leaving:
                    self._mark_stopped(failed=False)
                return 0
            if request["do"] == "close":
                self._mark_stopped(failed=request["failed"])
                return 0
            if request["do"] == "leave":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nobody else will end it
                leaving = True
                continue
            self._do(request)

    def _do(self, request: dict[str, Any]) -> None:
        number = request.get("number")
        try:
            found = self._carry_out[request["do"]](request)
        except Exception as error:
            if number is None:
                self._answer({"say": redact(f"recorder: {request['do']}: {error}")})
                return
            kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__base__ is ProtoflError), "")
            described: dict[str, Any] = {"kind": kind or type(error).__name__, "text": redact(str(error))}
            described["trace"] = redact(traceback.format_exc())
            if isinstance(error, OSError):  # a full disk, say: whoever tells people of it has words of its own
                place = None if error.filename is None else str(error.filename)
                described["system"] = [error.errno, error.strerror, place]
            self._answer({"number": number, "error": described})
        else:
            if number is not None:
                self._answer({"number": number, "answer": found})

    # ---- requests ------------------------------------------------------------------------------------------------

    def _configure(self, request: dict[str, Any]) -> None:
        self._tracking = request["tracking"]

    def _watch(self, request: dict[str, Any]) -> None:
        if self._tracking["enabled"]:
            self._trackers[request["run"]] = self._tracker(request["run"])

    def _stop(self, request: dict[str, Any]) -> None:
        tracker = self._trackers.pop(request["run"], None)
        if tracker is not None and _has_begun(request["run"]):
            tracker.mark_stopped(failed=request["failed"], reason=request["reason"])

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        from pipelines.reporting.run_report import report

        report(Path(request["run"]))
        return self._log(request)

    def _log(self, request: dict[str, Any]) -> dict[str, Any]:
        from pipelines.orchestration.pages import runs_page

        run, store = Path(request["run"]), None
        if self._tracking["enabled"]:
            tracker = self._trackers.pop(request["run"], None) or self._tracker(request["run"])
            if tracker.sync(final=True):
                store = runs_page(self._tracking["uri"], run)
                if self._tracking["log_model"]:
                    tracker.log_model(register=self._tracking["register"])
        return {"report": str(RunFiles(run).report), "store": store}

    def _comparison(self, request: dict[str, Any]) -> dict[str, Any]:
        from pipelines.reporting.comparison_files import markdown, print_table
        from pipelines.reporting.comparison_report import compare

        directory, facts = Path(request["directory"]), request["facts"]
        runs = [Path(run) for run in request["runs"]]
        compared = compare(
            request["config"],
            runs,
            directory,
            facts.get("failed"),
            rows=facts.get("rows", ()),
            tuning=facts.get("tuning"),
            budget=facts.get("budget"),
            draws=facts.get("draws", ()),
            with_times=facts.get("with_times", True),
            command=facts.get("command"),
        )
        return {
            "report": str(directory / "report.html"),
            "table": _on_console(facts, lambda console: print_table(compared, console)),
            "markdown": markdown(compared),
            "store": self._log_comparison(directory, runs, facts["name"]),
        }

    def _sweep(self, request: dict[str, Any]) -> dict[str, Any]:
        from pipelines.config import grid
        from pipelines.reporting import sweep_tables
        from pipelines.reporting.figures.sweeps import write_figure

        directory, facts = Path(request["directory"]), request["facts"]
        runs = [Path(run) for run in request["runs"]]
        plan = grid.plan(request["config"], facts["vary"], facts["seeds"], facts["baselines"], facts["points"])
        swept = sweep_tables.collect(plan, runs, facts["metric"])
        figure = write_figure(swept, directory)
        sweep_tables.write(swept, directory)
        return {
            "report": str(figure),
            "table": _on_console(facts, lambda console: sweep_tables.print_table(swept, console)),
            "markdown": sweep_tables.markdown(swept),
            "store": self._log_comparison(directory, runs, facts["name"]),
        }

    def _trial(self, request: dict[str, Any]) -> None:
        if self._tracking["enabled"]:
            self._study_tracker(request["study"]).log_ended()

    def _study(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._tracking["enabled"]:
            return {"store": None}
        from pipelines.orchestration.pages import runs_page

        tracker = self._study_tracker(request["study"])
        is_logged = tracker.finish()
        del self._studies[request["study"]]
        return {"store": runs_page(self._tracking["uri"], tracker.run.run_dir) if is_logged else None}

    # ---- MLflow --------------------------------------------------------------------------------------------------

    def _tracker(self, run: str) -> Any:
        from pipelines.tracking.sync import RunTracker

        return RunTracker(Path(run), uri=self._tracking["uri"])

    def _study_tracker(self, study: str) -> Any:
        from pipelines.tuning.log import StudyTracker

        if study not in self._studies:
            self._studies[study] = StudyTracker(Path(study), uri=self._tracking["uri"])
        return self._studies[study]

    def _log_comparison(self, directory: Path, runs: list[Path], name: str) -> str | None:
        if not self._tracking["enabled"]:
            return None
        from pipelines.orchestration.pages import runs_page
        from pipelines.runs.folder import has_whole_results
        from pipelines.tracking.comparisons import log_comparison

        finished = [run for run in runs if has_whole_results(run)]
        logged = log_comparison(directory, finished, self._tracking["uri"], name=name)
        return runs_page(self._tracking["uri"], finished[0]) if logged else None

    def _log_live(self) -> None:
        for run, tracker in self._trackers.items():
            if _has_begun(run):
                try:
                    tracker.sync()
                except ProtoflError as error:
                    self._answer({"say": str(error)})

    def _mark_stopped(self, *, failed: bool) -> None:
        begun = [tracker for run, tracker in self._trackers.items() if _has_begun(run)]
        for tracker in (*begun, *(study.run for study in self._studies.values())):
            try:
                tracker.mark_stopped(failed=failed)
            except ProtoflError as error:  # the others are to be marked all the same
                self._answer({"say": str(error)})


def _has_begun(run: str) -> bool:
    return (Path(run) / "config.json").exists()


def _on_console(facts: Mapping[str, Any], show: Callable[[Any], None]) -> str:
    """What a table looks like on the client's terminal, or in its log."""
    text = io.StringIO()
    show(console(file=text, width=facts["width"], force_terminal=facts["terminal"], soft_wrap=False))
    return text.getvalue()


if __name__ == "__main__":
    _code = main()
    sys.stderr.flush()
    os._exit(_code)  # all is on disk; to take apart what was imported would cost half a second
