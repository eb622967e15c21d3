"""A parameter file that leaves keys out: DVC's stages need some, which is said before anything is started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from pipelines.cli import make_run
from pipelines.cli.doctor import examine
from pipelines.plan.files import read_params
from pipelines.plan.params import with_values
from pipelines.plan.yaml_text import write
from pipelines.stages.parameters import missing_keys

ROOT = Path(__file__).resolve().parents[3]
SHORT = "data:\n  name: digits\npartition:\n  num_clients: 5\nfederation:\n  rounds: 2\n"


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A project with a short parameter file, and the programs that are started in it; none of them is."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "params.yaml").write_text(SHORT)
    programs: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[0] == "dvc":
            programs.append(command)
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(make_run.subprocess, "run", note)
    return programs


def test_keys_that_are_missing_are_named_with_what_to_add(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_run.main() == 2
    said = capsys.readouterr().err
    assert started == []
    assert said.count("\n") == 1
    assert all(
        words in said for words in ("params.yaml", "dvc.yaml", "seed: 0", "local: {}", "engine.device: ", "data.root: ")
    )
    assert any(line.startswith("miss dvc: ") and "seed: 0" in line for line in examine())


def test_what_is_to_be_added_changes_no_result_and_is_enough(started: list[list[str]]) -> None:
    raw = read_params(None)
    filled = with_values(raw, missing_keys(Path(), raw))
    assert missing_keys(Path(), filled) == {}
    assert filled["data"]["root"] == "images"
    assert Config.from_mapping(filled).identity() == Config.from_mapping(raw).identity()
    Path("params.yaml").write_text(write(filled))
    assert not any(line.startswith("miss dvc") for line in examine())
    assert make_run.main() == 1
    assert started == [["dvc", "repro"]]


def test_a_root_that_dvc_does_not_know_is_refused(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    raw = read_params(None)
    Path("params.yaml").write_text(write(with_values(raw, {**missing_keys(Path(), raw), "data.root": "~/images"})))
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


@pytest.mark.parametrize(
    "text", ["", "stages: 3\n", "stages: {a: {params: 4}}\n", "[", "stages: {a: {params: [{b: []}]}}"]
)
def test_what_is_wrong_with_dvc_yaml_is_for_dvc_to_say(text: str) -> None:
    Path("dvc.yaml").write_text(text)
    assert missing_keys(Path(), {}) == {}
