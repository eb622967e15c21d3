"""Run folders into MLflow: against a real SQLite store, with run folders made here."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import DataError
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
    """300 rounds of 11 or 12 values are more than three requests of at most 1000, each of whole rounds."""
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
    assert asked == ["create_run", "log_batch", "log_batch", "log_batch", "log_inputs", "set_terminated"]


@pytest.mark.parametrize("survived", range(6))
def test_a_crash_after_any_request_neither_loses_nor_doubles(
    survived: int,
    tmp_path: Path,
    reader: Any,
    write_run: Write,
    expected_points: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process dies right after the store has taken its ``survived``-th writing request."""
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


def test_other_results_of_the_same_configuration_get_their_own_run(
    tmp_path: Path, reader: Any, write_run: Write, expected_points: Expected
) -> None:
    """The folder was deleted, and training began again on another class of processor: values must not be mixed."""
    assert RunTracker(write_run(tmp_path / "run", 5), uri=reader.uri).sync()
    again = RunTracker(tmp_path / "run", uri=reader.uri)
    for rounds in (2, 5, 6):
        write_run(tmp_path / "run", rounds, shift=0.001)
        assert again.sync()
    assert sorted([reader.of_rounds(run) for run in reader.runs()], key=str) == sorted(
        [expected_points(5), expected_points(6, shift=0.001)], key=str
    )


def test_a_run_that_begins_again_shows_as_running_when_it_has_caught_up(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """Its folder was deleted; interrupted before it has caught up, it would be shown as running for ever."""
    stopped = RunTracker(write_run(tmp_path / "run", 5), uri=reader.uri)
    assert stopped.mark_stopped(failed=False)
    again, seen = RunTracker(tmp_path / "run", uri=reader.uri), []
    for rounds in (2, 6):
        write_run(tmp_path / "run", rounds)
        assert again.sync()
        [run] = reader.runs()
        seen.append(run.info.status)
    assert seen == ["KILLED", "RUNNING"]


def test_a_run_is_there_once_below_the_parent_that_was_logged_last(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """None: logged by itself again, which takes it from nobody."""
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    seen = []
    for parent in (None, "parent-1", "parent-2", None):
        assert RunTracker(run_dir, uri=reader.uri, parent_run_id=parent).sync(final=True)
        [run] = reader.runs()
        seen.append(run.data.tags.get("mlflow.parentRunId"))
    assert seen == [None, "parent-1", "parent-2", "parent-2"]


def test_a_run_that_another_process_is_logging_is_left_to_it(tmp_path: Path, reader: Any, write_run: Write) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    with (run_dir / "config.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert RunTracker(run_dir, uri=reader.uri).sync()
    assert reader.runs() == []
