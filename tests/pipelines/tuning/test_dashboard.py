"""Several files of studies as the one storage that Optuna's dashboard reads."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipelines.tuning.dashboard import Studies
from pipelines.tuning.journal import open_journal


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return tmp_path


def study(name: str, values: list[float], *, folder: str | None = None) -> optuna.Study:
    """A study with a trial for each x, whose value is x itself."""
    home = Path(folder or f"runs/{name}")
    home.mkdir(parents=True, exist_ok=True)
    made = optuna.create_study(
        storage=f"sqlite:///{home}/study.db", study_name=name, direction="maximize", load_if_exists=True
    )
    for value in values:
        made.enqueue_trial({"x": value})
        made.optimize(lambda trial: trial.suggest_float("x", 0, 10), n_trials=1)
    return made


def shown(storage: Studies) -> dict[str, list[float | None]]:
    """The values of all trials by the name of their study."""
    return {
        found.study_name: [trial.value for trial in storage.get_all_trials(found._study_id)]
        for found in storage.get_all_studies()
    }


def test_every_study_is_shown_under_its_folder_also_one_that_begins_later() -> None:
    study("tune-a", [1.0, 2.0])
    study("tune-b", [3.0])
    storage = Studies()
    assert shown(storage) == {"runs/tune-a": [1.0, 2.0], "runs/tune-b": [3.0]}
    study("tune-0", [4.0])
    study("tune-a", [5.0])
    ids = {found.study_name: found._study_id for found in storage.get_all_studies()}
    assert shown(storage) == {"runs/tune-0": [4.0], "runs/tune-a": [1.0, 2.0, 5.0], "runs/tune-b": [3.0]}
    assert len(set(ids.values())) == 3
    for name, number in ids.items():
        assert storage.get_study_name_from_id(number) == name
        assert storage.get_study_id_from_name(name) == number


@pytest.mark.parametrize("folder", ["runs/fair/tuning/fedavg", "runs/nightly/2026-11-26/tuning/fedavg"])
def test_journals_are_shown_beside_files_of_earlier_versions_also_those_of_a_tuned_comparison(folder: str) -> None:
    study("tune-a", [1.0])
    home = Path(folder)
    home.mkdir(parents=True)
    made = optuna.create_study(
        storage=open_journal(home / "study.journal"), study_name="fedavg-1", direction="maximize"
    )
    made.add_trial(create_trial(value=2.0))
    assert shown(Studies()) == {"runs/tune-a": [1.0], folder: [2.0]}


def test_two_studies_of_one_file_are_told_apart() -> None:
    for name in ("one", "two"):
        study(name, [1.0], folder="runs/both")
    assert set(shown(Studies())) == {"runs/both: one", "runs/both: two"}


def test_optuna_reads_a_study_through_it_and_may_note_something() -> None:
    """As the dashboard does for importances and for notes."""
    study("tune-a", [1.0])
    own = study("tune-b", [3.0, 7.0, 5.0])
    storage = Studies()
    seen = optuna.load_study(study_name="runs/tune-b", storage=storage)
    assert seen.best_value == 7.0 and seen.best_params == {"x": 7.0}
    assert seen.directions == own.directions
    trial = seen.best_trial
    assert storage.get_trial(trial._trial_id) == trial
    assert storage.get_trial_number_from_id(trial._trial_id) == 1
    seen.set_user_attr("note", "look at the second")
    assert own.user_attrs["note"] == "look at the second" == seen.user_attrs["note"]
    number = storage.create_new_trial(seen._study_id, FrozenTrial(**_waiting()))
    assert storage.get_trial(number).state == TrialState.WAITING and len(own.trials) == 4


def _waiting() -> dict[str, object]:
    empty: dict[str, object] = {}
    return {
        "number": 0,
        "state": TrialState.WAITING,
        "value": None,
        "datetime_start": None,
        "datetime_complete": None,
        "params": empty,
        "distributions": empty,
        "user_attrs": empty,
        "system_attrs": empty,
        "intermediate_values": empty,
        "trial_id": 0,
    }


def test_what_is_no_study_and_what_is_deleted_is_left_out(folder: Path) -> None:
    study("tune-a", [1.0])
    for name, content in (("tune-b", b"no database" * 100), ("tune-c", b"")):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "study.db").write_bytes(content)
    storage = Studies()
    assert shown(storage) == {"runs/tune-a": [1.0]}
    (folder / "runs" / "tune-a" / "study.db").unlink()
    assert shown(storage) == {}


def test_studies_are_begun_and_deleted_elsewhere() -> None:
    study("tune-a", [1.0])
    storage = Studies()
    with pytest.raises(NotImplementedError, match="protofl tune"):
        optuna.create_study(storage=storage, study_name="new")
    with pytest.raises(NotImplementedError, match="folder"):
        storage.delete_study(storage.get_study_id_from_name("runs/tune-a"))
    assert shown(storage) == {"runs/tune-a": [1.0]}
