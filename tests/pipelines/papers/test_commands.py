"""``protofl paper claims`` and ``keep`` where what they are given is not there, or damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.app import main
from pipelines.papers.published import PUBLISHED_DIR

from .test_publish import leave

TOLD: dict[str, Any] = {"id": "fedpa.table2", "seeds": [0], "partition_seeds": None, "rounds_scale": 1}


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and what was said on standard error."""
    code = main(["paper", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "damaged",
    [
        *({key: value for key, value in TOLD.items() if key != lacking} for lacking in TOLD),
        *([], "text", TOLD | {"seeds": None}, TOLD | {"rounds_scale": "much"}, TOLD | {"assignments": [1]}),
    ],
)
def test_a_damaged_table_is_told_with_its_file(
    damaged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fedpa.table2"
    folder.mkdir()
    (folder / "table.json").write_text(json.dumps(damaged))
    for words in (("claims", "--papers", "fedpa", "--home", str(tmp_path)), ("keep", str(folder))):
        code, said = ended(capsys, *words)
        assert code == 3, said
        assert said.startswith(f"protofl: {folder / 'table.json'}: damaged") and "; delete it" in said, said


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = leave(tmp_path / "table", {"fedavg": 90})
    code, said = ended(capsys, "keep", str(table), "--into", "/proc/nope")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("protofl: --into /proc/nope: cannot be written (No such file or directory)")


def test_papers_and_folders_that_there_are_not_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ended(capsys, "claims", "--papers", "fedpa,foo")
    assert code == 2 and "--papers foo: not known; one of fedpg, fedcspc, fedmlp, fedpa, gfpl" in said
    code, said = ended(capsys, "claims", "--kept", str(tmp_path / "nowhere"))
    assert code == 3 and "nowhere: no kept figures there" in said


@pytest.mark.slow
def test_the_list_tells_kept_runs_also_of_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """GFPL's Figure 4 prints no figures, so that its runs fill no cells; "0 kept" was said of them."""
    assert main(["paper", "list", "--json"]) == 0
    listed = {table["id"]: table for table in json.loads(capsys.readouterr().out)}
    assert main(["paper", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for path in PUBLISHED_DIR.glob("*.json"):
        kept = json.loads(path.read_text())
        found, runs = listed[kept["id"]], len(kept["runs"])
        assert found["kept_runs"][f"{kept['rounds_scale']:g}"] == runs
        if found["printed"]:
            assert re.search(rf"\b{runs} run", lines[kept["id"]])
        else:
            assert f"({runs} runs kept" in lines[kept["id"]]


def test_a_line_tells_how_many_pairs_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FedPA three points above FedAvg in either of two seeds on MNIST, α 0.1: one of the 35 pairs of its sentence."""
    leave(tmp_path / "fedpa.table2", {"fedavg": 90, "fedpa_authors": 93}, seeds=(0, 1))
    command = ["paper", "claims", "--papers", "fedpa", "--home", str(tmp_path)]
    assert main(command) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fedpa.best "))
    assert line.split()[1] == "undecided" and line.endswith("(1 of 35 pairs)")
    assert main([*command, "--json"]) == 0
    found = {one["id"]: one for one in json.loads(capsys.readouterr().out)}["fedpa.best"]
    decided = [pair for pair in found["pairs"] if pair["verdict"] != "not run"]
    assert [(pair["verdict"], pair["mean"], pair["n"], pair["df"]) for pair in decided] == [
        ("holds on one division", 3.0, 2, 1)
    ]
