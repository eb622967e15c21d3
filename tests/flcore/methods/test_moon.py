"""MOON by hand, its first turn, its memory and its frozen models (baselines.md sections 4 and 23)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.io.messages import Weights
from flcore.methods.moon import Moon
from flcore.methods.types import Batch

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}


def linear(lab: Any, **changes: Any) -> Any:
    """Client 0 holds (2, 0) of class 0: encoder E = I, head zero, one full batch, plain SGD at 0.1."""
    return lab.linear(encoder=True, federation={"rounds": 2}, **changes)


def test_one_step_by_hand(lab: Any) -> None:
    """z = z_g = (2, 0) and z_prev = (0, 2): cosines 1 and 0, τ = 0.5, so ℓ = ln(1 + e^-2) = 0.126928.

    p = e^0/(e^2 + e^0) = 0.119203 is the share of z_prev, and dℓ/dz = (p/τ)·∇cos(z, z_prev) = 0.238406·(0, 1)/2, since
    ∇cos(z, z_g) = 0 where the two agree. E is moved by z's gradient times xᵀ = (2, 0): E_10 = −0.1·μ·0.238406. The
    cross-entropy gives E nothing through a head of zeros.
    """
    mu = 3.0
    experiment = linear(lab, method={"name": "moon", "mu": mu, "tau": 0.5})
    initial = experiment.setting.initial
    turned = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    previous = Weights({**initial.params, "encoder.1.weight": turned})
    reply, client_state = lab.train(experiment, number=2, client_state={"previous": previous})
    share = 1 / (1 + math.exp(2))
    assert reply.losses["contrast"] == pytest.approx(mu * 0.126928, abs=1e-5)
    encoder = reply.message["model"].params["encoder.1.weight"]
    assert encoder.flatten().tolist() == pytest.approx([1, 0, -0.1 * mu * 2 * share, 1])
    assert lab.same(client_state["previous"], reply.message["model"])
    assert torch.equal(previous.params["encoder.1.weight"], turned)
    assert torch.equal(initial.params["encoder.1.weight"], torch.eye(2))


@pytest.mark.parametrize("number", [1, 2])
def test_without_a_previous_model_the_turn_is_fedavg(lab: Any, number: int) -> None:
    """In round 1, and in a later one that is a client's first."""
    changes = {"model": CSPC, "local__epochs": 2, "local__momentum": 0.9}
    expected, _ = lab.train(lab.experiment(**changes), number=number)
    found, _ = lab.train(lab.experiment(**changes, method__name="moon"), number=number)
    assert lab.same(found.message, expected.message)
    assert found.losses.get("contrast", 0.0) == 0.0


def test_the_frozen_models_are_asked_in_evaluation_mode(lab: Any) -> None:
    """A client whose previous model is the received one, without steps yet: both cosines are equal, ln 2.

    With BatchNorm and dropout z itself differs from both; the two frozen answers are the same all the same.
    """
    for model in ({"name": "fedproto_cnn"}, {"name": "fedgen_cnn"}, CSPC):
        experiment = lab.experiment(model=model, method={"name": "moon", "mu": 1.0}, local__steps=1)
        initial = experiment.setting.initial
        reply, _ = lab.train(experiment, number=2, client_state={"previous": initial})
        assert reply.losses["contrast"] == pytest.approx(math.log(2), abs=1e-6)


def test_features_that_are_known_are_not_asked_for() -> None:
    """z = (1, 0), looked up z_g = (1, 0) and z_prev = (0, 1): ln(1 + e^-2) at τ = 0.5, and no model is asked.

    With the two exchanged ln(1 + e^2) = 2 + the same.
    """

    class Known:
        def features(self, images: torch.Tensor, weights: Any = None) -> torch.Tensor:
            assert weights is None
            return images

        def classify(self, features: torch.Tensor) -> torch.Tensor:
            return features

    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    inputs = {"present": torch.tensor([True])}
    model: Any = Known()
    for frozen, expected in (((one, other), 0.126928), ((other, one), 2.126928)):
        batch = Batch(one, torch.tensor([0]), per_sample=dict(zip(("global", "previous"), frozen, strict=True)))
        assert Moon(mu=1.0).loss(model, batch, inputs)["contrast"].item() == pytest.approx(expected, abs=1e-6)
