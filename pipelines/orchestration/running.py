"""What the commands do: flows with a server behind them, or stages without one, and what is printed at the end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from flcore.config import Config
from flcore.engine.rounds import Observers
from flcore.errors import DataError, RunError
from flcore.run_folder import stored_config
from pipelines import stages
from pipelines.config import grid
from pipelines.orchestration.embedded_server import EmbeddedServer
from pipelines.orchestration.progress import CURRENT, watcher_for_standard_error
from pipelines.runs.layout import RunFiles, read_json
from pipelines.tracking.sync import RunTracker, set_mlflow_environment, ui_command


def run(
    config: Config, directory: Path, server: EmbeddedServer, *, quiet: bool = False, restart: bool = False
) -> dict[str, Any]:
    """``protofl run``: the flow ``federated-experiment`` for a checked configuration.

    Args:
        config: the run.
        directory: of the run.
        server: to report to; it may still be starting.
        quiet: say nothing but errors.
        restart: throw away a checkpoint that cannot be used; one that can is gone on with.

    Returns:
        The content of ``metrics.json``.
    """
    stages.refuse_other_run(config, directory)
    files = RunFiles(directory)
    if files.report.exists():  # written last; whether it is logged, `protofl track` sees to
        if not quiet:
            Console().print(f"{directory}: this run has finished already; nothing to do")
            _say_result(read_json(files.metrics), config, directory)
        return dict(read_json(files.metrics))
    with _flows(server, tracking=config.tracking.enabled, quiet=quiet) as flows:
        metrics = flows.federated_experiment(out=str(directory), config=config.to_mapping(), restart=restart)
    if not quiet:
        _say_result(metrics, config, directory)
    return dict(metrics)


def compare(
    raw: Mapping[str, Any],
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    out: Path,
    server: EmbeddedServer,
) -> None:
    """``protofl compare``: the flow ``sweep``, then the table."""
    from pipelines.reporting.comparison_tables import print_table  # seconds to import, which no stage needs

    config = Config.from_mapping(raw)
    with _flows(server, tracking=config.tracking.enabled) as flows:
        flows.sweep_entries(raw, methods, seeds)
        found = flows.sweep(methods=methods, seeds=seeds, out=str(out), config=dict(raw))
    compared = stages.compare(config, [Path(directory) for directory in found], out / "partitions", out)
    console = Console()
    print_table(compared, console)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    if config.tracking.enabled:
        console.print(f"runs in MLflow: {ui_command(config.tracking.uri)}", soft_wrap=True)


def sweep(
    raw: Mapping[str, Any],
    vary: Sequence[str],
    seeds: Sequence[int] | None,
    baselines: Sequence[str],
    metric: str,
    out: Path,
    server: EmbeddedServer,
) -> None:
    """``protofl sweep``: the flow ``sweep`` over a grid, then its table and figure.

    Raises:
        ConfigError: a key, a value or the metric cannot be used; nothing has been read or written then.
        RunError: runs failed; what the others gave is written and printed first.
    """
    plan = grid.plan(raw, vary, seeds, baselines)
    from pipelines.reporting import sweep_tables as sweeping
    from pipelines.reporting.figures.sweeps import write_figure
    from pipelines.runs.record import check_metric

    check_metric(metric)
    with _flows(server, tracking=plan.base.tracking.enabled) as flows:
        found = flows.sweep(
            vary=list(vary), seeds=list(plan.seeds), baselines=list(baselines), out=str(out), config=dict(raw)
        )
    directories = [Path(directory) for directory in found]
    failed = sum(not RunFiles(directory).metrics.exists() for directory in directories)
    if failed == len(directories):
        raise RunError(f"all {failed} runs failed, for the reasons given above; there is nothing to show")
    swept = sweeping.collect(plan, directories, metric)
    console = Console()
    sweeping.print_table(swept, console)
    table, figure = out / "sweep.md", write_figure(swept, out)
    sweeping.write(swept, out)
    console.print(f"table: {table}", soft_wrap=True)
    console.print(f"figure: {figure}", soft_wrap=True)
    if plan.base.tracking.enabled:
        console.print(f"runs in MLflow: {ui_command(plan.base.tracking.uri)}", soft_wrap=True)
    if failed:
        raise RunError(
            f"{failed} of {len(directories)} runs failed, for the reasons given above; the table is without them, and "
            "the same command tries them again"
        )


@contextmanager
def _flows(server: EmbeddedServer, *, tracking: bool, quiet: bool = False) -> Iterator[Any]:
    """The flows' module, with a watcher, once the server answers; Prefect loads while it starts."""
    set_mlflow_environment()
    watcher = watcher_for_standard_error(quiet=quiet)
    token = CURRENT.set(watcher)
    try:
        from pipelines.orchestration import flows

        # Needed at the end of a run, and seconds to import: done here while the server still starts.
        importlib.import_module("pipelines.reporting.html")
        if tracking:
            importlib.import_module("mlflow")
        server.wait()
        yield flows
    finally:
        CURRENT.reset(token)
        watcher.close()


def _say_result(metrics: Mapping[str, Any], config: Config, directory: Path) -> None:
    console = Console()
    named = (("top1_global", "global accuracy"), ("mean_local", "mean client accuracy"))
    scores = [f"{name} {100 * metrics[key]:.2f} %" for key, name in named if metrics[key] is not None]
    sent = f"{metrics['bytes_up'] / 1e6:.2f} MB up, {metrics['bytes_down'] / 1e6:.2f} MB down"
    console.print(f"{metrics['method']}: {', '.join(scores)} after {metrics['rounds']} rounds; {sent}", soft_wrap=True)
    console.print(f"report: {RunFiles(directory).report}", soft_wrap=True)
    if config.tracking.enabled:
        console.print(f"runs in MLflow: {ui_command(config.tracking.uri)}", soft_wrap=True)


def stage(name: str, config: Config, out: Path, prepared: Path, partition: Path, *, restart: bool = False) -> None:
    """``protofl stage``: one stage, inline."""
    if name == "train":
        _train(config, out, prepared, partition, restart=restart)
    else:
        _STAGES[name](config, out, prepared, partition)


def _prepare(config: Config, out: Path, prepared: Path, partition: Path) -> None:
    dataset = stages.prepare(config, out / "prepared")
    meta = dataset.meta
    print(f"{meta.name}: {meta.train_size} training and {meta.test_size} test images, {meta.num_classes} classes")


def _partition(config: Config, out: Path, prepared: Path, partition: Path) -> None:
    division = stages.partition(config, prepared, out / "partition" if partition == out / "partition" else partition)
    print("\n".join(stages.partition_table(division)))


def _train(config: Config, out: Path, prepared: Path, partition: Path, *, restart: bool) -> None:
    watcher = watcher_for_standard_error()
    try:
        watcher.rounds(f"{config.method.name} seed {config.seed}", config.federation.rounds, 0)
        observers = Observers(on_round=watcher.round)
        if not stages.train(config, prepared, partition, out, observers=observers, replace=True, restart=restart):
            print(f"{out}: this run has finished already")
    finally:
        watcher.close()


def _evaluate(config: Config, out: Path, prepared: Path, partition: Path) -> None:
    stages.evaluate(config, prepared, partition, out)


def _report(config: Config, out: Path, prepared: Path, partition: Path) -> None:
    print(stages.report(partition, out, config=config, prepared=prepared))


def _compare(config: Config, out: Path, prepared: Path, partition: Path) -> None:
    """Compare the runs of ``compare.methods`` and ``compare.seeds`` below ``<out>/runs``, and log them to MLflow."""
    directories = stages.comparison_runs(config, out)
    stages.compare(config, directories, out / "partitions", out / "comparison")
    print(out / "comparison" / "comparison.md")
    if config.tracking.enabled:
        track(directories, config.tracking.uri, out / "prepared" / "meta.json")


_STAGES: dict[str, Callable[[Config, Path, Path, Path], None]] = {
    "prepare": _prepare,
    "partition": _partition,
    "evaluate": _evaluate,
    "report": _report,
    "compare": _compare,
}


def track(directories: Sequence[Path], uri: str | None, prepared: Path | None = None) -> bool:
    """Log run directories to MLflow; False if the store could not be reached.

    Args:
        directories: of runs, finished or not.
        uri: of the store; None takes the one that each run was configured with.
        prepared: ``meta.json`` of the prepared data; None looks for it near each run.
    """
    set_mlflow_environment()
    logged = True
    for directory in directories:
        files = RunFiles(directory)
        if not files.config.exists():
            raise DataError(f"{directory}: no run there (config.json is missing)")
        stored = stored_config(directory)
        tracker = RunTracker(directory, uri=uri or stored.tracking.uri)
        finished = files.metrics.exists()
        if not tracker.sync(final=finished):
            logged = False
            break
        if finished and stored.tracking.log_model and stored.method.has_global_model:
            tracker.log_model(dataset=prepared, register=stored.tracking.register)
    print(f"runs in MLflow: {ui_command(uri)}" if logged else "MLflow could not be reached", file=sys.stderr)
    return logged
