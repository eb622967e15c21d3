"""The benchmark of whole comparisons, small: its cases keep to their cores, and both versions get the same to do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.command import describe, run
from benchmarks.comparison import _ON_CORES, METHODS, Options, comparison_params, one_cpu_per_core
from benchmarks.measuring import ROOT, Bench
from flcore.core.host import physical_cores
from pipelines.cli import app as cli
from pipelines.plan.comparison import comparison_plan

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to keep a process to some of the cores")


@linux
def test_a_case_sees_its_cores_alone(tmp_path: Path) -> None:
    """One processor of each core; a process that is kept to the last one starts others that are kept to it too."""
    cpus = one_cpu_per_core()
    assert len(cpus) == physical_cores()
    assert set(cpus) <= os.sched_getaffinity(0)
    inner = "import os; print(sorted(os.sched_getaffinity(0)))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}], check=True)"
    shim = [sys.executable, "-I", "-S", "-c", _ON_CORES, str(cpus[-1])]
    done = Bench("x", tmp_path).execute("case", [*shim, sys.executable, "-S", "-c", code])
    assert done.output.strip() == str([cpus[-1]])


def test_what_is_compared_can_be_run(tmp_path: Path) -> None:
    """8 methods x 3 seeds are 24 runs; of fewer methods, their settings alone, and a baseline that is one of them."""
    runs = comparison_plan(comparison_params(Options(), tmp_path)).runs
    assert [run.config.method.name for run in runs] == [method for method in METHODS for _ in range(3)]
    assert {run.config.federation.rounds for run in runs} == {10}
    few = comparison_params(Options(methods=("gfpl", "local"), seeds=(5,), rounds=3), tmp_path)
    assert few["compare"]["baseline"] == "gfpl"
    assert few["compare"]["settings"].keys() == {"gfpl"}
    assert [run.config.seed for run in comparison_plan(few).runs] == [5, 5]


@linux
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cores", "0"], "--cores 0: this process may use 1 to"),
        (["--cores", "4096"], "--cores 4096: this process may use 1 to"),
        (["--baseline", "nowhere"], "--baseline nowhere: no sources there; expected a folder with pipelines/"),
        (["--engine", "wrokers=2"], "engine.wrokers"),
        (["--engine", "engine.wrokers=2"], "engine.wrokers"),
        (["--methods", "what"], "what"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["bench", "comparison", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "repetition" not in said


@linux
@pytest.mark.slow
def test_both_versions_in_turn() -> None:
    """This version beside itself: one run each; 3600 runs an hour are one a second."""
    result = run("comparison", rounds=2, methods=("fedavg",), seeds=(0,), cores=(1,), baseline=ROOT)
    assert json.loads(json.dumps(result)) == result
    cases = {case["case"]: case for case in result["cases"]}
    assert list(cases) == ["1 core", "baseline, 1 core"]
    for case in cases.values():
        assert case["runs_per_hour"] == pytest.approx(3600 / case["seconds"]["median"])
    ours, theirs = (cases[name]["seconds"]["median"] for name in cases)
    assert result["ratios"] == {"runs per hour, 1 core/baseline, 1 core": pytest.approx(theirs / ours)}
    assert result["settings"]["runs"] == 1
    assert "runs/h" in describe(result)
