"""A table's runs, in a process of their own that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines.orchestration.commands import operation
from pipelines.papers.carry_out import run_table
from pipelines.papers.plan import Asked, plan

from .conftest import TINY, tiny

SCRIPT = """
import json, sys
from pathlib import Path
from pipelines.orchestration.commands import operation
from pipelines.papers.carry_out import run_table
from pipelines.papers.catalogue import table_of
from pipelines.papers.plan import Asked, plan

if __name__ == "__main__":
    table = table_of(json.loads(sys.argv[1]), "tiny.yaml")
    planned = plan(table, Asked(seeds=(0, 1), rounds_scale=0.2, assignments=("tracking.enabled=false",)))
    with operation(planned.settings[0].parameters, wait=False) as (how, _):
        run_table(planned, Path(sys.argv[2]), how)
"""
WRITTEN = ("table.md", "table.csv", "table.json")


def started(home: Path) -> subprocess.Popen[bytes]:
    """The table's runs in a folder and with a cache of their own."""
    home.mkdir(exist_ok=True)
    script = home / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"PROTOFL_CACHE": str(home / "cache")}
    command = [sys.executable, str(script), json.dumps(TINY), str(home / "table")]
    return subprocess.Popen(command, env=environment, cwd=home, start_new_session=True)


@pytest.mark.slow
def test_a_killed_table_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Killed when the first setting is compared, and started again: as if nothing had happened."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = started(killed)
    try:
        deadline = time.monotonic() + 600
        while not (killed / "table" / "even" / "comparison.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "table" / "skewed" / "comparison.json").exists()
    assert started(killed).wait(timeout=600) == 0
    assert started(whole).wait(timeout=600) == 0
    for name in WRITTEN:
        assert (killed / "table" / name).read_bytes() == (whole / "table" / name).read_bytes(), name
    cells = json.loads((whole / "table" / "table.json").read_text(encoding="utf-8"))["cells"]
    measured = {(cell["row"], cell["column"]) for cell in cells if cell["n"] == 2}
    assert measured == {
        ("fedavg", "even"),
        ("fedavg", "sent"),
        ("fedavg", "skewed"),
        ("near", "even"),
        ("near", "skewed"),
    }


def test_rows_of_an_earlier_command_stay_beside_those_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedProx alone, then FedAvg alone: both stand in the page, and what had finished is not trained again.

    Another seed of FedAvg is not all that is asked of FedProx, so that a third command shows FedAvg by itself.
    """
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "table"

    def run(row: str, seed: int) -> dict[tuple[str, str], int]:
        asked = Asked([row], ["even"], (seed,), None, 0.1, ("tracking.enabled=false",))
        planned = plan(tiny(), asked)
        with operation(planned.settings[0].parameters, wait=False) as (how, _):
            run_table(planned, out, how)
        cells = json.loads((out / "table.json").read_text(encoding="utf-8"))["cells"]
        return {(cell["row"], cell["column"]): cell["n"] for cell in cells if cell["n"]}

    assert run("near", 0) == {("near", "even"): 1}
    written = {path: path.stat().st_mtime_ns for path in (out / "even" / "runs").glob("*/metrics.json")}
    assert run("fedavg", 0) == {("fedavg", "even"): 1, ("near", "even"): 1, ("fedavg", "sent"): 1}
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert run("fedavg", 1) == {("fedavg", "even"): 1, ("fedavg", "sent"): 1}
