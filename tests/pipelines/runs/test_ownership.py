"""Whose folder it is: nothing is worked in, or emptied, that is another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flcore.io import disk
from flcore.core.errors import ConfigError
from pipelines.runs.ownership import Kind, claim_folder, may_be_replaced, remove_own, strangers


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("run", ()),
        ("run", (".gitignore",)),
        # Killed anywhere: before its description was there, or with it gone.
        ("run", (".running",)),
        ("run", ("inputs.json", "plugins/mine.py", ".config.json.12.34.tmp")),
        ("run", ("model.safetensors", "clients/0000.safetensors", "metrics.json")),
        # A run that has said that it is one may have notes beside it.
        ("run", ("config.json", "checkpoint/state.json", "notes.txt")),
        ("run", ("history.jsonl", "notes.txt")),
        ("comparison", ("runs/fedavg-s0-01234567/config.json",)),
        ("comparison", ("comparison.json", "runs.csv", "notes.txt")),
        ("comparison", ("tuning/fedavg/study.journal",)),
        ("sweep", ("runs/fedavg-s0-01234567/config.json",)),
        ("study", (".lock", ".claims/0000", "study.journal")),
        ("study", ("study.db", "study.db-journal")),
        ("study", (".lock", ".study.journal.lock")),
        ("paper table", ("table.json", "even/comparison.json", "notes.txt")),
        ("stages", ("prepared/meta.json", "soak/soak.md", ".gitignore", "runs.json")),
        ("prepared", ("train.safetensors",)),
        ("partitions", ("seed-0/manifest.json", ".seed-1.unfinished/manifest.json")),
        ("stage runs", ("fedavg-s0/config.json", "local-s12/config.json")),
    ],
)
def test_a_folder_of_its_own_is_gone_on_with_in_any_state(kind: Kind, names: tuple[str, ...], tmp_path: Path) -> None:
    claim_folder(kind, filled(tmp_path / "out", *names))
    assert left(tmp_path / "out") == sorted(names)


@pytest.mark.parametrize(
    ("kind", "names", "found"),
    [
        ("run", ("notes.txt", "thesis/ch1.tex"), "holds notes.txt and thesis, which a run would not"),
        ("run", ("notes.txt", "metrics.json"), "holds notes.txt, which"),
        ("run", (".git/HEAD",), "holds .git, which"),
        ("run", ("comparison.json", "metrics.json", "report.html"), "holds a comparison, not a run"),
        ("run", ("runs/fedavg-s0-01234567/config.json",), "holds runs, which"),
        ("run", ("sweep.json",), "holds a sweep, not a run"),
        ("run", ("study.journal", "trials/0000/config.json"), "holds a study, not a run"),
        ("run", ("prepared/meta.json", "partitions/seed-0/manifest.json"), "holds the stages of dvc.yaml, not a run"),
        ("comparison", ("config.json", "metrics.json", "notes.txt"), "holds a run, not a comparison"),
        ("comparison", ("checkpoint/state.json",), "holds a run, not a comparison"),
        ("comparison", ("sweep.json", "runs/x"), "holds a sweep, not a comparison"),
        ("comparison", ("runs.json", "runs/fedavg-s0/config.json"), "holds the stages of dvc.yaml, not a comparison"),
        ("comparison", ("proof.json", "runs/x"), "holds what protofl reproduce made, not a comparison"),
        ("sweep", ("config.json",), "holds a run, not a sweep"),
        ("sweep", ("comparison.json", "runs/x"), "holds a comparison, not a sweep"),
        ("study", ("config.json",), "holds a run, not a study"),
        ("study", ("notes.txt",), "holds notes.txt, which a study would not"),
        ("run", ("table.json", "even/comparison.json"), "holds a paper's table, not a run"),
        ("paper table", ("comparison.json", "runs/x"), "holds a comparison, not a paper's table"),
        ("paper table", ("table.csv", "report.html", "mine.txt"), "holds mine.txt, which a paper's table would not"),
        ("stages", ("comparison.json", "runs/x"), "holds a comparison, not the stages"),
        ("prepared", ("meta.json", "mine.csv"), "holds mine.csv, which prepared data would not"),
        ("partitions", ("seed-0/manifest.json", "essay.tex"), "holds essay.tex, which partitions would not"),
        ("stage runs", ("fedavg-s0-01234567/config.json",), "holds fedavg-s0-01234567, which runs of the stage"),
    ],
)
def test_what_is_another_s_is_refused_in_a_line_and_stays(
    kind: Kind, names: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    folder = filled(tmp_path / "out", *names)
    with pytest.raises(ConfigError) as refused:
        claim_folder(kind, folder)
    assert str(refused.value).startswith(f"{folder}: {found}")
    assert "choose another --out" in str(refused.value) and "\n" not in str(refused.value)
    assert left(folder) == sorted(names)


def test_a_table_has_its_settings_beside_what_every_table_has(tmp_path: Path) -> None:
    """A kill in the first of them leaves nothing else that says whose the folder is."""
    folder = filled(tmp_path / "out", "even/runs/fedavg-s0-01234567/config.json")
    claim_folder("paper table", folder, ["even", "skewed"])
    with pytest.raises(ConfigError, match="holds even, which a paper's table would not"):
        claim_folder("paper table", folder, ["skewed"])


@pytest.mark.parametrize("place", ["README.md", "README.md/below", "/proc/x", "/proc/x/y", "n" * 300])
def test_where_no_folder_can_be_is_known_before(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(filled(tmp_path, "README.md"))
    with pytest.raises(ConfigError, match=r"(is not a folder|cannot write there \(.+\)); choose another --out$"):
        claim_folder("run", Path(place))
    assert left(tmp_path) == ["README.md"]


def test_a_place_without_rights_is_refused_and_finished_results_there_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says it, which lets root write anywhere."""
    monkeypatch.setattr(os, "access", lambda *asked, **how: False)
    with pytest.raises(ConfigError, match=r"new: cannot write there \(Permission denied\)"):
        claim_folder("run", tmp_path / "new")
    claim_folder("run", filled(tmp_path / "finished", "config.json", "history.jsonl"))


def test_asking_leaves_no_folder(tmp_path: Path) -> None:
    claim_folder("run", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_run_leaves_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "out", "config.json", "clients/0000.safetensors", ".running", "notes.txt", "mine/a")
    assert strangers("run", folder) == ["mine", "notes.txt"]
    assert not may_be_replaced("run", folder)
    removed: list[str] = []
    remove = disk.remove
    monkeypatch.setattr(disk, "remove", lambda path, **how: removed.append(path.name) or remove(path, **how))
    remove_own("run", folder)
    assert left(folder) == ["mine/a", "notes.txt"]
    assert removed[-1] == ".running"  # else another could begin among what is still being removed


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = filled(tmp_path / "out" / "inside")
    assert may_be_replaced("run", inside)
    monkeypatch.chdir(inside)
    assert not may_be_replaced("run", Path("."))
    assert not may_be_replaced("run", tmp_path / "out")


@pytest.mark.parametrize("kind", ["run", "comparison", "study"])
def test_what_a_run_may_remove_is_no_place_for_results(kind: Kind, tmp_path: Path) -> None:
    """A run that has finished removes its checkpoint, with all that lies in it; also by a link that leads there."""
    run = filled(tmp_path / "a", "config.json", "checkpoint/state.json")
    (tmp_path / "link").symlink_to(run / "checkpoint")
    for inside in (run / "checkpoint" / "b", run / "figures", tmp_path / "link" / "b"):
        with pytest.raises(ConfigError, match="may remove"):
            claim_folder(kind, inside)
        assert not inside.exists()
    claim_folder(kind, run / "notes" / "b")
    claim_folder(kind, tmp_path / "checkpoint" / "b")  # of no run
