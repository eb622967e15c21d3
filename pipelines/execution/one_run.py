"""One run with existing data: its folder, its state and its training.

Called by the process of a command, and by workers of :mod:`pipelines.execution.run_pool`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flcore import running
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, RunError
from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator
from flcore.engine.rounds import Observers
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import code_fingerprint
from flcore.experiment.run_folder import (
    RunFiles,
    finished_by_other_code,
    forget_damaged_results,
    forget_results,
    holds_run,
    refuse_other_run,
    write_result,
)
from flcore.io import disk
from flcore.io.files import sealed
from flcore.io.locks import run_lock
from pipelines.runs import analyses, memory
from pipelines.runs.cache import Cache, has_finished, place
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs, write_inputs
from pipelines.runs.ownership import claim_names, may_be_replaced
from pipelines.runs.provenance import environment


class PrunedError(RunError):
    """An observer stopped the run; its checkpoint remains."""


def is_of_the_machine(error: BaseException | None) -> bool:
    """Return whether an error was caused by the system (a full disk, a file), not by the run."""
    return error is not None and (isinstance(error, OSError) or is_of_the_machine(error.__cause__))


def was_stopped_by_the_machine(error: BaseException | None) -> bool:
    """Return whether a run can resume after a system error is solved. Missing data (a DataError) remain missing."""
    return isinstance(error, RunError) and is_of_the_machine(error)


@dataclass(frozen=True)
class PlacedRun:
    """A validated run with its data and its folder.

    Attributes:
        config: without ``auto`` in ``engine``.
        hash: of configuration, data and partition. code: fingerprint of the code that it uses.
        label: its name in messages.
        restart: discard an unusable checkpoint and results that are damaged or of other code.
    """

    config: Config
    inputs: Inputs
    directory: Path
    hash: str
    code: str
    label: str
    restart: bool = False

    @property
    def is_finished(self) -> bool:
        """Return whether this code has finished it in its folder."""
        return has_finished(self.directory, self.hash, self.code)

    @property
    def was_finished_by_other_code(self) -> bool:
        """Return whether its folder has results of other code."""
        return finished_by_other_code(self.directory, self.code)


def placed(
    config: Config,
    inputs: Inputs,
    home: Path,
    *,
    label: str = "",
    directory: Path | None = None,
    alone: bool = False,
    restart: bool = False,
) -> PlacedRun:
    """Validate a run against its data, and determine its folder.

    Args:
        home: folder of runs, in which it is ``<method>-s<seed>-<hash, 8>``.
        directory: its folder, instead of one in ``home``.
        alone: no other run trains now, so ``engine.workers: null`` may give it all cores.
        label, restart: of :class:`PlacedRun`.

    Raises:
        ConfigError: the configuration does not fit the data, or the folder has other content.
        DataError: data are missing or damaged.
    """
    name = f"{config.method.name} seed {config.seed}" + (f", {label}" if label else "")
    if config.engine.workers is None and config.engine.name == "local" and not alone:
        config = replace(config, engine=replace(config.engine, workers=0))
    try:
        experiment = Experiment.open(config, inputs.prepared, inputs.partition)
        experiment.new_module()
    except ConfigError as error:
        raise ConfigError(f"{error} (with {label})" if label else str(error)) from error
    found = directory or home / f"{config.method.name}-s{config.seed}-{experiment.hash[:8]}"
    claim_names("run", found)
    try:
        is_own = holds_run(found, experiment.hash)
    except DataError:
        if directory is not None:
            raise
        is_own = True  # by its name; `fetch` reports the damage, for this run alone
    if not is_own:  # the folder of this run's images does not matter
        refuse_other_run(experiment.config, found)
    return PlacedRun(experiment.config, inputs, found, experiment.hash, code_fingerprint(config), name, restart)


def fetch(run: PlacedRun, cache: Cache) -> bool:
    """Use the results of a run that has finished under the same code, here or elsewhere; False if there are none.

    If it has finished in its own folder, update the recorded folders of its data.

    Raises:
        DataError: the run has finished here, its results are damaged, and it may not be restarted.
    """
    try:
        is_here = run.is_finished
    except DataError:
        if not run.restart:
            raise
        return False
    if is_here:
        _find_data_again(run)
        return True
    elsewhere = cache.finished_run(run.hash, run.code)
    if elsewhere is None or _is_taken(run):
        return False
    is_inside = run.directory.resolve().is_relative_to(elsewhere.resolve())
    if is_inside or not may_be_replaced("run", run.directory):  # training works there too
        return False
    with suppress(RunError):  # another process is using it: training reports this, or finds its results
        place("run", elsewhere, run.directory, partial(_say_where, run), lambda: run.is_finished or _is_taken(run))
    return run.is_finished


def _is_taken(run: PlacedRun) -> bool:
    """Return whether a run's folder has something to keep: a part of it, or results of other code."""
    return RunFiles(run.directory).checkpoint.exists() or run.was_finished_by_other_code


def _find_data_again(run: PlacedRun) -> None:
    try:
        _ = RunFolder(run.directory).inputs
    except DataError:
        with suppress(OSError):  # the folder may be read-only; reading results needs no data
            write_inputs(run.directory, run.inputs)


def _say_where(run: PlacedRun, copy: Path) -> None:
    """Record this run's data in a copy of its results: the original's may be elsewhere, or be deleted."""
    write_inputs(run.directory, run.inputs, copy)
    about, own = dict(RunFolder(copy).header), run.config.to_mapping()
    for section, key in (("data", "root"), ("partition", "path")):
        if key in own[section]:
            about["config"][section][key] = own[section][key]
    write_result(RunFiles(copy).config, sealed(about), durable=True)


def carry_out(
    run: PlacedRun,
    cache: Cache,
    *,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
) -> None:
    """Train or resume a run, and evaluate it; for a finished run, only compute missing analyses.

    Raises:
        RunError: training failed, other code has finished it, or another process is using the folder. An observer
            stopped it: a :class:`PrunedError`.
        DataError: data are damaged.
    """
    with run_lock(run.directory):
        files, steps = RunFiles(run.directory), orchestrator or InlineOrchestrator()
        folders = (run.inputs.prepared, run.inputs.partition, run.directory)
        if run.restart:
            _throw_away_damaged(run.directory)
        is_new = not run.is_finished
        if is_new:
            memory.reset_peak()
            if run.was_finished_by_other_code:
                if not run.restart:
                    raise RunError(
                        f"{run.directory}: was finished by a different version of the code and cannot be compared; "
                        "choose another folder, or --restart, which trains it again"
                    )
                forget_results(run.directory)
            write_inputs(run.directory, run.inputs)
            running.train(
                run.config,
                *folders,
                orchestrator=orchestrator,
                observers=observers,
                restart=run.restart,
                environment=environment(run.config),
            )
            steps.call("evaluate", _silent(running.evaluate), run.config, *folders)
            cache.note_run(run.directory, run.config)
        missing = analyses.left(run.config, run.directory)
        if missing:
            steps.call("analyse", analyses.compute, run.config, *folders, missing)
            disk.remove(files.report, missing_ok=True)  # it shows the old analyses
        if is_new:
            cache.note_peak(run.config, memory.peak())


def _throw_away_damaged(directory: Path) -> None:
    """Remove damaged results, and a description that does not name its run."""
    config = RunFiles(directory).config
    if not config.exists():
        return
    forget_damaged_results(directory)
    try:
        _ = RunFolder(directory).header
    except DataError:
        forget_results(directory)  # first: results without a description count as another run's
        disk.remove(config, missing_ok=True)


def _silent(function: Callable[..., object]) -> Callable[..., None]:
    """Return a function without its result, which is on disk: an orchestrator might store it."""

    def call(*arguments: object) -> None:
        function(*arguments)

    return call
