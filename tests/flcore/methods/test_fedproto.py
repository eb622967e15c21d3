"""FedProto by hand on linear models, and its answers (baselines.md 15 and 21)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.io.messages import Prototypes
from flcore.io.records import Record
from flcore.methods.fedproto import FedProto
from flcore.methods.types import PROTOTYPES


def by_hand(lab: Any, clients: list[list[int]], encoder: bool = False, **method: Any) -> Any:
    """A linear model that starts at zero, full batches, plain SGD: sample A = (2, 0) of class 0, three B = (0, 4)."""
    method = {"name": "fedproto", **method}
    return lab.linear([[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1], clients, encoder=encoder, method=method)


def test_the_encoder_moves_towards_the_prototype(lab: Any) -> None:
    """Encoder E = I, head zero (no gradient reaches E through it), A = (2, 0), prototype of class 0 at (0, 0), λ = 1.

    MSE over 1 sample and 2 dimensions: 4/2 = 2. Its gradient on E is (2/2)·(f - p)xᵀ = ((4, 0), (0, 0)), so
    E = ((0.6, 0), (0, 1)). The new feature (1.2, 0) goes up. λ = 0.5 halves the step: E_00 = 0.8, feature 1.6.
    """
    prototypes = Prototypes(torch.zeros(2, 2), torch.tensor([True, False]))
    for weight, corner in ((1.0, 0.6), (0.5, 0.8)):
        experiment = by_hand(lab, [[0]], encoder=True, weight=weight)
        reply, client_state = lab.train(experiment, server={"prototypes": prototypes})
        assert reply.losses["alignment"] == pytest.approx(2 * weight)
        encoder = client_state["model"].params["encoder.1.weight"]
        assert encoder.flatten().tolist() == pytest.approx([corner, 0, 0, 1])
        assert reply.message["prototypes"].means.tolist() == [[pytest.approx(2 * corner), 0], [0, 0]]
        assert reply.message["prototypes"].present.tolist() == [True, False]


def test_a_round_by_hand(lab: Any, tmp_path: Any) -> None:
    """Without encoder features are pixels: client 0 sends (2, 0) and (0, 4), client 1 (0, 4): means (2, 0), (0, 4)."""
    run = lab.run(by_hand(lab, [[0, 1], [2, 3]]), tmp_path / "run")
    assert run.state.server["prototypes"].means.tolist() == [[2, 0], [0, 4]]
    assert set(run.state.server) == {"prototypes"}


class Identity:
    """A model whose features are its input and whose head prefers class 1."""

    def features(self, images: Tensor) -> Tensor:
        return images

    def classify(self, features: Tensor) -> Tensor:
        return torch.tensor([[0.0, 1.0, 0.0]], device=features.device).expand(len(features), -1)


def scores(images: Tensor, prototypes: Prototypes, held: Tensor | None = None, inference: Any = "prototypes") -> Tensor:
    model: Any = Identity()
    return FedProto(inference=inference).predict(model, images, Record({PROTOTYPES: prototypes}), held)


def answers(
    images: Any, prototypes: Prototypes, classes: list[bool] | None, inference: Any = "prototypes"
) -> list[int]:
    held = None if classes is None else torch.tensor(classes)
    return scores(torch.tensor(images), prototypes, held, inference).argmax(dim=1).tolist()


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
    assert scores(torch.tensor([[1.0, 2.0]]), prototypes)[0].tolist() == pytest.approx([-2.5, -2.0, -math.inf])


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

    def of_so_many(count: int) -> list[float]:
        return scores(base.repeat(count, 1), prototypes)[0, 1:].tolist()

    assert of_so_many(1) == pytest.approx([-0.04, -0.01], rel=1e-2)
    assert of_so_many(30) == pytest.approx(of_so_many(1), rel=1e-3)
