"""Studies against real SQLite storages: what is searched, what is scored on, and that a study survives anything."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from flcore.config import Config
from flcore.data.sources.digits import Digits
from flcore.errors import ConfigError, RunError
from flcore.params import Param, Search
from pipelines import stages
from pipelines.cli.app import main
from pipelines.runs.layout import RunFiles
from pipelines.tracking.sync import read_history
from pipelines.tuning import study as tuning
from pipelines.tuning.study import Problem, StudyFiles, tune

PROJECT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2, "validation": 0.25},
    "method": {"name": "fedprox"},
    "federation": {"rounds": 2},
    "local": {"lr": 0.1, "batch_size": 16},
    "tracking": {"enabled": False},
}


def config_with(**sections: Any) -> Config:
    """The tiny federation of these tests, with sections updated."""
    merged = {name: {**section, **sections.pop(name, {})} for name, section in SETTINGS.items()}
    return Config.from_mapping({**merged, **sections})


def options(**keys: Any) -> list[str]:
    """The same federation as options of the command."""
    flat = {f"{section}.{key}": value for section, values in SETTINGS.items() for key, value in values.items()}
    flat |= {key.replace("__", "."): value for key, value in keys.items()}
    return [part for key, value in flat.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def trials_of(directory: Path) -> list[optuna.trial.FrozenTrial]:
    """The trials in a folder's own storage."""
    storage = f"sqlite:///{directory / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


def results_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "study.json").read_text())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in an empty directory, without a params.yaml."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    # main() replaces the hook; pytest's own comes back after each test.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


# ------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.filterwarnings("error::UserWarning:optuna")
def test_a_killed_command_goes_on_and_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """SIGKILL in the middle of a trial: no trial is lost, repeated or different from what it would have been."""
    killed, whole, rounds = tmp_path / "killed", tmp_path / "whole", 10
    command = [sys.executable, "-m", "pipelines.cli", "tune", "--method", "fedprox", "--trials", "2"]
    process = subprocess.Popen(
        [*command, "--out", str(killed), *options(federation__rounds=rounds)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        history = StudyFiles(killed).trial(1).checkpoint / "history.jsonl"
        deadline = time.monotonic() + 240
        while not (history.exists() and len(read_history(history)) >= 2):
            assert process.poll() is None, "the command ended by itself"
            assert time.monotonic() < deadline, "no round of the second trial in four minutes"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [trial.state for trial in trials_of(killed)] == [TrialState.COMPLETE, TrialState.RUNNING]
    done_before = read_history(history)

    config = config_with(federation={"rounds": rounds})
    tune(config, 2, "accuracy", None, killed)
    tune(config, 2, "accuracy", None, whole)

    trials = trials_of(killed)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    assert len({trial.params["method.mu"] for trial in trials}) == 2
    assert read_history(StudyFiles(killed).trial(1).history)[: len(done_before)] == done_before
    for name in ("study.json", "study.md", "study.svg", "params.yaml"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


INTERRUPTIONS: dict[str, tuple[object, str]] = {
    "before values are proposed": (Problem, "suggest"),
    "before training": (stages, "train"),
    "after training": (stages, "evaluate"),
    "after the trial, before its results are written": (tuning, "write_results"),
}


@pytest.mark.parametrize("moment", INTERRUPTIONS)
def test_an_interruption_at_any_moment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: bytes, moment: str
) -> None:
    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*INTERRUPTIONS[moment], interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(config_with(), 2, "accuracy", None, tmp_path / "study")
    tune(config_with(), 2, "accuracy", None, tmp_path / "study")
    assert (tmp_path / "study" / "study.json").read_bytes() == uninterrupted


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of two trials; tests must not write there."""
    directory = tmp_path_factory.mktemp("finished") / "study"
    tune(config_with(), 2, "accuracy", None, directory)
    return directory


@pytest.fixture(scope="module")
def uninterrupted(finished: Path) -> bytes:
    return (finished / "study.json").read_bytes()


# -------------------------------------------------------------------------------------------------------- results


def test_the_first_trial_has_the_given_values_and_more_trials_are_added(tmp_path: Path) -> None:
    given = config_with(method={"mu": 0.5})
    tune(given, 1, "accuracy", None, tmp_path)
    first = results_of(tmp_path)["trials"]
    tune(given, 2, "accuracy", None, tmp_path)
    both = results_of(tmp_path)["trials"]
    assert first[0]["params"] == {"method.mu": 0.5}
    assert both[:1] == first
    assert len(both) == 2
    assert 1e-3 <= both[1]["params"]["method.mu"] <= 1.0


def test_a_trial_repeated_from_its_params_reaches_exactly_the_same(tmp_path: Path, finished: Path) -> None:
    for trial in results_of(finished)["trials"]:
        repeated = config_with(method={"mu": trial["params"]["method.mu"]}, evaluation={"split": "validation"})
        run = tmp_path / str(trial["number"])
        stages.train(repeated, finished / "prepared", finished / "partition", run)
        history = read_history(RunFiles(run).history)
        assert [record["top1_global"] for record in history] == list(trial["rounds"].values())
        assert history[-1]["top1_global"] == trial["accuracy"]
        assert sum(history[-1]["bytes_up"].values()) + sum(history[-1]["bytes_down"].values()) == trial["bytes"]


def test_test_images_are_never_looked_at(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same study on data whose test images are all black: the same accuracies."""
    original = Digits.load

    def blackened(self: Digits, root: Path | None, download: bool = False) -> Any:
        raw = original(self, root, download)
        black = np.zeros_like(np.asarray(raw.test.images))
        return dataclasses.replace(raw, test=dataclasses.replace(raw.test, images=black))

    monkeypatch.setattr(Digits, "load", blackened)
    tune(config_with(), 2, "accuracy", None, tmp_path)
    assert results_of(tmp_path)["data_fingerprint"] != results_of(finished)["data_fingerprint"]
    assert results_of(tmp_path)["trials"] == results_of(finished)["trials"]


def test_the_printed_command_runs_the_best_trial_on_the_given_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line is a command whose parameter file and --set give the best values, scored on test data."""
    from pipelines.config.params import load_config

    given = config_with(partition={"validation": 0.0})
    tune(given, 2, "accuracy", None, tmp_path)
    said = capsys.readouterr()
    words = said.out.splitlines()[-1].split()
    assert words[:2] == ["protofl", "run"]
    config = load_config(Path(words[words.index("--params") + 1]), words[words.index("--set") + 1 :][:1])
    results = results_of(tmp_path)
    best = results["trials"][results["best"][0]]
    assert config == dataclasses.replace(
        given, method=dataclasses.replace(given.method, mu=best["params"]["method.mu"])
    )
    assert config.evaluation.split == "test"
    assert "sets aside 0.2" in said.err
    assert best["accuracy"] == max(trial["accuracy"] for trial in results["trials"])


def test_two_objectives_give_the_front(tmp_path: Path) -> None:
    """FedProx sends the same whatever μ is, so that the front is the most accurate trial alone."""
    tune(config_with(), 2, "accuracy,bytes", None, tmp_path)
    results = results_of(tmp_path)
    assert len(results["best"]) == 1
    assert [trial.values[1] for trial in trials_of(tmp_path)] == [trial["bytes"] for trial in results["trials"]]


def test_the_front_is_what_no_other_trial_beats_in_both() -> None:
    """(accuracy, bytes): (0.9, 200) loses to (0.9, 100), and (0.7, 60) to (0.8, 50)."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, sent in ((0.7, 60), (0.9, 200), (0.8, 50), (0.9, 100), (0.5, 10)):
        study.add_trial(optuna.trial.create_trial(values=[accuracy, sent], user_attrs={"bytes": sent}))
    best = tuning._best_trials(study)
    assert [trial.number for trial in best] == [3, 1, 2, 0, 4]
    assert [trial.number for trial in tuning._front(best)] == [3, 2, 4]


def test_a_method_without_a_global_model_is_scored_by_its_clients_mean(tmp_path: Path) -> None:
    tune(config_with(method={"name": "fedproto"}), 1, "accuracy", None, tmp_path)
    results = results_of(tmp_path)
    last = read_history(StudyFiles(tmp_path).trial(0).history)[-1]
    assert results["metric"] == "mean_local"
    assert results["trials"][0]["accuracy"] == last["mean_local"]


class _AllButTheFirst(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number > 0


def test_a_pruned_trial_counts_and_leaves_its_history_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_pruner", lambda config: _AllButTheFirst())
    tune(config_with(federation={"rounds": 3}), 2, "accuracy", None, tmp_path)
    first, pruned = results_of(tmp_path)["trials"]
    run = StudyFiles(tmp_path).trial(1)
    assert (first["state"], pruned["state"], pruned["accuracy"]) == ("complete", "pruned", None)
    assert list(pruned["rounds"]) == ["1"]
    assert [path.name for path in sorted(run.directory.rglob("*"))] == ["checkpoint", "history.jsonl", "config.json"]
    assert "| 1 |" in (tmp_path / "study.md").read_text()


def test_a_trial_interrupted_before_it_is_pruned_is_pruned_at_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after round 1 was committed and before it was reported: pruned at round 1 all the same."""
    monkeypatch.setattr(tuning, "_pruner", lambda config: _AllButTheFirst())
    config, original = config_with(federation={"rounds": 3}), optuna.trial.Trial.report

    def report(self: optuna.trial.Trial, value: float, step: int) -> None:
        if self.number == 1:
            raise KeyboardInterrupt
        original(self, value, step)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "report", report)
        with pytest.raises(KeyboardInterrupt):
            tune(config, 2, "accuracy", None, tmp_path)
    tune(config, 2, "accuracy", None, tmp_path)
    assert list(results_of(tmp_path)["trials"][1]["rounds"]) == ["1"]


def test_a_failed_trial_counts_and_does_not_end_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., bool] = stages.train

    def diverges(config: Config, prepared: Path, partition: Path, directory: Path, **keywords: Any) -> bool:
        if directory.name == "0000":
            raise RunError("round 1, client 0: the weights are not finite")
        return original(config, prepared, partition, directory, **keywords)

    monkeypatch.setattr(stages, "train", diverges)
    with pytest.raises(RunError, match="none of the 1 trials has finished; the last one: round 1, client 0"):
        tune(config_with(), 1, "accuracy", None, tmp_path)
    tune(config_with(), 2, "accuracy", None, tmp_path)
    assert [trial["state"] for trial in results_of(tmp_path)["trials"]] == ["fail", "complete"]
    assert results_of(tmp_path)["best"] == [1]


# -------------------------------------------------------------------------------------------------- search ranges


@pytest.mark.parametrize(
    ("parameter", "fits"),
    [
        (Param("k", "int", 3, "", search=Search(2, 9)), lambda v: type(v) is int and 2 <= v <= 9),
        (Param("k", "int or null", None, "", search=Search(1, 64, log=True)), lambda v: type(v) is int),
        (Param("mu", "float", 0.1, "", search=Search(0.01, 1, log=True)), lambda v: type(v) is float and v <= 1),
        (Param("how", "str", "a", "", search=Search(choices=("a", "b"))), lambda v: v in ("a", "b")),
        (Param("on", "bool", True, "", search=Search(choices=(True, False))), lambda v: type(v) is bool),
    ],
)
def test_values_have_the_type_of_their_parameter(parameter: Param, fits: Callable[[Any], bool]) -> None:
    study = optuna.create_study(sampler=tuning._sampler(0, 0))
    for _ in range(5):
        assert fits(tuning._suggest(study.ask(), parameter))


def test_given_values_outside_the_search_range_do_not_begin_the_study() -> None:
    assert Problem.of(config_with(method={"mu": 0.0}), "accuracy").first_guess() is None
    assert Problem.of(config_with(method={"mu": 0.2}), "accuracy").first_guess() == {"method.mu": 0.2}


def test_the_study_is_named_by_everything_but_what_it_searches() -> None:
    name = Problem.of(config_with(), "accuracy").name
    assert Problem.of(config_with(method={"mu": 0.2}, engine={"workers": 3}), "accuracy").name == name
    assert Problem.of(config_with(local={"lr": 0.2}), "accuracy").name != name
    assert Problem.of(config_with(seed=1), "accuracy").name != name
    assert Problem.of(config_with(), "accuracy,bytes").name != name


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "fedavg"], ["--method fedavg: has no search space; these have one:", "fedprox"]),
        (["--method", "fedpro"], ["method.name = fedpro: must be one of"]),
        (["--method", "fedprox", "--trials", "0"], ["--trials 0: must be at least 1"]),
        (["--method", "fedprox", "--storage", "nowhere"], ["--storage nowhere: cannot be opened"]),
        (["--method", "fedprox", "--storage", "sqlite:////no/such/dir/x.db"], ["unable to open database file"]),
        (["--method", "fedprox", "--storage", "postgresql://u:secret@127.0.0.1:1/x"], ["postgresql://***@127.0.0.1"]),
        (["--method", "fedprox", "--set", "local.lr=-1"], ["local.lr = -1"]),
    ],
)
def test_bad_input_is_a_line_or_two_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: list[str]
) -> None:
    assert main(["tune", *options(), *arguments, "--out", str(tmp_path / "study")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 2
    assert all(words in "\n".join(lines) for words in said)
    assert "secret" not in "\n".join(lines)
    assert not (tmp_path / "study" / "prepared").exists()


def test_the_folder_of_another_configuration_is_refused(finished: Path) -> None:
    before = (finished / "study.json").read_bytes()
    with pytest.raises(ConfigError, match=r"another configuration \(local\.lr is 0\.1 there\)\nchoose another --out"):
        tune(config_with(local={"lr": 0.05}), 3, "accuracy", None, finished)
    with pytest.raises(ConfigError, match="objective is accuracy there"):
        tune(config_with(), 3, "accuracy,bytes", None, finished)
    assert (finished / "study.json").read_bytes() == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process works on this study"):
            tune(config_with(), 1, "accuracy", None, tmp_path)


def test_a_shared_storage_leaves_other_folders_trials_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders, one storage: the trial that was interrupted in one is not taken up by the other."""
    storage = f"sqlite:///{tmp_path / 'common.db'}"

    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "train", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(config_with(), 1, "accuracy", storage, tmp_path / "one")
    tune(config_with(), 1, "accuracy", storage, tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two" / "trials").iterdir()) == ["0001"]
    tune(config_with(), 2, "accuracy", storage, tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one" / "trials").iterdir()) == ["0000"]
    assert [trial["state"] for trial in results_of(tmp_path / "one")["trials"]] == ["complete", "complete"]


# --------------------------------------------------------------------------------------------------------- MLflow


def test_mlflow_shows_the_study_with_its_trials_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses connections costs nothing but a warning; the same command later logs everything, once."""
    refused = config_with(tracking={"enabled": True, "uri": "http://127.0.0.1:9"})
    tune(refused, 2, "accuracy", None, tmp_path)
    assert len(results_of(tmp_path)["trials"]) == 2

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    reachable = config_with(tracking={"enabled": True, "uri": uri})
    monkeypatch.setattr(tuning, "_pruner", lambda config: _AllButTheFirst())
    for wanted in (2, 3, 3):
        tune(reachable, wanted, "accuracy", None, tmp_path)

    from mlflow.tracking.client import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "digits/iid"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    trials = {run.data.tags["trial"]: run for run in runs if run is not parent}
    results = results_of(tmp_path)
    assert {run.data.tags["mlflow.parentRunId"] for run in trials.values()} == {parent.info.run_id}
    assert [trials[n].info.status for n in "012"] == ["FINISHED", "FINISHED", "KILLED"]
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["study"] == results["study"]
    assert parent.data.metrics["final/top1_global"] == results["trials"][results["best"][0]]["accuracy"]
    assert parent.data.metrics["best/round"] == results["best"][0]
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {"study.json", "study.md", "study.svg"}
    for number, run in trials.items():
        logged = float(run.data.params["method.mu"])
        assert logged == results["trials"][int(number)]["params"]["method.mu"]
