"""The follower's subprocess: what it does with folders, in this process."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from pipelines.orchestration import follow
from pipelines.orchestration.follow import Following

TINY: dict[str, Any] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
}


def settings(uri: str | None) -> dict[str, Any]:
    tracking = {"enabled": uri is not None, "uri": uri, "log_model": False, "register": False}
    return {"tracking": tracking, "source": "protofl compare"}


def following(uri: str | None = None) -> tuple[Following, list[tuple[str, str]]]:
    """A follower of nothing yet, and what it prints."""
    printed: list[tuple[str, str]] = []
    started = Following(lambda kind, text: printed.append((kind, text)))
    started.take(settings(uri))
    return started, printed


def lines(*given: dict[str, Any]) -> queue.Queue[dict[str, Any] | None]:
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
    for line in (*given, None):
        waiting.put(line)
    return waiting


def logged(uri: str) -> Any:
    """The only run of the store."""
    from mlflow.tracking.client import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits/dirichlet")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("made") / "run"
    run(TINY, folder)
    return folder


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A run whose last results are missing."""
    run(TINY, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    (tmp_path / "run" / "seal.json").unlink()
    return tmp_path / "run"


def test_runs_are_logged_live_however_many_lines_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is always there: five of them, and runs are logged after each."""
    monkeypatch.setattr(follow, "_LIVE_EVERY_SECONDS", 0.0)
    started, _ = following()
    live: list[int] = []
    monkeypatch.setattr(started, "_log_open", lambda: live.append(len(started._open)))
    assert started.run(lines(*({"folder": str(tmp_path / str(number))} for number in range(5)))) == 0
    assert live == [1, 2, 3, 4, 5]


def test_a_run_that_is_trained_has_the_load_of_its_machine_and_one_that_stays_unfinished_is_marked(
    unfinished: Path, fresh_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command ends without a word, as when it is killed."""
    monkeypatch.setattr(follow, "_LIVE_EVERY_SECONDS", 0.0)
    started, printed = following(fresh_store)
    assert started.run(lines({"folder": str(unfinished)})) == 0
    found = logged(fresh_store)
    assert found.info.status == "KILLED"
    assert 0 < found.data.metrics["system/system_memory_usage_percentage"] <= 100
    assert "accuracy/top1_global" in found.data.metrics and printed == []


def test_to_measure_the_load_opens_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own monitor opens its default store in the working folder, where no store is named."""
    monkeypatch.chdir(tmp_path)
    started, _ = following()
    started.take({"tracking": {"enabled": True, "uri": None}, "source": None})
    assert 0 < started._load()["system_memory_usage_percentage"] <= 100
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_away_costs_a_warning_and_a_folder_that_is_no_run_an_error(made: Path, tmp_path: Path) -> None:
    """The page is drawn once; what the system refuses is said with its place."""
    # An address of its own: that a store is away is said once in a process, and other tests have stores there.
    started, printed = following("http://127.0.0.1:9/follower")
    page = made / "report.html"
    for _ in range(2):
        assert started.run(lines({"folder": str(made), "finished": True})) == 0
        drawn = page.stat().st_mtime_ns
    assert page.stat().st_mtime_ns == drawn
    [(kind, text)] = printed
    assert kind == "say" and "127.0.0.1:9/follower" in text

    started, printed = following()
    assert started.run(lines({"folder": str(tmp_path / "nowhere"), "finished": True})) == 3
    page.unlink()
    (made / "figures").rename(tmp_path / "figures")
    (made / "figures").write_text("a file where a folder is needed")
    assert started.run(lines({"folder": str(made), "finished": True})) == 4
    assert [kind for kind, _ in printed] == ["error", "error"] and str(made / "figures") in printed[1][1]
    (made / "figures").unlink()
    assert started.run(lines({"folder": str(made), "finished": True})) == 0, "the code is that of the last folder"


def test_a_run_that_cannot_be_marked_keeps_no_other_from_it(unfinished: Path, tmp_path: Path, fresh_store: str) -> None:
    """The description of the first one is damaged."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{}")
    started, printed = following(fresh_store)
    started.run(lines({"folder": str(tmp_path / "damaged")}, {"folder": str(unfinished)}))
    assert [kind for kind, _ in printed] == ["say"]
    assert logged(fresh_store).info.status == "KILLED"


def test_a_comparison_calls_methods_by_their_names_where_nobody_says_otherwise(made: Path, tmp_path: Path) -> None:
    """As the stage *compare* asks, and as a tuned comparison does: the same run in a row of another name."""
    started, printed = following()
    for rows, named in (((), "fedavg"), (("fedavg (tuned)",), "fedavg (tuned)")):
        facts = {"name": "c", "width": 100, "terminal": False} | ({"rows": rows} if rows else {})
        compared = {"kind": "comparison", "config": {}, "runs": [str(made)]}
        started.take({"folder": str(tmp_path / "c"), "compared": compared | facts})
        assert printed[-1][0] == "table" and named in printed[-1][1]
        assert f"| {named} |" in (tmp_path / "c" / "comparison.md").read_text()
