"""FedHKD: knowledge and its mean, one step by hand (baselines.md section 14)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flcore.io.messages import Count, Prototypes, TensorDict
from flcore.io.records import Payloads, Record
from flcore.methods.fedhkd import KNOWLEDGE, FedHKD, qualified_counts
from flcore.methods.kit.class_prototypes import CLASS_COUNTS
from flcore.methods.types import NUM_SAMPLES, Replies, RoundContext


def linear(lab: Any, **method: Any) -> Any:
    """Client 0 holds (2, 0) of class 0, client 1 (0, 4) of class 1; E = I, head zero, one full batch, SGD at 0.1."""
    return lab.linear(encoder=True, method={"name": "fedhkd", **method})


@pytest.mark.parametrize(("distance", "body"), [("mse", (5.0, 1.0)), ("l2", (math.sqrt(10), 1 / math.sqrt(10)))])
def test_one_step_by_hand(lab: Any, distance: str, body: tuple[float, float]) -> None:
    """f = (2, 0) of class 0, H̄_0 = (1, −3), Q̄_0 = (1, 0); class 1 has no knowledge.

    Body: f − H̄_0 = (1, 3), mean square 5 with gradient 2·(1, 3)/2, norm √10 with gradient (1, 3)/√10; row r of E moves
    by entry r times x = (2, 0). Head of zeros: softmax (1/2, 1/2), apart by (−1/2, 1/2): mean square 1/4, norm √(1/2).
    ``body`` is the value and the first entry of the gradient.
    """
    experiment = linear(lab, distance=distance, lambda_head=0.3, gamma=0.7)
    knowledge = Prototypes(torch.tensor([[1.0, -3, 1, 0], [0, 0, 0, 0]]), torch.tensor([True, False]))
    server = {"model": experiment.setting.initial, "knowledge": knowledge}
    reply, _ = lab.train(experiment, number=2, server=server)
    value, slope = body
    assert reply.losses == {
        "cross_entropy": pytest.approx(math.log(2)),
        "answers": pytest.approx(0.3 * (0.25 if distance == "mse" else math.sqrt(0.5))),
        "features": pytest.approx(0.7 * value),
    }
    expected = [1 - 0.1 * 0.7 * slope * 2, 0, -0.1 * 0.7 * slope * 3 * 2, 1]
    assert reply.message["model"].params["encoder.1.weight"].flatten().tolist() == pytest.approx(expected)


def test_the_heads_term_by_hand(lab: Any) -> None:
    """λ = 1, H̄_0 = (1, −3), Q̄_0 = (1, 0), T = 0.5, mse, γ off, a head of zeros.

    The loss is mean of (s − Q̄)², s = (1/2, 1/2): dL/ds = (−1/2, 1/2); through the softmax (Jacobian ±1/4) and T:
    dL/dlogits = (1/T)·(−1/4, 1/4) = (−1/2, 1/2). Row 0 of W gets 0.1·(1/2)·(1, −3) from it and 0.1·(1/2)·(2, 0) from
    the cross-entropy, its bias 0.1·(1/2 + 1/2).
    """
    experiment = linear(lab, lambda_head=1.0, gamma=0.0)
    knowledge = Prototypes(torch.tensor([[1.0, -3, 1, 0], [5, 5, 5, 5]]), torch.tensor([True, False]))
    server = {"model": experiment.setting.initial, "knowledge": knowledge}
    reply, _ = lab.train(experiment, number=2, server=server)
    assert set(reply.losses) == {"cross_entropy", "answers"}
    params = reply.message["model"].params
    assert params["head.weight"][0].tolist() == pytest.approx([0.15, -0.15])
    assert params["head.bias"][0].item() == pytest.approx(0.1)


def test_what_a_client_sends(lab: Any) -> None:
    """Mean features and mean softmax(logits/T) of the trained model in evaluation mode, for the classes held."""
    experiment = lab.experiment(model={"name": "fedproto_cnn"}, method__name="fedhkd")
    reply, client_state = lab.train(experiment)
    own = torch.from_numpy(lab.partition.clients[0].train.copy())
    images, labels = (lab.dataset.train.images[own].float() / 255 - 0.3) / 0.3, lab.dataset.train.labels[own]
    values, network = reply.message["model"].values, experiment.setting.network
    features = network.features(images, values)
    answers = (network.classify(features, values) / 0.5).softmax(1)
    knowledge = reply.message["knowledge"]
    assert knowledge.present.tolist() == [bool((labels == label).any()) for label in range(6)]
    for label in labels.unique():
        expected = torch.cat([features[labels == label].mean(0), answers[labels == label].mean(0)])
        assert torch.allclose(knowledge.means[label], expected, atol=1e-4)
    assert reply.message["class_counts"]["held"].tolist() == torch.bincount(labels)[knowledge.present].tolist()
    assert client_state == {}


def test_clipping_and_noise(lab: Any) -> None:
    """Clipped features have means of norm ζ at most; noise of σ = 3 on |C_k|·d values, not on the answers.

    Its mean square is 9 within four standard deviations of √(2/n)·9.
    """
    changes = {"model": {"name": "fedcspc_cnn"}}
    plain, clipped, noisy = (
        lab.train(lab.experiment(**changes, method={"name": "fedhkd", **options}))[0].message
        for options in ({}, {"clip": 0.01}, {"noise": 3.0})
    )
    means, bound = clipped["knowledge"].means[:, :256], 0.01 * (1 + 1e-6)
    assert bool((means.norm(dim=1) <= bound).all()) and bool((means.norm(dim=1) > 0).any())
    assert bool((plain["knowledge"].means[plain["knowledge"].present, :256].norm(dim=1) > 0.01).all())
    present = plain["knowledge"].present
    blur = (noisy["knowledge"].means - plain["knowledge"].means)[present]
    assert not blur[:, 256:].any()
    count = int(present.sum()) * 256
    assert float(blur[:, :256].square().mean()) == pytest.approx(9, abs=4 * 9 * math.sqrt(2 / count))
    assert not noisy["knowledge"].means[~present].any()
    assert lab.same(noisy["model"], plain["model"])


def test_who_counts() -> None:
    """Section 14 b: n = {30, 70} and {90, 10}, ν = 0.25. Below it everywhere, as 4 and 2 of 100: all holders count."""
    sizes = torch.tensor([100, 100])
    assert qualified_counts(torch.tensor([[30, 70], [90, 10]]), sizes, 0.25).tolist() == [[30, 70], [90, 0]]
    assert qualified_counts(torch.tensor([[4, 96], [2, 98]]), sizes, 0.25).tolist() == [[4, 96], [2, 98]]
    assert qualified_counts(torch.tensor([[25, 75], [0, 100]]), sizes, 0.25).tolist() == [[25, 75], [0, 100]]
    assert qualified_counts(torch.tensor([[1, 99], [0, 100]]), sizes, 0.0).tolist() == [[1, 99], [0, 100]]


@pytest.mark.parametrize(("absent_classes", "third"), [("masked", 6), ("zeros", 0)])
def test_mean_of_the_knowledge(lab: Any, absent_classes: Any, third: float) -> None:
    """Class 0: (30·1 + 90·5)/120 = 4; class 1: client 0 alone, 2; class 2: no client, keeps 6, or gets zeros."""
    setting = replace(lab.experiment().setting, num_classes=3)
    known = torch.tensor([True, True, absent_classes == "masked"])
    server = Record({KNOWLEDGE: Prototypes(torch.tensor([[9.0], [9.0], [6.0]]), known)})
    held = torch.tensor([True, True, False])
    replies: dict[int, Payloads] = {
        client: {
            KNOWLEDGE: Prototypes(torch.tensor([[first], [second], [0.0]]), held),
            CLASS_COUNTS: TensorDict({"held": torch.tensor(counts)}),
            NUM_SAMPLES: Count(100),
        }
        for client, first, second, counts in ((0, 1.0, 2.0, [30, 70]), (1, 5.0, 8.0, [90, 10]))
    }
    method = FedHKD(absent_classes=absent_classes)
    after, facts = method.fuse_knowledge(server, Replies(replies), RoundContext(setting, 2))
    assert after[KNOWLEDGE].means.flatten().tolist() == [4, 2, third]
    assert (after[KNOWLEDGE].present.tolist(), facts) == ([True] * 3, {})
