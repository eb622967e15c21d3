"""The commands that train: as a Prefect flow or inline; and their last lines on the terminal."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import MLOPS, RunError, require
from flcore.core.text import shorten
from pipelines.execution.follower import Follower
from pipelines.execution.progress import watcher_for_standard_error
from pipelines.orchestration.as_flow import as_flow, uses_prefect
from pipelines.plan.params import without_tracking
from pipelines.reporting.formats import plural
from pipelines.runs.standard_error import print_drawn, tell

if TYPE_CHECKING:
    from flcore.config.schema import Config
    from pipelines.execution.operation import Operation, PrintTarget
    from pipelines.execution.outcome import Outcome
    from pipelines.tuning.request import StudyRequest

_WIDTH_OF_A_LOG = 150  # 80 columns would fold every cell of a table


def run(
    raw: Mapping[str, Any],
    out: Path | None,
    *,
    prefect: bool | None = None,
    quiet: bool = False,
    restart: bool = False,
    wait: bool = True,
    copies: bool = True,
) -> dict[str, Any]:
    """``protofl run``: one configuration, from data to report; return the content of ``metrics.json``.

    Args:
        raw: parameters, not yet validated.
        out: the run's folder; None: ``runs/<method>-s<seed>-<hash, 8>``.
        prefect: run as a flow; None: if a configured server responds.
        quiet: print errors only.
        restart: discard an unusable checkpoint or damaged results.
        wait: for the report and for MLflow.
        copies: copy the results of this run if it has finished in another folder.
    """
    with operation(raw, quiet=quiet, wait=wait, copies=copies, restart=restart) as (how, config):
        if uses_prefect(prefect, how):
            from pipelines.orchestration import flows

            stored = without_tracking(config.to_mapping())
            given = None if out is None else str(out)
            outcome = as_flow(how, flows.federated_experiment, out=given, restart=restart, config=stored)
        else:
            from pipelines.execution.bodies import experiment

            outcome = experiment(config, out, how)
    from pipelines.runs.folder import RunFolder

    metrics = dict(RunFolder(outcome.directory).metrics)
    if not quiet:
        _say_run(outcome, metrics)
    return metrics


def compare(
    raw: Mapping[str, Any],
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    out: Path,
    *,
    tuned: int = 0,
    budget: str = "rounds",
    prefect: bool | None = None,
    restart: bool = False,
    wait: bool = True,
    copies: bool = True,
) -> None:
    """``protofl compare``: methods × seeds in parallel, then their table.

    ``tuned`` are trials for each method, ``budget`` is what all runs have equally; the others are as for :func:`run`.

    Raises:
        ConfigError: an entry cannot be run, or a claim is about something else.
        RunError: runs failed; the results of the others are written and printed first.
    """
    with operation(raw, wait=wait, copies=copies, restart=restart) as (how, _):
        from pipelines.plan.comparison import comparison_plan
        from pipelines.tuning.comparing import check_claims, compare_methods

        plan = comparison_plan(raw, methods, seeds)
        check_claims(plan, tuned=tuned > 0)
        if uses_prefect(prefect, how):
            from pipelines.orchestration import flows

            asked: dict[str, Any] = {"methods": list(methods) if methods else None, "seeds": seeds, "out": str(out)}
            asked |= {"tuned": tuned, "budget": budget}
            outcome = as_flow(how, flows.compare, **asked, restart=restart, config=plan.parameters)
        else:
            outcome = compare_methods(plan, out, how, tuned=tuned, budget=budget)
    say_table(outcome, len(plan.runs) * (2 if tuned else 1))


def sweep(
    raw: Mapping[str, Any],
    vary: Sequence[str],
    seeds: Sequence[int] | None,
    baselines: Sequence[str],
    metric: str,
    out: Path,
    *,
    points: Sequence[Mapping[str, Any]] = (),
    prefect: bool | None = None,
    restart: bool = False,
    wait: bool = True,
) -> None:
    """``protofl sweep``: one method over a grid of values, or ``points``, × seeds in parallel; table and figure.

    Raises:
        ConfigError: a key, a value or the metric is wrong; nothing has been read or written.
        RunError: runs failed; the results of the others are written and printed first.
    """
    with operation(raw, wait=wait, restart=restart) as (how, _):
        from pipelines.execution.bodies import comparison
        from pipelines.plan.grid import sweep_plan
        from pipelines.tuning.metrics import check_metric

        plan = sweep_plan(raw, vary, seeds, baselines, points)
        check_metric(metric, plan.base.method)
        asked: dict[str, Any] = {"vary": list(vary), "seeds": list(plan.seeds), "baselines": list(baselines)}
        asked |= {"metric": metric, "points": list(points)}
        if uses_prefect(prefect, how):
            from pipelines.orchestration import flows

            outcome = as_flow(how, flows.sweep, **asked, out=str(out), restart=restart, config=plan.parameters)
        else:
            outcome = comparison(plan, out, how, {**asked, "name": out.name})
    say_table(outcome, len(plan.runs))


def tune(
    raw: Mapping[str, Any], request: StudyRequest, out: Path, *, prefect: bool | None = None, wait: bool = True
) -> None:
    """``protofl tune``: an Optuna study of one method, on validation data.

    Raises:
        ConfigError: the request is invalid, or the folder has another study. RunError: no trial has finished.
    """
    with operation(raw, wait=wait) as (how, config):
        from pipelines.tuning.search import study

        if uses_prefect(prefect, how):
            from pipelines.orchestration import flows

            parameters = {key: value for key, value in asdict(request).items() if key != "storage"}
            stored = without_tracking(raw)
            outcome = as_flow(how, flows.tune, **parameters, out=str(out), config=stored, hidden=request.storage)
        else:
            outcome = study(config, request, out, how)
    print_drawn(outcome.table)
    if outcome.store is not None:
        print(f"study in MLflow: {outcome.store}")


# ---- settings ----------------------------------------------------------------------------------------------------


@contextmanager
def operation(
    raw: Mapping[str, Any], *, quiet: bool = False, wait: bool = True, copies: bool = True, restart: bool = False
) -> Iterator[tuple[Operation, Config]]:
    """Yield execution settings and the validated configuration.

    The follower starts first: its imports take as long as that of torch here.
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
            yield Operation(steps, watcher, follower, wait, copies, restart, console, _command()), config
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


def _say_run(outcome: Outcome, metrics: Mapping[str, Any]) -> None:
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
                "without them, and the same command tries them again"
            )


def _say_places(outcome: Outcome) -> None:
    report, here = outcome.report, Path.cwd()
    if report is not None:
        print(f"report: {report.relative_to(here) if report.is_relative_to(here) else report}")
    else:
        print(f"report and MLflow: being made; results are in {outcome.directory}")
    if outcome.store is not None:
        print(f"runs in MLflow: {outcome.store}")


# ---- records ------------------------------------------------------------------------------------------


def track(directories: Sequence[Path], uri: str | None, *, register: bool = False) -> bool:
    """``protofl track``: log folders to MLflow; return False if the store does not respond.

    ``register`` also registers the models of finished runs. Raises a DataError for a folder that nothing was run in.
    """
    from pipelines.orchestration.pages import runs_page
    from pipelines.tracking.backfill import log_folder
    from pipelines.tuning.folder import StudyFiles
    from pipelines.tuning.log import StudyTracker, study_of

    for directory in directories:
        study = study_of(directory)
        if study is None:
            is_logged = log_folder(directory, uri, register=register)
        else:
            tracker = StudyTracker(study, uri=uri)
            is_logged = tracker.finish() if StudyFiles(study).best.exists() else tracker.sync()
        if not is_logged:
            return False
    tell(f"runs in MLflow: {runs_page(uri)}")
    return True


def best(uri: str, metric: str, experiment: str | None, where: str | None, *, promote: bool) -> None:
    """``protofl track best``: print the best finished run; ``promote``: make its model the champion.

    Raises:
        ConfigError, DataError: as :func:`pipelines.tracking.best.best`.
        RunError: the store does not respond.
    """
    from pipelines.addresses import without_password
    from pipelines.tracking import best as ranking
    from pipelines.tracking.store import TrackingUnavailable

    try:
        found = ranking.best(uri, metric, experiment=experiment, where=where, promote=promote)
    except TrackingUnavailable as error:
        raise RunError(f"{without_password(uri)}: does not answer ({error}); try again when it does") from error
    print(f"{found.name}: {found.words}\nrun: {found.run_id}")
    if found.model is not None:
        print(f"champion: {found.model}, or models:/{found.model.split('/')[1]}@{ranking.CHAMPION}")
