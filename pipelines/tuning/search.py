"""``protofl tune``: a search of hyper-parameters on the clients' validation data; test data are never read.

A study lives in one folder: a run per trial below ``trials/``, and the results in ``study.json``, ``study.md``,
``trials.csv``, ``best.yaml`` and ``figures/``. Data and partition come from the cache. It can be killed at any moment:
the same command goes on inside the interrupted round of the interrupted trial, and ends with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.study import Study
from optuna.trial import TrialState

from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.errors import ConfigError, DataError, RunError
from flcore.experiment import Experiment
from pipelines.runs.cache import Cache
from pipelines.runs.inputs import Inputs
from pipelines.tuning.folder import StudyFiles, claim, only_one_process, refuse_other_study
from pipelines.tuning.problem import VALIDATION_SHARE, Problem
from pipelines.tuning.results import describe, markdown, printed, reason, write_results
from pipelines.tuning.study import Trials, best_trials, ended_trials, of_other_code, storage_errors
from pipelines.tuning.trial import TrialRun

if TYPE_CHECKING:
    from flcore.engine.orchestrator import Orchestrator
    from pipelines.execution.bodies import Operation
    from pipelines.execution.progress import Watcher
    from pipelines.tuning.log import StudyLog


@dataclass(frozen=True)
class StudyOutcome:
    """What a study leaves.

    Attributes:
        directory: its folder. best: in it, the parameter file with the best values.
        table: what was found, for a terminal. markdown: the same for a page.
        failed: by trial, why.
        store: where it is logged: what to type, or an address; None where it is not, or where nobody waited.
        was_finished: no trial had to be carried out.
    """

    directory: Path
    best: Path
    table: str
    markdown: str
    failed: Mapping[str, str]
    store: str | None = None
    was_finished: bool = False


def study(
    config: Config,
    trials: int,
    objective: str,
    metric: str | None,
    storage: str | None,
    out: Path,
    operation: Operation,
    *,
    max_bytes: int | None = None,
) -> StudyOutcome:
    """Search the hyper-parameters of ``config.method``, or go on searching.

    A trial that fails is named and counts; the next ones are carried out all the same.

    Args:
        config: all values that are not searched, and those with which the study begins.
        trials: how many ended trials (finished, given up or failed) are wanted in all.
        objective: ``accuracy`` or ``accuracy,bytes``.
        metric: the accuracy; None: ``top1_global``, or ``mean_local`` for a method without a global model.
        storage: Optuna's storage as an SQLAlchemy URL; None for a SQLite file in the folder.
        out: the study's folder.
        operation: how.
        max_bytes: with ``accuracy,bytes`` the most that a result may send; None: any number.

    Raises:
        ConfigError: the configuration cannot be run or scored like that, the folder holds another study or is in use,
            or the storage cannot be opened; all before any trial.
        DataError: data are missing or damaged, or no client has validation data.
        RunError: no trial has finished, or the storage was lost on the way.
    """
    if trials < 1:
        raise ConfigError(f"--trials {trials}: must be at least 1")
    problem, files = Problem.of(config, objective, metric, max_bytes), StudyFiles(out)
    refuse_other_study(problem, files)
    with only_one_process(out), storage_errors():
        found = Trials(problem, files, storage)
        inputs = _data(problem, found, files, operation.steps, operation.watcher)
        run = TrialRun(problem, files, inputs, Cache.here(), found.is_hopeless, operation.watcher)
        carried_out = _search(run, found, trials, operation.steps, operation.recorder)
        write_results(problem, found.study, files)
        outcome = _outcome(problem, found.study, files, operation.console)
    recorded = operation.recorder.study(out)
    store = operation.steps.call("report", recorded.result)["store"] if operation.wait else None
    return replace(outcome, store=store, was_finished=carried_out == 0)


def _outcome(problem: Problem, found: Study, files: StudyFiles, console: Mapping[str, Any]) -> StudyOutcome:
    """What the trials in the storage say.

    Raises:
        RunError: none of them has finished.
    """
    if not best_trials(found):
        ended = ended_trials(found)
        raise RunError(
            f"{files.directory}: none of the {len(ended)} trials has finished; the last one: {reason(ended[-1])}"
        )
    failed = [trial for trial in ended_trials(found) if trial.state == TrialState.FAIL]
    return StudyOutcome(
        files.directory,
        files.best,
        table=printed(problem, found, files, **console),
        markdown=markdown(problem, found),
        failed={f"trial {trial.number}": reason(trial) for trial in failed},
    )


def _data(problem: Problem, found: Trials, files: StudyFiles, steps: Orchestrator, watch: Watcher) -> Inputs:
    """Data and partition, once for all trials, with a folder that is marked as this study's.

    Raises:
        ConfigError: the given configuration does not fit the data, or the study began with others.
        DataError: data are missing, or no client has validation data.
    """
    config, cache = problem.config, Cache.here()
    if problem.given.partition.validation == 0:
        watch.say(
            f"partition.validation is 0: the study sets aside {VALIDATION_SHARE:g} of each client's training data"
        )
    watch.step("prepare")
    prepared = steps.call("prepare-data", cache.prepared, config)
    watch.step(f"partition (seed {config.partition_seed})")
    inputs = Inputs(prepared, steps.call("partition-data", cache.partition, config, prepared))
    partition = Partition.load(inputs.partition)
    if not any(len(client.val) for client in partition.clients):
        raise DataError(
            f"partition.validation = {config.partition.validation:g}: leaves no client any validation data; "
            "choose a larger share"
        )
    # Of the given values; others that the data refuse are a trial's failure.
    Experiment.open(config, inputs.prepared, inputs.partition).new_module()
    fingerprints = {
        "data_fingerprint": Dataset.load(prepared).meta.fingerprint,
        "partition_fingerprint": partition.fingerprint,
    }
    if not found.same_data(fingerprints):
        raise ConfigError(f"{files.directory}: this study began with other data; choose another --out")
    claim(problem, files)
    return inputs


def _search(run: TrialRun, found: Trials, wanted: int, steps: Orchestrator, log: StudyLog) -> int:
    """Carry out trials until so many have ended.

    Returns:
        How many were carried out.
    """
    files, watch = run.files, run.watch
    before = done = len(ended_trials(found.study))
    others = len(of_other_code(found.study, run.code))
    if others:
        watch.say(
            f"{others} of the {done} trials were carried out by other code than today's; choose another --out for "
            "a study by one code"
        )
    watch.runs(wanted, done)
    while done < wanted:
        trial = found.next()
        number = trial.number
        files.trial(number).directory.mkdir(parents=True, exist_ok=True)
        values = run.problem.suggest(trial)
        outcome = steps.call(f"trial-{number:04d}", partial(run.carry_out, number, values))
        found.tell(trial, outcome, run.code)
        watch.run_ended(f"trial {number}")
        watch.say(describe(run.problem, found.study.trials[number]))
        write_results(run.problem, found.study, files)
        log.trial(files.directory, number)
        done = len(ended_trials(found.study))
    return done - before
