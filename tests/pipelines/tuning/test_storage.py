"""The journal of a project: what Optuna's dashboard shows, and that a study survives its loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from optuna_dashboard._storage_url import get_storage  # type: ignore[import-untyped]

from flcore.core.errors import DataError
from flcore.io.files import read_json
from pipelines.tuning.storage import JOURNAL, open_storage
from tests.cases import quick

from .conftest import PROJECT, Configure, Search


def shown() -> dict[str, list[TrialState]]:
    """The states of trials by study, as the command ``optuna-dashboard .protofl/studies.journal`` reads them."""
    storage = get_storage(str(JOURNAL))
    return {
        name: [trial.state for trial in optuna.load_study(study_name=name, storage=storage).trials]
        for name in optuna.get_all_study_names(storage)
    }


def test_optunas_dashboard_shows_a_study_wherever_it_lies(config_with: Configure, search: Search) -> None:
    search(config_with(federation={"rounds": 1}), 1, Path("studies/of/mine"))
    assert shown() == {"studies/of/mine": [TrialState.COMPLETE]}
    study = optuna.load_study(study_name="studies/of/mine", storage=get_storage(str(JOURNAL)))
    results = read_json(Path("studies/of/mine/study.json"), "")
    assert study.best_value == results["trials"][0]["accuracy"]
    assert study.metric_names == ["top1_global"]
    assert study.trials[0].intermediate_values == {1: study.best_value}


def test_a_deleted_folder_begins_a_new_study(config_with: Configure, search: Search) -> None:
    import shutil

    search(config_with(federation={"rounds": 1}), 1, Path("study"))
    shutil.rmtree("study")
    search(config_with(federation={"rounds": 1}, local={"lr": 0.2}), 1, Path("study"))
    assert shown() == {"study": [TrialState.COMPLETE]}
    assert read_json(Path("study/study.json"), "")["given"]["local.lr"] == 0.2


@pytest.mark.parametrize("content", quick([b'{"op_code": 4, "worker_id": 3}\n', None, b""], 1))
def test_a_lost_journal_is_written_again_from_the_folders(
    config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """No trial is trained twice; a damaged journal is refused in one line that says to delete it."""
    from flcore import running

    search(config_with(), 2, Path("study"))
    before = Path("study/study.json").read_bytes()
    JOURNAL.unlink()
    if content is not None:
        JOURNAL.write_bytes(content)
    monkeypatch.setattr(running, "run_rounds", lambda *arguments, **options: pytest.fail("trained again"))
    if content:
        with pytest.raises(DataError, match=r"studies\.journal: damaged .*; delete it") as error:
            search(config_with(), 2, Path("study"))
        assert "\n" not in str(error.value)
        JOURNAL.unlink()
    search(config_with(), 2, Path("study"))
    assert Path("study/study.json").read_bytes() == before
    assert shown() == {"study": [TrialState.COMPLETE] * 2}


def test_a_named_journal_is_shared_by_folders(config_with: Configure, search: Search) -> None:
    """Two folders, one journal: the second one's trial is the study's second one."""
    config = config_with(federation={"rounds": 1})
    for trials, folder in ((1, "one"), (2, "two")):
        search(config, trials, Path(folder), storage="shared.journal")
    assert sorted(path.name for path in Path("two/trials").iterdir()) == ["0001"]
    storage = open_storage("shared.journal")
    assert len(optuna.get_all_study_names(storage)) == 1
    assert not JOURNAL.exists()


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    """By a full disk or a power failure; Optuna would refuse the whole file from the next line on."""
    path = tmp_path / "x.journal"
    first = optuna.create_study(storage=open_storage(str(path)), study_name="x", direction="maximize")
    first.add_trial(create_trial(value=1.0))
    with path.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_i')
    again = optuna.load_study(storage=open_storage(str(path)), study_name="x")
    again.add_trial(create_trial(value=2.0))
    read = optuna.load_study(storage=open_storage(str(path)), study_name="x")
    assert [trial.value for trial in read.trials] == [1.0, 2.0]


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_away(tmp_path: Path) -> None:
    """Optuna's default waits half a minute for that; for ever where a relative path names the journal."""
    path = Path("folder", "x.journal")
    holds = (
        "import os, signal, sys; from pipelines.tuning.storage import open_storage\n"
        "open_storage(sys.argv[1])._backend._lock.acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run([sys.executable, "-c", holds, str(path)], cwd=tmp_path, check=False, env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert path.with_name("x.journal.lock").is_symlink()
    began = time.monotonic()
    optuna.create_study(storage=open_storage(str(path)), study_name="x")
    assert time.monotonic() - began < 20
