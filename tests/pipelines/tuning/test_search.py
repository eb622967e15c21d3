"""Studies on disk: what they leave, that a kill at any moment changes nothing, and that no trial stops the others."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from flcore import running
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from flcore.data.sources.digits import Digits
from pipelines.plan.files import read_params
from pipelines.runs.folder import RunFolder
from pipelines.tuning import search as searching
from pipelines.tuning import trial as trials
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.problem import Problem

from .conftest import PROJECT, RESULTS, Configure, Search, interrupt, results_of, states_of

# ------------------------------------------------------------------------------------------------- interruptions

KILLED_IN_ITS_SECOND_TRIAL = """
import os, signal, sys
from pathlib import Path
from pipelines.tuning import search as searching
from tests.pipelines.tuning.conftest import Told, _configure, _pool, _search

searching.RunPool = _pool  # trials train in the process that is killed

class Killed(Told):
    def round(self, label, number, record):
        if (label, number) == ("trial 1", 2):
            os.kill(os.getpid(), signal.SIGKILL)

_search(_configure(federation={"rounds": 4}), 2, Path(sys.argv[1]), told=Killed())
"""


@pytest.mark.slow
def test_a_killed_process_is_gone_on_with_and_ends_as_an_uninterrupted_one(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the middle of a trial: no trial is lost, repeated or different from what it would have been."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_IN_ITS_SECOND_TRIAL, str(killed)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    began = [leg["began_ms"] for leg in RunFolder(StudyFiles(killed).trial(1).directory).legs]
    assert len(began) == 2

    config = config_with(federation={"rounds": 4})
    search(config, 2, killed)
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "another"))
    search(config, 2, whole)
    assert states_of(killed) == [("complete", None)] * 2
    # Its first two rounds are those of the process that was killed.
    legs = json.loads(StudyFiles(killed).trial(1).timing.read_text())["rounds"]
    assert [leg["began_ms"] for leg in legs][:2] == began
    for name in RESULTS:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


MOMENTS: list[tuple[object, str]] = [
    (Problem, "suggest"),
    (running, "train"),
    (running, "evaluate"),
    (trials.TrialRuns, "end"),
    (optuna.study.Study, "tell"),
    (searching, "write_results"),
]


def test_interruptions_at_all_moments_of_a_trial_change_nothing(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """One after the other, each further on in the first trial than the one before."""
    for owner, name in MOMENTS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                search(config_with(), 2, tmp_path / "study")
    search(config_with(), 2, tmp_path / "study")
    for result in RESULTS:
        assert (tmp_path / "study" / result).read_bytes() == (finished / result).read_bytes()


# -------------------------------------------------------------------------------------------------------- results


def test_the_first_trial_has_the_given_values_and_more_trials_are_added(
    tmp_path: Path, config_with: Configure, search: Search, told: Any
) -> None:
    given = config_with(method={"mu": 0.5}, local={"epochs": 2})
    first = search(given, 1, tmp_path, told=told)
    before = results_of(tmp_path)["trials"]
    assert before[0]["params"] == {
        "method.mu": 0.5,
        "local.lr": 0.1,
        "local.momentum": 0.0,
        "local.schedule": "constant",
        "local.epochs": 2,
    }
    assert (first.was_finished, first.store, first.failed) == (False, "sqlite:///somewhere.db", {})
    search(given, 2, tmp_path, told=told)
    both = results_of(tmp_path)["trials"]
    assert both[:1] == before
    assert len(both) == 2
    assert both[1]["params"] != before[0]["params"]
    again = search(given, 2, tmp_path, told=told, wait=False)
    assert (again.was_finished, again.store) == (True, None)
    assert (told.trials, told.studies) == (2, 3)


def test_the_best_file_gives_the_given_configuration_with_the_best_values_on_test_data(
    tmp_path: Path, config_with: Configure, search: Search, told: Any
) -> None:
    given = config_with(partition={"validation": 0.0}, tracking={"uri": "http://u:secret@127.0.0.1:9"})
    outcome = search(given, 2, tmp_path, told=told)
    results = results_of(tmp_path)
    best = results["trials"][results["best"][0]]
    assert best["accuracy"] == max(trial["accuracy"] for trial in results["trials"])
    config = Config.from_mapping(read_params(outcome.directory / "best.yaml"))
    mapping = given.to_mapping()
    for key, value in best["params"].items():
        section, name = key.split(".")
        mapping[section][name] = value
    mapping["tracking"] = Config.from_mapping({}).to_mapping()["tracking"]
    assert config.to_mapping() == mapping
    assert config.evaluation.split == "test"
    assert any(line.startswith("2 trials: all given or random") for line in told.lines)
    assert "partition.validation is 0: the study sets aside 0.2 of each client's training data" in told.lines
    assert outcome.table.endswith(f"protofl run --params {outcome.directory}/best.yaml\n")
    assert f"**{best['number']}**" in outcome.markdown
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not any(b"secret" in text for text in texts)


def test_test_images_are_never_looked_at(
    tmp_path: Path, config_with: Configure, search: Search, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same study on data whose test images are all black: the same accuracies."""
    original = Digits.load

    def blackened(self: Digits, root: Path | None, download: bool = False) -> Any:
        raw = original(self, root, download)
        black = np.zeros_like(np.asarray(raw.test.images))
        return dataclasses.replace(raw, test=dataclasses.replace(raw.test, images=black))

    monkeypatch.setattr(Digits, "load", blackened)
    search(config_with(), 2, tmp_path / "study")
    found, usual = results_of(tmp_path / "study"), results_of(finished)
    assert found["data_fingerprint"] != usual["data_fingerprint"]
    assert found["trials"] == usual["trials"]


def test_a_method_without_a_global_model_has_a_study_of_its_own_figure_and_bytes(
    tmp_path: Path, config_with: Configure, search: Search
) -> None:
    search(config_with(method={"name": "fedproto"}), 1, tmp_path, objective="accuracy,bytes")
    results = results_of(tmp_path)
    last = RunFolder(StudyFiles(tmp_path).trial(0).directory).history[-1]
    assert results["metric"] == "mean_local"
    assert results["trials"][0]["accuracy"] == last["mean_local"]
    assert results["best"] == [0]


# ---------------------------------------------------------------------------------------------- folders and storages


def test_the_folder_of_another_study_is_refused(config_with: Configure, search: Search, finished: Path) -> None:
    before = (finished / "study.json").read_bytes()
    said = r"another configuration \(local\.batch_size is 16 there\)\nchoose another --out"
    with pytest.raises(ConfigError, match=said):
        search(config_with(local={"batch_size": 8}), 3, finished)
    with pytest.raises(ConfigError, match="objective is accuracy there"):
        search(config_with(), 3, finished, objective="accuracy,bytes")
    with pytest.raises(ConfigError, match=r"tune\.parallel is 1 there"):
        search(config_with(), 3, finished, at_once=2)
    with pytest.raises(ConfigError, match=r"tune\.sampler is tpe there"):
        search(config_with(tune={"sampler": "random"}), 3, finished)
    assert (finished / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"trials": 0}, ConfigError, "--trials 0: must be at least 1"),
        ({"storage": "nowhere"}, ConfigError, "--storage nowhere: cannot be opened"),
        ({"storage": "sqlite:////no/such/folder/x.db"}, ConfigError, "unable to open database file"),
        ({"storage": "postgresql://u:secret@127.0.0.1:1/x"}, ConfigError, r"postgresql://\*\*\*@127.0.0.1"),
        ({"validation": 0.001}, DataError, "partition.validation = 0.001: leaves no client any validation data"),
    ],
)
def test_bad_input_is_a_line_or_two(
    tmp_path: Path, config_with: Configure, search: Search, asked: dict[str, Any], kind: type[Exception], said: str
) -> None:
    config = config_with(partition={"validation": asked.get("validation", 0.25)})
    with pytest.raises(kind, match=said) as error:
        search(config, asked.get("trials", 1), tmp_path / "study", storage=asked.get("storage"))
    assert "secret" not in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.slow
def test_a_shared_storage_leaves_other_folders_trials_alone(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders, one storage: the trial that was interrupted in one is not taken up by the other."""
    storage = f"sqlite:///{tmp_path / 'common.db'}"
    with monkeypatch.context() as patch:
        patch.setattr(running, "train", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(config_with(), 1, tmp_path / "one", storage=storage)
    search(config_with(), 1, tmp_path / "two", storage=storage)
    assert sorted(path.name for path in (tmp_path / "two" / "trials").iterdir()) == ["0001"]
    search(config_with(), 2, tmp_path / "one", storage=storage)
    assert sorted(path.name for path in (tmp_path / "one" / "trials").iterdir()) == ["0000"]
    assert states_of(tmp_path / "one") == [("complete", None)] * 2
