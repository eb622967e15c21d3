"""Commands on folders in which a finished run is damaged: the others are compared; ``--restart`` trains it again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
SMALL = (
    "data.limit_per_class=20",
    "partition.num_clients=2",
    "partition.min_size=5",
    "federation.rounds=1",
    "compare.seeds=[0]",
    "tracking.enabled=false",
)
COMPARE = ("compare", "--methods", "fedavg,fedprox")
SWEEP = ("sweep", "--seeds", "0", "--vary", "local.lr=0.01,0.05")


def typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    words = [*arguments, "--no-prefect", *(part for value in SMALL for part in ("--set", value))]
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *words, "--out", "all"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def compared(folder: Path) -> list[str]:
    """The methods of the tables."""
    return [row["method"] for row in json.loads((folder / "all" / "comparison.json").read_text())["runs"]]


def measured(folder: Path) -> list[float]:
    """The points of the tables that have a run."""
    rows = json.loads((folder / "all" / "sweep.json").read_text())["rows"]
    return [row["values"]["local.lr"] for row in rows if row["seeds"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows", "names"),
    [(COMPARE, compared, ["fedavg", "fedprox"]), (SWEEP, measured, [0.01, 0.05])],
    ids=["compare", "sweep"],
)
def test_one_damaged_run_does_not_stop_the_rest(
    command: tuple[str, ...], rows: Callable[[Path], list[object]], names: list[object], tmp_path: Path
) -> None:
    """Two runs; one gets a byte too many, the other is deleted, and trained though the first one is damaged.

    The damaged one is named with its cure, the tables are those of the other one, and the cure works.
    """
    assert typed(tmp_path, *command).returncode == 0
    histories = sorted(tmp_path.glob("all/runs/*/history.jsonl"))
    whole = [path.read_bytes() for path in histories]
    # By name: fedavg before fedprox; of a sweep the point is in the configuration.
    configs = [json.loads(path.with_name("config.json").read_text())["config"] for path in histories]
    order = [config["method"]["name"] if command == COMPARE else config["local"]["lr"] for config in configs]
    damaged, gone = (histories[order.index(name)] for name in names)
    with damaged.open("ab") as file:
        file.write(b"x")
    shutil.rmtree(gone.parent)

    done = typed(tmp_path, *command)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{damaged.relative_to(tmp_path)}: damaged" in done.stderr and "--restart" in done.stderr
    assert "1 of 2 runs failed" in done.stderr
    assert gone.read_bytes() in whole and rows(tmp_path) == names[1:]

    done = typed(tmp_path, *command, "--restart")
    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in histories] == whole and rows(tmp_path) == names
