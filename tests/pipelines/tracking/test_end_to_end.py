"""What MLflow says after a comparison of two methods over two seeds on the digits.

The runs are made by `flcore.run` and logged afterwards, or, slower, by ``protofl compare``: what is logged is the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from pipelines.runs.folder import RunFolder
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.sync import RunTracker

from .conftest import Reader, undocumented

METHODS, SEEDS = ("fedavg", "fedproto"), (0, 1)
SECRET = "s3cr3t-w0rd"
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"num_clients": 4},
    "federation": {"rounds": 3},
    "local": {"epochs": 1},
}
FEW_PARAMETERS = {
    "seed",
    *("data.name", "partition.name", "model.name", "method.name"),
    *("partition.num_clients", "partition.alpha", "federation.rounds", "federation.participation"),
    *("local.epochs", "local.batch_size", "local.optimizer", "local.lr"),
}
"""Of FedAvg; FedProto has the weight of its loss as well."""

Maker = Callable[[Path, str], None]


def by_library(folder: Path, uri: str) -> None:
    """Make the runs in this process, and log them with a table."""
    runs = [folder / "out" / "runs" / f"{method}-s{seed}" for method in METHODS for seed in SEEDS]
    for directory in runs:
        method, _, seed = directory.name.partition("-s")
        run({**SETTINGS, "seed": int(seed), "method": {"name": method}, "tracking": {"uri": uri}}, directory)
    (folder / "out" / "comparison.csv").write_text("method,top1\n")
    (folder / "out" / "comparison.md").write_text("| method |\n|---|\n")
    (folder / "out" / "report.html").write_text("<html/>")
    (folder / "out" / "figures").mkdir()
    (folder / "out" / "figures" / "accuracy.svg").write_text("<svg/>")
    assert log_comparison(folder / "out", [RunFolder(run) for run in runs], uri)
    for directory in runs:
        assert RunTracker(directory, uri=uri).finish(with_model=True)


def by_command(folder: Path, uri: str) -> None:
    """``protofl compare``."""
    from pipelines.cli.app import main

    (folder / "all.yaml").write_text(json.dumps(SETTINGS))
    rows = ["--methods", ",".join(METHODS), "--seeds", ",".join(map(str, SEEDS)), "--set", f"tracking.uri={uri}"]
    assert (
        main(["compare", "--params", str(folder / "all.yaml"), *rows, "--out", str(folder / "out"), "--no-prefect"])
        == 0
    )


@dataclass(frozen=True)
class Compared:
    """A comparison and the store it was logged to.

    Attributes:
        began, ended: milliseconds since 1970 around it. said: on the terminal.
    """

    folder: Path
    reader: Reader
    began: float
    ended: float
    said: str

    @cached_property
    def children(self) -> dict[tuple[str, int], Any]:
        """The compared runs, by method and seed."""
        runs = [run for run in self.reader.runs() if "seed" in run.data.tags]
        return {(run.data.tags["method"], int(run.data.tags["seed"])): run for run in runs}

    @cached_property
    def parent(self) -> Any:
        """The comparison's own run."""
        [found] = [run for run in self.reader.runs() if "seed" not in run.data.tags]
        return found

    def values(self, run: Any, metric: str) -> list[float]:
        """A metric's values in the order of rounds."""
        return [value for _, value in self.reader.points(run).get(metric, [])]

    def folder_of(self, method: str, seed: int) -> Path:
        """Where a run lies."""
        [found] = self.folder.glob(f"out/runs/{method}-s{seed}*")
        return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(by_library, id="library"), pytest.param(by_command, id="command", marks=pytest.mark.slow)],
)
def compared(request: pytest.FixtureRequest, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The comparison, made once for each way to make it; the address of its store holds a password."""
    make: Maker = request.param
    folder = tmp_path_factory.mktemp("compared")
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PROTOFL_CACHE", str(folder / "cache"))
        capture = request.config.pluginmanager.getplugin("capturemanager")
        began = 1000 * time.time()
        make(folder, f"sqlite:///{folder / 'mlflow.db'}?password={SECRET}")
        ended = 1000 * time.time()
        said = "".join(capture.read_global_capture()) if capture.is_globally_capturing() else ""
    return Compared(folder, Reader(f"sqlite:///{folder / 'mlflow.db'}"), began, ended, said)


def test_four_runs_lie_below_one_comparison_and_begin_and_end_when_they_did(compared: Compared) -> None:
    """A run lasts at least the seconds that its rounds took; the comparison ends after its last run."""
    assert set(compared.children) == {(method, seed) for method in METHODS for seed in SEEDS}
    parent = compared.parent.info
    assert (parent.run_name, parent.status) == ("out", "FINISHED")
    for (method, seed), child in compared.children.items():
        assert child.data.tags["mlflow.parentRunId"] == parent.run_id
        start, end = child.info.start_time, child.info.end_time
        timing = json.loads((compared.folder_of(method, seed) / "timing.json").read_text())
        assert compared.began <= start < end <= parent.end_time <= compared.ended
        assert end - start >= 1000 * sum(timing["seconds"].values()) - 3, "three rounds, each rounded to milliseconds"
        history = compared.reader.client.get_metric_history(child.info.run_id, "comm/bytes_up")
        ends = sorted(point.timestamp for point in history)
        assert len(ends) == 3
        assert start < ends[0] < ends[1] < ends[2] == end


def test_each_run_has_the_data_it_was_trained_and_tested_on(compared: Compared) -> None:
    """Both methods of a seed share a partition, the seeds do not; all are tested on the same images."""
    from mlflow.data.dataset_source_registry import get_dataset_source_from_json

    of = {
        key: {entry.tags[0].value: entry.dataset for entry in child.inputs.dataset_inputs}
        for key, child in compared.children.items()
    }
    assert all(set(datasets) == {"training", "test"} for datasets in of.values())
    digests = {key: datasets["training"].digest for key, datasets in of.items()}
    assert digests["fedavg", 0] == digests["fedproto", 0] != digests["fedavg", 1] == digests["fedproto", 1]
    tested = {datasets["test"].digest for datasets in of.values()}
    assert len(tested) == 1 and tested.isdisjoint(digests.values())
    for (method, seed), datasets in of.items():
        metrics = json.loads((compared.folder_of(method, seed) / "metrics.json").read_text())
        assert metrics["partition_fingerprint"].startswith(digests[method, seed])
        assert datasets["training"].name == f"digits/dirichlet s{seed}"
        for context, file in (("training", "manifest.json"), ("test", "meta.json")):
            dataset = datasets[context]
            source = get_dataset_source_from_json(dataset.source, dataset.source_type)
            assert (Path(source.load()) / file).exists(), "it opens"


def test_every_metric_is_one_that_is_documented_and_means_it(compared: Compared) -> None:
    """FedProto has a vote and no global model; bytes count from the start of the run."""
    assert undocumented({name for run in compared.reader.runs() for name in run.data.metrics}) == []
    for (method, seed), child in compared.children.items():
        metrics = json.loads((compared.folder_of(method, seed) / "metrics.json").read_text())
        answers, none = ("top1_vote", "top1_global") if method == "fedproto" else ("top1_global", "top1_vote")
        assert compared.values(child, f"final/{answers}") == [metrics[answers]]
        assert compared.values(child, f"final/{none}") == compared.values(child, f"accuracy/{none}") == []
        sent = compared.values(child, "comm/bytes_up")
        assert sent[0] < sent[1] < sent[2] == metrics["bytes_up"]
        assert compared.values(child, "comm/total_bytes_up") == [metrics["bytes_up"]]


def test_parameters_are_what_people_compare_by(compared: Compared, request: pytest.FixtureRequest) -> None:
    """Runs made without this project's commands do not say which those are: they have all that can change a result."""
    for (method, _), child in compared.children.items():
        named = set(child.data.params)
        expected = FEW_PARAMETERS | ({"method.weight"} if method == "fedproto" else set())
        assert expected <= named
        assert not {name for name in named if name.startswith(("tracking", "compare"))}
        if request.node.callspec.id == "command":
            assert named == expected


def test_every_run_has_a_model_that_of_a_method_without_a_global_one_too(compared: Compared) -> None:
    for (method, _), child in compared.children.items():
        [output] = child.outputs.model_outputs
        place = Path(compared.reader.client.get_logged_model(output.model_id).artifact_location)
        assert (place / "data" / "run" / "server.safetensors").exists()
        assert (place / "data" / "run" / "clients").exists() is (method == "fedproto")


def test_the_password_of_the_store_is_nowhere(compared: Compared) -> None:
    files = [path for path in compared.folder.rglob("*") if path.is_file()]
    assert {"mlflow.db", "config.json", "MLmodel"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in compared.said
    for path in files:
        if path.name == "config.json":
            assert "tracking" not in json.loads(path.read_text())["config"]
