"""Methods by hand on linear models, their limit cases to the bit, and their traffic (baselines.md 1-3, 15, 21-23)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.messages import Count, Prototypes, Weights
from flcore.methods import METHODS
from flcore.methods.fedproto import FedProto
from flcore.records import serialise

# Sample A = (2, 0) of class 0 and three samples B = (0, 4) of class 1.
PIXELS, LABELS = [[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1]


def by_hand(lab: Any, clients: list[list[int]], encoder: bool = False, **changes: Any) -> Any:
    """A linear model that starts at zero, full batches, plain SGD with learning rate 0.1."""
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    settings = {"local": {"lr": 0.1, "batch_size": 100}, "federation": {"rounds": 1}} | changes
    return lab.experiment(
        dataset, lab.by_hand(dataset, clients, [[0, 1]] * len(clients)), lab.ToySpec(encoder), **settings
    )


def same(first: Weights, second: Weights) -> bool:
    """Equal to the bit, names and order included."""
    return first.header() == second.header() and serialise({"model": first}) == serialise({"model": second})


@pytest.mark.parametrize("method", ["fedavg", "local", "fedprox", "central", "fedproto"])
def test_one_step_on_one_sample(lab: Any, method: str) -> None:
    """From zero weights softmax is (1/2, 1/2). A = (2, 0) has class 0: row 0 has gradient (-1/2)·(2, 0), bias -1/2.

    With learning rate 0.1: W = ((0.1, 0), (-0.1, 0)), b = (0.05, -0.05). The loss was ln 2. FedProx's gradient vanishes
    at w_g and FedProto has no prototypes in round 1, so all methods take this step.
    """
    experiment = by_hand(lab, [[0]], method={"name": method})
    reply, memory = lab.train(experiment)
    weights = memory["model"] if method in ("local", "fedproto") else reply.message["model"]
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


def test_fedproto_moves_the_encoder_towards_the_prototype(lab: Any) -> None:
    """Encoder E = I, head zero (no gradient reaches E through it), A = (2, 0), prototype of class 0 at (0, 0), λ = 1.

    MSE over 1 sample and 2 dimensions: 4/2 = 2. Its gradient on E is (2/2)·(f - p)xᵀ = ((4, 0), (0, 0)), so
    E = ((0.6, 0), (0, 1)). The new feature (1.2, 0) goes up. λ = 0.5 halves the step: E_00 = 0.8, feature 1.6.
    """
    prototypes = Prototypes(torch.zeros(2, 2), torch.tensor([True, False]))
    for weight, corner in ((1.0, 0.6), (0.5, 0.8)):
        experiment = by_hand(lab, [[0]], encoder=True, method={"name": "fedproto", "weight": weight})
        reply, memory = lab.train(experiment, server={"prototypes": prototypes})
        assert reply.losses["alignment"] == pytest.approx(2 * weight)
        encoder = memory["model"].params["encoder.1.weight"]
        assert encoder.flatten().tolist() == pytest.approx([corner, 0, 0, 1])
        assert reply.message["prototypes"].means.tolist() == [[pytest.approx(2 * corner), 0], [0, 0]]
        assert reply.message["prototypes"].present.tolist() == [True, False]


def test_fedproto_round_by_hand(lab: Any, tmp_path: Any) -> None:
    """Without encoder features are pixels: client 0 sends (2, 0) and (0, 4), client 1 (0, 4): means (2, 0), (0, 4)."""
    run = lab.run(by_hand(lab, [[0, 1], [2, 3]], method={"name": "fedproto"}), tmp_path / "run")
    assert run.state.server["prototypes"].means.tolist() == [[2, 0], [0, 4]]
    assert set(run.state.server) == {"prototypes"}


def test_fedproto_counts_clients_not_samples() -> None:
    """Prototypes 1 and 5 give 3 (section 15 b)."""
    server = {"prototypes": Prototypes.empty(1, 1)}
    replies = {
        k: {"prototypes": Prototypes(torch.tensor([[value]]), torch.tensor([True]))}
        for k, value in enumerate([1.0, 5.0])
    }
    (stage,) = FedProto().stages().values()
    assert stage(server, replies, None, 1)["prototypes"].means.item() == 3.0  # type: ignore[arg-type]


# ---- limit cases, to the bit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_fedprox_without_its_term_is_fedavg(lab: Any, model: str, tmp_path: Any) -> None:
    runs = {
        name: lab.run(
            lab.experiment(method=options, model={"name": model}, federation__participation=0.5, local__momentum=0.5),
            tmp_path / name,
        )
        for name, options in {
            "fedavg": {"name": "fedavg"},
            "off": {"name": "fedprox", "mu": 0},
            "on": {"name": "fedprox", "mu": 0.5},
        }.items()
    }  # fmt: skip
    expected = runs["fedavg"].state.server["model"]
    assert same(runs["off"].state.server["model"], expected)
    assert runs["off"].history == runs["fedavg"].history
    assert not same(runs["on"].state.server["model"], expected)
    assert [r["participants"] for r in runs["on"].history] == [r["participants"] for r in runs["fedavg"].history]


@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_fedproto_without_its_term_is_local_training(lab: Any, model: str, tmp_path: Any) -> None:
    runs = {
        name: lab.run(lab.experiment(method=options, model={"name": model}), tmp_path / name)
        for name, options in {
            "local": {"name": "local"},
            "off": {"name": "fedproto", "weight": 0},
            "on": {"name": "fedproto", "weight": 1},
        }.items()
    }
    for client in range(4):
        expected = runs["local"].memory(client)["model"]
        assert same(runs["off"].memory(client)["model"], expected)
        assert not same(runs["on"].memory(client)["model"], expected)
    assert [r["local_accuracy"] for r in runs["off"].history] == [r["local_accuracy"] for r in runs["local"].history]


@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn", "fedcspc_cnn"])
def test_the_first_round_of_fedproto_is_local_training(lab: Any, model: str, tmp_path: Any) -> None:
    changes = {"federation__rounds": 1, "model": {"name": model}, "local__epochs": 2, "local__momentum": 0.5}
    local = lab.run(lab.experiment(method__name="local", **changes), tmp_path / "local")
    proto = lab.run(lab.experiment(method__name="fedproto", **changes), tmp_path / "fedproto")
    for client in range(4):
        assert same(proto.memory(client)["model"], local.memory(client)["model"])


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "central"])
def test_one_client_with_everything_is_local_training(lab: Any, method: str, tmp_path: Any) -> None:
    """Baselines.md section 23, 2. FedProx differs from the second step on unless it is off."""
    everything = lab.by_hand(lab.dataset, [range(240)], [range(60)])
    options = {"name": method} | ({"mu": 0} if method == "fedprox" else {})
    changes = {"local__epochs": 2, "partition__num_clients": 1}
    local = lab.run(lab.experiment(partition=everything, method__name="local", **changes), tmp_path / "local")
    other = lab.run(lab.experiment(partition=everything, method=options, **changes), tmp_path / "other")
    assert same(other.state.server["model"], local.memory(0)["model"])
    assert [r["mean_local"] for r in other.history] == [r["mean_local"] for r in local.history]


def test_central_trains_on_the_union_of_all_clients(lab: Any, tmp_path: Any) -> None:
    everything = lab.by_hand(lab.dataset, [range(240)], [range(60)])
    single = lab.run(lab.experiment(partition=everything, method__name="central"), tmp_path / "single")
    divided = lab.run(lab.experiment(method__name="central"), tmp_path / "divided")
    assert same(single.state.server["model"], divided.state.server["model"])
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


# ---- traffic -----------------------------------------------------------------------------------------------------


def traffic(lab: Any, tmp_path: Any, clients: list[list[int]], **changes: Any) -> Any:
    run = lab.run(by_hand(lab, clients, **changes), tmp_path / "run")
    return SimpleNamespace(up=run.state.up, down=run.state.down, last=run.history[-1])


@pytest.mark.parametrize("method", ["local", "central"])
def test_references_send_nothing(lab: Any, method: str, tmp_path: Any) -> None:
    cost = traffic(lab, tmp_path, [[0], [1, 2, 3]], method={"name": method}, federation={"rounds": 3})
    assert (cost.up, cost.down) == ({}, {})
    assert (cost.last["bytes_up"], cost.last["bytes_down"], cost.last["scalars_up"]) == ({}, {}, 0)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_weights_travel_both_ways(lab: Any, method: str, tmp_path: Any) -> None:
    """P = 2·2 + 2 = 6 scalars, 24 bytes; 3 rounds of 2 clients: 36 scalars, 144 bytes each way; 6 counts of 8 up."""
    cost = traffic(lab, tmp_path, [[0], [1, 2, 3]], method={"name": method}, federation={"rounds": 3})
    assert cost.last["bytes_up"] == {"model": 144, "num_samples": 48}
    assert cost.last["bytes_down"] == {"model": 144}
    assert cost.last["scalars_up"] == 36


def test_only_the_sampled_send(lab: Any, tmp_path: Any) -> None:
    cost = traffic(lab, tmp_path, [[0], [1, 2, 3]], federation={"rounds": 3, "participation": 0.5})
    assert cost.last["bytes_up"] == {"model": 3 * 24, "num_samples": 3 * 8}


def test_prototypes_travel_for_the_classes_held(lab: Any, tmp_path: Any) -> None:
    """d = 2. Up per round: client 0 holds class 0, client 1 both: |C_k|·d = 2 + 4 scalars, 3·(8 + 8) = 48 bytes.

    Down: nothing in round 1, then both classes to both clients: 2·2·16 = 64 bytes a round.
    Three rounds: 144 bytes up, 128 down, 18 scalars.
    """
    dataset = lab.toy_dataset([[2, 0], [0, 4], [1, 0]], [0, 1, 0], None, None)
    partition = lab.by_hand(dataset, [[0], [1, 2]])
    run = lab.run(
        lab.experiment(dataset, partition, lab.ToySpec(), method__name="fedproto", federation__rounds=3),
        tmp_path / "run",
    )
    assert run.history[0]["bytes_down"] == {"prototypes": 0}
    assert run.history[-1]["bytes_up"] == {"prototypes": 144}
    assert run.history[-1]["bytes_down"] == {"prototypes": 128}
    assert run.history[-1]["scalars_up"] == 18


def test_batchnorm_statistics_are_counted_apart(lab: Any, tmp_path: Any) -> None:
    """fedgen_cnn at 1x16x16, d = 8, 6 classes: 984 + (256·8 + 8) + (8·6 + 6) = 3,094 parameters.

    Statistics: 2·6 + 2·16 floats and 2 counters: 44·4 + 16 = 192 bytes. One round of 4 clients, both ways.
    """
    run = lab.run(lab.experiment(federation__rounds=1), tmp_path / "run")
    assert run.history[0]["bytes_up"] == {"model": 4 * 3094 * 4, "model_buffers": 4 * 192, "num_samples": 32}
    assert run.history[0]["bytes_down"] == {"model": 4 * 3094 * 4, "model_buffers": 4 * 192}
    assert run.history[0]["scalars_up"] == 4 * 3094


@pytest.mark.parametrize("method", METHODS)
def test_measured_bytes_are_those_of_the_messages(lab: Any, method: str) -> None:
    """Invariant 3, on what each method really sends and receives in round 1."""
    experiment = lab.experiment(method__name=method)
    server = experiment.method.start_server(experiment.setting)
    reply, _ = lab.train(experiment, server=server)
    if method == "central":
        assert (reply.up, reply.down) == ({}, {})
        return
    assert sum(size.bytes for size in reply.up.values()) == len(serialise(reply.message))
    inbox = experiment.method.broadcast(server, 0, experiment.setting)
    assert sum(size.bytes for size in reply.down.values()) == len(serialise(inbox))


# ---- what a method keeps and answers -----------------------------------------------------------------------------


def test_who_trains_and_who_answers() -> None:
    """Of the references and the methods of this file."""
    facts = {name: (cls.trains, cls.data_scope, cls.has_global_model, cls.has_vote) for name, cls in METHODS.items()}
    assert (
        facts.items()
        >= {
            "local": ("all", "client", False, False),
            "central": ("all", "union", True, False),
            "fedavg": ("cohort", "client", True, False),
            "fedprox": ("cohort", "client", True, False),
            "fedproto": ("cohort", "client", False, True),
        }.items()
    )


def test_fedavg_says_its_sample_count(lab: Any) -> None:
    reply, memory = lab.train(by_hand(lab, [[0], [1, 2, 3]]), client=1)
    assert reply.message["num_samples"] == Count(3)
    assert (memory, reply.remembers) == ({}, False)


class Identity:
    """A model whose features are its input and whose head prefers class 1."""

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(features), -1)


def answers(
    images: Any, prototypes: Prototypes, classes: list[bool] | None, inference: Any = "prototypes"
) -> list[int]:
    held = None if classes is None else torch.tensor(classes)
    scores = FedProto(inference=inference).predict(Identity(), torch.tensor(images), {"prototypes": prototypes}, held)  # type: ignore[arg-type]
    return scores.argmax(dim=1).tolist()


def test_nearest_prototype_among_the_own_classes() -> None:
    """Prototypes at 0, 10, 20 on a line; 9 is nearest to 10, among classes 0 and 2 to 0 (9 < 11), 11 to 20."""
    prototypes = Prototypes(torch.tensor([[0.0], [10.0], [20.0]]), torch.tensor([True, True, True]))
    images = [[9.0], [11.0], [19.0]]
    assert answers(images, prototypes, None) == [1, 1, 2]
    assert answers(images, prototypes, [True, False, True]) == [0, 2, 2]
    assert answers(images, prototypes, None, "classifier") == [1, 1, 1]


def test_scores_are_minus_the_mean_squared_distance() -> None:
    """Feature (1, 2) to (0, 0): (1 + 4)/2 = 2.5; to (1, 4): (0 + 4)/2 = 2; a missing class is out of reach."""
    prototypes = Prototypes(torch.tensor([[0.0, 0.0], [1.0, 4.0], [0.0, 0.0]]), torch.tensor([True, True, False]))
    method = FedProto(inference="prototypes")
    scores = method.predict(Identity(), torch.tensor([[1.0, 2.0]]), {"prototypes": prototypes}, None)  # type: ignore[arg-type]
    assert scores[0].tolist() == pytest.approx([-2.5, -2.0, -math.inf])


def test_before_the_first_prototypes_the_head_answers() -> None:
    assert answers([[9.0]], Prototypes.empty(3, 1), [True, True, True]) == [1]


def test_without_a_prototype_of_an_own_class_the_head_answers() -> None:
    """Under partial participation the first cohort may hold none of a client's classes: class 0 is no answer then."""
    others = Prototypes(torch.tensor([[0.0], [10.0], [0.0]]), torch.tensor([True, False, False]))
    assert answers([[9.0]], others, [False, True, True]) == [1]


def test_answers_do_not_depend_on_how_many_are_asked_together() -> None:
    """Features around 300 in 50 dimensions, two prototypes 0.1 and 0.2 away in each: distances 0.01 and 0.04.

    |f|² + |p|² - 2f·p = 9·10⁶ has a float32 error of about 1, of which the mean over 50 dimensions leaves 0.02.
    """
    base = 300 + torch.rand(50, generator=torch.Generator().manual_seed(0))
    means = torch.stack([torch.zeros(50), base + 0.2, base - 0.1])
    prototypes = Prototypes(means, torch.tensor([True, True, True]))
    method = FedProto(inference="prototypes")

    def scores(count: int) -> list[float]:
        images = base.repeat(count, 1)
        return method.predict(Identity(), images, {"prototypes": prototypes}, None)[0, 1:].tolist()  # type: ignore[arg-type]

    assert scores(1) == pytest.approx([-0.04, -0.01], rel=1e-2)
    assert scores(30) == pytest.approx(scores(1), rel=1e-3)
