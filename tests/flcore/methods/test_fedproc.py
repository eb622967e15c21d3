"""FedProc: its schedule, and one step by hand (baselines.md section 11)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.io.messages import Prototypes


def test_schedule(lab: Any) -> None:
    """Section 11 b, T = 10: the share of the contrast in round t = 5 and 9 is 0.5 and 0.1.

    It would be 1 in round 0, where there is no prototype yet: all of the loss is the whole cross-entropy.
    """
    experiment = lab.experiment(method__name="fedproc", federation__rounds=10)
    prototypes = {"prototypes": Prototypes(torch.zeros(6, 8), torch.ones(6, dtype=torch.bool))}
    server = {**experiment.method.start_server(experiment.setting), **prototypes}
    reply, _ = lab.train(experiment, server=server)
    assert set(reply.losses) == {"cross_entropy"}
    plain, _ = lab.train(lab.experiment(method__name="fedavg", federation__rounds=10), server=server)
    assert reply.losses == plain.losses
    for number, share in ((6, 0.5), (10, 0.1)):
        # All prototypes are zero: every class has the same similarity, ln 6.
        reply, _ = lab.train(experiment, server=server, number=number)
        assert reply.losses["contrast"] == pytest.approx(share * math.log(6), rel=1e-5)


def test_one_step_by_hand(lab: Any) -> None:
    """f = (2, 0) of class 0, prototypes (1, 0) and (0, 1), τ = 1: ℓ = ln(1 + e^-1) = 0.313262; round t = 1 of T = 2.

    Half of it, and half of ln 2. p = 1/(1 + e) = 0.268941 is the share of class 1: dℓ/df = p·(0, 1)/2 (the cosine with
    (1, 0) is at its maximum), so E_10 = −0.1·(1/2)·0.268941·(1/2)·2. The head moves by half a FedAvg step: W_00 = 0.05.
    """
    experiment = lab.linear(encoder=True, federation={"rounds": 2}, method={"name": "fedproc"})
    prototypes = Prototypes(torch.eye(2), torch.ones(2, dtype=torch.bool))
    server = {"model": experiment.setting.initial, "prototypes": prototypes}
    reply, client_state = lab.train(experiment, number=2, server=server)
    assert reply.losses == {
        "cross_entropy": pytest.approx(math.log(2) / 2),
        "contrast": pytest.approx(0.313262 / 2, abs=1e-6),
    }
    params = reply.message["model"].params
    assert params["encoder.1.weight"].flatten().tolist() == pytest.approx([1, 0, -0.1 * 0.268941 / 2, 1], abs=1e-6)
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.05, 0, -0.05, 0])
    assert reply.message["prototypes"].present.tolist() == [True, False]
    assert client_state == {}
