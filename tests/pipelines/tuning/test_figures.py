"""Figures from ``study.json`` alone, in a process of its own: the same bytes, and neither torch nor a storage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.tuning import figures

PROJECT = Path(__file__).resolve().parents[3]
SPACE = {
    "method.mu": {"low": 0.001, "high": 1.0, "log": True, "whole": False},
    "local.epochs": {"low": 1, "high": 10, "log": True, "whole": True},
    "local.schedule": {"choices": ["constant", "cosine", None]},
    "local.lr": {"low": 0.01, "high": 0.1, "log": True, "whole": False},
    "local.momentum": {"choices": [0.0, 0.9]},
}


def _trial(number: int, state: str) -> dict[str, Any]:
    return {
        "number": number,
        "state": state,
        "params": {
            "method.mu": 0.001 * (number + 1),
            "local.epochs": 1 + number % 10,
            "local.schedule": [None, "constant", "cosine"][number % 3],
            "local.lr": 0.02,
            "local.momentum": 0.9,
        },
        "accuracy": 0.5 + 0.01 * number if state == "complete" else None,
        "bytes": 1000 + number if state == "complete" else None,
        "error": None,
        "rounds": {"1": 0.4, "2": 0.5 + 0.01 * number} if state == "complete" else {"1": 0.3},
    }


def _described(objective: str, trials: list[dict[str, Any]], max_bytes: int | None = None) -> dict[str, Any]:
    directions = ["maximize", "minimize"][: len(objective.split(","))]
    about = {"metric": "top1_global", "objective": objective, "directions": directions, "max_bytes": max_bytes}
    return {**about, "space": SPACE, "trials": trials}


def _write(directory: Path, objective: str, trials: list[dict[str, Any]], max_bytes: int | None = None) -> None:
    described = _described(objective, trials, max_bytes)
    directory.mkdir()
    (directory / "study.json").write_text(json.dumps(described))


def _names(directory: Path) -> list[str]:
    return sorted(path.stem for path in (directory / "figures").iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_study_is_drawn_by_optuna(tmp_path: Path) -> None:
    """Trial 1 is another folder's, 2 was given up, 3 has failed; five keys are four in a figure of slices and one."""
    states = {0: "complete", 2: "pruned", 3: "fail"} | dict.fromkeys(range(4, 13), "complete")
    _write(tmp_path / "a", "accuracy", [_trial(number, state) for number, state in states.items()])
    figures.write(tmp_path / "a")
    assert _names(tmp_path / "a") == ["history", "importances", "parallel", "rounds", "slice-1", "slice-2"]

    _write(tmp_path / "b", "accuracy,bytes", [_trial(0, "complete")])
    figures.write(tmp_path / "b")
    assert _names(tmp_path / "b") == ["front", "history", "parallel", "slice-1", "slice-2"]
    first = {path.name: path.read_bytes() for path in (tmp_path / "b" / "figures").iterdir()}
    figures.write(tmp_path / "b")
    assert {path.name: path.read_bytes() for path in (tmp_path / "b" / "figures").iterdir()} == first


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_trials_that_lack_keys_are_drawn(tmp_path: Path) -> None:
    """One key in every other trial, one in none, and with a limit that the second half is beyond, or all are."""
    trials = [_trial(number, "complete") for number in range(12)]
    for trial in trials:
        del trial["params"]["local.momentum"]
        if trial["number"] % 2:
            del trial["params"]["method.mu"]
    _write(tmp_path / "a", "accuracy", trials)
    figures.write(tmp_path / "a")
    assert _names(tmp_path / "a") == ["history", "importances", "parallel", "rounds", "slice-1"]

    for name, limit, best in (("b", 1005, [0, 1, 2, 3, 4, 5]), ("c", 10, [])):
        _write(tmp_path / name, "accuracy,bytes", trials, limit)
        figures.write(tmp_path / name)
        assert _names(tmp_path / name) == ["front", "history", "importances", "parallel", "slice-1"]
        study = figures.study_of(_described("accuracy,bytes", trials, limit))
        assert [trial.number for trial in study.best_trials] == best


def test_the_study_in_memory_is_the_one_on_disk() -> None:
    trials = [_trial(number, state) for number, state in ((1, "complete"), (3, "pruned"))]
    study = figures.study_of(_described("accuracy", trials))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL", "PRUNED"]
    assert study.best_trial.number == 1
    assert study.best_params == trials[0]["params"]
    assert study.trials[3].intermediate_values == {1: 0.3}


def test_nothing_heavy_is_imported_for_studies_by_whom_it_does_not_concern() -> None:
    """The recorder neither torch; the process that trains neither MLflow, nor matplotlib, nor pandas."""
    code = (
        "import sys; import pipelines.tuning.log, pipelines.tuning.figures; assert 'torch' not in sys.modules;"
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('matplotlib')];"
        "import pipelines.tuning.search; assert not {'mlflow', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PROJECT).returncode == 0
