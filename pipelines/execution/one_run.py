"""One run whose data are there: where it belongs, whether it has finished, and its training.

Both the process that a command runs in and the workers of :mod:`pipelines.execution.run_pool` call this.
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
    read_run_config,
    refuse_other_run,
    write_result,
)
from flcore.io import disk
from flcore.io.files import sealed
from flcore.io.locks import run_lock
from pipelines.runs import analyses, memory
from pipelines.runs.cache import Cache, has_finished, place
from pipelines.runs.inputs import Inputs, inputs_of, write_inputs
from pipelines.runs.ownership import claim_names, may_be_replaced
from pipelines.runs.provenance import environment


class PrunedError(RunError):
    """An observer stopped the run; its checkpoint stays."""


def is_of_the_machine(error: BaseException | None) -> bool:
    """Whether what the system refused (space on a disk, a file) is behind an error, and nothing that a run has done."""
    return error is not None and (isinstance(error, OSError) or is_of_the_machine(error.__cause__))


def was_stopped_by_the_machine(error: BaseException | None) -> bool:
    """Whether a run may go on when the machine lets it. Data that are missing (a DataError) stay missing."""
    return isinstance(error, RunError) and is_of_the_machine(error)


@dataclass(frozen=True)
class PlacedRun:
    """A run that is checked, with its data and its folder.

    Attributes:
        config: of the run, without ``auto`` in ``engine``. inputs: its data.
        directory: where it goes.
        hash: of configuration, data and partition. code: fingerprint of the code that it uses.
        label: what messages call it.
    """

    config: Config
    inputs: Inputs
    directory: Path
    hash: str
    code: str
    label: str

    @property
    def is_finished(self) -> bool:
        """Whether its folder holds it, finished by this code."""
        return has_finished(self.directory, self.hash, self.code)

    @property
    def was_finished_by_other_code(self) -> bool:
        """Whether its folder holds results that other code than this has made."""
        return finished_by_other_code(self.directory, self.code)


def placed(
    config: Config, inputs: Inputs, home: Path, *, label: str = "", directory: Path | None = None, alone: bool = False
) -> PlacedRun:
    """Check a run against its data, and say where it belongs.

    Args:
        config: of the run. inputs: its data.
        home: folder of runs; in it ``<method>-s<seed>-<hash, 8>`` is this one's.
        label: what tells it from others, beside method and seed.
        directory: where it goes instead.
        alone: no other run is beside it, so ``engine.workers: null`` may give it all cores.

    Raises:
        ConfigError: the configuration does not fit the data, or the folder holds something else.
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
        is_own = True  # by its name; that it is damaged is said of this run alone, when it is looked for
    if not is_own:  # where the images of this very run lie has no say in it
        refuse_other_run(experiment.config, found)
    return PlacedRun(experiment.config, inputs, found, experiment.hash, code_fingerprint(config), name)


def fetch(run: PlacedRun, cache: Cache, *, restart: bool = False, copies: bool = True) -> bool:
    """Take the results of a run that has finished elsewhere under the same code; False if there are none.

    One that has finished here is told where its data lie, if they do not lie where they did.

    Args:
        run: which. cache: knows where runs have finished.
        restart: damaged results are none: :func:`carry_out` throws them away.
        copies: also take results from other folders.

    Raises:
        DataError: the run has finished here, and its results are damaged.
    """
    try:
        is_here = run.is_finished
    except DataError:
        if not restart:
            raise
        return False
    if is_here:
        _find_data_again(run)
        return True
    elsewhere = cache.finished_run(run.hash, run.code) if copies else None
    if elsewhere is None or _is_taken(run):
        return False
    is_inside = run.directory.resolve().is_relative_to(elsewhere.resolve())
    if is_inside or not may_be_replaced("run", run.directory):  # training does not mind
        return False
    with suppress(RunError):  # another process is at work there: training says so, or finds what it has done
        place("run", elsewhere, run.directory, partial(_say_where, run), lambda: run.is_finished or _is_taken(run))
    return run.is_finished


def _is_taken(run: PlacedRun) -> bool:
    """Whether a run's folder holds what is not to be replaced: half of it, or all of it by other code."""
    return RunFiles(run.directory).checkpoint.exists() or run.was_finished_by_other_code


def _find_data_again(run: PlacedRun) -> None:
    try:
        inputs_of(run.directory)
    except DataError:
        with suppress(OSError):  # results may lie where nothing can be written; to be read they need no data
            write_inputs(run.directory, run.inputs)


def _say_where(run: PlacedRun, copy: Path) -> None:
    """Let a copy of a run's results name this run's files: those of the other one may lie elsewhere, or go."""
    write_inputs(run.directory, run.inputs, copy)
    about, own = read_run_config(copy), run.config.to_mapping()
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
    restart: bool = False,
) -> None:
    """Train a run, or go on with it, and evaluate it; one that has finished is only analysed, where that is new.

    Args:
        run: what, and where.
        cache: is told where it has finished, and what it took.
        orchestrator: how the pieces of a round are carried out; None: plain calls.
        observers: who is told of progress.
        restart: throw away a checkpoint that cannot be used, and results that are damaged or of other code; a
            checkpoint that can be used is gone on with.

    Raises:
        RunError: training failed; or, as a :class:`PrunedError`, an observer stopped it. Or other code has finished it
            there, or another process is at work there.
        DataError: data are damaged.
    """
    with run_lock(run.directory):
        _carry_out(run, cache, orchestrator, observers, restart)


def _carry_out(
    run: PlacedRun,
    cache: Cache,
    orchestrator: Orchestrator | None,
    observers: Observers | None,
    restart: bool,
) -> None:
    files, steps = RunFiles(run.directory), orchestrator or InlineOrchestrator()
    folders = (run.inputs.prepared, run.inputs.partition, run.directory)
    if restart:
        _throw_away_damaged(run.directory)
    is_new = not run.is_finished
    if is_new:
        memory.reset_peak()
        if run.was_finished_by_other_code:
            if not restart:
                raise RunError(
                    f"{run.directory}: was finished by a different version of the code and cannot be compared; choose "
                    "another folder, or --restart, which trains it again"
                )
            forget_results(run.directory)
        write_inputs(run.directory, run.inputs)
        train = partial(
            running.train,
            run.config,
            *folders,
            orchestrator=orchestrator,
            observers=observers,
            restart=restart,
            environment=environment(run.config),
        )
        cache.on_whole_data(run.config, run.inputs.prepared, train)
        steps.call("evaluate", _silent(running.evaluate), run.config, *folders)
        cache.note_run(run.directory, run.config)
    missing = analyses.left(run.config, run.directory)
    if missing:
        steps.call("analyse", analyses.compute, run.config, *folders, missing)
        disk.remove(files.report, missing_ok=True)  # it shows them
    if is_new:
        cache.note_peak(run.config, memory.peak())


def _throw_away_damaged(directory: Path) -> None:
    """Results that are not what was written, and a description of which nobody can say whose it is."""
    config = RunFiles(directory).config
    if not config.exists():
        return
    forget_damaged_results(directory)
    try:
        read_run_config(directory)
    except DataError:
        forget_results(directory)  # first: results without a description are taken for somebody else's
        disk.remove(config, missing_ok=True)


def _silent(function: Callable[..., object]) -> Callable[..., None]:
    """Drop a result that lies on disk: an orchestrator might keep it."""

    def call(*arguments: object) -> None:
        function(*arguments)

    return call
