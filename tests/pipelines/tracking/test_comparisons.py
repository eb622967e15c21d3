"""A comparison in MLflow: a parent with what was compared, and the runs below it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import DataError
from pipelines.runs.folder import read_folder
from pipelines.tracking import store
from pipelines.tracking.comparisons import labels_of, log_comparison
from pipelines.tracking.later import log_folder

BEGAN = 1_700_000_000_000  # as in conftest.py: each round takes a second

Write = Callable[..., Path]
PARENT = "mlflow.parentRunId"


def tables(folder: Path, text: str = "| method | top-1 |\n|---|---|\n") -> Path:
    """A comparison's folder with its files; those in ``runs/`` and the hidden ones belong to no comparison."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name in ("comparison.csv", "report.html", ".hidden.csv", "notes.bin"):
        (folder / name).write_text(name)
    (folder / "comparison.md").write_text(text)
    (folder / "figures" / "accuracy.svg").write_text("<svg/>")
    return folder


def by_name(reader: Any) -> dict[str, Any]:
    return {run.info.run_name: run for run in reader.runs()}


def test_a_comparison_reads_back(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """FedAvg at 3 rounds 0.3 and at 4 rounds 0.4 (two seeds): mean 0.35, standard deviation 0.1 / √2 = 0.0707…"""
    folder = tables(tmp_path / "compared")
    runs = [
        write_run(folder / "runs" / "a", 3, finished=True, seed=0),
        write_run(folder / "runs" / "b", 4, finished=True, seed=1),
        write_run(folder / "runs" / "c", 2, finished=True, seed=0, method="fedprox"),
    ]
    assert log_comparison(folder, runs, reader.uri)

    found = by_name(reader)
    assert set(found) == {"compared", "fedavg-s0-00fedavg", "fedavg-s1-01fedavg", "fedprox-s0-00fedpro"}
    parent = found.pop("compared")
    assert {run.data.tags[PARENT] for run in found.values()} == {parent.info.run_id}
    assert (parent.info.status, parent.info.start_time, parent.info.end_time) == ("FINISHED", BEGAN, BEGAN + 4000)
    assert parent.data.tags["methods"] == "fedavg, fedprox"
    assert parent.data.tags["seeds"] == "0, 1"
    assert parent.data.params == {}
    assert parent.data.metrics == pytest.approx(
        {
            "comparison/runs": 3,
            "mean/top1_global/fedavg": 0.35,
            "std/top1_global/fedavg": 0.1 / 2**0.5,
            "mean/top1_global/fedprox": 0.2,
            "mean/mean_local/fedavg": 0.7,
            "std/mean_local/fedavg": 0.0,
            "mean/mean_local/fedprox": 0.7,
            "mean/bytes_up/fedavg": 107 * 3.5,
            "std/bytes_up/fedavg": 107 / 2**0.5,
            "mean/bytes_up/fedprox": 214,
            "mean/bytes_down/fedavg": 700,
            "std/bytes_down/fedavg": 200 / 2**0.5,
            "mean/bytes_down/fedprox": 400,
        }
    )
    kept = {"comparison.csv", "comparison.md", "report.html", "figures/accuracy.svg", "runs.json"}
    assert reader.artifacts(parent) == kept
    table = json.loads((Path(parent.info.artifact_uri) / "runs.json").read_text())
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert first == {
        "name": "fedavg",
        "seed": 0,
        "top1_global": pytest.approx(0.3),
        "top1_vote": None,
        "mean_local": 0.7,
        "mean_local_own_classes": None,
        "pooled_local": None,
        "bytes_up": 321,
        "bytes_down": 600,
        "seconds": 2.25,
        "run_id": found["fedavg-s0-00fedavg"].info.run_id,
    }
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("| method | top-1 |")
    assert f"[fedprox, seed 0](#/experiments/{parent.info.experiment_id}/runs/{table['data'][2][-1]})" in note


def test_a_comparison_logged_again_changes_nothing(tmp_path: Path, reader: Any, write_run: Write) -> None:
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in (0, 1)]
    assert log_comparison(folder, runs, reader.uri)
    before = reader.contents()
    assert log_comparison(folder, runs, reader.uri)
    assert reader.contents() == before


def test_a_seed_or_a_method_more_goes_to_the_same_comparison_a_method_less_begins_another(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """So is one whose runs failed at first and are carried out now."""
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in (0, 1)]
    other = write_run(folder / "runs" / "prox", 2, finished=True, seed=0, method="fedprox")
    assert log_comparison(folder, runs[:1], reader.uri)
    assert log_comparison(folder, runs, reader.uri)
    assert log_comparison(folder, [*runs, other], reader.uri)
    [first] = [run for run in reader.runs() if run.info.run_name == "compared"]
    assert reader.points(first)["comparison/runs"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert first.data.tags["methods"] == "fedavg, fedprox"

    assert log_comparison(folder, [other], reader.uri)
    parents = {run.info.run_id for run in reader.runs() if run.info.run_name == "compared"}
    assert len(parents) == 2
    tagged = f"tags.`protofl.comparison.{first.info.run_id}` = 'compared'"
    assert len(reader.client.search_runs([first.info.experiment_id], tagged)) == 3, "the first one is found by its tag"
    under = {run.info.run_name: run.data.tags[PARENT] for run in reader.runs() if PARENT in run.data.tags}
    [last] = parents - {first.info.run_id}
    assert sorted(under.values()) == sorted([first.info.run_id, first.info.run_id, last]), "that logged last has them"


def test_runs_that_are_compared_no_more_are_let_go_however_many(
    tmp_path: Path, reader: Any, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store answers a page at a time: here two runs, of which the comparison has four and then one."""
    monkeypatch.setattr(store, "_RUNS_PER_REQUEST", 2)
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in range(4)]
    assert log_comparison(folder, runs, reader.uri)
    assert log_comparison(folder, runs[:1], reader.uri)
    found = by_name(reader)
    assert PARENT in found["fedavg-s0-00fedavg"].data.tags
    for seed in (1, 2, 3):
        tags = found[f"fedavg-s{seed}-0{seed}fedavg"].data.tags
        assert not [name for name in tags if name == PARENT or "comparison" in name]


def test_a_long_table_is_cut_and_the_links_stay(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """MLflow keeps 8,000 characters of a description."""
    folder = tables(tmp_path / "compared", "| a row of the table |\n" * 1000)
    assert log_comparison(folder, [write_run(folder / "runs" / "a", 2, finished=True)], reader.uri)
    note = by_name(reader)["compared"].data.tags["mlflow.note.content"]
    assert 7900 < len(note) <= 8000
    assert "[fedavg, seed 3](#/experiments/" in note.splitlines()[-1]


def test_runs_of_one_method_are_told_apart_by_what_they_differ_in(tmp_path: Path, write_run: Write) -> None:
    folders: list[Path] = []
    for place, alpha in (("a", 0.1), ("b", 0.5), ("c", 0.5)):
        folder = write_run(tmp_path / place, 2, finished=True, seed=len(folders), method="fedavg")
        header = json.loads((folder / "config.json").read_text())
        header["identity"]["partition"]["alpha"] = alpha
        (folder / "config.json").write_text(json.dumps(header))
        folders.append(folder)
    folders.append(write_run(tmp_path / "d", 2, finished=True, method="fedprox"))
    assert labels_of([read_folder(folder) for folder in folders]) == [
        "fedavg alpha 0.1",
        "fedavg alpha 0.5",
        "fedavg alpha 0.5",
        "fedprox",
    ]


def test_what_is_no_comparison_is_refused(tmp_path: Path, uri: str, write_run: Write) -> None:
    with pytest.raises(DataError, match="no comparison to log"):
        log_comparison(tables(tmp_path / "empty"), [], uri)
    with pytest.raises(DataError, match="no tables"):
        log_comparison(tmp_path, [write_run(tmp_path / "runs" / "a", 2, finished=True)], uri)
    with pytest.raises(DataError, match="no run, comparison or study there"):
        log_folder(tmp_path, uri)
    (tmp_path / "sweep.json").write_text('{"runs": [{"config_hash": "gone"}]}')
    with pytest.raises(DataError, match="1 of its 1 runs are not in"):
        log_folder(tmp_path, uri)


def test_rows_are_called_as_the_comparison_calls_them_and_long_labels_are_shortened(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """A tuned method differs in twenty values from the same as given: MLflow takes no name of more than 250 letters."""
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / name, 2, finished=True, seed=seed) for seed, name in enumerate("ab")]
    hashes = [json.loads((run / "metrics.json").read_text())["config_hash"] for run in runs]
    named = zip(("fedavg (tuned)", "fedavg"), hashes, strict=True)
    rows = [{"method": name, "config_hash": hash} for name, hash in named]
    (folder / "comparison.json").write_text(json.dumps({"runs": rows}))
    assert log_comparison(folder, runs, reader.uri)
    assert by_name(reader)["compared"].data.tags["methods"] == "fedavg tuned, fedavg"

    told = [read_folder(run) for run in runs]
    for number, run in enumerate(told):
        run.identity["local"] = {f"a_key_with_a_long_name_{key}": number for key in range(20)}
    labels = labels_of(told)
    assert len(set(labels)) == 2
    assert max(map(len, labels)) <= 150
    assert labels[0].startswith("fedavg 20 values ")
