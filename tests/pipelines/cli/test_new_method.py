"""``protofl new method``: what it writes works as written, and it overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flcore.config.plugins import load
from flcore.core.errors import ConfigError
from pipelines.cli.new_method import write
from pipelines.cli.registry import describe_one

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


@pytest.mark.slow
def test_its_test_passes_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """In this process: another one would have to import everything again."""

    class Results:
        def __init__(self) -> None:
            self.outcomes: list[str] = []

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                self.outcomes.append(report.outcome)

    _, test = write("my_method", tmp_path)
    results = Results()
    folders = (f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'base'}")
    assert pytest.main([str(test), "-q", "-p", "no:cacheprovider", *folders], plugins=[results]) == 0
    assert results.outcomes == ["passed"] * 4


def test_the_method_can_be_loaded_and_tuned(tmp_path: Path) -> None:
    path, test = write("my_method", tmp_path / "made")
    assert (path, test) == (tmp_path / "made" / "my_method.py", tmp_path / "made" / "test_my_method.py")
    load(path)
    described = describe_one("method", "my_method")
    assert described["search"]["weight"] == {"low": 1e-4, "high": 1.0, "log": True}
    assert described["summary"] == "FedAvg with a penalty on long features"


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
