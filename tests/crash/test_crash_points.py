"""Some of the points at which a command can be stopped, or the disk can fail it (`tests/crash/points.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

POINTS = Path(__file__).parent / "points.py"


def tried(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and table of the program."""
    table = tmp_path / "table.json"
    command = [sys.executable, str(POINTS), "--json", str(table), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=3000)
    assert table.exists(), done.stderr
    return done.returncode, json.loads(table.read_text())


def test_a_command_goes_on_after_faults_drawn_at_random(tmp_path: Path) -> None:
    code, table = tried(tmp_path, "--scenarios", "gfpl", "--points", "24", "--seed", "1", "--lanes", "2")
    assert table["lost"] == [] and code == 0
    assert table["tried"] == 24
    assert table["calls"]["gfpl"]["rename"] > 20, "the run is no empty one"


def test_a_loss_would_be_seen(tmp_path: Path) -> None:
    """A program that writes in place is caught at each of its two writes.

    Its operations: 1 the folder, 2 the file, 3 and 4 the halves of its content. Killed after 2 or 3, or torn in 3 or 4,
    what is there is taken for the whole. Killed after 1 nothing is there, and after 4 all is.
    """
    code, table = tried(tmp_path, "--scenarios", "careless", "--lanes", "2")
    assert code == 1
    assert table["calls"]["careless"] == {"create": 1, "new_folder": 1, "write": 2}
    lost = {(one["fault"]["kind"], one["fault"]["at"]) for one in table["lost"]}
    assert {("kill", 2), ("kill", 3), ("tear", 3), ("tear", 4)} <= lost
    assert ("kill", 1) not in lost and ("kill", 4) not in lost


@pytest.mark.slow
def test_every_command_goes_on_after_faults_drawn_at_random(tmp_path: Path) -> None:
    code, table = tried(tmp_path, "--points", "60", "--seed", "2")
    assert table["lost"] == [] and code == 0
