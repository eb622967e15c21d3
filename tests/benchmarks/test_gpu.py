"""``protofl bench gpu``: small where there is a GPU, refused in one line where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.command import run
from benchmarks.peers.roster import PEERS
from flcore.core.errors import ConfigError


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^bench gpu: no CUDA device on this machine; "):
        run("gpu")


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_every_way_is_measured() -> None:
    result = run("gpu", rounds=2, repetitions=1, clients=(4,))
    assert [case["case"] for case in result["cases"]] == [
        *("cuda, serial, 4 clients", "cuda, stacked, 4 clients", "cuda, compiled, 4 clients"),
        *("cuda, compiled, tf32, 4 clients", "cuda, compiled, bf16, 4 clients", "cpu, compiled, 4 clients"),
    ]
    assert len(result["ratios"]) == 5


@pytest.mark.slow
def test_a_cpu_in_a_gpus_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole benchmark with its processes, on what there is; makes the environments of JAX and pfl if need be.

    2 rounds of 50 clients with 5 steps are 500 steps, of 4 clients with 20 steps 160.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(gpu, "CROSS_DEVICE_WORK", replace(gpu.CROSS_DEVICE_WORK, rounds=2))
    cases = {"cuda, serial": ("device=cpu",), "cuda, compiled": ("device=cpu", "stack=true")}
    monkeypatch.setattr(gpu, "CASES", cases)
    for name in ("jax", "pfl"):
        monkeypatch.setitem(PEERS, f"{name}_cuda", PEERS[name])
    result = run("gpu", rounds=2, repetitions=1, clients=(4,), only_peers=("jax_cuda", "pfl_cuda"))
    done = {case["case"]: case["steps_per_second"] * case["seconds"]["median"] for case in result["cases"]}
    four = {
        "cuda, serial, 4 clients",
        "cuda, compiled, 4 clients",
        "jax_cuda, 4 clients",
        "jax_cuda, 4 clients, process",
    }
    published = {gpu.CROSS_DEVICE, "pfl_cuda", "pfl_cuda, process"}
    assert done == pytest.approx(dict.fromkeys(four, 160) | dict.fromkeys(published, 500))
    assert result["ratios"].keys() == {
        "speed-up of cuda, compiled, 4 clients",
        "jax_cuda, 4 clients/cuda, compiled, 4 clients",
        f"pfl_cuda/{gpu.CROSS_DEVICE}",
    }
    assert {peer["status"] for peer in result["settings"]["peers"].values()} == {"measured"}
