"""FedRep: two phases, what each leaves alone, and one turn by hand (baselines.md section 16)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flcore.engine.client import ClientRunner, make_trainer
from flcore.engine.client_data import ClientData
from flcore.engine.local.serial import TrainJob
from flcore.io.messages import Weights
from flcore.io.records import Record, serialise
from flcore.methods.types import Exchange, Phase


def bits(weights: Weights) -> bytes:
    return serialise({"weights": weights})


def test_one_turn_by_hand(lab: Any) -> None:
    """A = (2, 0) of class 0, E = I, head zero, learning rate 0.1, one pass each.

    Head: softmax (1/2, 1/2), gradient of row 0 (−1/2)·(2, 0): W = ((0.1, 0), (−0.1, 0)), b = (0.05, −0.05). Body, with
    this head: the logits differ by 2·(0.2 + 0.05) = 0.5, so p = 1/(1 + e^0.5) = 0.377541 is class 1's share and
    df = −p·W_0 + p·W_1 = (−0.2p, 0); E_00 gets −0.1·(−0.2p)·2 = 0.04p. Losses ln 2 and ln(1 + e^−0.5), their mean.
    """
    reply, client_state = lab.train(lab.linear(encoder=True, method__name="fedrep"))
    assert list(reply.message["model"].params) == ["encoder.1.weight"]
    share = 1 / (1 + math.exp(0.5))
    encoder = reply.message["model"].params["encoder.1.weight"].flatten().tolist()
    assert encoder == pytest.approx([1 + 0.04 * share, 0, 0, 1])
    assert client_state["top"].params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert client_state["top"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    expected = (math.log(2) + math.log(1 + math.exp(-0.5))) / 2
    assert (reply.losses["cross_entropy"], reply.steps) == (pytest.approx(expected), 2)


def after_phases(lab: Any, experiment: Any, *phases: Phase) -> Weights:
    """The whole model of client 0 after a first exchange of these phases."""
    runner, exchange = ClientRunner(experiment), Exchange(phases=phases)
    server = Record(experiment.method.start_server(experiment.setting))
    ctx = lab.receive(runner, 1, exchange, 0, server, Record())
    data = ClientData.of(experiment, [0], 1)
    job = TrainJob([ctx], data, [experiment.method.initial_weights(ctx)], exchange.phases, 0)
    (outcome,) = make_trainer(experiment).train(job)
    return outcome.weights


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("head_from", ["head", "fully_connected"])
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn", "fedcspc_cnn"])
def test_what_each_phase_leaves_alone(lab: Any, model: str, head_from: str, stack: bool) -> None:
    """Section 16 b, with BatchNorm statistics: they are the base's, and stand still while the head is trained."""
    method = {"name": "fedrep", "head_from": head_from}
    experiment = lab.experiment(method=method, model={"name": model}, local__momentum=0.9, engine__stack=stack)
    rep = experiment.method

    def top(weights: Weights) -> Weights:
        return Weights({name: weights.params[name] for name in rep.personal(weights)})

    start = experiment.setting.initial
    (exchange,) = rep.round_exchanges(1, experiment.setting)
    after_head, after_body = (
        after_phases(lab, experiment, exchange.phases[0]),
        after_phases(lab, experiment, *exchange.phases),
    )
    assert bits(rep.base(after_head)) == bits(rep.base(start))
    assert all(not torch.equal(tensor, start.params[name]) for name, tensor in top(after_head).params.items())
    assert bits(top(after_body)) == bits(top(after_head))
    moved = rep.base(after_body)
    # Not the biases: in front of a BatchNorm layer their gradient is zero.
    for name, tensor in moved.values.items():
        assert name.endswith(".bias") or not torch.equal(tensor, start.values[name]), name


def test_passes(lab: Any) -> None:
    """Client 0's mini-batches: E_h passes and then E_f, E_h by default what `local` says."""

    def steps(method: dict[str, Any], **changes: Any) -> int:
        reply, _ = lab.train(lab.experiment(method={"name": "fedrep", **method}, **changes))
        return int(reply.steps)

    one_pass = -(-len(lab.partition.clients[0].train) // 16)
    assert steps({}) == 2 * one_pass
    assert steps({}, local__epochs=3) == 4 * one_pass
    assert steps({"head_epochs": 2, "body_epochs": 3}, local__epochs=7) == 5 * one_pass


def test_the_frozen_base_has_no_dropout(lab: Any) -> None:
    """Features of the base in the head's phase are those of evaluation: one full batch, one step, computed apart."""
    changes = {"model": {"name": "fedproto_cnn"}, "local": {"lr": 0.1, "batch_size": 1000, "steps": 1}}
    experiment = lab.experiment(**changes, method={"name": "fedrep"})
    (exchange,) = experiment.method.round_exchanges(1, experiment.setting)
    assert isinstance(exchange, Exchange) and exchange.phases[0].loss is not None
    seen: list[torch.Tensor] = []

    class Listening:
        def __init__(self, model: Any) -> None:
            self.model = model

        def for_extra_inputs(self) -> Any:
            return self.model.for_extra_inputs()

        def classify(self, features: torch.Tensor) -> Any:
            seen.append(features.detach())
            return self.model.classify(features)

    inner = exchange.phases[0].loss
    head = replace(exchange.phases[0], loss=lambda model, batch, inputs: inner(Listening(model), batch, inputs))
    after_phases(lab, experiment, head)
    setting, own = experiment.setting, torch.from_numpy(lab.partition.clients[0].train.copy())
    images = (lab.dataset.train.images[own].float() / 255 - 0.3) / 0.3
    expected = setting.network.features(images, setting.initial.values)
    assert torch.allclose(seen[0].sum(0), expected.sum(0), atol=1e-3)
