"""Comparisons in which every method is tuned with the same budget."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from flcore.errors import ConfigError
from flcore.run_folder import described
from pipelines.execution import admission
from pipelines.execution.bodies import Operation
from pipelines.execution.recorder import Recorder
from pipelines.execution.steps import InlineSteps
from pipelines.reporting.comparison_files import markdown
from pipelines.reporting.comparison_report import compare
from pipelines.runs.layout import read_json
from pipelines.tuning.tuned import tuned_comparison

RAW: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2},
    "federation": {"rounds": 2},
    "local": {"lr": 0.001, "batch_size": 16},
    "compare": {"methods": ["fedavg", "fedproto"], "seeds": [0, 1], "baseline": "fedavg"},
    "tracking": {"enabled": False},
}


class Comparing:
    """A recorder that writes comparisons, here, and remembers what else it is told."""

    def __init__(self) -> None:
        self.studies: list[str] = []
        self.trials = 0

    def watch(self, directory: Path) -> None:
        pass

    def finish(self, directory: Path) -> Future[dict[str, Any]]:
        return _done({"report": "", "store": None})

    def trial(self, study: Path, number: int) -> None:
        self.trials += 1

    def study(self, study: Path) -> Future[dict[str, Any]]:
        self.studies.append(study.name)
        return _done({"store": None})

    def compare(
        self, kind: str, config: Mapping[str, Any], runs: Sequence[Path], directory: Path, **facts: Any
    ) -> Future[dict[str, Any]]:
        compared = compare(config, runs, directory, facts["failed"], rows=facts["rows"], tuning=facts["tuning"])
        return _done({"report": "", "store": None, "table": "", "markdown": markdown(compared)})


def _done(answer: dict[str, Any]) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    future.set_result(answer)
    return future


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> tuple[Operation, Comparing]:
    monkeypatch.setattr(admission, "physical_cores", lambda: 1)
    recorder = Comparing()
    return Operation(InlineSteps(), _quiet(), cast(Recorder, recorder)), recorder


def _quiet() -> Any:
    from pipelines.execution.progress import Lines

    return Lines(lambda line: None)


def test_every_method_has_the_same_budget_and_stands_tuned_beside_as_given(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    """Two methods, three trials each, two seeds: eight runs in four rows, differences to the tuned baseline.

    A learning rate of 0.001 learns nothing in two rounds, so that another trial is the best one.
    """
    operation, recorder = carried_out
    outcome = tuned_comparison(RAW, None, None, 3, tmp_path / "tuned", operation)
    assert (recorder.trials, recorder.studies) == (6, ["fedavg", "fedproto"])
    document = json.loads((tmp_path / "tuned" / "comparison.json").read_text())
    rows = ["fedavg (tuned)", "fedproto (tuned)", "fedavg", "fedproto"]
    assert [row["method"] for row in document["methods"]] == rows
    assert document["baseline"] == "fedavg (tuned)"
    with (tmp_path / "tuned" / "runs.csv").open() as file:
        assert [(row["method"], row["seed"]) for row in csv.DictReader(file)] == [
            (row, seed) for row in rows for seed in "01"
        ]
    for tuned in document["tuning"]:
        study = read_json(tmp_path / "tuned" / "tuning" / tuned["method"] / "study.json")
        best = study["trials"][study["best"][0]]
        assert (tuned["trials"], tuned["failed"], tuned["metric"]) == (3, 0, study["metric"])
        # The document rounds to twelve digits.
        assert tuned["given"] == pytest.approx(study["trials"][0]["accuracy"], rel=1e-9)
        assert tuned["best"] == pytest.approx(best["accuracy"], rel=1e-9)
        assert tuned["best"] > tuned["given"]
        values = {key: value for key, value in best["params"].items() if value != study["given"][key]}
        assert tuned["values"].keys() == values.keys()
        assert tuned["values"]["local.lr"] == pytest.approx(values["local.lr"], rel=1e-9)
        # The runs have these values, on all training data and scored on test data.
        best_file = yaml.safe_load((tmp_path / "tuned" / "tuning" / tuned["method"] / "best.yaml").read_text())
        found = [described(path.parent) for path in sorted((tmp_path / "tuned" / "runs").glob("*/config.json"))]
        lrs = [
            about["config"]["local"]["lr"] for about in found if about["config"]["method"]["name"] == tuned["method"]
        ]
        assert sorted(lrs) == sorted([0.001, 0.001, best_file["local"]["lr"], best_file["local"]["lr"]])
        assert {about["config"]["evaluation"]["split"] for about in found} == {"test"}
    assert "Tuning: 3 trials of each method" in outcome.markdown
    page = (tmp_path / "tuned" / "report.html").read_text()
    assert "Tuning: 3 trials of each method" in page
    assert "2 methods on digits" in page

    before = {path: path.read_bytes() for path in (tmp_path / "tuned").glob("comparison.*")}
    tuned_comparison(RAW, None, None, 3, tmp_path / "tuned", operation)
    assert recorder.trials == 6
    assert {path: path.read_bytes() for path in before} == before


def test_values_that_nothing_beats_are_one_run_in_two_rows(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    """One trial is that of the values given."""
    operation, _ = carried_out
    tuned_comparison(RAW, ["fedavg"], [0], 1, tmp_path / "tuned", operation)
    document = json.loads((tmp_path / "tuned" / "comparison.json").read_text())
    assert [row["method"] for row in document["methods"]] == ["fedavg (tuned)", "fedavg"]
    assert document["tuning"][0]["values"] == {}
    assert len(list((tmp_path / "tuned" / "runs").iterdir())) == 1


def test_what_cannot_be_run_is_refused_before_any_trial(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    operation, recorder = carried_out
    with pytest.raises(ConfigError, match="no run"):
        tuned_comparison(RAW, None, [], 3, tmp_path / "tuned", operation)
    with pytest.raises(ConfigError, match=r"method\.use_ca = true: the model has no projection"):
        tuned_comparison(RAW, ["fedavg", "fedcspc"], None, 3, tmp_path / "tuned", operation)
    assert recorder.trials == 0
