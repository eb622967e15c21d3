"""Devices and precision: bf16 and compilation on a CPU; the same run on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.aggregation.mean import average_weights
from flcore.core.errors import ConfigError
from flcore.engine.client import ClientRunner
from flcore.engine.numerics import set_numerics
from flcore.experiment.experiment import Experiment
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Record
from flcore.io.stacks import WeightStack
from flcore.math.compression import quantised_all

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.fixture(autouse=True)
def _numerics() -> None:
    """As whoever trains sets them: without, cuDNN takes TF32, and another kernel each time."""
    if torch.cuda.is_available():
        set_numerics("float32")


def furthest(one: Any, other: Any) -> float:
    """The largest difference of two runs' global models, relative to each tensor's largest value."""
    pairs = [
        (one.state.server["model"].values[name], value) for name, value in other.state.server["model"].values.items()
    ]
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-6)) for a, b in pairs if a.is_floating_point())


def one_round(lab: Any, folder: Path, **changes: Any) -> Any:
    return lab.run(lab.experiment(federation__rounds=1, local__steps=2, **changes), folder)


def test_bf16_changes_the_last_bits_and_not_the_kind_of_weights(lab: Any, tmp_path: Path) -> None:
    exact = one_round(lab, tmp_path / "float32")
    for stack in (False, True):
        rough = one_round(lab, tmp_path / f"bf16-{stack}", engine__precision="bf16", engine__stack=stack)
        assert 0 < furthest(rough, exact) < 0.1  # bf16 has 8 bits: 0.4 % per product
        assert all(value.dtype == torch.float32 for value in rough.state.server["model"].params.values())


def test_a_missing_gpu_is_said_before_data_are_used(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = lab.config(engine__device="cuda")
    with pytest.raises(ConfigError, match=r"engine\.device = cuda: no CUDA device"):
        Experiment.open(config, lab.prepared, lab.partition_folder)


def test_a_client_that_is_first_sampled_late_has_all_its_tensors_on_the_device(lab: Any) -> None:
    """FedAvg in few bits adds the differences that a client missed to the initial model: it has no memory yet.

    The device is PyTorch's `meta`, which every machine has.
    """
    experiment = lab.experiment(method__name="fedavg_q", federation__participation=0.5)
    method, setting = experiment.method, experiment.setting
    object.__setattr__(experiment.config.engine, "device", "meta")
    sent = quantised_all(setting.initial.params, 8, torch.Generator())
    changes = TensorDict({f"000001/{name}": value for name, value in sent.items()})
    [exchange] = method.round_exchanges(2, setting)
    server = Record({**method.start_server(setting), "changes": changes})
    ctx = lab.receive(ClientRunner(experiment), 2, exchange, 3, server, Record())
    received, own = ctx.received["changes"].named, ctx.setting.initial.values
    assert received.keys() == changes.named.keys()
    assert {tensor.device.type for tensor in (*received.values(), *own.values())} == {"meta"}


@needs_gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine__stack": True},
        {"method__name": "fedproto"},
        {"engine__stack": True, "engine__compile": "default"},
        {"method__name": "fedproto", "engine__stack": True, "engine__compile": "default"},
    ],
    ids=str,
)
def test_on_a_gpu_a_round_agrees_with_the_cpu(lab: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    here = one_round(lab, tmp_path / "cpu", **{k: v for k, v in changes.items() if k == "method__name"})
    there = one_round(lab, tmp_path / "gpu", engine__device="cuda", **changes)
    assert there.history[0]["participants"] == here.history[0]["participants"]
    if "model" in here.state.server:
        assert furthest(there, here) < 1e-3


WAYS = {"stacked": {"engine__stack": True}, "fused": {"engine__stack": True, "engine__compile": "default"}}


@needs_gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])  # the second one drops out
def test_on_a_gpu_a_run_repeats_itself(lab: Any, tmp_path: Path, model: str, way: str) -> None:
    changes = {"engine__device": "cuda", "model": {"name": model}, **WAYS[way]}
    runs = [lab.run(lab.experiment(**changes), tmp_path / str(i)) for i in (1, 2)]
    assert runs[0].bytes == runs[1].bytes


@needs_gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_a_kill_changes_no_byte(lab: Any, stops: Any, tmp_path: Path, way: str) -> None:
    """Killed behind the second of three rounds: the third one's models come from the disk, and its fold is the same."""
    experiment = lab.experiment(engine__device="cuda", **WAYS[way])
    whole = lab.run(experiment, tmp_path / "whole")
    stops.run_until(experiment, tmp_path / "killed", 2)
    assert lab.run(experiment, tmp_path / "killed").bytes == whole.bytes


@needs_gpu
def test_models_that_are_folded_on_a_gpu_are_those_folded_on_the_cpu() -> None:
    """To the bit: who goes on after a kill has copies of some models only, and folds these where they are."""
    generator = torch.Generator().manual_seed(0)
    stack = WeightStack({"w": torch.randn(7, 100_003, generator=generator).cuda()}, {}, stays=True)
    here = stack.to("cpu")
    assert here.trained is stack
    models = dict(enumerate(here.rows()))
    sizes = {client: 3 * client + 1 for client in range(7)}
    copies = {client: Weights(dict(model.params)) for client, model in models.items()}
    found, expected = average_weights(models, sizes), average_weights(copies, sizes)
    assert torch.equal(found.params["w"], expected.params["w"])
