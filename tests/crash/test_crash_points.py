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
    table = tmp_path / "crash-points.json"
    command = [sys.executable, str(POINTS), "--out", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=3000)
    assert table.exists(), done.stderr
    return done.returncode, json.loads(table.read_text())


@pytest.mark.slow
def test_a_command_goes_on_after_faults_drawn_at_random(tmp_path: Path) -> None:
    code, table = tried(tmp_path, "--scenarios", "partition", "--points", "2", "--seed", "1", "--lanes", "2")
    assert table["lost"] == [] and code == 0
    assert table["tried"] == 2
    assert table["calls"]["partition"]["rename"] >= 4, (
        "indices and manifest, in the cache and where they were asked for"
    )


def test_a_loss_would_be_seen(tmp_path: Path) -> None:
    """A program that writes in place is caught at each of its two writes.

    Its operations: 1 the folder, 2 the file is opened, 3 half of its content, 4 opened again, 5 the other half. Killed
    after 2, 3 or 4, or torn in 3 or 5, what is there is taken for the whole. Killed after 1 nothing is there, and after
    5 all is.
    """
    code, table = tried(tmp_path, "--scenarios", "careless", "--lanes", "2")
    assert code == 1
    assert table["calls"]["careless"] == {"new_folder": 1, "open_end": 2, "write": 2}
    lost = {(one["fault"]["kind"], one["fault"]["at"]) for one in table["lost"]}
    assert {("kill", 2), ("kill", 3), ("kill", 4), ("tear", 3), ("tear", 5)} <= lost
    assert ("kill", 1) not in lost and ("kill", 5) not in lost


@pytest.mark.slow
def test_every_command_goes_on_after_faults_drawn_at_random(tmp_path: Path) -> None:
    code, table = tried(tmp_path, "--points", "60", "--seed", "2")
    assert table["lost"] == [] and code == 0
