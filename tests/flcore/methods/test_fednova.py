"""FedNova: steps and rounds by hand, its limit case to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.methods.fednova import effective_steps
from tests.cases import quick


@pytest.mark.parametrize(
    ("steps", "momentum", "shrinkage", "expected"),
    [
        (0, 0.0, 0.0, 0.0),
        (5, 0.0, 0.0, 5.0),
        (3, 0.5, 0.0, 4.25),  # velocities 1, 1.5, 1.75; the paper's (3 - 0.5·(1 - 0.125)/0.5)/0.5 = 2.125/0.5
        (3, 0.0, 0.1, 2.71),  # 1, 1.9, 2.71; the paper's (1 - 0.9³)/0.1
        (2, 0.5, 0.1, 2.4),  # v = 1, x = 1; v = 0.5 + 1 - 0.1 = 1.4, x = 2.4
    ],
)
def test_effective_steps_by_hand(steps: int, momentum: float, shrinkage: float, expected: float) -> None:
    assert effective_steps(steps, momentum, shrinkage) == pytest.approx(expected)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_effective_steps_are_those_of_training(lab: Any, momentum: float, mu: float) -> None:
    """Weight decay is off and a batch has one sample: A black image's gradient is that of the bias alone.

    p is near 1/2 all the time at η = 1e-4: the gradient of b_0 is -1/2, so that b_0 = η/2 · ‖a‖₁ after 4 steps.
    """
    local = {"lr": 1e-4, "batch_size": 1, "momentum": momentum}
    clients = [[0, 1, 2, 3], [4]]
    experiment = lab.linear(
        [[0, 0]] * 4 + [[0, 1]], [0] * 4 + [1], clients, method={"name": "fednova", "mu": mu}, local=local
    )
    reply, _ = lab.train(experiment)
    sent = reply.message["effective_steps"]["norm"].item()
    assert sent == pytest.approx(effective_steps(4, momentum, 1e-4 * mu))
    assert reply.message["model"].params["head.bias"][0].item() == pytest.approx(0.5e-4 * sent, rel=1e-3)


def test_a_round_by_hand(lab: Any, tmp_path: Path) -> None:
    """Client 0 has sample A = (2, 0) of class 0 and takes a step; client 1 has B = (0, 4) three times, of class 1.

    Batches of one at η = 0.1: w_0 = -η g_A with bias 0.05, ‖a_0‖ = 1. Client 1 takes three steps: at zero p_0 = 1/2,
    so b_0 = -0.05, W_01 = -0.2; the logits differ by 2·(0.8 + 0.05) = 1.7, p_0 = 1/(1 + e^1.7) = 0.154465, so b_0 =
    -0.0654465, W_01 = -0.2617860; then by 2·(1.0471440 + 0.0654465) = 2.2251810, p_0 = 0.0975121, so b_0 = -0.0751977,
    W_01 = -0.3007908. ‖a_1‖ = 3. p = (1/4, 3/4): τ_eff = 1/4 + 9/4 = 2.5. The bias: 0.25·2.5·0.05 +
    0.75·(2.5/3)·(-0.0751977) = 0.03125 - 0.0469986; W_00 = 0.25·2.5·0.1 = 0.0625, W_01 = 0.625·(-0.3007908).
    """
    local = {"lr": 0.1, "batch_size": 1}
    experiment = lab.linear(
        [[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1], [[0], [1, 2, 3]], method={"name": "fednova"}, local=local
    )
    run = lab.run(experiment, tmp_path / "run")
    params = run.state.server["model"].params
    assert params["head.bias"][0].item() == pytest.approx(0.03125 - 0.0469986, abs=1e-6)
    assert params["head.weight"][0].tolist() == pytest.approx([0.0625, -0.1879942], abs=1e-6)


@pytest.mark.parametrize("momentum", quick([0.9, 0.0], 1))
@pytest.mark.parametrize(("mu", "other"), quick([(0.1, {"name": "fedprox", "mu": 0.1}), (0.0, {"name": "fedavg"})], 1))
def test_with_equal_steps_it_is_fedavg_to_the_bit(
    lab: Any, mu: float, other: dict[str, Any], momentum: float, tmp_path: Path
) -> None:
    """Clients of other sizes take three steps each; with as many passes it is another model."""
    local = {"lr": 0.05, "batch_size": 16, "momentum": momentum}
    found = {
        (name, steps): lab.run(
            lab.experiment(method=method, local={**local, "steps": steps}, federation__rounds=2),
            tmp_path / f"{name}-{steps}",
        ).state.server["model"]
        for name, method in {"own": {"name": "fednova", "mu": mu}, "other": other}.items()
        for steps in (3, None)
    }
    assert lab.same(found["own", 3], found["other", 3])
    assert not lab.same(found["own", None], found["other", None])
    assert all(torch.equal(found["own", 3].buffers[name], value) for name, value in found["other", 3].buffers.items())
