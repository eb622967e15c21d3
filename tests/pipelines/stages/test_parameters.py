"""Parameters with which DVC would not see changes: they are refused before anything is started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import make_run
from pipelines.cli.doctor import examine

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A project, and the programs that are started in it; none of them is."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".git").mkdir()
    programs: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[0] == "dvc":
            programs.append(command)
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(make_run.subprocess, "run", note)
    return programs


def test_a_root_that_dvc_does_not_know_is_refused(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    Path("params.yaml").write_text("data: {root: ~/images}\n")
    assert make_run.main() == 2 and started == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "data.root" in said
    assert any(line.startswith("miss dvc: ") and "data.root" in line for line in examine())


def test_a_parameter_file_that_cannot_be_read_is_a_line(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("params.yaml").write_text("seed: [\n")
    assert make_run.main() == 2
    assert capsys.readouterr().err.startswith("protofl: params.yaml: not valid YAML: ")
    assert started == []
