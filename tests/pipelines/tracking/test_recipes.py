"""Every filter and every Python block of docs/how-to/mlflow.md, carried out against a real store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flcore.io.files import sealed, write_json
from pipelines.runs.folder import RunFolder
from pipelines.tracking.comparisons import log_comparison
from pipelines.tracking.description import NOTE_TAG
from pipelines.tracking.model import MODEL_URI_TAG
from pipelines.tracking.run_status import STOPPED_TAG
from pipelines.tracking.sync import RunTracker

Write = Callable[..., Path]

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "mlflow.md").read_text(encoding="utf-8")
FILTERS = [line for line in re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1].splitlines() if line[0] != "#"]  # type: ignore[index]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STORE = "sqlite:///mlruns/mlflow.db"
STUDY = "fedprox-ab3d3ac3"


def about(run_dir: Path, rounds: int, **header: Any) -> Path:
    """Let a run's folder say how long it is and which commit made it."""
    said = dict(RunFolder(run_dir).header)
    for section in ("config", "identity"):
        said[section]["federation"] = {"rounds": rounds}
    said["environment"]["code_version"] = "748b903" + 33 * "0" if rounds == 10 else 40 * "b"
    said["environment"]["compared_by"].append("federation.rounds")
    write_json(run_dir / "config.json", sealed(said | header))
    return run_dir


@pytest.fixture
def store(tmp_path: Path, uri: str, write_run: Write) -> str:
    """A comparison of FedAvg (10 rounds, seeds 0 and 1) and FedPA (4 rounds), a study of one trial, and a killed run.

    A run of n rounds has accuracy 0.1 n, takes 0.75 n seconds, and its clients send 107 n bytes: ten rounds 1.0, 7.5 s
    and 1,070 bytes; four rounds 0.4, 3 s and 428.
    """
    folder = tmp_path / "comparison"
    runs = [
        about(write_run(folder / "runs" / "a", 10, finished=True, seed=0), 10),
        about(write_run(folder / "runs" / "b", 10, finished=True, seed=1), 10),
        about(write_run(folder / "runs" / "c", 4, finished=True, seed=0, method="fedpa"), 4),
    ]
    (folder / "comparison.csv").write_text("method\n")
    assert log_comparison(folder, [RunFolder(run) for run in runs], uri)
    searched = about(write_run(tmp_path / "s" / "study", 1, finished=True, method="fedprox"), 1, study=STUDY)
    above = RunTracker(searched, uri=uri, extra_tags={"study": STUDY})
    assert above.sync(final=True)
    trial = about(write_run(tmp_path / "s" / "trials" / "0000", 6, finished=True, method="fedprox", seed=6), 6)
    below = {"study": STUDY, "trial": "0"}
    assert RunTracker(trial, uri=uri, parent_run_id=above.run_id, extra_tags=below).sync(final=True)
    killed = about(write_run(tmp_path / "killed", 2, method="moon", seed=2), 2)
    assert RunTracker(killed, uri=uri).mark_stopped(failed=False)
    return uri


A, B, C = "fedavg-s0-00fedavg", "fedavg-s1-01fedavg", "fedpa-s0-00fedpa"
TRIAL, KILLED, ABOVE = "fedprox-s6-06fedpro", "moon-s2-02moon", "comparison"
FOUND = {
    "status = 'FINISHED' and tags.method = 'fedpa'": {C},
    "tags.method LIKE 'fed%' and metrics.`final/top1_global` > 0.9": {A, B},
    "params.`partition.alpha` = '0.1' and params.`federation.rounds` = '10'": {A, B},
    "tags.seed != '1' and tags.method = 'fedavg'": {A},
    "attributes.run_name LIKE 'fedavg-s%'": {A, B},
    "metrics.`time/total` < 5 and metrics.`comm/total_bytes_up` < 1000": {C, TRIAL},
    "status != 'FINISHED'": {KILLED},
    "datasets.name = 'digits' and datasets.context = 'test'": {A, B, C, TRIAL, STUDY},
    "datasets.name = 'digits/dirichlet s1'": {B},
    "tags.`mlflow.source.git.commit` LIKE '748b903%'": {A, B, ABOVE},
    "metrics.`comparison/runs` > 0": {ABOVE},
    "metrics.`study/best_trial` >= 0": {STUDY},
    f"tags.study = '{STUDY}' and tags.trial LIKE '%'": {TRIAL},
}


def test_every_filter_of_the_page_finds_what_it_says(store: str, reader: Any) -> None:
    """All in one store."""
    assert list(FOUND) == FILTERS
    experiment = reader.client.get_experiment_by_name("digits/dirichlet").experiment_id
    for asked, names in FOUND.items():
        found = {run.info.run_name.rstrip("x") for run in reader.client.search_runs([experiment], asked)}
        assert found == names, asked


def carried_out(block: str, store: str) -> dict[str, Any]:
    """What a block of the page leaves in its names; its store is this one, and is forgotten again."""
    import mlflow

    assert block.count(STORE) == 1
    before = mlflow.get_tracking_uri()
    names: dict[str, Any] = {}
    try:
        exec(compile(block.replace(STORE, store), "mlflow.md", "exec"), names)
    finally:
        mlflow.set_tracking_uri(before)
    return names


def test_runs_as_a_table(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the comparison nor the study nor its trial: two of FedAvg, one of FedPA, each with 0.7."""
    runs = carried_out(BLOCKS[0], store)["runs"]
    assert sorted(runs["tags.mlflow.runName"].str[:9]) == ["fedavg-s0", "fedavg-s1", "fedpa-s0-"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed[-2:]] == [
        ["10", "0.1", "fedavg", "0.7", "0.0", "2"],
        ["4", "0.1", "fedpa", "0.7", "NaN", "1"],
    ]


def test_runs_and_table_of_one_comparison(store: str) -> None:
    found = carried_out(BLOCKS[1], store)
    assert len(found["runs"]) == 3
    table: pd.DataFrame = found["table"]
    assert table.loc["fedavg"].tolist() == [0.7, 0.7] and table.loc["fedpa", "0"] == 0.7


def test_a_curve(store: str) -> None:
    [block] = BLOCKS[2:]
    assert carried_out(block, store)["curve"] == pytest.approx({n: 0.1 * n for n in range(1, 11)})


def test_every_tag_is_on_the_page_of_names(store: str) -> None:
    """Of what is logged here, and the two that a logged model and the reason for a stop bring."""
    from mlflow.tracking.client import MlflowClient

    page = (Path(__file__).parents[3] / "docs" / "reference" / "mlflow-names.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.partition("## Tags")[2].partition("## ")[0].splitlines() if "`" in line]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    client = MlflowClient(tracking_uri=store)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    tags = {re.sub(r"(?<=^protofl.comparison.)[0-9a-f]{32}$", "<run id>", tag) for run in runs for tag in run.data.tags}
    assert {"trial", "methods", NOTE_TAG, "protofl.comparison.<run id>"} < tags
    assert (tags | {MODEL_URI_TAG, STOPPED_TAG}) - named == set()
