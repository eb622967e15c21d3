"""The references by hand, their limit cases to the bit and their traffic (baselines.md 1-3, 21-23); all methods."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.io.messages import Count, Weights
from flcore.io.records import serialise
from flcore.methods import METHODS
from flcore.methods.types import BATCHNORM, MODEL
from tests.cases import SMALL, quick

# Sample A = (2, 0) of class 0 and three samples B = (0, 4) of class 1.
PIXELS, LABELS = [[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1]


def by_hand(lab: Any, clients: list[list[int]], **changes: Any) -> Any:
    """A linear model that starts at zero, full batches, plain SGD with learning rate 0.1."""
    return lab.linear(PIXELS, LABELS, clients, **changes)


@pytest.mark.parametrize("method", ["fedavg", "local", "fedprox", "central", "fedproto"])
def test_one_step_on_one_sample(lab: Any, method: str) -> None:
    """From zero weights softmax is (1/2, 1/2). A = (2, 0) has class 0: row 0 has gradient (-1/2)·(2, 0), bias -1/2.

    With learning rate 0.1: W = ((0.1, 0), (-0.1, 0)), b = (0.05, -0.05). The loss was ln 2. FedProx's gradient vanishes
    at w_g and FedProto has no prototypes in round 1, so all methods take this step.
    """
    experiment = by_hand(lab, [[0]], method={"name": method})
    reply, client_state = lab.train(experiment)
    weights = client_state["model"] if method in ("local", "fedproto") else reply.message["model"]
    assert weights.params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0])
    assert weights.params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    assert reply.losses["cross_entropy"] == pytest.approx(math.log(2))
    assert reply.steps == 1


def test_fedavg_round_by_hand(lab: Any, tmp_path: Any) -> None:
    """Client 0 holds A: W_0 = (0.1, 0), b_0 = 0.05.

    Client 1 holds three B: gradient of row 0 (1/2)·(0, 4), so W_0 = (0, -0.2), b_0 = -0.05. Weighted
    1:3: W_0 = (0.025, -0.15), b_0 = 0.0125 - 0.0375 = -0.025; row 1 is its negative.
    """
    run = lab.run(by_hand(lab, [[0], [1, 2, 3]]), tmp_path / "run")
    params = run.state.server["model"].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.025, -0.15, -0.025, 0.15])
    assert params["head.bias"].tolist() == pytest.approx([-0.025, 0.025])
    assert run.history[0]["train_loss"]["cross_entropy"] == pytest.approx(math.log(2))


def second_step(mu: float) -> tuple[float, float]:
    """W_00 and b_0 after two steps on A at learning rate 0.1.

    After the first W_00 = 0.1, b_0 = 0.05 and row 1 opposite: the logits differ by 2·(0.2 + 0.05) = 0.5, so the
    probability of class 1 is p = 1/(1 + e^0.5) = 0.377541 and the gradients of row 0 are -2p and -p, plus μ times the
    way from zero.
    """
    p = 1 / (1 + math.exp(0.5))
    return 0.1 + 0.1 * (2 * p - mu * 0.1), 0.05 + 0.1 * (p - mu * 0.05)


@pytest.mark.parametrize("mu", [0.0, 0.1, 1.0])
def test_fedprox_second_step(lab: Any, mu: float) -> None:
    """μ = 1: 0.1 + 0.1·(0.755081 - 0.1) = 0.1655081 and 0.05 + 0.1·(0.377541 - 0.05) = 0.0827541.

    Mean loss of the term: 0 in step 1; in step 2 (μ/2)·2·(0.1² + 0.05²) = 0.0125·μ; half of it 0.00625·μ.
    """
    assert second_step(1.0) == pytest.approx((0.1655081, 0.0827541), abs=1e-7)
    changes = {"method": {"name": "fedprox", "mu": mu}, "local": {"lr": 0.1, "batch_size": 100, "epochs": 2}}
    reply, _ = lab.train(by_hand(lab, [[0]], **changes))
    params = reply.message["model"].params
    assert (params["head.weight"][0, 0].item(), params["head.bias"][0].item()) == pytest.approx(second_step(mu))
    assert reply.losses.get("proximal", 0.0) == pytest.approx(0.00625 * mu)
    assert ("proximal" in reply.losses) == (mu > 0)


def test_central_trains_on_the_union_of_all_clients(lab: Any, tmp_path: Any) -> None:
    everything = lab.by_hand(lab.dataset, [range(240)], [range(60)])
    single = lab.run(lab.experiment(partition=everything, method__name="central"), tmp_path / "single")
    divided = lab.run(lab.experiment(method__name="central"), tmp_path / "divided")
    assert lab.same(single.state.server["model"], divided.state.server["model"])
    assert divided.state.steps == 3 * 15  # 240 samples in batches of 16


@pytest.mark.parametrize("model", ["fedcspc_cnn", "toy"])
def test_one_fedavg_round_is_one_gradient_step_on_the_union(lab: Any, model: str, tmp_path: Any) -> None:
    """Section 2 b: full batches, one epoch, plain SGD, no BatchNorm, no dropout; tolerance 1e-6."""
    changes: dict[str, Any] = {"local": {"lr": 0.1, "batch_size": 1000}, "federation": {"rounds": 1}}
    if model == "toy":
        changes["spec"] = lab.ToySpec(encoder=True)
    else:
        changes["model"] = {"name": model}
    averaged = lab.run(lab.experiment(method__name="fedavg", **changes), tmp_path / "fedavg")
    central = lab.run(lab.experiment(method__name="central", **changes), tmp_path / "central")
    initial = lab.experiment(**changes).setting.initial.params
    for name, expected in central.state.server["model"].params.items():
        assert torch.allclose(averaged.state.server["model"].params[name], expected, atol=1e-6)
    assert any(not torch.equal(initial[name], tensor) for name, tensor in central.state.server["model"].params.items())


def test_only_the_sampled_send(lab: Any, tmp_path: Any) -> None:
    """P = 2·2 + 2 = 6 scalars of 4 bytes, from one of two clients a round."""
    run = lab.run(by_hand(lab, [[0], [1, 2, 3]], federation={"rounds": 3, "participation": 0.5}), tmp_path / "run")
    assert run.history[-1]["bytes_up"] == {"model": 3 * 24, "num_samples": 3 * 8}


def test_who_trains_and_who_answers() -> None:
    """Everybody but those named: the cohort, on clients' own data, with one model for all that answers by itself."""
    asked = ("trains", "data_scope", "has_global_model", "has_vote", "can_be_base", "predicts_from_client_state")
    found = {name: tuple(getattr(cls(), fact) for fact in asked) for name, cls in METHODS.items()}
    special = {
        "local": ("all", "client", False, False, False, False),
        "central": ("all", "union", True, False, False, False),
        "ditto": ("cohort", "client", False, False, False, False),
        "fedproto": ("cohort", "client", False, True, False, False),
        "fedper": ("cohort", "client", False, False, False, False),
        "fedrep": ("cohort", "client", False, False, False, False),
        "fesem": ("cohort", "client", False, False, False, False),
        "gfpl": ("cohort", "client", False, False, False, False),
        "fedensemble": ("cohort", "client", True, False, False, True),
    }
    for name, facts in found.items():
        assert facts[:4] == special.get(name, ("cohort", "client", True, False))[:4], name
    for name in ("fedavg", "fedprox", "moon", "fedntd", "creff", "fedproc", "fedhkd"):
        assert found[name] == ("cohort", "client", True, False, True, False), name
    assert {name: found[name] for name in special} == special


@pytest.mark.parametrize("name", ["fedproto", "fedproc", "fedhkd", "fedpa", "fedpg", "fedmlp", "fedcspc", "gfpl"])
def test_what_is_released_is_clipped_and_noisy(lab: Any, name: str) -> None:
    """Lengths of at most C = 0.01, though none is as short by itself; noise moves the same vectors, and only them."""
    small = {"fedcspc": {"clusters": 1}, "gfpl": {"first_exchange": 0, "interval": 1}}.get(name, {})
    unit = {} if name in ("fedcspc", "gfpl") else {"proto_unit": "client"}
    sent = []
    for release in ({}, {"proto_clip": 0.01, **unit}, {"proto_clip": 0.01, "proto_noise": 0.1, **unit}):
        method = {"name": name, **small, **release}
        experiment = lab.experiment(model=lab.model_of(name), method=method, local__lr=0.01)
        exchange = len(experiment.method.round_exchanges(1, experiment.setting)) - 1 if name == "fedmlp" else 0
        sent.append(lab.train(experiment, exchange=exchange)[0].message)
    plain, clipped, noisy = map(released, sent)
    assert float(plain.norm(dim=1).min()) > 0.01
    assert float(clipped.norm(dim=1).max()) <= 0.01 * (1 + 1e-5)
    assert noisy.shape == clipped.shape and bool((noisy != clipped).all())
    if MODEL in sent[0]:
        assert lab.same(sent[0][MODEL], sent[2][MODEL])


def released(message: Any) -> torch.Tensor:
    """The vectors of a message that its release step concerns."""
    for name in ("prototypes", "knowledge"):
        if name in message:
            return message[name].means[message[name].present, :8]  # knowledge: features, then answers
    return message["mixtures"].means if "mixtures" in message else message["cluster_prototypes"]["vectors"]


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "moon"},
        {"name": "fedntd"},
        {"name": "creff"},
        {"name": "fedcspc", "norm_match": True, "use_lrl": False, "use_ca": False},
    ],
    ids=lambda method: method["name"],
)
def test_frozen_models_look_through_a_clients_own_statistics(lab: Any, method: dict[str, Any]) -> None:
    """Under ``batchnorm: local`` what is received has none. FedAvg, which asks no frozen model, sees no other.

    MOON's previous model has zero weights: its features are its biases, so that only the received one's can differ.
    """
    model = {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "local"}
    experiment = lab.experiment(method=method, model=model, local__steps=1)
    initial = experiment.setting.initial
    previous = Weights({name: torch.full_like(value, "bias" in name) for name, value in initial.params.items()})
    seen = []
    for shift in (0, 3):
        moved = {name: value + shift if "mean" in name else value for name, value in initial.buffers.items()}
        client_state = {BATCHNORM: Weights({}, moved), "previous": previous}
        reply, _ = lab.train(experiment, number=2, client_state=client_state)
        seen.append((dict(reply.losses), serialise(reply.message)))
    assert (seen[0] == seen[1]) == (method["name"] == "fedavg")


ODD: list[dict[str, Any]] = [
    {"name": "fedproto"},
    {"name": "fedproc", "similarity": "inner", "weighted": True},
    {"name": "fedhkd", "distance": "mse"},
    {"name": "fedhkd", "distance": "l2", "clip": 1.0},
    {"name": "fedensemble", "variant": "permutation"},
    {"name": "fedcspc", "base": "moon", "cal_epochs": 2, "n_aug": 1, "fusion": "minmax", "keep_stale": True},
    {"name": "fedcspc", "cal_epochs": 2, "use_cpm": False, "fusion": "authors", "contrast": "full"},
    {"name": "fedcspc", "cal_epochs": 2, "use_ca": False, "feedback": False},
    {"name": "fedpa", "gen_steps": 3, "preset": "authors"},
    {"name": "fedpg", **SMALL["fedpg"]},
    {"name": "fesem", "centres": 5},
    {"name": "gfpl", "first_exchange": 0, "interval": 1, "retrain_source": "own"},
]


@pytest.mark.parametrize("method", quick(ODD, 1), ids=lambda method: "-".join(str(value) for value in method.values()))
def test_odd_clients_give_numbers(lab: Any, method: dict[str, Any], tmp_path: Any) -> None:
    """One class only; one sample; fewer samples than a batch; classes 4 and 5 that nobody holds."""
    labels = lab.dataset.train.labels
    of = [torch.nonzero(labels == label).flatten().tolist() for label in range(4)]
    clients = [of[0], of[1][:1], of[1][1:4] + of[2][:4], of[3]]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    experiment = lab.experiment(partition=partition, model={"name": "fedcspc_cnn"}, method=method)
    run = lab.run(experiment, tmp_path / "run")
    assert not run.failures
    for record in (run.state.server, run.client_state(1), run.client_state(2)):
        tensors = [tensor for payload in record.values() for tensor in payload.arrays().values()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    for name in {"prototypes", "knowledge"} & set(run.state.server):
        assert run.state.server[name].present.tolist() == [True] * 4 + [False] * 2
    assert all(record["mean_local"] is not None for record in run.history)


def test_fedavg_says_its_sample_count(lab: Any) -> None:
    reply, client_state = lab.train(by_hand(lab, [[0], [1, 2, 3]]), client=1)
    assert reply.message["num_samples"] == Count(3)
    assert (client_state, reply.has_state) == ({}, False)
