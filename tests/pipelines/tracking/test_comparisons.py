"""A comparison in MLflow: a parent with what was compared, and the runs below it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import DataError
from pipelines.runs.folder import RunFolder
from pipelines.tracking import description, store
from pipelines.tracking.backfill import log_folder
from pipelines.tracking.comparisons import log_comparison

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


def folders(runs: Sequence[Path]) -> list[RunFolder]:
    return [RunFolder(run) for run in runs]


def by_name(reader: Any) -> dict[str, Any]:
    return {run.info.run_name: run for run in reader.runs()}


def test_a_comparison_reads_back(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """The comparison began and ended long after its runs, and another command made it."""
    folder = tables(tmp_path / "compared")
    runs = [
        write_run(folder / "runs" / "a", 3, finished=True, seed=0),
        write_run(folder / "runs" / "b", 4, finished=True, seed=1),
        write_run(folder / "runs" / "c", 2, finished=True, seed=0, method="fedprox"),
    ]
    for path in (*folder.glob("*.*"), *folder.glob("figures/*")):
        os.utime(path, (1_800_000_000, 1_800_000_000))
    began = 1_799_999_000_000
    assert log_comparison(folder, folders(runs), reader.uri, began_ms=began, source="protofl compare")

    found = by_name(reader)
    assert set(found) == {"compared", "fedavg-s0-00fedavg", "fedavg-s1-01fedavg", "fedprox-s0-00fedpro"}
    parent = found.pop("compared")
    assert {run.data.tags[PARENT] for run in found.values()} == {parent.info.run_id}
    assert (parent.info.status, parent.info.start_time, parent.info.end_time) == ("FINISHED", began, 1_800_000_000_000)
    assert parent.data.tags["methods"] == "fedavg, fedprox"
    assert parent.data.tags["seeds"] == "0, 1"
    assert parent.data.params == {}
    assert parent.data.tags["mlflow.source.name"] == "protofl compare"
    assert parent.data.metrics == {"comparison/runs": 3}, "a chart for each number would say nothing"
    kept = {"comparison.csv", "comparison.md", "report.html", "figures/accuracy.svg"}
    assert reader.artifacts(parent) == kept
    assert parent.data.tags["mlflow.note.content"] == (folder / "comparison.md").read_text()


def test_a_comparison_logged_again_changes_nothing(tmp_path: Path, reader: Any, write_run: Write) -> None:
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in (0, 1)]
    assert log_comparison(folder, folders(runs), reader.uri)
    before = reader.contents()
    assert log_comparison(folder, folders(runs), reader.uri)
    assert reader.contents() == before


def test_a_comparison_stays_one_and_takes_no_children_of_another(tmp_path: Path, reader: Any, write_run: Write) -> None:
    """A seed more, a method more, and one less; a second comparison of the same runs has them by its tag."""
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in (0, 1)]
    other = write_run(folder / "runs" / "prox", 2, finished=True, seed=0, method="fedprox")
    for hour, compared in enumerate((runs[:1], runs, [*runs, other], [other])):
        os.utime(folder / "comparison.md", (1_900_000_000 + 3600 * hour,) * 2)
        assert log_comparison(folder, folders(compared), reader.uri)
        first = by_name(reader)["compared"]
        under = [run for run in reader.runs() if run.data.tags.get(PARENT) == first.info.run_id]
        assert len(under) == len(compared) == first.data.metrics["comparison/runs"]
    assert first.data.tags["methods"] == "fedprox"

    assert log_comparison(folder, folders([*runs, other]), reader.uri)
    assert log_comparison(tables(tmp_path / "later"), folders([*runs, other]), reader.uri)
    found = by_name(reader)
    later = found.pop("later").info
    found.pop("compared")
    assert {run.data.tags[PARENT] for run in found.values()} == {first.info.run_id}
    tagged = reader.client.search_runs([later.experiment_id], f"tags.`protofl.comparison.{later.run_id}` = 'later'")
    assert len(tagged) == 3


def test_a_comparison_over_partitions_has_a_parent_in_each_experiment(
    tmp_path: Path, reader: Any, write_run: Write
) -> None:
    """MLflow shows children in their own experiment only."""
    folder = tables(tmp_path / "swept")
    runs = [
        write_run(folder / "runs" / name, 2, finished=True, seed=seed, partition={"name": name})
        for seed, name in enumerate(("dirichlet", "shards"))
    ]
    assert log_comparison(folder, folders(runs), reader.uri)
    for experiment in ("digits/dirichlet", "digits/shards"):
        parent, child = sorted(reader.runs(experiment), key=lambda run: PARENT in run.data.tags)
        assert child.data.tags[PARENT] == parent.info.run_id


def test_runs_that_are_compared_no_more_are_let_go_however_many(
    tmp_path: Path, reader: Any, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store answers a page at a time: here two runs, of which the comparison has four and then one."""
    monkeypatch.setattr(store, "_RUNS_PER_REQUEST", 2)
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / str(seed), 2, finished=True, seed=seed) for seed in range(4)]
    assert log_comparison(folder, folders(runs), reader.uri)
    assert log_comparison(folder, folders(runs[:1]), reader.uri)
    found = by_name(reader)
    assert PARENT in found["fedavg-s0-00fedavg"].data.tags
    for seed in (1, 2, 3):
        tags = found[f"fedavg-s{seed}-0{seed}fedavg"].data.tags
        assert not [name for name in tags if name == PARENT or "comparison" in name]


def test_a_description_has_the_first_lines_of_a_long_table() -> None:
    """MLflow keeps 8,000 characters; a line with its line break has 23."""
    table = "\n".join(["| a row of the table |"] * 1000)
    assert description.note(table) == "\n".join(["| a row of the table |"] * (8000 // 23))
    assert description.note("| short |\n") == "| short |\n"


def test_what_is_no_comparison_is_refused(tmp_path: Path, uri: str, write_run: Write) -> None:
    with pytest.raises(DataError, match="no comparison to log"):
        log_comparison(tables(tmp_path / "empty"), [], uri)
    with pytest.raises(DataError, match="no tables"):
        log_comparison(tmp_path, [RunFolder(write_run(tmp_path / "runs" / "a", 2, finished=True))], uri)
    with pytest.raises(DataError, match="no run, comparison or study there"):
        log_folder(tmp_path, uri)
    (tmp_path / "sweep.json").write_text('{"runs": [{"config_hash": "gone"}]}')
    with pytest.raises(DataError, match="1 of its 1 runs are not in"):
        log_folder(tmp_path, uri)


def test_rows_are_called_as_the_comparison_calls_them(tmp_path: Path, reader: Any, write_run: Write) -> None:
    folder = tables(tmp_path / "compared")
    runs = [write_run(folder / "runs" / name, 2, finished=True, seed=seed) for seed, name in enumerate("ab")]
    hashes = [json.loads((run / "metrics.json").read_text())["config_hash"] for run in runs]
    named = zip(("fedavg (tuned)", "fedavg"), hashes, strict=True)
    rows = [{"method": name, "config_hash": hash} for name, hash in named]
    (folder / "comparison.json").write_text(json.dumps({"runs": rows}))
    assert log_comparison(folder, folders(runs), reader.uri)
    assert by_name(reader)["compared"].data.tags["methods"] == "fedavg (tuned), fedavg"
