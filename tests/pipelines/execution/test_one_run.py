"""A run's folder where files move, are damaged or wanted by two at once: the same command ends with the same run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flcore import running
from flcore.config.schema import Config
from flcore.core.errors import RunError
from flcore.experiment.run_folder import read_run_config
from flcore.io.locks import run_lock
from pipelines.execution import one_run
from pipelines.execution.bodies import experiment
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.runs.cache import ENVIRONMENT_VARIABLE, Cache
from pipelines.runs.folder import RunFolder
from tests.following import NoFollower


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))


def config(root: str | None = None, rounds: int = 1) -> Config:
    """A run on digits, which read no file, whatever the root."""
    return Config.from_mapping(
        {
            "data": {"limit_per_class": 20, "root": root},
            "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
            "federation": {"rounds": rounds},
        }
    )


def carried_out(asked: Config, out: str) -> Outcome:
    return experiment(asked, Path(out), Operation(InlineSteps(), Watcher(), NoFollower()))  # type: ignore[arg-type]


def test_a_run_that_was_taken_from_elsewhere_names_its_own_files() -> None:
    """The same images below two roots: the same command finds its run again."""
    carried_out(config("/a"), "one")
    for _ in range(2):
        assert carried_out(config("/b"), "two").was_finished
    assert [read_run_config(Path(name))["config"]["data"]["root"] for name in ("one", "two")] == ["/a", "/b"]
    # Images that have moved are the same images: the run that lies there is the one that is asked for.
    assert carried_out(config("/b"), "one").was_finished


def test_a_finished_run_is_told_where_its_data_lie_when_they_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder first, then the cache: what asks for the data names the command that made the run."""
    carried_out(config(), "one")
    Path("deeper").mkdir()
    Path("one").rename("deeper/one")
    for cache in ("cache", "another cache"):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / cache))
        assert carried_out(config(), "deeper/one").was_finished
        assert RunFolder(Path("deeper/one")).inputs.prepared.parent == tmp_path / cache / "prepared"
        shutil.rmtree("cache", ignore_errors=True)


def test_a_run_has_its_folder_to_itself_until_it_has_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command, typed once more at any of these moments, is refused."""
    came: list[str] = []

    def come_meanwhile(place: Any, name: str) -> None:
        step = getattr(place, name)

        def stepping(*arguments: Any, **keywords: Any) -> Any:
            with pytest.raises(RunError, match="another process is at work"), run_lock(Path("one")):
                pass
            came.append(name)
            return step(*arguments, **keywords)

        monkeypatch.setattr(place, name, stepping)

    steps = [(one_run, "write_inputs"), (running, "train"), (running, "evaluate"), (Cache, "note_run")]
    for place, name in steps:
        come_meanwhile(place, name)
    carried_out(config(), "one")
    assert came == [name for _, name in steps]
    assert not Path("one/.running").exists()


def test_a_run_that_another_process_has_just_begun_is_not_replaced() -> None:
    """It holds the folder's lock and has written nothing yet; the same run lies finished elsewhere."""
    carried_out(config(), "one")
    with run_lock(Path("two")):
        with pytest.raises(RunError, match="two: another process is at work on this run"):
            carried_out(config(), "two")
        assert Path("two/.running").exists() and not Path("two/history.jsonl").exists()
    assert carried_out(config(), "two").was_finished
