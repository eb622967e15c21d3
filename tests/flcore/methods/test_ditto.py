"""Ditto: a personal step by hand, and what clients keep and answer with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.io.messages import Weights
from flcore.methods.ditto import PERSONAL


def test_personal_steps_by_hand(lab: Any) -> None:
    """x = (2, 0) of class 0, η = 0.1, λ = 1. v starts at b = (0.2, 0), W = 0; w = 0 was received.

    The logits differ by 0.2: p_1 = 1/(1 + e^0.2) = 0.4501660. The gradient of b_0 is -p_1 + λ·0.2 = -0.2501660, so
    b_0 = 0.2250166; of b_1 p_1, so -0.0450166; of W_00 -2·p_1: 0.0900332. The term was 0.5·0.04 = 0.02.
    """
    assert 1 / (1 + math.exp(0.2)) == pytest.approx(0.4501660, abs=1e-7)
    experiment = lab.linear(method={"name": "ditto"})
    initial = experiment.setting.initial
    own = Weights({**initial.params, "head.bias": torch.tensor([0.2, 0.0])})
    first, between = lab.train(experiment, client_state={PERSONAL: own})
    assert lab.same(between[PERSONAL], own)
    assert lab.same(between["model"], initial)
    assert "proximal" not in first.losses
    second, client_state = lab.train(experiment, exchange=1, client_state=between)
    assert (second.up, second.down, list(client_state)) == ({}, {}, ["personal"])
    assert client_state[PERSONAL].params["head.bias"].tolist() == pytest.approx([0.2250166, -0.0450166])
    assert client_state[PERSONAL].params["head.weight"][0].tolist() == pytest.approx([0.0900332, 0])
    assert second.losses["proximal"] == pytest.approx(0.02)


def test_clients_answer_with_their_own_model(lab: Any, tmp_path: Path) -> None:
    """One that was never sampled with the initial one; the personal models are all that clients keep."""
    experiment = lab.experiment(method__name="ditto", federation={"rounds": 1, "participation": 0.5})
    run = lab.run(experiment, tmp_path / "run")
    sampled = run.history[0]["participants"]
    assert len(sampled) == 2
    for client in range(4):
        client_state = run.client_state(client)
        answer = lab.client_model(experiment.method, run.state.server, client, client_state, experiment.setting)
        assert list(client_state) == (["personal"] if client in sampled else [])
        assert lab.same(answer, experiment.setting.initial) == (client not in sampled)
