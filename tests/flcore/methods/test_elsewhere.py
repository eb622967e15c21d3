"""Whole rounds on a device that is none (`tests/flcore/conftest.py`): no method mixes devices, as a GPU demands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.io.records import on_device, serialise
from flcore.math.generators.networks import TrainedLinear
from flcore.methods.registry import METHODS
from tests.cases import SMALL

CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **SMALL.get(name, {})} for name in METHODS},
    "fedpa": {"name": "fedpa", **SMALL["fedpa"], "proto_clip": 1.0, "proto_noise": 0.1},
    "fedpg, the authors' way": {
        **SMALL["fedpg"],
        **{"name": "fedpg", "proto_init": "random", "proto_lr": 1e-4, "virtual_dtype": "uint8", "support": 4},
    },
    "fedproto, nearest": {"name": "fedproto", "inference": "prototypes"},
    **{f"protolda, {own}": {"name": "protolda", "personal": own, "forget": [2]} for own in ("shares", "mixture")},
    **{f"{name}, noisy": {"name": name, "noise_multiplier": 0.1} for name in ("protolda", "protolda_blocks")},
    "protolda, balanced and by cross-validation": {"name": "protolda", "balance": True, "shrinkage": None},
}


QUICK = ("fedproto",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_rounds_elsewhere(lab: Any, elsewhere: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic there is the CPU's: server, memories and figures are those of a run on the CPU, to the bit."""
    monkeypatch.setattr(TrainedLinear, "forward", torch.nn.Linear.forward)  # oneDNN's products are for a CPU alone
    changes: dict[str, Any] = {"federation": {"rounds": 2, "participation": 0.5}, "local": {"lr": 0.01, "steps": 1}}
    changes["model"] = lab.model_of("fedcspc" if case == "moon" else CASES[case]["name"])
    experiment = lab.experiment(method=CASES[case], **changes)
    config = experiment.config
    moved = replace(experiment, config=replace(config, engine=replace(config.engine, device=elsewhere)))
    assert moved.setting.device == elsewhere
    here, there = lab.run(experiment, tmp_path / "here"), lab.run(moved, tmp_path / "there")
    assert there.history == here.history
    assert serialise(there.state.server) == serialise(here.state.server)
    assert {client: serialise(there.client_state(client)) for client in there.state.client_states} == {
        client: serialise(here.client_state(client)) for client in here.state.client_states
    }

    for server in (there.state.server, on_device(there.state.server, elsewhere)):
        streams = (torch.Generator().manual_seed(0) for _ in range(2))
        made = moved.method.generated_features(server, moved.setting, 3, next(streams))
        expected = experiment.method.generated_features(here.state.server, experiment.setting, 3, next(streams))
        for found, same in zip(made or (), expected or (), strict=True):
            assert torch.equal(found.cpu(), same)


def test_what_a_device_refuses(elsewhere: str) -> None:
    """Tensors of both devices; not numbers, and not places on the CPU that something on the device is read at."""
    there, row = torch.ones(3, 2).to(elsewhere), torch.tensor([0])
    assert there.device.type == (2 * there[row] + torch.tensor(1.0)).device.type == elsewhere
    assert there.cpu().device.type == "cpu"
    for mixed in (
        lambda: there + torch.ones(3, 2),
        lambda: torch.ones(3, 2)[row.to(elsewhere)],
        lambda: torch.where(there > 0, torch.ones(3, 2), there),
        lambda: torch.nn.functional.linear(there, torch.ones(4, 2)),
    ):
        with pytest.raises(RuntimeError, match="some on the CPU"):
            mixed()
    weight = torch.ones(2, 2, device=elsewhere, requires_grad=True)
    (gradient,) = torch.autograd.grad((there @ weight).square().sum(), weight)
    assert gradient.tolist() == [[12.0, 12.0], [12.0, 12.0]]  # 3 rows: d/dw of (1·w_0j + 1·w_1j)² = 2·2
