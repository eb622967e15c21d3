"""Simulated poisoned clients: who they are, what they send and on what they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flcore.config.sections import FederationConfig
from flcore.core.errors import ConfigError
from flcore.experiment.poisoning import Poisoning
from flcore.io.messages import Count, Prototypes, Weights
from flcore.io.records import Record
from flcore.methods.types import ClientContext

T = torch.tensor


def poisoned_clients(federation: FederationConfig, num_clients: int, seed: int) -> tuple[int, ...]:
    return Poisoning.of(federation, num_clients, seed).clients


def test_who_is_poisoned() -> None:
    """As many as asked for, by the seed alone; or those that are named."""
    drawn = poisoned_clients(FederationConfig(poisoned=3), 10, 0)
    assert len(drawn) == 3 and list(drawn) == sorted(set(drawn)) and set(drawn) <= set(range(10))
    assert drawn == poisoned_clients(FederationConfig(poisoned=3, attack="scale"), 10, 0)
    assert len({poisoned_clients(FederationConfig(poisoned=3), 10, seed) for seed in range(10)}) > 1
    assert poisoned_clients(FederationConfig(poisoned_clients=(7, 2)), 10, 0) == (2, 7)
    assert poisoned_clients(FederationConfig(), 10, 0) == ()


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        ({"poisoned": 11}, "federation.poisoned = 11: there are 10 clients"),
        ({"poisoned_clients": (3, 10)}, "federation.poisoned_clients: no client 10, ids go from 0 to 9"),
    ],
)
def test_clients_that_there_are_not(federation: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        poisoned_clients(FederationConfig(**federation), 10, 0)


def sent(lab: Any, attack: str, scale: float) -> Record:
    """Trained from (1, 1) to (3, 0), statistics 5, a prototype (1, -2) of class 0 and a count."""
    received = Weights({"w": T([1.0, 1.0])}, {"mean": T([4.0])})
    ctx = ClientContext(lab.experiment().setting, 2, received=Record({"model": received}))
    message = {
        "model": Weights({"w": T([3.0, 0.0])}, {"mean": T([5.0])}),
        "prototypes": Prototypes(T([[1.0, -2.0], [0.0, 0.0]]), T([True, False])),
        "num_samples": Count(7),
    }
    federation = FederationConfig(attack=attack, attack_scale=scale)  # type: ignore[arg-type]
    honest = Poisoning(federation, 0, (ctx.client + 1,))
    assert honest.message(message, ctx) is message
    return Record(Poisoning(federation, 0, (ctx.client,)).message(message, ctx))


@pytest.mark.parametrize(
    ("attack", "scale", "weights", "prototype"),
    [
        ("sign_flip", 2.0, [1 - 2 * 2, 1 + 2 * 1], [-2, 4]),
        ("scale", 2.0, [1 + 2 * 2, 1 - 2 * 1], [2, -4]),
        ("sign_flip", 1.0, [-1, 2], [-1, 2]),
        ("random_labels", 2.0, [3, 0], [1, -2]),
    ],
)
def test_what_leaves_a_poisoned_client(
    lab: Any, attack: str, scale: float, weights: list[float], prototype: list[float]
) -> None:
    """The update is (2, -1); statistics, counts and which classes there are stay as they are."""
    found = sent(lab, attack, scale)
    assert found["model"].params["w"].tolist() == weights
    assert found["model"].buffers["mean"].tolist() == [5]
    assert found["prototypes"].means[0].tolist() == prototype
    assert (found["prototypes"].present.tolist(), found["num_samples"]) == ([True, False], Count(7))


def test_random_labels(lab: Any) -> None:
    """Of the poisoned alone, of all classes alike: 3,000 labels in 10 classes, 300 ± 5·√270 each."""
    dataset = lab.toy_dataset([[0]] * 6000, [0] * 6000, [[0]], [0])
    partition = lab.by_hand(dataset, [list(range(3000)), list(range(3000, 6000))], [[0], []])

    def changed(seed: int) -> torch.Tensor:
        return Poisoning(FederationConfig(attack="random_labels"), seed, (1,)).labels(labels, partition, 10)

    labels = torch.zeros(6000, dtype=torch.int64)
    found = changed(0)
    assert torch.equal(found[:3000], labels[:3000]) and not labels.any()
    counts = torch.bincount(found[3000:], minlength=10)
    assert counts.sum() == 3000 and (counts - 300).abs().max() < 83
    assert torch.equal(found, changed(0)) and not torch.equal(found, changed(1))


def test_a_poisoned_client_trains_on_its_random_labels(lab: Any) -> None:
    """Its counts are those of its random labels, its reply is another; the honest ones' are what they were."""
    plain = lab.experiment()
    poisoned = lab.experiment(federation__poisoned_clients=[1], federation__attack="random_labels")
    rows = poisoned.training_indices(1, 1)
    expected = torch.bincount(poisoned.train_labels[rows], minlength=6)
    assert torch.equal(poisoned.label_counts(1, 1), expected)
    assert not torch.equal(expected, plain.label_counts(1, 1)) and expected.sum() == len(rows)
    for client, same in ((0, True), (1, False)):
        (ours, _), (theirs, _) = lab.train(poisoned, client), lab.train(plain, client)
        equal = [
            torch.equal(tensor, theirs.message["model"].params[name])
            for name, tensor in ours.message["model"].params.items()
        ]
        assert all(equal) == same
