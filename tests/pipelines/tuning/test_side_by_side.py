"""Trials at the same time: the same study on any number of cores and processes, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.execution import admission

from .conftest import PROJECT, RESULTS, Configure, Search

# ---- cores and processes -----------------------------------------------------------------------------------------


def digests(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in RESULTS}


@pytest.mark.slow
def test_a_study_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five trials, three at once: here one after the other, then by two processes of their own."""
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(admission, "physical_cores", lambda cores=cores: cores)
        monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / f"cache-{cores}"))
        search(config_with(), 5, tmp_path / str(cores), at_once=3)
        found.append(digests(tmp_path / str(cores)))
    assert found[0] == found[1]
    assert [trial["state"] for trial in json.loads(found[0]["study.json"])["trials"]] == ["complete"] * 5


WORKS_ON_IT = """
import os, signal, sys
from pathlib import Path
from tests.pipelines.tuning.conftest import Told, _configure, _search

class Watching(Told):
    def round(self, label, number, record):
        Path(sys.argv[1], f"by-{os.getpid()}").touch()
        if sys.argv[2] == "killed" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

_search(_configure(federation={"rounds": 4}), 6, Path(sys.argv[1]), told=Watching(), at_once=3)
"""


@pytest.mark.slow
def test_two_processes_share_a_study_and_one_is_killed(
    tmp_path: Path, config_with: Configure, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each carries trials out; what the killed one leaves, the other one takes up, and nothing is done twice."""
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    shared.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", WORKS_ON_IT, str(shared), what], env=environment)
        for what in ("killed", "stays")
    ]
    assert [process.wait(timeout=300) for process in processes] == [-signal.SIGKILL, 0]
    assert len(list(shared.glob("by-*"))) == 2
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "another"))
    search(config_with(federation={"rounds": 4}), 6, whole, at_once=3)
    assert digests(shared) == digests(whole)
