"""Stage *train*: trains and evaluates every run of the comparison, as many at once as the machine allows.

DVC keeps the stage's outputs (``persist``), so that only changed runs are trained. ``runs.json`` names the run in each
folder and the code that trained it; it is an output like the results, so it changes with them when another revision is
checked out or pulled. ``config.json`` names this machine, so it is no output; it describes only runs that are missing
in ``runs.json``, which were started here and interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.core.errors import DataError, RunError
from flcore.experiment.run_folder import RunFiles, write_result, write_run_config
from flcore.io import disk
from flcore.io.files import read_json, remove_stale_temp, write_json
from flcore.io.locks import run_lock
from pipelines.execution.bodies import carry_out_placed
from pipelines.execution.one_run import PlacedRun, placed
from pipelines.execution.operation import Operation
from pipelines.reporting.formats import plural
from pipelines.runs.compared import compared_by
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs, write_inputs
from pipelines.stages.partition import partition_folder, refuse_other_division, remove_others

_CURE = "delete it, and the stage trains again"


def train(
    configs: Sequence[Config],
    prepared: Path,
    partitions: Path,
    directory: Path,
    operation: Operation,
) -> list[Path]:
    """Train and evaluate runs into ``<directory>/<method>-s<seed>``; remove folders of other runs.

    ``<directory>.json`` names the runs and their code.

    Raises:
        ConfigError: a partition was made with other parameters.
        RunError: runs failed (the others are finished, and reused next time), or another process has started one.
    """
    ledger = directory.with_suffix(".json")
    remove_stale_temp(ledger.parent, ledger.name)
    known = read_json(ledger, _CURE) if ledger.exists() else {}
    runs: list[PlacedRun] = []
    for config in configs:
        refuse_other_division(config, partitions)
        runs.append(_placed(config, prepared, partitions, directory, restart=operation.restart))
    kept = {run.directory.name: _named(run) for run in runs if known.get(run.directory.name) == _named(run)}
    write_json(ledger, kept, durable=True)  # first: a run that is interrupted below must not be in it
    for run in runs:
        if run.directory.name in kept:
            _describe_again(run)
        elif run.directory.exists():
            with run_lock(run.directory):  # another process may be writing its description
                if run.directory.name in known or not _was_begun(run) or run.was_finished_by_other_code:
                    remove_others(run.directory, [".running", ".running.holder"])
    if directory.exists():
        remove_others(directory, [run.directory.name for run in runs])
    failed = carry_out_placed(runs, operation)
    ended = {run.directory.name: _named(run) for run in runs if run.label not in failed}
    write_json(ledger, ended, durable=True)
    if failed:
        first, reason = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} of {plural(len(runs), 'run')} failed; the first of them, {first}: {reason}\n"
            "the others are finished and kept; mend the cause, and the same command trains what failed"
        )
    return [run.directory for run in runs]


def describe_pulled(configs: Sequence[Config], prepared: Path, partitions: Path, directory: Path) -> None:
    """Describe runs whose results came from DVC, which does not fetch files that name a machine.

    The stage *compare* reads descriptions, and runs alone if only its own parameters have changed.

    Args:
        configs: of the runs. prepared: their data. partitions: folder of ``seed-<seed>``.
        directory: of the runs; ``<directory>.json`` names their runs and code.
    """
    ledger = directory.with_suffix(".json")
    known = read_json(ledger, _CURE) if ledger.exists() else {}
    for config in configs:
        if not _is_described(run_folder(directory, config)):
            run = _placed(config, prepared, partitions, directory)
            if known.get(run.directory.name) == _named(run):
                _describe_again(run)


def run_folder(directory: Path, config: Config) -> Path:
    """Return the folder of a run of the comparison."""
    return directory / f"{config.method.name}-s{config.seed}"


def _placed(config: Config, prepared: Path, partitions: Path, directory: Path, *, restart: bool = False) -> PlacedRun:
    run = placed(config, Inputs(prepared, partition_folder(partitions, config)), directory, restart=restart)
    return replace(run, directory=run_folder(directory, config))


def _named(run: PlacedRun) -> dict[str, str]:
    return {"run": run.hash, "code": run.code}


def _was_begun(run: PlacedRun) -> bool:
    """Return whether the description and results in a folder are of this run, which may be unfinished."""
    return _hashes(run.directory) == {run.hash}


def _is_described(directory: Path) -> bool:
    """Return whether the description in a folder is of the run that has its results there."""
    return len(_hashes(directory)) == 1


def _hashes(directory: Path) -> set[str]:
    """Return which runs the description and, if there are any, the results in a folder are of; empty if damaged."""
    there = RunFolder(directory)
    try:
        return {there.config_hash, *([str(there.metrics.get("config_hash"))] if there.is_finished else [])}
    except DataError:
        return set()


def _describe_again(run: PlacedRun) -> None:
    """Write the description of a run with results from DVC, which does not fetch files that name a machine.

    Existing ones may be another run's.
    """
    files = RunFiles(run.directory)
    if run.is_finished or not files.metrics.exists():
        return
    for path in (files.report, files.config):
        disk.remove(path, missing_ok=True)
    disk.remove_tree(files.figures)
    config = replace(run.config, plugins=plugins.keep(run.config.plugins, run.directory))
    environment = {"compared_by": compared_by(config)}  # the training environment is unknown here
    write_run_config(run.directory, config, run.hash, code=run.code, environment=environment)
    write_result(files.timing, {"rounds": [], "seconds": {}, "steps_per_second": None, "joules": None})
    write_inputs(run.directory, run.inputs)
