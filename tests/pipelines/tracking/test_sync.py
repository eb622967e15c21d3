"""Run directories into MLflow: against a real SQLite store, with run directories made here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from flcore.config import Config
from flcore.errors import DataError
from flcore.models import build_model, extract_weights
from flcore.records import save_record
from pipelines.tracking import sync as tracking
from pipelines.tracking.sync import (
    RunTracker,
    find_dataset,
    flatten,
    read_history,
    resolve_uri,
    round_metrics,
    ui_command,
)

tracking.set_mlflow_environment()

CONFIG = {
    "seed": 3,
    "data": {"name": "digits", "limit_per_class": None},
    "partition": {"name": "dirichlet", "alpha": 0.1, "num_clients": 10},
    "model": {"name": "fedgen_cnn", "channels": [8, 16]},
    "method": {"name": "fedavg"},
    "engine": {"name": "local", "workers": 2},
}
PROJECT = Path(__file__).resolve().parents[3]
DATASET = {"name": "digits", "shape": [1, 28, 28], "num_classes": 10, "fingerprint": "d" * 64}
HASH = "0123456789abcdef" * 4
ENVIRONMENT = {
    "torch": "2.15.0",
    "device": "cpu",
    "cpu_capability": "AVX2",
    "lock_hash": "l0ck",
    "code_version": "a" * 40,
}


def record_of(round_number: int, shift: float = 0.0) -> dict[str, Any]:
    """A history record whose values are awkward on purpose: 0.1 has no exact binary form, some are null."""
    return {
        "round": round_number,
        "top1_global": 0.1 * round_number + shift,
        "loss_global": 2.3 / round_number,
        "mean_local": None if round_number % 2 else 0.7,
        "pooled_local": None,
        "client_std": 0.01,
        "train_loss": {"cross_entropy": 1.0 / (round_number + shift)},
        "bytes_up": {"weights": 100 * round_number, "prototypes": 7 * round_number},
        "bytes_down": {"weights": 200 * round_number},
        "a_key_of_the_future": [1, 2],
    }


def write_run(run_dir: Path, rounds: int, *, finished: bool = False, shift: float = 0.0) -> Path:
    """A run directory after ``rounds`` rounds, as training leaves it."""
    (run_dir / "checkpoint").mkdir(parents=True, exist_ok=True)
    header = {"config": CONFIG, "config_hash": HASH, "environment": ENVIRONMENT}
    (run_dir / "config.json").write_text(json.dumps(header))
    history = "".join(json.dumps(record_of(n, shift)) + "\n" for n in range(1, rounds + 1))
    (run_dir / "checkpoint" / "history.jsonl").write_text(history)
    (run_dir / "checkpoint" / "state.safetensors").write_bytes(b"not an artifact")
    if finished:
        (run_dir / "history.jsonl").write_text(history)
        metrics = {
            "method": "fedavg",
            "rounds": rounds,
            "top1_global": 0.1 * rounds + shift,
            "mean_local": 0.7,
            "pooled_local": None,
            "best_top1_global": 0.9,
            "best_round": 2,
            "bytes_up": 107 * rounds,
            "bytes_down": 200 * rounds,
            "partition_fingerprint": "partition-f1ngerprint",
            "data_fingerprint": "d" * 64,
        }
        (run_dir / "metrics.json").write_text(json.dumps(metrics))
        seconds = [{"round": n, "seconds": {"train": 0.5, "evaluate": 0.25}} for n in range(1, rounds + 1)]
        timing = {"seconds": {"train": 0.5 * rounds, "prepare": 1.5}, "rounds": seconds, "steps_per_second": 321.5}
        (run_dir / "timing.json").write_text(json.dumps(timing))
        (run_dir / "figures").mkdir(exist_ok=True)
        (run_dir / "figures" / "accuracy.svg").write_text("<svg/>")
        (run_dir / "report.html").write_text("<html/>")
        save_file({"head": np.arange(10, dtype=np.float32)}, run_dir / "model.safetensors")
        (run_dir / "clients").mkdir(exist_ok=True)
        save_file({"head": np.zeros(1, np.float32)}, run_dir / "clients" / "0000.safetensors")
    return run_dir


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making its tables takes seconds, copying the file none."""
    from mlflow.tracking.client import MlflowClient

    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works in an empty directory, in which nothing may be left: MLflow likes to make a store where it stands."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    assert list((tmp_path / "here").iterdir()) == []


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    """A fresh SQLite store."""
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(empty_store.read_bytes())
    return f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"


def client_of(uri: str) -> Any:
    """MLflow's own client, the independent reader of these tests."""
    from mlflow.tracking.client import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def runs_of(uri: str) -> list[Any]:
    """All runs of the experiment that CONFIG belongs to, the oldest first."""
    client = client_of(uri)
    experiment = client.get_experiment_by_name("digits/dirichlet")
    if experiment is None:
        return []
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def points_of(uri: str, run: Any) -> dict[str, list[tuple[int, float]]]:
    """Every metric of a run as (step, value) pairs, in the order of steps; duplicates would show."""
    client = client_of(uri)
    return {
        key: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, key))
        for key in run.data.metrics
    }


def contents_of(uri: str) -> list[Any]:
    """Everything in the store that a sync could change."""
    return [(r.info, r.data.tags, r.data.params, points_of(uri, r), r.inputs.to_dictionary()) for r in runs_of(uri)]


def per_round(points: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """The metrics that come from the history."""
    groups = ("accuracy/", "loss/", "comm/bytes_")
    return {key: values for key, values in points.items() if key.startswith(groups)}


def expected_points(rounds: int, shift: float = 0.0) -> dict[str, list[tuple[int, float]]]:
    """What the history on disk says, in the form of :func:`points_of`."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for number in range(1, rounds + 1):
        for key, value in round_metrics(record_of(number, shift)).items():
            expected.setdefault(key, []).append((number, value))
    return expected


def test_a_record_becomes_metrics_with_the_contract_names() -> None:
    """bytes_up of round 2: 200 of weights + 14 of prototypes = 214 in all; pooled_local is null and left out."""
    assert round_metrics(record_of(2)) == {
        "accuracy/top1_global": 0.2,
        "accuracy/mean_local": 0.7,
        "accuracy/client_std": 0.01,
        "loss/global": 1.15,
        "loss/train_cross_entropy": 0.5,
        "comm/bytes_up": 214.0,
        "comm/bytes_up_weights": 200.0,
        "comm/bytes_up_prototypes": 14.0,
        "comm/bytes_down": 400.0,
        "comm/bytes_down_weights": 400.0,
    }


def test_flatten_keeps_every_key_once() -> None:
    flat = flatten(CONFIG)
    assert flat["seed"] == "3"
    assert flat["data.limit_per_class"] == "null"
    assert flat["model.channels"] == "[8, 16]"
    assert flat["partition.alpha"] == "0.1"
    assert len(flat) == 11


def test_an_incomplete_last_line_is_left_out_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": 2, "name": "\xc3')
    assert [record["round"] for record in read_history(path)] == [1]
    path.write_bytes(b'{"round": 1\n{"round": 2}\n')
    with pytest.raises(DataError, match="line 1"):
        read_history(path)


def test_uri_explicit_over_environment_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(None) == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert ui_command(None) == "mlflow ui --workers 1 --backend-store-uri sqlite:///mlruns/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:5000")
    assert resolve_uri(None) == "http://user:secret@127.0.0.1:5000"
    assert ui_command(None) == "http://***@127.0.0.1:5000"
    assert resolve_uri("sqlite:///other.db") == f"sqlite:///{tmp_path}/other.db"


def test_a_directory_without_config_is_an_error(tmp_path: Path, uri: str) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        RunTracker(tmp_path, uri=uri).sync()


def test_a_finished_run_reads_back_as_on_disk(tmp_path: Path, uri: str) -> None:
    run_dir = write_run(tmp_path / "run", 5, finished=True)
    assert RunTracker(run_dir, uri=uri, extra_tags={"study": "alphas"}).sync(final=True)

    [run] = runs_of(uri)
    assert run.info.run_name == "fedavg-s3-01234567"
    assert run.info.status == "FINISHED"
    assert run.data.params == flatten(CONFIG)
    tags = {
        "method": "fedavg",
        "seed": "3",
        "study": "alphas",
        "engine": "local",
        "device": "cpu",
        "lock_hash": "l0ck",
        "code_version": "a" * 40,
        "mlflow.source.git.commit": "a" * 40,
        "partition_hash": "partition-f1ngerprint",
        "data_hash": "d" * 64,
        "protofl.config_hash": HASH,
    }
    assert tags.items() <= run.data.tags.items()

    points = points_of(uri, run)
    assert per_round(points) == expected_points(5)
    assert points["time/train"] == [(n, 0.5) for n in range(1, 6)]
    assert {key: values for key, values in points.items() if len(values) == 1} == {
        "final/top1_global": [(5, 0.5)],
        "final/mean_local": [(5, 0.7)],
        "best/top1_global": [(5, 0.9)],
        "best/round": [(5, 2.0)],
        "comm/total_bytes_up": [(5, 535.0)],
        "comm/total_bytes_down": [(5, 1000.0)],
        "time/total_train": [(5, 2.5)],
        "time/total_prepare": [(5, 1.5)],
        "time/steps_per_second": [(5, 321.5)],
    }
    [dataset_input] = run.inputs.dataset_inputs
    assert (dataset_input.dataset.name, dataset_input.dataset.digest) == ("digits", "d" * 36)

    stored = Path(run.info.artifact_uri)
    assert stored.is_relative_to(tmp_path / "mlruns" / "artifacts" / "digits" / "dirichlet")
    assert {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()} == {
        "config.json",
        "history.jsonl",
        "metrics.json",
        "timing.json",
        "report.html",
        "figures/accuracy.svg",
    }


def test_a_finished_run_synced_again_changes_nothing(tmp_path: Path, uri: str) -> None:
    run_dir = write_run(tmp_path / "run", 3, finished=True)
    first = RunTracker(run_dir, uri=uri)
    assert first.sync(final=True)
    before = contents_of(uri)
    assert first.sync(final=True)
    assert RunTracker(run_dir, uri=uri).sync(final=True)
    assert RunTracker(run_dir, uri=uri).sync()
    assert [str(content) for content in contents_of(uri)] == [str(content) for content in before]


def test_a_growing_run_is_continued_by_other_processes(tmp_path: Path, uri: str) -> None:
    run_dir = tmp_path / "run"
    tracker = RunTracker(write_run(run_dir, 0), uri=uri)
    assert tracker.sync()
    for rounds in (1, 4):
        write_run(run_dir, rounds)
        with (run_dir / "checkpoint" / "history.jsonl").open("a") as file:
            file.write('{"round": 99, "top1_gl')
        assert tracker.sync()
        assert RunTracker(run_dir, uri=uri).sync()
    [run] = runs_of(uri)
    assert run.info.status == "RUNNING"
    assert per_round(points_of(uri, run)) == expected_points(4)

    assert RunTracker(run_dir, uri=uri).mark_stopped(failed=False)
    assert runs_of(uri)[0].info.status == "KILLED"
    assert RunTracker(write_run(run_dir, 6), uri=uri).sync()
    assert runs_of(uri)[0].info.status == "RUNNING"
    assert RunTracker(write_run(run_dir, 8, finished=True), uri=uri).sync(final=True)
    [run] = runs_of(uri)
    assert run.info.status == "FINISHED"
    assert per_round(points_of(uri, run)) == expected_points(8)


def test_more_rounds_than_one_request_takes(tmp_path: Path, uri: str) -> None:
    """300 rounds of 9 or 10 metrics are 2850 metrics: three requests of at most 1000, each of whole rounds."""
    assert RunTracker(write_run(tmp_path / "run", 300), uri=uri).sync()
    assert per_round(points_of(uri, runs_of(uri)[0])) == expected_points(300)


@pytest.mark.parametrize("survived", range(6))
def test_a_crash_after_any_request_neither_loses_nor_doubles(
    survived: int, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
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
            RunTracker(run_dir, uri=uri).sync(final=True)

    assert RunTracker(run_dir, uri=uri).sync(final=True)
    [run] = runs_of(uri)
    points = points_of(uri, run)
    assert run.info.status == "FINISHED"
    assert run.data.params == flatten(CONFIG)
    assert per_round(points) == expected_points(4)
    assert points["final/top1_global"] == [(4, 0.4)]
    assert points["time/train"] == [(n, 0.5) for n in range(1, 5)]
    assert len(run.inputs.dataset_inputs) == 1


def test_other_results_of_the_same_configuration_get_their_own_run(tmp_path: Path, uri: str) -> None:
    """The code changed, the run directory was deleted, training began again: values must not be mixed."""
    assert RunTracker(write_run(tmp_path / "run", 5), uri=uri).sync()
    (tmp_path / "run" / "checkpoint" / "history.jsonl").unlink()
    again = RunTracker(tmp_path / "run", uri=uri)
    for rounds in (2, 5, 6):
        write_run(tmp_path / "run", rounds, shift=0.001)
        assert again.sync()
    old, new = runs_of(uri)
    assert per_round(points_of(uri, old)) == expected_points(5)
    assert per_round(points_of(uri, new)) == expected_points(6, shift=0.001)


def test_parents_keep_their_children_apart(tmp_path: Path, uri: str) -> None:
    run_dir = write_run(tmp_path / "run", 2, finished=True)
    for parent in (None, "parent-1", "parent-2", "parent-1", None):
        assert RunTracker(run_dir, uri=uri, parent_run_id=parent).sync(final=True)
    assert [run.data.tags.get("mlflow.parentRunId") for run in runs_of(uri)] == [None, "parent-1", "parent-2"]


def test_a_short_run_pays_for_one_sync(tmp_path: Path, uri: str) -> None:
    tracker = RunTracker(write_run(tmp_path / "run", 2), uri=uri)
    assert tracker.maybe_sync(now=100.0)
    assert tracker.maybe_sync(now=114.9)
    assert runs_of(uri) == []
    assert tracker.maybe_sync(now=115.0)
    assert len(runs_of(uri)) == 1
    write_run(tmp_path / "run", 3)
    assert tracker.maybe_sync(now=129.0)
    assert runs_of(uri)[0].data.metrics["comm/bytes_up"] == 214.0


def test_a_run_that_another_process_is_logging_is_left_to_it(tmp_path: Path, uri: str) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    with (run_dir / "config.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert RunTracker(run_dir, uri=uri).sync()
    assert runs_of(uri) == []


def closed_port() -> int:
    """A loopback port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unreachable_server_costs_one_warning_and_little_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, uri: str
) -> None:
    now = [0.0]
    run_dir = write_run(tmp_path / "run", 2)
    tracker = RunTracker(run_dir, uri=f"http://127.0.0.1:{closed_port()}", clock=lambda: now[0])
    began = time.perf_counter()
    with caplog.at_level(logging.DEBUG, logger="pipelines.tracking.sync"):
        assert not tracker.sync()
        assert time.perf_counter() - began < 8
        pause = time.perf_counter()
        for now[0] in (1.0, 59.0):
            assert not tracker.sync()
        assert time.perf_counter() - pause < 0.1, "it tried again before the pause was over"
        now[0] = 61.0
        assert not tracker.sync()
        now[0] = 61.0 + 119.0
        pause = time.perf_counter()
        assert not tracker.sync()
        assert time.perf_counter() - pause < 0.1, "the second pause is twice the first"
    [message] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in message
    assert f"protofl track {run_dir}" in message
    assert RunTracker(run_dir, uri=uri).sync()
    assert len(runs_of(uri)) == 1


def test_a_locked_database_is_given_up_soon_and_taken_up_later(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_LOCK_PATIENCE_SECONDS", 0.2)
    tracker = RunTracker(write_run(tmp_path / "run", 2), uri=uri, clock=lambda: 0.0)
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.perf_counter()
        assert not tracker.sync()
        assert time.perf_counter() - began < 2
    assert "locked" in caplog.text
    write_run(tmp_path / "run", 3, finished=True)
    assert tracker.sync(final=True), "a final sync does not wait for the pause to end"
    assert per_round(points_of(uri, runs_of(uri)[0])) == expected_points(3)


@pytest.mark.parametrize("broken", ["nonsense://nowhere", "sqlite:///{dir}/file/mlflow.db", "sqlite:///{dir}"])
def test_a_store_that_cannot_be_opened_does_not_stop_training(tmp_path: Path, broken: str) -> None:
    (tmp_path / "file").write_text("a file where a directory is needed")
    began = time.perf_counter()
    assert not RunTracker(write_run(tmp_path / "run", 1), uri=broken.format(dir=tmp_path)).sync()
    assert time.perf_counter() - began < 5


def test_a_deleted_experiment_is_said(tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    assert RunTracker(run_dir, uri=uri).sync()
    client = client_of(uri)
    client.delete_experiment(client.get_experiment_by_name("digits/dirichlet").experiment_id)
    assert not RunTracker(run_dir, uri=uri).sync()
    assert "mlflow experiments restore" in caplog.text


def write_model_run(run_dir: Path) -> Path:
    """A finished run whose global model is a real one with its initial weights."""
    config = Config()
    described = DATASET | {"mean": [0.3], "std": [0.2]}
    weights = extract_weights(build_model(config.model_spec, (1, 28, 28), 10, seed=4))
    write_run(run_dir, 2, finished=True)
    header = {"config": config.to_mapping(), "config_hash": HASH, "environment": ENVIRONMENT}
    (run_dir / "config.json").write_text(json.dumps(header))
    (run_dir / "prepared").mkdir()
    (run_dir / "prepared" / "meta.json").write_text(json.dumps(described))
    save_torch_file({**weights.params, **weights.buffers}, run_dir / "model.safetensors")
    save_record(run_dir / "server.safetensors", {"model": weights})
    return run_dir


def expected_probabilities(images: np.ndarray) -> np.ndarray:
    """What the model of :func:`write_model_run` says: softmax of the logits of (pixel / 255 - mean) / std."""
    module = build_model(Config().model_spec, (1, 28, 28), 10, seed=4).eval()
    with torch.no_grad():
        logits = module((torch.from_numpy(images).float() / 255 - 0.3) / 0.2)[1]
    return np.asarray(logits.softmax(dim=1))


def test_the_logged_model_predicts_has_a_signature_and_no_pickle(tmp_path: Path, uri: str) -> None:
    import mlflow

    run_dir = write_model_run(tmp_path / "run")
    tracker = RunTracker(run_dir, uri=uri)
    assert tracker.sync(final=True)
    model_uri = tracker.log_model(register=True)
    assert model_uri is not None
    assert RunTracker(run_dir, uri=uri).log_model(register=True) == model_uri

    client = client_of(uri)
    [version] = client.search_model_versions("name = 'digits-dirichlet'")
    assert version.run_id == tracker.run_id
    [run] = runs_of(uri)
    assert run.info.status == "FINISHED"
    assert [output.model_id for output in run.outputs.model_outputs] == [model_uri.removeprefix("models:/")]

    files = Path(client.get_logged_model(model_uri.removeprefix("models:/")).artifact_location)
    names = {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()}
    assert {"MLmodel", "serving.py", "artifacts/model.safetensors", "artifacts/config.json"} <= names
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".pyc"))]

    images = np.random.default_rng(0).integers(0, 256, size=(3, 1, 28, 28), dtype=np.uint8)
    path_before = list(sys.path)
    try:
        model = mlflow.pyfunc.load_model(str(files))
    finally:
        sys.path[:] = path_before  # MLflow puts the model's code in front
    [image_spec] = model.metadata.signature.inputs.inputs
    assert (image_spec.type, image_spec.shape) == (np.dtype("uint8"), (-1, 1, 28, 28))
    answer = model.predict(images)
    np.testing.assert_allclose(answer, expected_probabilities(images), atol=1e-6)
    unwrapped = model.unwrap_python_model()
    np.testing.assert_allclose(unwrapped.predict(None, images.astype(np.float32) / 255), answer, atol=1e-6)


def test_a_logged_model_is_complete_without_this_project(tmp_path: Path, uri: str) -> None:
    """Loaded in another process from another directory, where no ``flcore`` is to be found but the stored one."""
    tracker = RunTracker(write_model_run(tmp_path / "run"), uri=uri)
    model_uri = tracker.log_model()
    assert model_uri is not None
    files = client_of(uri).get_logged_model(model_uri.removeprefix("models:/")).artifact_location
    script = f"""
import sys
sys.path = [entry for entry in sys.path if entry != {str(PROJECT)!r}]
sys.meta_path = [finder for finder in sys.meta_path if "protofl" not in str(finder)]
import mlflow, numpy
images = numpy.full((1, 1, 28, 28), 51, dtype=numpy.uint8)
print(mlflow.pyfunc.load_model({files!r}).predict(images)[0].tolist())
import flcore
assert flcore.__file__.startswith({files!r}), flcore.__file__
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    expected = expected_probabilities(np.full((1, 1, 28, 28), 51, dtype=np.uint8))[0]
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-6)


def test_the_data_of_a_run_are_found_above_it_by_their_fingerprint(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "artifacts" / "runs" / "fedavg-s3", 1, finished=True)
    for folder, fingerprint in ((tmp_path / "artifacts" / "prepared", "d" * 64), (run_dir / "prepared", "e" * 64)):
        folder.mkdir()
        (folder / "meta.json").write_text(json.dumps(DATASET | {"fingerprint": fingerprint}))
    assert find_dataset(run_dir) == tmp_path / "artifacts" / "prepared" / "meta.json"
    (tmp_path / "artifacts" / "prepared" / "meta.json").unlink()
    with pytest.raises(DataError, match="prepared data are not there"):
        find_dataset(run_dir)


def test_a_run_without_a_global_model_has_nothing_to_log(tmp_path: Path, uri: str) -> None:
    """Methods of personal models leave a file without tensors."""
    run_dir = write_model_run(tmp_path / "run")
    save_torch_file({}, run_dir / "model.safetensors")
    with pytest.raises(DataError, match="no global model"):
        RunTracker(run_dir, uri=uri).log_model()


@pytest.fixture
def server(tmp_path: Path, uri: str) -> Iterator[str]:
    """A real MLflow server on loopback, with the same SQLite store behind it."""
    port = closed_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", uri, "--artifacts-destination", str(tmp_path / "served")]
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the MLflow server did not start:\n{(tmp_path / 'server.log').read_text()}")
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


@pytest.mark.services
def test_a_real_server_takes_the_same(tmp_path: Path, uri: str, server: str) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    assert RunTracker(run_dir, uri=server).sync()
    write_run(run_dir, 5, finished=True)
    assert RunTracker(run_dir, uri=server).sync(final=True)
    assert RunTracker(run_dir, uri=server).sync(final=True)
    [run] = runs_of(server)
    assert run.info.status == "FINISHED"
    assert per_round(points_of(server, run)) == expected_points(5)
    figures = client_of(server).list_artifacts(run.info.run_id, "figures")
    assert [figure.path for figure in figures] == ["figures/accuracy.svg"]

    model_uri = RunTracker(write_model_run(tmp_path / "model"), uri=server).log_model(register=True)
    assert model_uri is not None
    assert len(client_of(server).search_model_versions("name = 'digits-dirichlet'")) == 1


@pytest.mark.services
def test_a_server_shows_what_was_logged_without_one(tmp_path: Path, uri: str, server: str) -> None:
    """`mlflow ui` over the default SQLite file finds the figures that were stored beside it."""
    assert RunTracker(write_run(tmp_path / "run", 2, finished=True), uri=uri).sync(final=True)
    [run] = runs_of(server)
    address = f"{server}/get-artifact?path=figures/accuracy.svg&run_uuid={run.info.run_id}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.read() == b"<svg/>"
