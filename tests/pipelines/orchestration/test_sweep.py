"""A sweep from the command line: refused before anything is written; killed, it goes on; its runs are found again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flcore import run
from flcore.core.errors import ConfigError
from pipelines.cli import app as cli
from pipelines.orchestration import flows
from pipelines.plan.grid import sweep_plan
from pipelines.plan.params import override
from pipelines.reporting import sweep_tables
from pipelines.reporting.figures.sweeps import write_figure
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import RunFiles

PROJECT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_command_refuses_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Prefect server configured none is started, and none is asked: it is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for arguments, named in (
        (["--vary", "local.lr=0.1,-1"], "local.lr = -1: must be > 0"),
        (["--vary", "local.lr=0.1", "--metric", "loss"], "--metric loss: must be one of top1_global"),
    ):
        assert cli.main(["sweep", *arguments, "--out", "s"]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_the_flow_refuses_a_metric_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment's has no command that looks at it first."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--metric loss: must be one of top1_global"):
        flows.sweep.fn(vary=["local.lr=0.1"], metric="loss", out="s")
    assert not (tmp_path / "s").exists()


REAL = (
    "method.name=fedprox",
    "data.limit_per_class=20",
    "data.size=28",
    "partition.num_clients=2",
    "partition.min_size=5",
    "federation.rounds=2",
    "tracking.enabled=false",
)
RATE = "local.lr=0.05"


def command(*arguments: str) -> list[str]:
    assignments = [part for assignment in REAL for part in ("--set", assignment)]
    return [
        sys.executable,
        "-m",
        "pipelines.cli",
        "sweep",
        *assignments,
        "--seeds",
        "0",
        "--out",
        "s",
        *arguments,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, set[int]]:
    """A folder in which a sweep of two points was killed on its way and then finished by the same command.

    Also what that printed, and when the points' histories were written.
    """
    folder = tmp_path_factory.mktemp("sweep")
    call = command("--set", RATE, "--vary", "method.mu=0.01,10")
    process = subprocess.Popen(
        call, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not list(folder.glob("s/runs/*/checkpoint/state.json")) and time.monotonic() < deadline:
        assert process.poll() is None, "the sweep ended before it was killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.parent: _written(path.parent) for path in folder.glob("s/runs/*/metrics.json")}  # perhaps none yet
    done = subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert {run_dir: _written(run_dir) for run_dir in finished} == finished, "a finished run was repeated"
    written = {_written(path.parent) for path in folder.glob("s/runs/*/metrics.json")}
    assert len(written) == 2
    return folder, done.stdout, written


def _written(run_dir: Path) -> int:
    return (run_dir / "history.jsonl").stat().st_mtime_ns


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_ends_as_runs_made_alone(
    killed_and_resumed: tuple[Path, str, set[int]], tmp_path: Path
) -> None:
    folder, printed, _ = killed_and_resumed
    assert "report: s/sweep.png" in printed
    planned = sweep_plan(override({}, (*REAL, RATE)), ["method.mu=0.01,10"], seeds=[0])
    directories = [tmp_path / f"run-{number}" for number in range(2)]
    for planned_run, directory in zip(planned.runs, directories, strict=True):
        run(planned_run.config, directory)
    sweep = sweep_tables.collect(planned, [RunFolder(directory) for directory in directories], "mean_local")
    for path in (*sweep_tables.write(sweep, tmp_path), write_figure(sweep, tmp_path)):
        assert (folder / "s" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_another_sweep_finds_the_runs_it_shares_and_outlives_one_that_fails(
    killed_and_resumed: tuple[Path, str, set[int]],
) -> None:
    """lr 0.05 with the default mu was a point of the first sweep; with 1e30 training diverges."""
    folder, _, written = killed_and_resumed
    call = command("--vary", "local.lr=1e30,0.05", "--baselines", "local")
    done = subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 4
    assert "fedprox seed 0, local.lr = 1e+30 failed: round 1" in done.stderr
    assert "protofl: 2 of 4 runs failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert written & {_written(path.parent) for path in folder.glob("s/runs/*/history.jsonl")}
    assert len(list(folder.glob("s/runs/fedprox-*/history.jsonl"))) == 2
    rows = json.loads((folder / "s" / "sweep.json").read_text())["rows"]
    assert [(row["method"], row["values"]["local.lr"], row["seeds"]) for row in rows] == [
        ("fedprox", 1e30, []),
        ("fedprox", 0.05, [0]),
        ("local", 1e30, []),
        ("local", 0.05, [0]),
    ]
    assert RunFiles(next(folder.glob("s/runs/local-*"))).config.exists()
