"""What `mlflow.db` says after a comparison of two methods over two seeds on the digits, read with SQLite alone.

The runs are made by `flcore.run` and logged afterwards, or, slower, by ``protofl compare``: what is logged is the same.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.metrics import meaning
from pipelines.tracking.sync import RunTracker

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
    assert log_comparison(folder / "out", runs, uri)
    for directory in runs:
        assert RunTracker(directory, uri=uri).finish(with_model=True)


def by_command(folder: Path, uri: str) -> None:
    """``protofl compare``, without its command line."""
    from pipelines.orchestration.commands import compare

    compare({**SETTINGS, "tracking": {"uri": uri}}, METHODS, SEEDS, folder / "out", prefect=False)


@dataclass(frozen=True)
class Compared:
    """A comparison and the database it was logged to.

    Attributes:
        began, ended: milliseconds since 1970 around it. said: on the terminal.
    """

    folder: Path
    database: sqlite3.Connection
    began: float
    ended: float
    said: str

    def runs(self) -> dict[str, dict[str, Any]]:
        """Every run's row, by its id."""
        self.database.row_factory = sqlite3.Row
        return {row["run_uuid"]: dict(row) for row in self.database.execute("select * from runs")}

    def told(self, table: str) -> dict[str, dict[str, str]]:
        """Tags or parameters of every run, by its id."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for run_id, key, value in self.database.execute(f"select run_uuid, key, value from {table}"):
            found[run_id][key] = value
        return found

    def datasets(self, run_id: str) -> dict[str, dict[str, Any]]:
        """The data sets of a run, by what it used them for."""
        rows = self.database.execute(
            "select t.value as context, d.* from inputs i join datasets d on i.source_id = d.dataset_uuid"
            " join input_tags t on t.input_uuid = i.input_uuid where i.destination_id = ? and t.name = ?",
            (run_id, "mlflow.data.context"),
        )
        return {row["context"]: dict(row) for row in rows}

    def metrics(self, run_id: str, key: str) -> list[float]:
        """A metric's values in the order of rounds."""
        asked = "select value from metrics where run_uuid = ? and key = ? order by step"
        return [value for (value,) in self.database.execute(asked, (run_id, key))]

    def children(self) -> dict[tuple[str, int], str]:
        """Ids of the compared runs, by method and seed."""
        tags = self.told("tags")
        return {(tags[name]["method"], int(tags[name]["seed"])): name for name in tags if "seed" in tags[name]}

    def parent(self) -> str:
        """Id of the comparison's own run."""
        [found] = set(self.runs()) - set(self.children().values())
        return found

    def folder_of(self, method: str, seed: int) -> Path:
        """Where a run lies."""
        [found] = self.folder.glob(f"out/runs/{method}-s{seed}*")
        return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(by_library, id="library"), pytest.param(by_command, id="command", marks=pytest.mark.slow)],
)
def compared(
    request: pytest.FixtureRequest, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
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
    database = sqlite3.connect(folder / "mlflow.db")
    yield Compared(folder, database, began, ended, said)
    database.close()


def test_four_runs_lie_below_one_comparison(compared: Compared) -> None:
    tags, children = compared.told("tags"), compared.children()
    assert set(children) == {(method, seed) for method in METHODS for seed in SEEDS}
    assert {tags[child]["mlflow.parentRunId"] for child in children.values()} == {compared.parent()}
    assert "mlflow.parentRunId" not in tags[compared.parent()]
    assert compared.runs()[compared.parent()]["name"] == "out"
    assert {row["status"] for row in compared.runs().values()} == {"FINISHED"}


def test_runs_begin_and_end_when_they_did(compared: Compared) -> None:
    """A run lasts at least the seconds that its rounds took; the comparison ends after its last run."""
    rows = compared.runs()
    for (method, seed), child in compared.children().items():
        start, end = rows[child]["start_time"], rows[child]["end_time"]
        timing = json.loads((compared.folder_of(method, seed) / "timing.json").read_text())
        assert compared.began <= start < end <= compared.ended
        assert end - start >= 1000 * sum(timing["seconds"].values()) - 3, "three rounds, each rounded to milliseconds"
        asked = "select distinct timestamp from metrics where run_uuid = ? and key = 'comm/bytes_up' order by step"
        ends = [at for (at,) in compared.database.execute(asked, (child,))]
        assert len(ends) == 3
        assert start < ends[0] < ends[1] < ends[2] == end
    parent = rows[compared.parent()]
    last = max(rows[child]["end_time"] for child in compared.children().values())
    assert compared.began <= parent["start_time"] <= parent["end_time"] <= compared.ended
    assert parent["end_time"] >= last


def test_runs_say_who_made_them_by_what(compared: Compared) -> None:
    for tags in compared.told("tags").values():
        assert tags["mlflow.user"] not in ("", "unknown")
        assert tags["mlflow.source.name"]
        assert tags["mlflow.source.type"] == "LOCAL"


def test_each_run_has_the_data_it_was_trained_and_tested_on(compared: Compared) -> None:
    """Both methods of a seed share a partition, the seeds do not; all are tested on the same images."""
    from mlflow.data.dataset_source_registry import get_dataset_source_from_json

    of = {key: compared.datasets(child) for key, child in compared.children().items()}
    assert all(set(datasets) == {"training", "test"} for datasets in of.values())
    digests = {key: datasets["training"]["digest"] for key, datasets in of.items()}
    assert digests["fedavg", 0] == digests["fedproto", 0] != digests["fedavg", 1] == digests["fedproto", 1]
    assert {datasets["test"]["digest"] for datasets in of.values()}.isdisjoint(digests.values())
    assert len({datasets["test"]["digest"] for datasets in of.values()}) == 1
    for (method, seed), datasets in of.items():
        metrics = json.loads((compared.folder_of(method, seed) / "metrics.json").read_text())
        assert metrics["partition_fingerprint"].startswith(digests[method, seed])
        assert datasets["training"]["name"] == f"digits/dirichlet s{seed}"
        for context, file in (("training", "manifest.json"), ("test", "meta.json")):
            row = datasets[context]
            source = get_dataset_source_from_json(row["dataset_source"], row["dataset_source_type"])
            assert (Path(source.load()) / file).exists(), "it opens"
            assert json.loads(row["dataset_profile"])["num_rows"] > 0
            assert "mlflow_tensorspec" in json.loads(row["dataset_schema"])


def test_every_metric_is_one_that_is_documented_and_means_it(compared: Compared) -> None:
    """FedProto has a vote and no global model; bytes count from the start of the run."""
    names = {name for (name,) in compared.database.execute("select distinct key from metrics")}
    assert {name for name in names if meaning(name) is None} == set()
    for (method, seed), child in compared.children().items():
        metrics = json.loads((compared.folder_of(method, seed) / "metrics.json").read_text())
        answers, none = ("top1_vote", "top1_global") if method == "fedproto" else ("top1_global", "top1_vote")
        assert compared.metrics(child, f"final/{answers}") == [metrics[answers]]
        assert compared.metrics(child, f"final/{none}") == compared.metrics(child, f"accuracy/{none}") == []
        sent = compared.metrics(child, "comm/bytes_up")
        assert sent[0] < sent[1] < sent[2] == metrics["bytes_up"]
        assert compared.metrics(child, "comm/total_bytes_up") == [metrics["bytes_up"]]


def test_parameters_are_what_people_compare_by(compared: Compared, request: pytest.FixtureRequest) -> None:
    """Runs made without this project's commands do not say which those are: they have all that can change a result."""
    parameters = compared.told("params")
    for (method, _), child in compared.children().items():
        named = set(parameters[child])
        expected = FEW_PARAMETERS | ({"method.weight"} if method == "fedproto" else set())
        assert expected <= named
        assert not {name for name in named if name.startswith(("tracking", "compare"))}
        if request.node.callspec.id == "command":
            assert named == expected


def test_the_comparison_keeps_its_table_its_figures_and_its_page(compared: Compared) -> None:
    kept = Path(compared.runs()[compared.parent()]["artifact_uri"])
    files = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert {"comparison.csv", "comparison.md", "report.html", "runs.json"} <= files
    assert any(name.startswith("figures/") for name in files)
    table = json.loads((kept / "runs.json").read_text())
    assert [row[:2] for row in table["data"]] == [[method, seed] for method in METHODS for seed in SEEDS]
    assert [row[-1] for row in table["data"]] == [
        compared.children()[method, seed] for method in METHODS for seed in SEEDS
    ]


def test_every_run_has_a_model_that_of_a_method_without_a_global_one_too(compared: Compared) -> None:
    asked = "select source_run_id, artifact_location from logged_models"
    places = {run_id: Path(place) for run_id, place in compared.database.execute(asked)}
    assert set(places) == set(compared.children().values())
    for (method, _), child in compared.children().items():
        assert (places[child] / "data" / "run" / "server.safetensors").exists()
        assert (places[child] / "data" / "run" / "clients").exists() is (method == "fedproto")


def test_the_password_of_the_store_is_nowhere(compared: Compared) -> None:
    files = [path for path in compared.folder.rglob("*") if path.is_file()]
    assert {"mlflow.db", "config.json", "MLmodel"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in compared.said
    for path in files:
        if path.name == "config.json":
            assert "tracking" not in json.loads(path.read_text())["config"]
