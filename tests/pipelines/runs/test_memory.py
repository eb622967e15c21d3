"""Memory: what is measured is what is there, and an estimate counts what its formula says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from flcore.config.schema import Config
from flcore.models import build_model
from flcore.experiment.inputs import divide, read_source
from pipelines.runs import memory
from pipelines.runs.inputs import Inputs

MIB = 2**20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("data")
    found = Inputs(folder / "prepared", folder / "partition")
    found.prepared.mkdir()
    found.partition.mkdir()
    read_source(config(), found.prepared)
    divide(config(), found.prepared, found.partition)
    return found


def config(**sections: Any) -> Config:
    small = {"data": {"limit_per_class": 20}, "partition": {"num_clients": 4, "alpha": 1.0, "min_size": 5}}
    return Config.from_mapping({**small, **sections})


def test_an_estimate_counts_what_grows(inputs: Inputs) -> None:
    """Half again of 4 bytes: for each client of a round three times the weights, for each image what a pass makes."""

    def grown(**sections: Any) -> float:
        return memory.estimate(config(**sections), inputs, 0) - memory.estimate(config(), inputs, 0)

    weights = sum(
        tensor.numel() for tensor in build_model(config().model_spec, (1, 8, 8), 10, seed=0).state_dict().values()
    )
    assert grown(federation={"participation": 0.5}) == pytest.approx(-1.5 * 4 * weights * 3 * 2, abs=1)
    per_image = grown(evaluation={"batch_size": 513})  # one more than is the default
    assert per_image > 1.5 * 4 * 64  # the image itself, 8 x 8, and what the network makes of it
    assert grown(local={"batch_size": 42}) == pytest.approx(3 * 10 * per_image, abs=20)  # ten more
    assert grown(engine={"compile": "default"}) == 600 * MIB
    # Stacks: their tensors, and images of eight clients where one client's were counted.
    assert grown(engine={"stack": True, "stack_memory_mb": 100}) > 100 * MIB
    assert memory.estimate(config(), inputs, 7) == 7 + memory.estimate(config(), inputs, 0)


@pytest.mark.slow
def test_a_peak_counts_from_where_it_was_reset() -> None:
    """100 MiB are taken and given back: seen after it, not seen any more once it is counted anew."""
    code = f"""
from pipelines.runs import memory
memory.reset_peak()
before = memory.peak()
block = bytearray(100 * {MIB})
del block
taken = memory.peak()
memory.reset_peak()
print(taken - before, taken - memory.peak())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken, given_back = map(int, done.stdout.split())
    assert 95 * MIB < taken < 120 * MIB
    if Path("/proc/self/clear_refs").exists():
        assert given_back > 90 * MIB


def test_what_a_process_holds_is_with_all_that_it_has_started() -> None:
    """A process that starts one with 50 MiB of text."""
    inner = f"import time; x = b'1' * 50 * {MIB}; print('ready', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        held = memory.resident(process.pid)
        [child] = (child.pid for child in psutil.Process(process.pid).children())
        assert 50 * MIB < memory.resident(child) < held < 110 * MIB
        os.kill(child, 9)
        assert process.wait() == 0
    assert memory.resident(process.pid) == 0


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    """Of 1000 bytes 600 are used, 100 of them by files that nobody reads: 500."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory._free_in(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._free_in(tmp_path) == float("inf")
    assert memory._free_in(tmp_path / "none") == float("inf")
    assert 0 < memory.free_memory() < float("inf")
