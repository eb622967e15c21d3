"""FedDC: turns and rounds by hand, and that drifts add up (baselines.md 9)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.aggregation.mean import average_weights
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.math.losses.basic import inner_product
from flcore.methods.feddc import DRIFT, LOCAL_CHANGE, STEP, FedDC, aggregate_with_drift, track_drift
from flcore.methods.types import MODEL, Replies
from tests.cases import quick


def vector(*values: float) -> Weights:
    return Weights({"w": torch.tensor(values)})


def close(weights: Weights, *values: float) -> bool:
    return weights.params["w"].tolist() == pytest.approx(values, abs=1e-6)


def test_the_correction_is_a_constant_gradient() -> None:
    weight = torch.tensor([3.0, -1.0], requires_grad=True)
    term = inner_product({"w": weight}, {"w": torch.tensor([2.0, 5.0])})
    assert (term.item(), torch.autograd.grad(term, weight)[0].tolist()) == (1.0, [2.0, 5.0])


def test_a_round_of_the_server_by_hand() -> None:
    """Fact b: K = 3, two of them sampled with w = (1, 0) and (3, 2), h = (0.2, 0), (0, 0.4), (0.1, 0.1) afterwards.

    From w_g = (0.5, 0.5) their drifts have grown by (0.5, -0.5) and (2.5, 1.5), (3, 1) in all, so the mean over three
    was (0.3 - 3, 0.5 - 1)/3 and is (0.1, 0.166667) then: w_g = (2, 1) + that. g = (1, 1) hears of changes (0.3, 0) and
    (0.3, 0.9), a third of which adds up to (0.2, 0.3).
    """
    before = {MODEL: vector(0.5, 0.5), DRIFT: vector((0.3 - 3) / 3, (0.5 - 1) / 3), LOCAL_CHANGE: vector(1, 1)}
    told = {0: {MODEL: vector(1, 0), STEP: vector(0.3, 0)}, 2: {MODEL: vector(3, 2), STEP: vector(0.3, 0.9)}}
    server: Record = Record(before)
    ctx: Any = SimpleNamespace(setting=SimpleNamespace(num_clients=3))
    for stage in (track_drift, aggregate_with_drift):
        server, facts = stage(server, Replies(told), ctx)
        assert facts == {}
    assert close(server[DRIFT], 0.1, 0.5 / 3)
    assert close(server[MODEL], 2.1, 7 / 6)
    assert close(server[LOCAL_CHANGE], 1.2, 1.3)


@pytest.mark.parametrize(
    ("correction", "bias", "after"),
    [
        # 1/(ηT)·(g_k - g) = (0.3 - 0.1)/0.1 = 2: b_0 = -0.1·(-0.5 + 0.2 + 2) = -0.17, and Δ is it.
        ("last", -0.17, -0.17),
        # s - s_k = 0.1 - 0.3: b_0 = -0.1·(-0.5 + 0.2 - 0.2) = 0.05; s_k becomes 0.3 - 0.1 - 0.05/0.1 = -0.3.
        ("recursive", 0.05, -0.3),
    ],
)
def test_a_turn_by_hand(lab: Any, correction: str, bias: float, after: float) -> None:
    """x = (2, 0) of class 0, weights 0, one step at η = 0.1; α = 1. h_k, g_k and g are 0 but for b_0: 0.2, 0.3, 0.1.

    The cross-entropy's gradient is (-0.5, 0.5) on the bias and (-1, 0), (1, 0) on the rows of W; the penalty's α·h_k.
    """
    experiment = lab.linear(method={"name": "feddc", "alpha": 1.0, "correction": correction})
    initial = experiment.setting.initial

    def of_bias(value: float) -> Weights:
        return Weights({"head.weight": torch.zeros(2, 2), "head.bias": torch.tensor([value, 0.0])})

    server = Record({MODEL: initial, DRIFT: of_bias(0), LOCAL_CHANGE: of_bias(0.1)})
    reply, client_state = lab.train(
        experiment, server=server, client_state={DRIFT: of_bias(0.2), LOCAL_CHANGE: of_bias(0.3)}
    )
    params = reply.message[MODEL].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert params["head.bias"].tolist() == pytest.approx([bias, -0.05])
    assert client_state[DRIFT].params["head.bias"].tolist() == pytest.approx([0.2 + bias, -0.05])
    assert client_state[LOCAL_CHANGE].params["head.bias"][0].item() == pytest.approx(after)
    assert reply.message[STEP].params["head.bias"][0].item() == pytest.approx(after - 0.3)
    assert reply.losses["drift"] == pytest.approx(0.5 * 0.2**2)
    assert reply.losses["correction"] == 0  # ⟨w, v⟩ at w = 0


@dataclass(frozen=True)
class CorrectionAlone(FedDC):
    """No gradient but the correction's."""

    name = "correction-alone"

    def loss(self, model: Any, batch: Any, inputs: Any) -> dict[str, torch.Tensor]:
        return {"correction": super().loss(model, batch, inputs)["correction"]}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("correction", "bias", "after"), [("last", -0.2, -0.2), ("recursive", None, 0.0)])
def test_a_correction_is_as_strong_with_momentum_as_without(
    lab: Any, correction: str, bias: float | None, after: float, momentum: float
) -> None:
    """40 steps; b_0 of g_k (s_k) and g is 0.3 and 0.1: the correction moves b_0 by g - g_k = -0.2 in all.

    A state s_k is an average gradient: the gradient is s - s_k = -0.2 in every step, so that s_k - s - Δ/(η·S) =
    0.3 - 0.1 - 0.2 = 0. With a divisor η·T, and momentum, b_0 would be -0.2·S/T = -1.56: S = (40 - 9·(1 - 0.9⁴⁰))/0.1.
    """
    experiment = lab.linear(
        algorithm=CorrectionAlone(correction=correction, use_drift=False),  # type: ignore[arg-type]
        local={"lr": 0.1, "batch_size": 100, "steps": 40, "momentum": momentum},
    )

    def of_bias(value: float) -> Weights:
        return Weights({"head.weight": torch.zeros(2, 2), "head.bias": torch.tensor([value, 0.0])})

    server = Record({MODEL: experiment.setting.initial, LOCAL_CHANGE: of_bias(0.1)})
    reply, client_state = lab.train(experiment, server=server, client_state={LOCAL_CHANGE: of_bias(0.3)})
    if bias is not None:
        assert reply.message[MODEL].params["head.bias"].tolist() == pytest.approx([bias, 0], abs=1e-5)
    assert client_state[LOCAL_CHANGE].params["head.bias"].tolist() == pytest.approx([after, 0], abs=1e-5)


@pytest.mark.parametrize("method", quick([{"name": "feddc"}, {"name": "fedcspc", "base": "feddc", "cal_epochs": 3}], 1))
def test_the_mean_of_all_drifts_is_the_servers(lab: Any, method: dict[str, Any], tmp_path: Any) -> None:
    """After rounds of two of four clients: h is the mean of what they remember, those never sampled at 0; so is g.

    Also where they are sent another head than the average's: both sides measure from there.
    """
    model = {"name": "fedcspc_cnn", "projection_dim": 8}
    experiment = lab.experiment(method=method, model=model, federation={"rounds": 4, "participation": 0.5})
    run = lab.run(experiment, tmp_path / "run")
    nothing = Weights({name: torch.zeros_like(value) for name, value in experiment.setting.initial.params.items()})
    for slot in (DRIFT, LOCAL_CHANGE):
        kept = {client: run.client_state(client).get(slot, nothing) for client in range(4)}
        mean = average_weights(kept, dict.fromkeys(kept, 1))
        assert all(
            torch.allclose(run.state.server[slot].params[name], value, atol=1e-6) for name, value in mean.params.items()
        )
        assert max(float(value.abs().max()) for value in mean.params.values()) > 1e-3
