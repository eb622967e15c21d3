"""Models in MLflow: they answer as the run did, here and where this project is not installed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flcore import run
from flcore.core.errors import DataError
from flcore.data.dataset import Dataset
from pipelines.tracking.best import CHAMPION, best, promote_run
from pipelines.tracking.serving import Predictor
from pipelines.tracking.sync import RunTracker

PROJECT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 0.3},
    "federation": {"rounds": 1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs: of one model for all, of one per client that vote, and of one per client with a shared part."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedproto", "fedper"):
        run({**SETTINGS, "method": {"name": method}}, folder / method)
    return {method: folder / method for method in ("fedavg", "fedproto", "fedper")}


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    """MLflow puts the model's code in front of everything."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def model_of(run_dir: Path, reader: Any, *, register: bool = False) -> str:
    """The address of a run's model, which is logged."""
    tracker = RunTracker(run_dir, uri=reader.uri)
    assert tracker.finish(with_model=True, register=register)
    assert tracker.model_uri is not None
    return tracker.model_uri


def logged(run_dir: Path, reader: Any) -> tuple[Path, Any]:
    """Where the model lies, and the model as MLflow loads it."""
    import mlflow

    uri = model_of(run_dir, reader)
    place = Path(reader.client.get_logged_model(uri.removeprefix("models:/")).artifact_location)
    return place, mlflow.pyfunc.load_model(str(place))


def scored(run_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the test set."""
    test = Dataset.load(run_dir / "prepared").test
    return np.asarray(test.images.numpy()), np.asarray(test.labels.numpy())


def test_probabilities_give_the_loss_of_the_run(tmp_path: Path) -> None:
    """Of members whose probabilities are averaged: -mean ln p of the right class is `loss_global`."""
    folder = tmp_path / "run"
    run({**SETTINGS, "method": {"name": "fedensemble", "combine": "probs"}}, folder)
    config, meta = (json.loads(folder.joinpath(name).read_text()) for name in ("config.json", "prepared/meta.json"))
    predict = Predictor(config["config"], meta, folder / "partition", folder / "server.safetensors", None)
    images, labels = scored(folder)
    loss = -np.log(predict(images)[np.arange(len(labels)), labels]).mean()
    assert loss == pytest.approx(json.loads((folder / "metrics.json").read_text())["loss_global"], rel=1e-5)


@pytest.mark.parametrize(("method", "figure"), [("fedavg", "top1_global"), ("fedproto", "top1_vote")])
def test_a_model_answers_as_its_run_did(method: str, figure: str, made: dict[str, Path], reader: Any) -> None:
    """On the whole test set it is right as often as `metrics.json` says."""
    place, model = logged(made[method], reader)
    images, labels = scored(made[method])
    answer = model.predict(images)
    metrics = json.loads((made[method] / "metrics.json").read_text())
    assert (answer.argmax(axis=1) == labels).mean() == pytest.approx(metrics[figure])
    np.testing.assert_allclose(answer.sum(axis=1), 1.0, atol=1e-5)

    [images_in] = model.metadata.signature.inputs.inputs
    assert (images_in.type, images_in.shape) == (np.dtype("uint8"), (-1, 1, 8, 8))
    [out] = model.metadata.signature.outputs.inputs
    assert (out.type, out.shape) == (np.dtype("float32"), (-1, 10)) == (answer.dtype, (-1, answer.shape[1]))
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert {"MLmodel", "code/protofl.zip", "data/run/server.safetensors", "input_example.json"} <= names
    names = {name for name in names if "__pycache__" not in name}  # which Python writes when it loads the code
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".pyc"))]


def test_each_client_answers_with_its_own_model(made: dict[str, Path], reader: Any) -> None:
    """FedPer: the clients' heads differ, what they share does not; only three clients are there."""
    _, model = logged(made["fedper"], reader)
    images, _ = scored(made["fedper"])
    images = images[:5]
    answers = [model.predict(images, params={"client": client}) for client in range(3)]
    assert not np.allclose(answers[0], answers[1])
    assert not np.allclose(answers[1], answers[2])
    with pytest.raises(DataError, match="clients 0 to 2"):
        model.predict(images, params={"client": 3})


def test_a_model_is_logged_once_and_registered_once(made: dict[str, Path], reader: Any) -> None:
    assert RunTracker(made["fedavg"], uri=reader.uri).sync(final=True)
    uri = model_of(made["fedavg"], reader, register=True)
    assert model_of(made["fedavg"], reader, register=True) == uri
    [version] = reader.client.search_model_versions("name = 'digits-dirichlet'")
    assert version.tags == {"method": "fedavg", "seed": "0"}
    assert version.aliases == [], "nobody is champion who was not made it"
    [found] = reader.runs()
    assert (found.info.status, found.info.run_id) == ("FINISHED", version.run_id)
    assert [output.model_id for output in found.outputs.model_outputs] == [uri.removeprefix("models:/")]


def test_scores_are_linked_to_the_model_and_its_data(made: dict[str, Path], reader: Any) -> None:
    """So MLflow ranks models by them."""
    score = json.loads((made["fedper"] / "metrics.json").read_text())["mean_local"]
    model = reader.client.get_logged_model(model_of(made["fedper"], reader).removeprefix("models:/"))
    linked = {metric.key: metric for metric in model.metrics}
    assert {name.partition("/")[0] for name in linked} == {"final"}
    scored = linked["final/mean_local"]
    [test] = [
        entry.dataset
        for entry in reader.client.get_run(scored.run_id).inputs.dataset_inputs
        if entry.tags[0].value == "test"
    ]
    assert (scored.value, scored.dataset_name, scored.dataset_digest) == (score, test.name, test.digest)


def test_the_best_run_is_champion_only_when_it_is_promoted(made: dict[str, Path], reader: Any) -> None:
    """Of FedAvg and FedPer, which has no global model, only FedAvg has one to be best in."""
    for method in ("fedper", "fedavg"):
        model_of(made[method], reader)
    assert best(reader.uri, "mean_local").model is None
    assert reader.client.search_registered_models() == []

    scores = {method: json.loads((made[method] / "metrics.json").read_text()) for method in ("fedavg", "fedper")}
    assert scores["fedper"]["bytes_up"] < scores["fedavg"]["bytes_up"], "its clients keep their heads"
    for metric, method, number in (
        ("top1_global", "fedavg", 1),
        ("bytes_up", "fedper", 2),
        ("top1_global", "fedavg", 1),
    ):
        found = best(reader.uri, metric, promote=True)
        assert found.model == f"models:/digits-dirichlet/{number}"
        version = reader.client.get_model_version_by_alias("digits-dirichlet", CHAMPION)
        assert (version.version, version.tags["method"]) == (number, method)
        assert version.description == f"champion: {found.words}"
    assert len(reader.client.search_model_versions("name = 'digits-dirichlet'")) == 2

    assert promote_run(made["fedper"], reader.uri, "mean_local = 0.9, at least 0.8") == "models:/digits-dirichlet/2"
    champion = reader.client.get_model_version_by_alias("digits-dirichlet", CHAMPION)
    assert champion.description.splitlines()[0] == "champion: mean_local = 0.9, at least 0.8"

    reader.client.update_model_version("digits-dirichlet", "1", "champion: long ago\nsigned off by QA")
    best(reader.uri, "top1_global", promote=True)
    kept = reader.client.get_model_version("digits-dirichlet", "1").description.splitlines()
    assert [len(kept), kept[-1]] == [2, "signed off by QA"]


@pytest.mark.slow
def test_a_logged_model_is_complete_without_this_project(made: dict[str, Path], reader: Any, tmp_path: Path) -> None:
    """Loaded in another process from another directory, where no `flcore` is to be found but the stored one."""
    place, model = logged(made["fedproto"], reader)
    expected = model.predict(np.full((1, 1, 8, 8), 51, dtype=np.uint8))[0]
    script = f"""
import sys
sys.path = [entry for entry in sys.path if entry != {str(PROJECT)!r}]
sys.meta_path = [finder for finder in sys.meta_path if "protofl" not in str(finder)]
import mlflow, numpy
images = numpy.full((1, 1, 8, 8), 51, dtype=numpy.uint8)
print(mlflow.pyfunc.load_model({str(place)!r}).predict(images)[0].tolist())
import flcore
assert flcore.__file__.startswith({str(place)!r}), flcore.__file__
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-6)


def test_a_run_whose_data_are_gone_is_logged_without_a_model(
    made: dict[str, Path], reader: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = shutil.copytree(made["fedavg"], tmp_path / "moved")
    shutil.rmtree(run_dir / "prepared")
    tracker = RunTracker(run_dir, uri=reader.uri)
    assert tracker.finish(with_model=True) and tracker.model_uri is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "without its model" in caplog.text
    (run_dir / "metrics.json").unlink()
    with pytest.raises(DataError, match="has not finished"):
        tracker.finish()
