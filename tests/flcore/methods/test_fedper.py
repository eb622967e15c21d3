"""FedPer: what is personal, what is shared, and who answers (baselines.md sections 17 and 21)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.fedper import FedPer
from flcore.models import MODELS, build_model, extract_weights
from tests.cases import quick

METHOD_NAMES = ["fedper", "fedrep"]


def part(weights: Weights, prefix: str) -> Record:
    return {"part": Weights({name: tensor for name, tensor in weights.params.items() if name.startswith(prefix)})}


@cache
def initial(model: str, shape: tuple[int, int, int]) -> Weights:
    return extract_weights(build_model(MODELS[model](), shape, 10))


@pytest.mark.parametrize(
    ("model", "shape", "head_from", "shared"),
    [
        # conv 1→10 and 10→20 of 5×5: 260 + 5,020 = 5,280; with the linear layer 320→50 16,050 more (section 15 c).
        ("fedproto_cnn", (1, 28, 28), "fully_connected", 5280),
        ("fedproto_cnn", (1, 28, 28), "head", 5280 + 16050),
        # conv 3→6 and 6→16 of 5×5: 456 + 2,416; all but the head's 256·10 + 10 of 92,626 (fedcspc.md section 2).
        ("fedcspc_cnn", (3, 32, 32), "fully_connected", 2872),
        ("fedcspc_cnn", (3, 32, 32), "head", 92626 - 2570),
        # ResNet-18: only the last layer is fully connected: 512·10 + 10 of 11,173,962.
        ("resnet18", (3, 32, 32), "fully_connected", 11173962 - 5130),
        ("resnet18", (3, 32, 32), "head", 11173962 - 5130),
    ],
)
def test_shared_scalars(model: str, shape: tuple[int, int, int], head_from: Any, shared: int) -> None:
    weights = initial(model, shape)
    method = FedPer(head_from=head_from)
    base = method.base(weights)
    assert base.num_parameters == shared
    assert set(base.params) | set(method.personal(weights)) == set(weights.params)
    assert set(base.params).isdisjoint(method.personal(weights))
    assert dict(base.buffers) == dict(weights.buffers)


def test_a_round_is_fedavg_of_the_base_and_keeps_the_heads(lab: Any, tmp_path: Any) -> None:
    """From equal initial heads clients train as in FedAvg; only the averaging differs, and only of the head."""
    changes = {"model": {"name": "fedcspc_cnn"}, "federation__rounds": 1}
    averaged = lab.run(lab.experiment(**changes), tmp_path / "fedavg")
    experiment = lab.experiment(**changes, method__name="fedper")
    run = lab.run(experiment, tmp_path / "fedper")
    expected, base = averaged.state.server["model"], run.state.server["model"]
    for prefix in ("encoder.", "projection."):
        assert lab.same(part(base, prefix), part(expected, prefix))
    assert not part(base, "head.")["part"].params
    heads = [run.client_state(client)["top"].params["head.weight"] for client in range(4)]
    assert len({tuple(head.flatten().tolist()) for head in heads}) == 4
    assert run.history[0]["mean_local"] is not None


@pytest.mark.parametrize("head_from", quick(["fully_connected", "head"], 1))
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_global_model_is_the_base(lab: Any, method: str, head_from: str, tmp_path: Any) -> None:
    """Section 21: no personal parameter is in it, before a round and after; what stands on it is the scorer's business.

    With the top of a client it is that client's model.
    """
    options = {"name": method, "head_from": head_from}
    experiment = lab.experiment(method=options, model={"name": "fedcspc_cnn"}, federation__rounds=1)
    asked, setting = experiment.method, experiment.setting
    start = asked.global_model(asked.start_server(setting))
    assert lab.same(start, asked.base(setting.initial))
    run = lab.run(experiment, tmp_path / "run")
    base, client_state = asked.global_model(run.state.server), run.client_state(2)
    personal = asked.personal(setting.initial)
    assert personal and set(base.params) == set(setting.initial.params) - set(personal)
    own = lab.client_model(asked, run.state.server, 2, client_state, setting)
    assert lab.same(own, Weights({**own.params, **base.params, **client_state["top"].params}))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_who_answers_for_a_client(lab: Any, method: str, tmp_path: Any) -> None:
    """Half of the clients per round: whoever was never sampled has the initial head, all have the current base."""
    experiment = lab.experiment(
        method__name=method, model={"name": "fedcspc_cnn"}, federation={"rounds": 1, "participation": 0.5}
    )
    run = lab.run(experiment, tmp_path / "run")
    sampled = run.history[0]["participants"]
    start = experiment.setting.initial
    for client in range(4):
        client_state = run.client_state(client)
        own = lab.client_model(experiment.method, run.state.server, client, client_state, experiment.setting)
        assert own is not None and list(own.params) == list(start.params)
        assert lab.same(part(own, "encoder."), part(run.state.server["model"], "encoder."))
        assert lab.same(part(own, "head."), part(start, "head.")) == (client not in sampled)
        assert bool(client_state) == (client in sampled)
