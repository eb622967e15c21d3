"""A tiny federation, and studies of it in this process: the log only remembers what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from flcore.config.schema import Config
from pipelines.execution.follower import Follower
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Watcher
from pipelines.execution.run_pool import RunPool
from pipelines.execution.steps import InlineSteps
from pipelines.tuning import search as searching
from pipelines.tuning.request import StudyRequest
from pipelines.tuning.search import study
from tests.one_process import ThisProcess

SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2, "validation": 0.25},
    "method": {"name": "fedprox"},
    "federation": {"rounds": 2},
    "local": {"lr": 0.1, "batch_size": 16},
}


PROJECT = Path(__file__).resolve().parents[3]
RESULTS = ("study.json", "study.md", "trials.csv", "best.yaml", "params.yaml")

Configure = Callable[..., Config]
Search = Callable[..., Outcome]


def results_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "study.json").read_text())  # type: ignore[no-any-return]


def states_of(directory: Path) -> list[tuple[str, str | None]]:
    """State of every trial, with the reason of one that has failed."""
    return [(trial["state"], trial["error"]) for trial in results_of(directory)["trials"]]


def interrupt(*arguments: object, **keywords: object) -> None:
    raise KeyboardInterrupt


@dataclass
class Told(Watcher):
    """Remembers lines for people, and what it is asked to draw and log."""

    lines: list[str] = field(default_factory=list)
    trials: int = 0
    studies: int = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def follow(self, folder: Path) -> None:
        assert (folder / "study.json").exists()
        self.trials += 1

    def finish(self, folder: Path) -> None:
        assert (folder / "study.json").exists()
        self.studies += 1

    def wait(self) -> dict[str, str]:
        return {"store": "sqlite:///somewhere.db"}


def _pool(size: int, *given: Any) -> ThisProcess | RunPool:
    """Trials one after the other are carried out here, parallel ones in processes."""
    return (ThisProcess if size == 1 else RunPool)(size, *given)


def _configure(**sections: Any) -> Config:
    merged = {name: {**section, **sections.pop(name, {})} for name, section in SETTINGS.items()}
    return Config.from_mapping({**merged, **sections})


def _search(
    config: Config,
    trials: int,
    out: Path,
    *,
    objective: str = "accuracy",
    metric: str | None = None,
    storage: str | None = None,
    told: Told | None = None,
    wait: bool = True,
    at_once: int = 1,
) -> Outcome:
    told = told or Told()
    operation = Operation(InlineSteps(), told, cast(Follower, told), wait)
    config = Config.from_mapping({**config.to_mapping(), "tune": {**config.to_mapping()["tune"], "parallel": at_once}})
    return study(config, StudyRequest(trials, objective, metric, storage), out, operation)


@pytest.fixture(scope="session")
def config_with() -> Callable[..., Config]:
    """Makes the tiny federation's configuration, with sections updated."""
    return _configure


@pytest.fixture(scope="session")
def search() -> Callable[..., Outcome]:
    """Carries out a study inline."""
    return _search


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of two trials; tests must not write there."""
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFL_CACHE", str(directory / "cache"))
        patch.setattr(searching, "RunPool", _pool)
        patch.chdir(directory)
        _search(_configure(), 2, directory / "study")
    return directory / "study"


@pytest.fixture
def told() -> Told:
    """What a study says, to be handed to ``search``."""
    return Told()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in an empty folder with a cache of its own, so that no trial is taken from another test's."""
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(searching, "RunPool", _pool)
    monkeypatch.chdir(tmp_path)
