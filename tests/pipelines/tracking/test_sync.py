"""Run folders into MLflow: against a real SQLite store, with run folders made here."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import DataError
from pipelines.tracking import sync
from pipelines.tracking.run_status import mark_silent_here
from pipelines.tracking.sync import RunTracker

BEGAN = 1_700_000_000_000  # as in conftest.py: each round takes a second

Write = Callable[..., Path]
Expected = Callable[..., dict[str, list[tuple[int, float]]]]


def test_a_folder_without_config_is_an_error(tmp_path: Path, uri: str) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        RunTracker(tmp_path, uri=uri).sync()


def test_a_finished_run_reads_back_as_on_disk(
    tmp_path: Path, reader: Any, write_run: Write, expected_points: Expected
) -> None:
    """Five rounds of a second each: 5 × 0.5 s of training and 5 × 0.25 s of evaluation are 3.75 s."""
    run_dir = write_run(tmp_path / "run", 5, finished=True)
    assert RunTracker(run_dir, uri=reader.uri, extra_tags={"study": "alphas"}).sync(final=True)

    [run] = reader.runs()
    assert run.info.run_name == "fedavg-s3-03fedavg"
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", BEGAN, BEGAN + 5000)
    assert run.data.params == {
        "seed": "3",
        "partition.alpha": "0.1",
        "method.name": "fedavg",
    }  # a limit of null is none
    tags = {
        "method": "fedavg",
        "seed": "3",
        "study": "alphas",
        "engine": "local",
        "device": "cpu",
        "lock_hash": "l0ck",
        "partition_hash": f"{3:x>64}",
        "data_hash": "d" * 64,
        "mlflow.source.name": "protofl compare",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "a" * 40,
        "mlflow.source.git.dirty": "true",
    }
    assert tags.items() <= run.data.tags.items()
    assert run.info.user_id == run.data.tags["mlflow.user"] not in ("", "unknown")

    points = reader.points(run)
    assert reader.of_rounds(run) == expected_points(5)
    assert points["time/train-clients"] == [(n, 0.5) for n in range(1, 6)]
    assert {key: values for key, values in points.items() if len(values) == 1} == {
        "final/top1_global": [(5, 0.5)],
        "final/mean_local": [(5, 0.7)],
        "best/top1_global": [(5, 0.9)],
        "best/round": [(5, 2.0)],
        "comm/total_bytes_up": [(5, 535.0)],
        "comm/total_bytes_down": [(5, 1000.0)],
        "time/total": [(5, 3.75)],
        "time/total_train-clients": [(5, 2.5)],
        "time/total_evaluate": [(5, 1.25)],
        "time/steps_per_second": [(5, 321.5)],
    }
    history = reader.client.get_metric_history(run.info.run_id, "accuracy/top1_global")
    assert [point.timestamp for point in history] == [BEGAN + 1000 * n for n in range(1, 6)]

    kept = {"config.json", "history.jsonl", "metrics.json", "timing.json", "report.html", "figures/accuracy.svg"}
    assert reader.artifacts(run) == kept, "no weights, no checkpoint, no inputs.json, which names this machine"
    assert Path(run.info.artifact_uri).is_relative_to(tmp_path / "mlruns" / "artifacts" / "digits" / "dirichlet")


def test_a_finished_run_synced_again_changes_nothing(tmp_path: Path, reader: Any, write_run: Write) -> None:
    run_dir = write_run(tmp_path / "run", 3, finished=True)
    first = RunTracker(run_dir, uri=reader.uri)
    assert first.sync(final=True)
    before = reader.contents()
    assert first.sync(final=True)
    assert RunTracker(run_dir, uri=reader.uri).sync(final=True)
    assert RunTracker(run_dir, uri=reader.uri).sync()
    assert reader.contents() == before


def test_a_growing_run_is_continued_by_other_processes(
    tmp_path: Path, reader: Any, write_run: Write, expected_points: Expected
) -> None:
    run_dir = tmp_path / "run"
    tracker = RunTracker(write_run(run_dir, 0), uri=reader.uri)
    assert tracker.sync()
    for rounds in (1, 4):
        write_run(run_dir, rounds)
        with (run_dir / "checkpoint" / "history.jsonl").open("a") as file:
            file.write('{"round": 99, "top1_gl')
        assert tracker.sync()
        assert RunTracker(run_dir, uri=reader.uri).sync()
    [run] = reader.runs()
    assert run.info.status == "RUNNING"
    assert reader.of_rounds(run) == expected_points(4)

    assert RunTracker(run_dir, uri=reader.uri).mark_stopped(failed=False)
    [run] = reader.runs()
    assert (run.info.status, run.info.end_time) == ("KILLED", BEGAN + 4000)
    assert tracker.mark_stopped(failed=True)
    assert reader.runs()[0].info.status == "FAILED"
    write_run(run_dir, 6)
    assert tracker.sync()
    assert reader.runs()[0].info.status == "RUNNING"
    write_run(run_dir, 8, finished=True)
    assert tracker.sync(final=True)
    [run] = reader.runs()
    assert (run.info.status, run.info.end_time) == ("FINISHED", BEGAN + 8000)
    assert reader.of_rounds(run) == expected_points(8)
    assert run.data.tags["partition_hash"] == f"{3:x>64}", "known only when it has finished"


def test_why_a_run_was_stopped_is_a_tag_until_it_goes_on(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """With no password in it, and no longer than a page shows; a run that has finished says nothing of the kind."""
    run_dir = write_run(tmp_path / "run", rounds=1, finished=False)
    address = "postgresql://me:hidden@host/runs"
    assert RunTracker(run_dir, uri=reader.uri).mark_stopped(failed=True, reason=f"Failed: {address} " + "x" * 2000)
    [stopped] = reader.runs()
    said = stopped.data.tags["protofl.stopped"]
    assert stopped.info.status == "FAILED"
    assert said.startswith("Failed: postgresql://me:***@host/runs xxx") and len(said) == 1000
    write_run(run_dir, rounds=2, finished=True)
    assert RunTracker(run_dir, uri=reader.uri).sync(final=True)
    [finished] = reader.runs()
    assert finished.info.status == "FINISHED" and "protofl.stopped" not in finished.data.tags
    assert RunTracker(run_dir, uri=reader.uri).mark_stopped(failed=True, reason="late")
    [same] = reader.runs()
    assert same.info.status == "FINISHED" and "protofl.stopped" not in same.data.tags


def test_more_rounds_than_one_request_takes(
    tmp_path: Path, reader: Any, write_run: Write, expected_points: Expected
) -> None:
    """300 rounds of 11 or 12 values are more than three requests of at most 1000."""
    assert RunTracker(write_run(tmp_path / "run", 300), uri=reader.uri).sync()
    assert reader.of_rounds(reader.runs()[0]) == expected_points(300)


def test_a_run_costs_few_requests(tmp_path: Path, uri: str, write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, history and summary in one request each, whatever the number of rounds."""
    from mlflow.tracking.client import MlflowClient

    asked: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(MlflowClient, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("create_run", "log_batch", "log_inputs", "log_param", "log_metric", "set_tag", "set_terminated"):
        monkeypatch.setattr(MlflowClient, name, counted(name))
    assert RunTracker(write_run(tmp_path / "run", 50, finished=True), uri=uri).sync(final=True)
    assert asked == ["create_run", "log_batch", "log_batch", "log_inputs", "log_batch", "set_terminated"]


@pytest.mark.parametrize("survived", range(1, 6))
def test_a_crash_after_any_request_neither_loses_nor_doubles(
    survived: int,
    tmp_path: Path,
    reader: Any,
    write_run: Write,
    expected_points: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process dies right after the store has taken its ``survived``-th writing request.

    After the first one its folder does not name the new MLflow run yet; that one stays empty, and is marked later.
    """
    from mlflow.tracking.client import MlflowClient

    class Killed(BaseException):
        """Nothing in the tracker may catch this."""

    calls = iter(range(100))

    def dying(name: str) -> Any:
        original = getattr(MlflowClient, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = original(*args, **kwargs)
            if next(calls) == survived:
                raise Killed
            return answer

        return call

    run_dir = write_run(tmp_path / "run", 4, finished=True)
    with monkeypatch.context() as patch:
        for name in ("create_run", "log_batch", "log_inputs", "set_terminated"):
            patch.setattr(MlflowClient, name, dying(name))
        with pytest.raises(Killed):
            RunTracker(run_dir, uri=reader.uri).sync(final=True)

    assert RunTracker(run_dir, uri=reader.uri).sync(final=True)
    [run] = reader.runs()
    points = reader.points(run)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "3", "partition.alpha": "0.1", "method.name": "fedavg"}
    assert reader.of_rounds(run) == expected_points(4)
    assert points["final/top1_global"] == [(4, 0.4)]
    assert points["time/train-clients"] == [(n, 0.5) for n in range(1, 5)]
    assert len(run.inputs.dataset_inputs) == 2
    assert run.data.tags["data_hash"] == "d" * 64


def test_another_execution_of_a_run_is_another_mlflow_run(
    tmp_path: Path, reader: Any, write_run: Write, expected_points: Expected
) -> None:
    """Trained again an hour later, on another class of processor; a kill and a copy of the folder are no execution."""
    run_dir = tmp_path / "run"
    assert RunTracker(write_run(run_dir, 0), uri=reader.uri).sync()
    assert RunTracker(write_run(run_dir, 5), uri=reader.uri).sync()
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    assert RunTracker(copy, uri=reader.uri).sync()
    again = RunTracker(run_dir, uri=reader.uri)
    for rounds in (2, 6):
        write_run(run_dir, rounds, shift=0.001, began=BEGAN + 3_600_000)
        assert again.sync()
    found = {run.info.run_id: reader.of_rounds(run) for run in reader.runs()}
    assert found.pop(again.run_id) == expected_points(6, shift=0.001)
    assert [*found.values()] == [expected_points(5)]
    known = json.loads((run_dir / ".mlflow.json").read_text())
    assert [entry["run_id"] for entry in known.values()] == [again.run_id]


def test_a_run_that_was_deleted_in_mlflow_is_logged_again(tmp_path: Path, reader: Any, write_run: Write) -> None:
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    for _ in range(2):
        tracker = RunTracker(run_dir, uri=reader.uri)
        assert tracker.sync(final=True)
        [run] = reader.runs()
        assert (run.info.run_id, run.info.status) == (tracker.run_id, "FINISHED")
        reader.client.delete_run(run.info.run_id)


def test_a_run_stays_below_its_first_parent_while_that_is_there(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """None: logged by itself, before and after; the first parent is deleted in the end."""
    client, run_dir = reader.client, write_run(tmp_path / "run", 2, finished=True)
    first, second = (client.create_run("0").info.run_id for _ in range(2))
    seen = []
    for parent in (None, first, second, None, second):
        if len(seen) == 4:
            client.delete_run(first)
        assert RunTracker(run_dir, uri=reader.uri, parent_run_id=parent).sync(final=True)
        [run] = reader.runs()
        seen.append(run.data.tags.get("mlflow.parentRunId"))
    assert seen == [None, first, first, first, second]


def test_a_run_whose_machine_has_died_is_marked_as_stopped_by_the_next_one(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """It was eleven minutes without a sign of life; a run that gives one is left alone, and the dead one may resume."""
    folders = [write_run(tmp_path / str(seed), 1, seed=seed) for seed in range(3)]
    dead, alive = RunTracker(folders[0], uri=reader.uri), RunTracker(folders[1], uri=reader.uri)
    assert dead.sync() and alive.sync()
    last = time.time_ns() // 1_000_000 - 660_000
    reader.client.set_tag(dead.run_id, "protofl.alive", str(last))
    assert RunTracker(folders[2], uri=reader.uri).sync()
    states = {run.info.run_id: run.info for run in reader.runs()}
    assert (states[dead.run_id].status, states[dead.run_id].end_time) == ("KILLED", last)
    assert "no sign of life since" in reader.client.get_run(dead.run_id).data.tags["protofl.stopped"]
    assert states[alive.run_id].status == "RUNNING"
    assert RunTracker(folders[0], uri=reader.uri).sync()
    resumed = reader.client.get_run(dead.run_id)
    assert resumed.info.status == "RUNNING" and "protofl.stopped" not in resumed.data.tags


def test_a_run_whose_processes_were_all_killed_is_marked_by_the_server(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """100 s without a sign of life are more than 90; 80 s are not. What was only slow is set running again."""
    slow, alive = (RunTracker(write_run(tmp_path / str(seed), 1, seed=seed), uri=reader.uri) for seed in range(2))
    now = time.time_ns() // 1_000_000
    for tracker, seconds in ((slow, 100), (alive, 80)):
        assert tracker.sync()
        reader.client.set_tag(tracker.run_id, "protofl.alive", str(now - 1000 * seconds))
    mark_silent_here(reader.client)
    states = {run.info.run_id: run.info.status for run in reader.runs()}
    assert states == {slow.run_id: "KILLED", alive.run_id: "RUNNING"}
    assert slow._target is not None
    slow._target.alive_ms = now - 100_000
    assert slow.sync()
    resumed = reader.client.get_run(slow.run_id)
    assert resumed.info.status == "RUNNING" and "protofl.stopped" not in resumed.data.tags


def test_an_unreadable_file_is_no_outage_of_the_store(
    tmp_path: Path, reader: Any, write_run: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and the store takes the next run at once; so it does the same run when the file is there."""
    first, second = (write_run(tmp_path / str(seed), 2, finished=True, seed=seed) for seed in range(2))
    gone = first / "figures" / "gone.svg"
    with monkeypatch.context() as patch:
        patch.setattr(sync, "small_files", lambda folder: [gone] if folder == first else [])
        with pytest.raises(FileNotFoundError) as raised:
            RunTracker(first, uri=reader.uri).sync(final=True)
        assert raised.value.filename == str(gone)
        assert RunTracker(second, uri=reader.uri).sync(final=True)
    assert RunTracker(first, uri=reader.uri).sync(final=True)
    assert {run.info.status for run in reader.runs()} == {"FINISHED"}
    assert not caplog.records


def test_a_run_that_another_process_is_logging_is_left_to_it(tmp_path: Path, reader: Any, write_run: Write) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    with (run_dir / "config.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert RunTracker(run_dir, uri=reader.uri).sync()
    assert reader.runs() == []
