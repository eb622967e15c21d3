"""The best finished run of a store: by which figure, of which runs; its promotion is in test_model.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError, DataError
from pipelines.tracking import description
from pipelines.tracking.best import best, metric_of
from pipelines.tracking.sync import RunTracker

Write = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path, uri: str, write_run: Write) -> str:
    """Runs of 3, 4 and 2 rounds, whose accuracy is 0.1 per round and whose clients send 107 bytes per round.

    A trial of 6 rounds would be the best by accuracy, and a run that has not finished as well.
    """
    for name, rounds, method, finished, tags in (
        ("a", 3, "fedavg", True, None),
        ("b", 4, "fedavg", True, None),
        ("c", 2, "fedprox", True, None),
        ("trial", 6, "fedprox", True, {"trial": "0", "study": "x"}),
        ("running", 7, "moon", False, None),
    ):
        run_dir = write_run(
            tmp_path / name, rounds, finished=finished, method=method, seed=rounds, federation={"rounds": rounds}
        )
        assert RunTracker(run_dir, uri=uri, extra_tags=tags).sync(final=True)
    return uri


@pytest.mark.parametrize(
    ("metric", "where", "seed", "words"),
    [
        (
            "top1_global",
            None,
            4,
            "final/top1_global 0.4 on test data, the highest of 3 finished runs in digits/dirichlet"
            " (of different rounds: --where chooses among them)",
        ),
        ("final/top1_global", "tags.method = 'fedprox'", 2, "0.2 on test data, the only finished run in"),
        (
            "bytes_up",
            None,
            2,
            "comm/total_bytes_up 214, the lowest of 3 finished runs in digits/dirichlet (of different",
        ),
        ("time/total", "tags.method = 'fedavg'", 3, "time/total 2.25, the lowest of 2 finished runs"),
    ],
)
def test_accuracy_is_best_where_it_is_highest_and_costs_where_they_are_lowest(
    store: str, metric: str, where: str | None, seed: int, words: str
) -> None:
    """The run of n rounds has seed n; of each round's 0.75 s three are 2.25 s."""
    found = best(store, metric, where=where)
    assert found.name == f"{'fedprox' if seed == 2 else 'fedavg'}-s{seed}-{seed:02d}{found.name[:6]}"
    assert words in found.words
    assert found.model is None


def test_of_equals_the_first_one_is_the_best(store: str) -> None:
    """All have a mean over clients of 0.7, and all began at the same moment: the name decides."""
    assert best(store, "mean_local").name == "fedavg-s3-03fedavg"


def test_what_cannot_be_ranked_is_refused(store: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metric top1_globl: no figure .* did you mean top1_global\?"):
        best(store, "top1_globl")
    with pytest.raises(ConfigError, match="--metric best/round: no run can be the best in it; more or fewer rounds"):
        best(store, "best/round")
    for setting in ("noise_multiplier", "delta", "clip"):
        with pytest.raises(ConfigError, match=f"--metric privacy/{setting}: .* it was set, not reached"):
            best(store, f"privacy/{setting}")
    with pytest.raises(ConfigError, match="--experiment mnist/iid: not in this store; there are Default, digits/diri"):
        best(store, "mean_local", experiment="mnist/iid")
    with pytest.raises(ConfigError, match=r"--where alpha < 1: not a filter of MLflow \(Invalid"):
        best(store, "mean_local", where="alpha < 1")
    with pytest.raises(DataError, match="no finished run has final/top1_vote; log runs with"):
        best(store, "top1_vote")
    with pytest.raises(DataError, match=r"--promote: fedavg-s4-.* is the best, but its model is not in the store"):
        best(store, "top1_global", promote=True)
    with pytest.raises(DataError, match="there is no store at"):
        best(f"sqlite:///{tmp_path / 'none.db'}", "mean_local")
    assert not (tmp_path / "none.db").exists(), "nor is one made"


def test_runs_of_several_experiments_are_not_ranked_together(
    store: str, tmp_path: Path, write_run: Write, reader: Any
) -> None:
    run_dir = write_run(tmp_path / "other", 9, finished=True, seed=9, partition={"name": "shards"})
    assert RunTracker(run_dir, uri=store).sync(final=True)
    with pytest.raises(ConfigError, match="--experiment: several have final/top1_global; choose from digits/diri"):
        best(store, "top1_global")
    assert best(store, "top1_global", experiment="digits/shards").value == pytest.approx(0.9)


def test_own_data_with_a_title_are_an_experiment_of_their_own(
    store: str, tmp_path: Path, write_run: Write, reader: Any
) -> None:
    """Two data sets of images of one's own: the best of one is not sought among the other's runs."""
    data = {"name": "imagefolder", "title": "Ward 3"}
    run_dir = write_run(tmp_path / "titled", 9, finished=True, seed=9, data=data)
    assert RunTracker(run_dir, uri=store).sync(final=True)
    found = best(store, "top1_global", experiment="Ward 3/dirichlet")
    assert (found.among, found.value) == (1, pytest.approx(0.9))
    [run] = reader.runs("Ward 3/dirichlet")
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"Ward 3", "Ward 3/dirichlet s9"}
    assert description.registered_name(found.experiment) == "Ward 3-dirichlet"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("top1_vote", "final/top1_vote"),
        ("final/etf/mean_local", "final/etf/mean_local"),
        ("scalars_up_per_round", "comm/scalars_up_per_round"),
        ("time/steps_per_second", "time/steps_per_second"),
        ("energy/total_train-clients", "energy/total_train-clients"),
        ("num_parameters", "model/num_parameters"),
        ("privacy/epsilon", "privacy/epsilon"),
        ("tasks/final_forgetting_global", "tasks/final_forgetting_global"),
    ],
)
def test_a_figure_is_named_as_in_its_file_or_as_in_mlflow(name: str, metric: str) -> None:
    assert metric_of(name) == metric
