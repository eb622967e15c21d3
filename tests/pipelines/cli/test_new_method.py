"""``protofl new method``: what it writes works as written, and it overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flcore.errors import ConfigError
from flcore.plugins import load, unload
from pipelines.cli.new_method import write

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("length", [88, 120])
def test_both_files_are_formatted_and_pass_the_projects_own_rules(tmp_path: Path, length: int) -> None:
    """Whatever line length the reader's own project has: the default one, or ours."""
    write("a_method", tmp_path)
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    common = ["--isolated", "--line-length", str(length), "."]
    rules = ["--select", ",".join(lint["select"]), "--ignore", ",".join(lint["ignore"])]
    google = ["--config", 'lint.pydocstyle.convention="google"']
    for command in (["check", "--no-cache", *rules, *google], ["format", "--no-cache", "--check"]):
        line = [sys.executable, "-m", "ruff", *command, *common]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_its_test_passes_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write("my_method", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_method.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_the_method_can_be_loaded_and_tuned(tmp_path: Path) -> None:
    path, test = write("my_method", tmp_path / "made")
    assert (path, test) == (tmp_path / "made" / "my_method.py", tmp_path / "made" / "test_my_method.py")
    load(path)
    try:
        from pipelines.cli.registry import describe_method

        described = describe_method("my_method")
        assert described["search"]["weight"] == {"low": 1e-4, "high": 1.0, "log": True}
        assert "class MyMethod(FedAvg)" in path.read_text()
    finally:
        unload("my_method")


@pytest.mark.parametrize("name", ["Mine", "1st", "my-method", "class", ""])
def test_names_that_no_method_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name is made of a-z"):
        write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_no_name_is_taken_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is a method called so already"):
        write("fedavg", tmp_path)
    (tmp_path / "test_mine.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"test_mine\.py: is there already"):
        write("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
