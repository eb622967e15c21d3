"""What commands that train have in common: how they run, and their last lines on the terminal."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import MLOPS, RunError, require
from flcore.core.text import shorten
from pipelines.execution.follower import Follower
from pipelines.execution.progress import watcher_for_standard_error
from pipelines.reporting.formats import plural
from pipelines.runs.standard_error import print_drawn

if TYPE_CHECKING:
    from flcore.config.schema import Config
    from pipelines.execution.operation import Operation, PrintTarget
    from pipelines.execution.outcome import Outcome

_WIDTH_OF_A_LOG = 150  # 80 columns would fold every cell of a table


@contextmanager
def operation(
    raw: Mapping[str, Any], *, quiet: bool = False, wait: bool = True, restart: bool = False
) -> Iterator[tuple[Operation, Config]]:
    """Yield execution settings and the validated configuration.

    The follower starts first: its imports take as long as that of torch here.

    Args:
        raw: parameters, not yet validated.
        quiet: print errors only. wait: for the report and for MLflow.
        restart: discard unusable checkpoints and damaged results.
    """
    section = raw.get("tracking")
    asked = not isinstance(section, Mapping) or section.get("enabled", True) is not False
    tracking = asked and find_spec("mlflow") is not None
    said = [f"not logged: MLflow is not installed; pip install {MLOPS}"] if asked and not tracking else []
    tell: list[Callable[[str], None]] = [said.append]
    with Follower(tracking, lambda text: tell[0](text)) as follower:
        from flcore.config.schema import Config
        from pipelines.execution.operation import Operation
        from pipelines.execution.steps import InlineSteps

        config = Config.from_mapping(raw)
        if config.tracking.enabled and config.tracking.uri is not None:
            require("mlflow", "tracking.uri", MLOPS)
        follower.configure(config.to_mapping()["tracking"] | {"enabled": tracking})
        watcher = watcher_for_standard_error(quiet=quiet)
        tell[0] = watcher.say
        try:
            for text in said:
                watcher.say(text)
            steps, terminal = InlineSteps(config.engine.worker_count), sys.stdout.isatty()
            width = shutil.get_terminal_size().columns if terminal else _WIDTH_OF_A_LOG
            console: PrintTarget = {"terminal": terminal, "width": width}  # tables have to fit it
            yield Operation(steps, watcher, follower, wait, restart, console, _command()), config
            if not wait:
                follower.leave()
        finally:
            watcher.close()


# ---- what is printed ---------------------------------------------------------------------------------------------


def _command() -> str | None:
    """Return the command as typed, without what addresses contain; None if another program calls."""
    program, *words = sys.argv
    is_ours = Path(program).name in ("protofl", "__main__.py")
    return shlex.join(["protofl", *(shorten(word, 1000) for word in words)]) if is_ours else None


def say_run(outcome: Outcome, *, as_json: bool) -> None:
    """Print the results of a run: in words, or the content of ``metrics.json`` alone."""
    from flcore.io.files import json_text
    from pipelines.runs.folder import RunFolder

    metrics = dict(RunFolder(outcome.directory).metrics)
    if as_json:
        print(json_text(metrics, indent=2))
        return
    if outcome.was_finished:
        print(f"{outcome.directory}: this run has finished already; nothing to do")
    named = (
        ("top1_global", "global accuracy"),
        ("top1_vote", "vote of the clients"),
        ("mean_local", "mean client accuracy"),
    )
    scores = [f"{name} {100 * metrics[key]:.2f} %" for key, name in named if metrics.get(key) is not None]
    sent = f"{metrics['bytes_up'] / 1e6:.2f} MB up, {metrics['bytes_down'] / 1e6:.2f} MB down"
    scored = ", ".join(scores) or "no score, since no model could be tested,"
    print(f"{metrics['method']}: {scored} after {plural(metrics['rounds'], 'round')}; {sent}")
    _say_places(outcome)


def say_table(outcome: Outcome, runs: int) -> None:
    """Print the table of many runs; RunError if some of them failed."""
    try:
        if outcome.table:
            print_drawn(outcome.table)
        _say_places(outcome)
    finally:  # also if the terminal is closed
        if outcome.failed:
            raise RunError(
                f"{len(outcome.failed)} of {plural(runs, 'run')} failed, for the reasons given above; the table is "
                "without them; mend the cause, and the same command trains them again"
            )


def _say_places(outcome: Outcome) -> None:
    report, here = outcome.report, Path.cwd()
    if report is not None:
        print(f"report: {report.relative_to(here) if report.is_relative_to(here) else report}")
    else:
        print(f"report and MLflow: being made; results are in {outcome.directory}")
    if outcome.store is not None:
        print(f"runs in MLflow: {outcome.store}")
