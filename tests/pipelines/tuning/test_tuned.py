"""Comparisons in which every method is tuned with the same budget."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from flcore.core.errors import ConfigError
from flcore.experiment.run_folder import read_run_config
from pipelines.execution import admission, bodies
from pipelines.execution.follower import Follower
from pipelines.execution.operation import Operation
from pipelines.execution.steps import InlineSteps
from pipelines.plan.comparison import comparison_plan
from pipelines.plan.params import with_variants
from pipelines.reporting import comparison_report
from pipelines.reporting.comparison_report import collect, write_report
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import read_json
from pipelines.tuning.tuned import tuned_comparison
from tests.following import NoFollower
from tests.one_process import ThisProcess

RAW: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2},
    "federation": {"rounds": 2},
    "local": {"lr": 0.001, "batch_size": 16},
    "compare": {"methods": ["fedavg", "fedproto"], "seeds": [0, 1], "baseline": "fedavg"},
    "tracking": {"enabled": False},
}


class Comparing(NoFollower):
    """Writes comparisons here."""

    def compare(
        self, kind: str, config: Mapping[str, Any], runs: Sequence[Path], directory: Path, **facts: Any
    ) -> None:
        about = {key: facts.get(key) for key in ("rows", "draws", "tuning")}
        write_report(collect(config, [RunFolder(run) for run in runs], facts["failed"], **about), directory)


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> tuple[Operation, Comparing]:
    monkeypatch.setattr(admission, "physical_cores", lambda: 1)
    monkeypatch.setattr(bodies, "RunPool", ThisProcess)
    # Nor are figures looked at: a comparison's take two seconds.
    monkeypatch.setattr(comparison_report, "comparison_drawings", lambda comparison, partition: {})
    follower = Comparing()
    return Operation(InlineSteps(), _quiet(), cast(Follower, follower)), follower


def _quiet() -> Any:
    from pipelines.execution.progress import Lines

    return Lines(lambda line: None)


@pytest.mark.slow
def test_every_method_has_the_same_budget_and_stands_tuned_beside_as_given(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    """Two methods, three trials each, two seeds: eight runs in four rows, differences to the tuned baseline.

    A learning rate of 0.001 learns nothing in two rounds, so that another trial is the best one.
    """
    operation, follower = carried_out
    outcome = tuned_comparison(comparison_plan(RAW), 3, tmp_path / "tuned", operation)
    assert follower.finished[:2] == ["fedavg", "fedproto"]
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
        found = [read_run_config(path.parent) for path in sorted((tmp_path / "tuned" / "runs").glob("*/config.json"))]
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
    tuned_comparison(comparison_plan(RAW), 3, tmp_path / "tuned", operation)
    assert len(list((tmp_path / "tuned").glob("tuning/*/trials/*"))) == 6
    assert {path: path.read_bytes() for path in before} == before


def test_values_that_nothing_beats_are_one_run_in_two_rows(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    """One trial is that of the values given."""
    operation, _ = carried_out
    tuned_comparison(comparison_plan(RAW, ["fedavg"], [0]), 1, tmp_path / "tuned", operation)
    document = json.loads((tmp_path / "tuned" / "comparison.json").read_text())
    assert [row["method"] for row in document["methods"]] == ["fedavg (tuned)", "fedavg"]
    assert document["tuning"][0]["values"] == {}
    assert len(list((tmp_path / "tuned" / "runs").iterdir())) == 1


@pytest.mark.slow
def test_variants_are_tuned_as_methods_are_and_every_division_is_run(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    """FedAvg and a variant of it, two seeds on two divisions: four rows of four runs, one study each."""
    operation, _ = carried_out
    raw = with_variants(RAW, ["long=fedavg,local.epochs=2"])
    raw["compare"] = raw["compare"] | {"partition_seeds": [5, 6]}
    outcome = tuned_comparison(comparison_plan(raw, ["fedavg", "long"]), 2, tmp_path / "tuned", operation)
    assert [path.name for path in sorted((tmp_path / "tuned" / "tuning").iterdir())] == ["fedavg", "long"]
    document = json.loads((tmp_path / "tuned" / "comparison.json").read_text())
    rows = ["fedavg (tuned)", "long (tuned)", "fedavg", "long"]
    assert [(row["method"], row["num_seeds"], row["seeds"]) for row in document["methods"]] == [
        (row, 4, [0, 1]) for row in rows
    ]
    assert document["divisions"] == [5, 6]
    with (tmp_path / "tuned" / "runs.csv").open() as file:
        assert [(row["method"], row["division"], row["seed"]) for row in csv.DictReader(file)] == [
            (row, division, seed) for row in rows for division in "56" for seed in "01"
        ]
    with (tmp_path / "tuned" / "curves.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["seed"], first["division"], first["round"]) == ("0", "5", "1")
    assert "divisions 5, 6" in outcome.markdown
    assert "95 % interval, 2 divisions." in outcome.markdown


def test_what_cannot_be_run_is_refused_before_any_trial(
    carried_out: tuple[Operation, Comparing], tmp_path: Path
) -> None:
    operation, follower = carried_out
    with pytest.raises(ConfigError, match="no run"):
        tuned_comparison(comparison_plan(RAW, None, []), 3, tmp_path / "tuned", operation)
    with pytest.raises(ConfigError, match=r"method\.use_ca = true: the model has no projection"):
        tuned_comparison(comparison_plan(RAW, ["fedavg", "fedcspc"]), 3, tmp_path / "tuned", operation)
    assert follower.followed == []
