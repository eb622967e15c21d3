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


def _write(directory: Path, objective: str, states: dict[int, str]) -> None:
    trials = [_trial(number, state) for number, state in states.items()]
    described = {"metric": "top1_global", "objective": objective, "space": SPACE, "trials": trials}
    directory.mkdir()
    (directory / "study.json").write_text(json.dumps(described))


def _names(directory: Path) -> list[str]:
    return sorted(path.stem for path in (directory / "figures").iterdir())


@pytest.mark.filterwarnings("error")
def test_a_study_is_drawn_by_optuna(tmp_path: Path) -> None:
    """Trial 1 is another folder's, 2 was given up, 3 has failed; five keys are four in a figure of slices and one."""
    _write(
        tmp_path / "a", "accuracy", {0: "complete", 2: "pruned", 3: "fail"} | dict.fromkeys(range(4, 13), "complete")
    )
    figures.write(tmp_path / "a")
    assert _names(tmp_path / "a") == ["history", "importances", "parallel", "rounds", "slice-1", "slice-2"]

    _write(tmp_path / "b", "accuracy,bytes", {0: "complete"})
    figures.write(tmp_path / "b")
    assert _names(tmp_path / "b") == ["front", "history", "parallel", "slice-1", "slice-2"]
    first = {path.name: path.read_bytes() for path in (tmp_path / "b" / "figures").iterdir()}
    figures.write(tmp_path / "b")
    assert {path.name: path.read_bytes() for path in (tmp_path / "b" / "figures").iterdir()} == first


def test_the_study_in_memory_is_the_one_on_disk() -> None:
    described = {
        "metric": "mean_local",
        "objective": "accuracy",
        "space": SPACE,
        "trials": [_trial(number, state) for number, state in ((1, "complete"), (3, "pruned"))],
    }
    study = figures.study_of(described)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL", "PRUNED"]
    assert study.best_trial.number == 1
    assert study.best_params == described["trials"][0]["params"]
    assert study.trials[3].intermediate_values == {1: 0.3}


def test_nothing_heavy_is_imported_for_studies_by_whom_it_does_not_concern() -> None:
    """The recorder neither torch; the process that trains neither MLflow, nor matplotlib, nor pandas."""
    code = (
        "import sys; import pipelines.tuning.log, pipelines.tuning.figures; assert 'torch' not in sys.modules;"
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('matplotlib')];"
        "import pipelines.tuning.search; assert not {'mlflow', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PROJECT).returncode == 0
