"""Trials at the same time: the same study on any number of cores and processes, whoever is killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from flcore.config.schema import Config
from pipelines.execution import admission
from pipelines.execution.one_run import NO_HURDLES, Hurdles
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.journal import open_journal
from pipelines.tuning.problem import Problem
from pipelines.tuning.search import StudyOutcome
from pipelines.tuning.study import Trials, chosen

PROJECT = Path(__file__).resolve().parents[3]
RESULTS = ("study.json", "study.md", "trials.csv", "best.yaml", "params.yaml")

Configure = Callable[..., Config]
Search = Callable[..., StudyOutcome]


# ---- a trial depends on those before it and not under way --------------------------------------------------------


def ended(problem: Problem, number: int, accuracy: float) -> FrozenTrial:
    """A finished trial with values of its own."""
    values = {**problem.given_values, "method.mu": 0.001 * (number + 1), "local.lr": 0.01 * (number + 1)}
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial(values)
    trial = study.ask()
    problem.suggest(trial)
    study.tell(trial, accuracy)
    found = study.trials[0]
    found.number = number
    return found


def test_a_trial_is_chosen_without_those_that_may_be_under_way(config_with: Configure) -> None:
    """Trial 20 of a study with three at once knows how 0 to 17 have ended, and of 18 and 19 the values alone."""
    problem = Problem.of(config_with(), "accuracy", None)
    known = [ended(problem, number, 0.5 + 0.01 * number) for number in range(20)]
    choice = chosen(problem, known, 3)
    assert chosen(problem, [*known[:18], *(ended(problem, number, 0.1) for number in (18, 19))], 3) == choice
    assert chosen(problem, [*known[:17], ended(problem, 17, 0.1), *known[18:]], 3) != choice
    assert chosen(problem, known, 2) != choice
    assert chosen(problem, [], 3) == problem.given_values


def test_hurdles_are_the_medians_of_the_finished_trials_that_a_trial_knows(
    tmp_path: Path, config_with: Configure
) -> None:
    """Six rounds, so from round 2 on and before the last. Trials 0 to 5 had k and 2 k at rounds 2 and 5: of 0 to 4 the
    medians are 2 and 4.

    With two at once trial 6 knows 0 to 4, and 5 not; trial 5 knows 0 to 3, too few.
    """
    problem = Problem.of(config_with(federation={"rounds": 6}), "accuracy", None)
    trials = Trials(problem, StudyFiles(tmp_path), None, 2)
    space = FloatDistribution(0, 1)
    for number in range(6):
        rounds = {1: 9.0, 2: float(number), 5: 2.0 * number, 6: 1.0}
        trials.study.add_trial(
            create_trial(value=1.0, params={"x": 0.5}, distributions={"x": space}, intermediate_values=rounds)
        )
    assert trials.hurdles(6) == Hurdles("top1_global", {2: 2.0, 5: 4.0})
    assert trials.hurdles(5) == NO_HURDLES
    # Of 0 to 5 the median is between the third and the fourth.
    assert trials.hurdles(7).at == {2: 2.5, 5: 5.0}


def test_a_hurdle_is_for_the_best_round_until_then() -> None:
    hurdles = Hurdles("top1_global", {2: 0.5, 4: 0.7})

    def history(*values: float | None) -> list[dict[str, Any]]:
        return [{"round": number, "top1_global": value} for number, value in enumerate(values, start=1)]

    assert hurdles.failed_at(history(0.6, 0.1, 0.2, 0.6)) == 4
    assert hurdles.failed_at(history(0.6, 0.1, 0.7, 0.1)) is None
    assert hurdles.failed_at(history(0.4)) is None
    assert hurdles.failed_at(history(0.4, math.nan)) == 2
    assert hurdles.failed_at(history(None, None)) == 2
    assert NO_HURDLES.failed_at(history(math.nan, 0.0)) is None


# ---- cores and processes -----------------------------------------------------------------------------------------


def digests(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in RESULTS}


@pytest.mark.slow
def test_a_study_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five trials, three at once: here one after the other, then by two processes of their own."""
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(admission, "physical_cores", lambda cores=cores: cores)
        monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / f"cache-{cores}"))
        search(config_with(), 5, tmp_path / str(cores), at_once=3)
        found.append(digests(tmp_path / str(cores)))
    assert found[0] == found[1]
    assert [trial["state"] for trial in json.loads(found[0]["study.json"])["trials"]] == ["complete"] * 5


WORKS_ON_IT = """
import os, signal, sys
from pathlib import Path
from tests.pipelines.tuning.conftest import Told, _configure, _search

class Watching(Told):
    def round(self, label, number, record):
        Path(sys.argv[1], f"by-{os.getpid()}").touch()
        if sys.argv[2] == "killed" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

_search(_configure(federation={"rounds": 4}), 6, Path(sys.argv[1]), told=Watching(), at_once=3)
"""


@pytest.mark.slow
def test_two_processes_share_a_study_and_one_is_killed(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each carries trials out; what the killed one leaves, the other one takes up, and nothing is done twice."""
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    shared.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", WORKS_ON_IT, str(shared), what], env=environment)
        for what in ("killed", "stays")
    ]
    assert [process.wait(timeout=300) for process in processes] == [-signal.SIGKILL, 0]
    assert len(list(shared.glob("by-*"))) == 2
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "another"))
    search(config_with(federation={"rounds": 4}), 6, whole, at_once=3)
    assert digests(shared) == digests(whole)


# ---- the journal -------------------------------------------------------------------------------------------------


def test_a_line_that_a_killed_process_left_half_written_is_taken_off(tmp_path: Path) -> None:
    """Optuna would refuse the whole file from the next line on."""
    path = tmp_path / "study.journal"
    first = optuna.create_study(storage=open_journal(path), study_name="x", direction="maximize")
    first.add_trial(create_trial(value=1.0))
    with path.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_i')
    again = optuna.load_study(storage=open_journal(path), study_name="x")
    again.add_trial(create_trial(value=2.0))
    read = optuna.load_study(storage=open_journal(path), study_name="x")
    assert [trial.value for trial in read.trials] == [1.0, 2.0]
    assert {trial.state for trial in read.trials} == {TrialState.COMPLETE}


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    """Optuna's own would hold everybody up for half a minute."""
    path = tmp_path / "study.journal"
    holds = (
        "import os, signal, sys; from pathlib import Path; from pipelines.tuning.journal import _FileLock\n"
        "_FileLock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    lock = path.with_name(f".{path.name}.lock")
    subprocess.run([sys.executable, "-c", holds, str(lock)], cwd=PROJECT, check=False)
    assert lock.exists()
    began = time.monotonic()
    optuna.create_study(storage=open_journal(path), study_name="x")
    assert time.monotonic() - began < 10
