"""``protofl bench gpu``: small where there is a GPU, refused in one line where there is none."""

from __future__ import annotations

import pytest
import torch

from flcore.errors import ConfigError
from pipelines import bench


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^bench gpu: no CUDA device on this machine; "):
        bench.run("gpu", {})


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_every_way_is_measured() -> None:
    result = bench.run("gpu", {"rounds": 2, "repetitions": 1, "clients": (4,)})
    assert [case["case"] for case in result["cases"]] == [
        *("cuda, serial, 4 clients", "cuda, stacked, 4 clients", "cuda, recorded, 4 clients"),
        *("cuda, recorded, tf32, 4 clients", "cuda, recorded, bf16, 4 clients", "cpu, compiled, 4 clients"),
    ]
    assert len(result["ratios"]) == 5
