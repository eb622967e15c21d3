"""FedDyn: two rounds by hand, and that it is FedDC without its correction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.io.records import Record
from flcore.methods.feddyn import GRADIENT
from flcore.methods.types import Replies, RoundContext


def test_two_rounds_by_hand(lab: Any) -> None:
    """Client 0 has the sample x = (2, 0) of class 0, η = 0.1, α = 1, one step a round; client 1 of two is never asked.

    Round 1, at 0: the gradient of b_0 is -1/2, so b_0 = 0.05 and W_00 = 0.1. g_0 = 0 - α·w_0: -0.05 and -0.1.
    h = -(α/2)·w_0: -0.025 and -0.05. w = w_0 - h/α: b_0 = 0.075, W_00 = 0.15.

    Round 2: the logits differ by 2·(0.3 + 0.075) = 0.75, p_1 = 1/(1 + e^0.75) = 0.3208213. The gradient of b_0:
    -p_1 - g_0 + α·0 = -0.3208213 + 0.05 = -0.2708213; of W_00: -0.6416426 + 0.1 = -0.5416426. w_0 moves by 0.0270821
    and 0.0541643. h = -0.025 - 0.5·0.0270821 = -0.0385411; w: b_0 = 0.075 + 0.0270821 + 0.0385411 = 0.1406232.
    W_00 = 0.15 + 0.0541643 + 0.05 + 0.0270821 = 0.2812464. g_0 of b_0 = -0.05 - 0.0270821.
    """
    assert 1 / (1 + math.exp(0.75)) == pytest.approx(0.3208213, abs=1e-7)
    experiment = lab.linear(method={"name": "feddyn", "alpha": 1.0})
    server, client_state = Record(experiment.method.start_server(experiment.setting)), Record()
    aggregate = experiment.method.server_steps()["aggregate"]
    for number, (bias, weight, own) in enumerate([(0.075, 0.15, -0.05), (0.1406232, 0.2812464, -0.0770821)], 1):
        reply, client_state = lab.train(experiment, number=number, server=server, client_state=client_state)
        server, _ = aggregate(server, Replies({0: reply.message}), RoundContext(experiment.setting, number))
        assert server["model"].params["head.bias"].tolist() == pytest.approx([bias, -bias], abs=1e-6)
        assert server["model"].params["head.weight"][0].tolist() == pytest.approx([weight, 0], abs=1e-6)
        assert client_state[GRADIENT].params["head.bias"][0].item() == pytest.approx(own, abs=1e-6)


def test_it_is_feddc_without_the_correction(lab: Any, tmp_path: Path) -> None:
    """FedDC's h_k is -g_k/α: its penalty has the same gradient, its server the same shift. Clients come and go."""
    own, other = (
        lab.run(lab.experiment(method=method, federation={"rounds": 4, "participation": 0.5}), tmp_path / str(i))
        for i, method in enumerate(
            [{"name": "feddyn", "alpha": 0.1}, {"name": "feddc", "alpha": 0.1, "use_correction": False}]
        )
    )
    for name, value in other.state.server["model"].params.items():
        torch.testing.assert_close(own.state.server["model"].params[name], value, atol=1e-5, rtol=1e-4)
    for name, value in other.state.server["drift"].params.items():
        torch.testing.assert_close(own.state.server["gradient"].params[name], -0.1 * value, atol=1e-6, rtol=1e-3)
    assert own.history[-1]["bytes_up"] == other.history[-1]["bytes_up"]
