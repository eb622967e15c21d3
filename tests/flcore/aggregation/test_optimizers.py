"""Two steps of each server optimiser by hand.

Two rounds on one parameter: x = 1, the fold is 2, then the step, then the fold is x + 2, so that Δ is 1, then 2.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.aggregation.optimizers import MOMENTUM, SECOND_MOMENT, server_step
from flcore.aggregation.settings import Aggregation
from flcore.io.messages import Weights
from flcore.io.records import Record


def weights(value: float, **buffers: Any) -> Weights:
    return Weights({"w": torch.tensor([value])}, {name: torch.tensor(value) for name, value in buffers.items()})


def two_rounds(**how: Any) -> tuple[list[float], Record]:
    """The model after each of two rounds with updates 1 and 2, and what the server keeps."""
    section, model, server, seen = Aggregation(**how), weights(1.0), Record(), []
    for update in (1.0, 2.0):
        model, kept = server_step(model, weights(model.params["w"].item() + update), server, section)
        server = Record({**server, **kept})
        seen.append(model.params["w"].item())
    return seen, server


def kept(server: Record) -> tuple[float, float]:
    return server[MOMENTUM].params["w"].item(), server[SECOND_MOMENT].params["w"].item()


def test_momentum_by_hand() -> None:
    """m = 1, x = 1 + 0.5 · 1 = 1.5; m = 0.9 · 1 + 2 = 2.9, x = 1.5 + 0.5 · 2.9 = 2.95. No second moment."""
    seen, server = two_rounds(optimizer="momentum", server_lr=0.5)
    assert seen == pytest.approx([1.5, 2.95], rel=1e-6)
    assert server[MOMENTUM].params["w"].item() == pytest.approx(2.9, rel=1e-6)
    assert SECOND_MOMENT not in server


def test_adam_by_hand() -> None:
    """τ = 0.5: v = 0.25 before. m = 0.5, v = 0.75 · 0.25 + 0.25 · 0.25 = 0.25, x = 1 + 0.1 · 0.5 / (0.5 + 0.5) = 1.05.
    m = 0.5 · 0.5 + 0.5 · 2 = 1.25, v = 0.75 · 0.25 + 0.25 · 1.5625 = 0.578125.
    """
    seen, server = two_rounds(optimizer="adam", momentum=0.5, beta2=0.75, tau=0.5, server_lr=0.1)
    assert kept(server) == pytest.approx((1.25, 0.578125), rel=1e-6)
    assert seen == pytest.approx([1.05, 1.05 + 0.125 / (math.sqrt(0.578125) + 0.5)], rel=1e-6)


def test_yogi_by_hand() -> None:
    """β1 = 0, τ = 2: v = 4 before. Of 1 the sign of 4 - 1 is plus: v = 4 - 0.25 · 1 = 3.75; of 4 that of 3.75 - 4 is
    minus: v = 3.75 + 0.25 · 4 = 4.75.
    """
    seen, server = two_rounds(optimizer="yogi", momentum=0.0, beta2=0.75, tau=2.0, server_lr=0.1)
    assert kept(server) == (2, 4.75)
    first = 1 + 0.1 / (math.sqrt(3.75) + 2)
    assert seen == pytest.approx([first, first + 0.2 / (math.sqrt(4.75) + 2)], rel=1e-6)


def test_adagrad_by_hand() -> None:
    """β1 = 0 unless said, τ = 1: v = 1 before, then 1 + 1 = 2, then 2 + 4 = 6."""
    seen, server = two_rounds(optimizer="adagrad", tau=1.0)
    assert kept(server) == (2, 6)
    first = 1 + 0.1 / (math.sqrt(2) + 1)
    assert seen == pytest.approx([first, first + 0.2 / (math.sqrt(6) + 1)], rel=1e-6)


def test_the_defaults_are_those_of_the_paper() -> None:
    sections = [Aggregation(optimizer="momentum"), Aggregation(optimizer="adam")]
    sections += [Aggregation(optimizer="yogi"), Aggregation(optimizer="adagrad")]
    assert [section.first_decay for section in sections] == [0.9, 0.9, 0.9, 0.0]
    assert [section.learning_rate for section in sections] == [1.0, 0.1, 0.01, 0.1]
    assert {(section.beta2, section.tau) for section in sections} == {(0.99, 1e-3)}


def test_momentum_of_nothing_at_rate_one_is_the_fold_to_the_bit() -> None:
    """Also where fold and model are of very different size: fold + 0 · Δ + 0, not x + (fold − x)."""
    generator = torch.Generator().manual_seed(3)
    before, fold = (Weights({"w": torch.randn(1000, generator=generator) * scale}) for scale in (1e6, 1e-6))
    how = Aggregation(optimizer="momentum", momentum=0.0)
    assert torch.equal(server_step(before, fold, Record(), how)[0].params["w"], fold.params["w"])


def test_buffers_take_the_fold() -> None:
    fold = weights(2.0, mean=3.0, steps=7)
    model, kept = server_step(weights(1.0, mean=1.0, steps=0), fold, Record(), Aggregation(optimizer="adam"))
    assert (model.buffers["mean"].item(), model.buffers["steps"].item()) == (3, 7)
    assert all(not payload.buffers for payload in kept.values() if isinstance(payload, Weights))
