"""``protofl check method``: a table for a name or a file, and an exit code that says whether all checks pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flcore.testing import CHECKS
from pipelines.cli.app import main
from pipelines.cli.new_method import write

FAULT = """
    def reply(self, turn, trained):
        message, memory = super().reply(turn, trained)
        return message, {"model": trained.weights * float("nan")}
"""


def test_a_file_that_passes_and_one_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, _ = write("checked_good", tmp_path)
    bad, _ = write("checked_bad", tmp_path)
    bad.write_text(bad.read_text() + FAULT)
    assert main(["check", "method", str(good), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in found] == list(CHECKS)
    assert {one["check"] for one in found if one["result"] != "passed"} == {"workers"}
    assert main(["check", "method", str(bad)]) == 4
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("checked_bad: 0 of 1")
    assert "checked_bad: runs" in said.err


def test_what_cannot_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for command, key in (
        (["check", "method", "fedavgg"], "fedavgg"),
        (["check", "method", "fedprox", "--set", "method.mo=1"], "method.mo"),
        (["check", "method", "none.py"], "none.py"),
    ):
        assert main(command) in (2, 3), command
        assert key in capsys.readouterr().err
