"""One run whose data are there: where it belongs, whether it has finished, and its training.

Both the process that a command runs in and the workers of :mod:`pipelines.execution.run_pool` call this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flcore import training
from flcore.config import Config
from flcore.engine.local.meeting import Seat
from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator
from flcore.engine.rounds import Observers
from flcore.errors import ConfigError
from flcore.experiment import Experiment
from flcore.provenance import code_fingerprint
from flcore.run_folder import RunFiles, described, refuse_other_run
from flcore.running import evaluate
from pipelines.runs import analyses, memory
from pipelines.runs.cache import Cache, has_finished, place
from pipelines.runs.inputs import Inputs, write_inputs
from pipelines.runs.provenance import environment


@dataclass(frozen=True)
class PlacedRun:
    """A run that is checked, with its data and its folder.

    Attributes:
        config: of the run. inputs: its data.
        directory: where it goes.
        hash: of configuration, data and partition. code: fingerprint of the code that it uses.
        label: what messages call it.
        company: the other runs that the same process carries out at the same time, training in one stack with this one
            (``engine.stack_runs``); mostly none.
    """

    config: Config
    inputs: Inputs
    directory: Path
    hash: str
    code: str
    label: str
    company: tuple[PlacedRun, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether its folder holds it, finished by this code."""
        return has_finished(self.directory, self.hash, self.code)


def placed(config: Config, inputs: Inputs, home: Path, *, label: str = "", directory: Path | None = None) -> PlacedRun:
    """Check a run against its data, and say where it belongs.

    Args:
        config: of the run. inputs: its data.
        home: folder of runs; in it ``<method>-s<seed>-<hash, 8>`` is this one's.
        label: what tells it from others, beside method and seed.
        directory: where it goes instead.

    Raises:
        ConfigError: the configuration does not fit the data, or the folder holds another run.
        DataError: data are missing or damaged.
    """
    name = f"{config.method.name} seed {config.seed}" + (f", {label}" if label else "")
    experiment = Experiment.open(config, inputs.prepared, inputs.partition)
    try:
        experiment.new_module()
    except ConfigError as error:
        raise ConfigError(f"{error} (with {label})" if label else str(error)) from error
    found = directory or home / f"{config.method.name}-s{config.seed}-{experiment.hash[:8]}"
    refuse_other_run(config, found)
    return PlacedRun(config, inputs, found, experiment.hash, code_fingerprint(config), name)


def in_company(runs: Sequence[PlacedRun]) -> list[PlacedRun]:
    """Who is carried out by a process of its own: runs that share stacks stand in the company of the first of them."""
    groups: dict[Hashable, list[PlacedRun]] = {}
    for run in runs:
        own = (run.config.kin(), run.inputs.prepared) if run.config.engine.stack_runs else run.label
        groups.setdefault(own, []).append(run)
    return [replace(first, company=tuple(others)) for first, *others in groups.values()]


def fetch(run: PlacedRun, cache: Cache) -> bool:
    """Take the results of a run that has finished elsewhere under the same code; False if there are none."""
    if run.is_finished:
        return True
    elsewhere = cache.finished_run(run.hash, run.code)
    if elsewhere is None or RunFiles(run.directory).checkpoint.exists():
        return False
    place(elsewhere, run.directory)
    write_inputs(run.directory, run.inputs)
    return True


def carry_out(
    run: PlacedRun,
    cache: Cache,
    *,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
    restart: bool = False,
    seat: Seat | None = None,
) -> None:
    """Train a run, or go on with it, and evaluate it; one that has finished is only analysed, where that is new.

    Args:
        run: what, and where.
        cache: is told where it has finished, and what it took.
        orchestrator: how the pieces of a round are carried out; None: plain calls.
        observers: who is told of progress.
        restart: throw away a checkpoint that cannot be used; one that can is gone on with.
        seat: where it meets its company; None: it trains alone.

    Raises:
        RunError: training failed. DataError: data are damaged.
    """
    files, steps = RunFiles(run.directory), orchestrator or InlineOrchestrator()
    folders = (run.inputs.prepared, run.inputs.partition, run.directory)
    is_new = not run.is_finished
    if is_new:
        memory.reset_peak()
        _forget_other_code(run)
        write_inputs(run.directory, run.inputs)
        training.train(
            run.config,
            run.inputs.prepared,
            run.inputs.partition,
            run.directory,
            orchestrator=orchestrator,
            observers=observers,
            restart=restart,
            about=environment(run.config),
            seat=seat,
        )
        steps.call("evaluate", _silent(evaluate), run.config, *folders)
        cache.note_run(run.directory, run.config)
    missing = analyses_left(run)
    if missing:
        steps.call("analyse", analyses.compute, run.config, *folders, missing)
        files.report.unlink(missing_ok=True)  # it shows them
    if is_new:
        cache.note_peak(run.config, memory.peak() // (1 + len(run.company)))


def analyses_left(run: PlacedRun) -> list[str]:
    """The analyses that a run asks for and nobody has made."""
    return [name for name in run.config.evaluation.analyses if name not in analyses.stored_names(run.directory)]


def _silent(function: Callable[..., object]) -> Callable[..., None]:
    """Drop a result that lies on disk: an orchestrator might keep it."""

    def call(*arguments: object) -> None:
        function(*arguments)

    return call


def _forget_other_code(run: PlacedRun) -> None:
    """Results of the same run by other code make room: those of one comparison are of one code."""
    files = RunFiles(run.directory)
    if files.history.exists() and files.config.exists() and described(run.directory).get("code") != run.code:
        for path in (files.history, files.metrics, files.report):
            path.unlink(missing_ok=True)
