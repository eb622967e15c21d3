"""Fused kernels: what they compute, when it is said that making them takes time, and doing without them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.local import cuda_graph
from flcore.engine.local.cuda_graph import CudaGraphCompiler, fused
from flcore.engine.local.program import NotCompilableError


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) on this machine")
def test_fused_kernels_do_what_the_function_does(steps: Any) -> None:
    """On a CPU, by the same compiler: [2, 2, 2, 2] halved is ones, its sum was 8; of [0, 1, 2] 2 is the most."""
    called = fused(steps.halving, steps.example)
    assert steps.example[0].tolist() == [1, 1, 1, 1]  # what it was shown is not touched
    values = torch.full((4,), 2.0)
    terms, (recorded,) = called([values, torch.arange(3.0)])
    assert ({name: value.item() for name, value in terms.items()}, recorded.tolist()) == (
        {"sum": 8, "most": 2},
        [0, 2, 4],
    )
    assert values.tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_what_asks_for_a_value_is_not_fused(steps: Any) -> None:
    with pytest.raises(NotCompilableError):
        fused(steps.asking, steps.example)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that says it has one; what is fused there, by name of the method."""
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(cuda_graph, "fused", lambda function, example: made.append("fused") or function)
    monkeypatch.setattr(cuda_graph, "CudaGraphStep", lambda function, example, moved: function)
    return made


def test_that_it_takes_time_is_said_once_per_machine(steps: Any, a_gpu: list[str], tmp_path: Path, caplog: Any) -> None:
    """Two processes fuse the same step, a third one a step of other code."""
    for code in (1, 1, 2):
        CudaGraphCompiler(tmp_path, fuse=True).make(steps.halving, steps.example, 1, {"code": code})
    assert len(a_gpu) == 3
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["engine.compile: fusing the kernels of a step, once on this machine (half a minute) ..."] * 2
