"""The soak's short form: a dozen faults at random moments, with real servers, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
FAULTS = 12


@pytest.mark.services
def test_nothing_is_lost_in_a_dozen_faults(tmp_path: Path) -> None:
    home = tmp_path / "soak"
    command = [sys.executable, "-m", "tests.soak", "--faults", str(FAULTS), "--out", str(home)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    thrown = json.loads((home / "soak.json").read_text())["thrown"]
    assert len(thrown) == FAULTS
    assert {one["outcome"] for one in thrown} <= {"gone on", "refused"}
    assert len({one["kind"] for one in thrown}) >= FAULTS / 2  # each kind as often as every other
