"""Weights of three clients into one model, by hand: clipped, robust, noisy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flcore.aggregation.mean import average_weights
from flcore.aggregation.settings import Aggregation
from flcore.aggregation.weights import fold_weights, update_norm
from flcore.io.messages import Weights

T = torch.tensor

BEFORE = Weights({"a": T([1.0, 1.0]), "b": T([0.0])})
# Updates (3, 4 | 0), (0, 0 | 1), (0, -12 | 5): norms 5, 1, 13.
SENT = {
    7: Weights({"a": T([1.0, -11.0]), "b": T([5.0])}),
    0: Weights({"a": T([4.0, 5.0]), "b": T([0.0])}),
    2: Weights({"a": T([1.0, 1.0]), "b": T([1.0])}),
}
SIZES = {0: 1, 2: 1, 7: 2}


def fold(sent: Any = SENT, *, cohort: int = 3, seed: int = 0, before: Weights = BEFORE, **how: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return fold_weights(sent, SIZES, before, Aggregation(**how), cohort=cohort, generator=generator)


def values(model: Weights) -> list[float]:
    return [value for tensor in model.params.values() for value in tensor.tolist()]


def test_at_its_defaults_it_is_fedavg_to_the_bit() -> None:
    model, facts = fold()
    expected = average_weights(SENT, SIZES)
    assert all(torch.equal(model.params[name], expected.params[name]) for name in expected.params)
    assert facts == {}


def test_norms_of_updates() -> None:
    assert [update_norm(SENT[client], BEFORE) for client in (0, 2, 7)] == [5, 1, 13]


def test_clipped_to_a_number() -> None:
    """To 2.5: (1.5, 2 | 0), (0, 0 | 1) and 2.5/13 · (0, -12 | 5), as 1:1:2 of 4: with c = 2.5/13,
    w = (1 + 1.5/4, 1 + (2 - 24c)/4 | (1 + 10c)/4).
    """
    model, facts = fold(clip=2.5)
    c = 2.5 / 13
    assert values(model) == pytest.approx([1.375, 1 + (2 - 24 * c) / 4, (1 + 10 * c) / 4], rel=1e-6)
    assert facts == {"update_norm": 5, "clip_norm": 2.5, "clipped": 2}


def test_clipped_to_the_median_norm() -> None:
    """The bound is 5: only client 7's update shrinks, by 5/13."""
    model, facts = fold(clip="median")
    assert values(model) == pytest.approx([1 + 3 / 4, 1 + (4 - 24 * 5 / 13) / 4, (1 + 10 * 5 / 13) / 4], rel=1e-6)
    assert facts == {"update_norm": 5, "clip_norm": 5, "clipped": 1}


def test_a_bound_that_nobody_reaches_changes_no_bit() -> None:
    model, facts = fold(clip=13.0)
    assert values(model) == values(average_weights(SENT, SIZES))
    assert facts["clipped"] == 0


def test_the_robust_rules_do_not_weigh() -> None:
    """Per coordinate of 4 1 1 | 5 1 -11 | 0 1 5 the middle one, although client 7 says that it has half of the data."""
    for how in ({"rule": "median"}, {"rule": "trimmed_mean", "trim": 0.1}):
        assert values(fold(**how)[0]) == [1, 1, 1]


def test_clipped_first_then_the_rule() -> None:
    """To 1: (0.6, 0.8 | 0), (0, 0 | 1), (0, -12/13 | 5/13); the medians are (0, 0 | 5/13)."""
    assert values(fold(rule="median", clip=1.0)[0]) == pytest.approx([1, 1, 5 / 13], rel=1e-6)


def test_statistics_count_in_the_norm_and_counters_are_rounded() -> None:
    """Update (3 | 4): norm 5, clipped to 2.5 half of it, (1.5 | 2); counters 2 and 5: the median is 3.5, rounded 4."""

    def model(weight: float, mean: float, steps: int) -> Weights:
        return Weights({"w": T([weight])}, {"mean": T([mean]), "steps": torch.tensor(steps)})

    sent, before = {0: model(4.0, 5.0, 2), 2: model(1.0, 1.0, 5)}, model(1.0, 1.0, 0)
    assert update_norm(sent[0], before) == 5
    clipped = fold(sent, before=before, clip=2.5)[0]
    assert (clipped.params["w"].item(), clipped.buffers["mean"].item()) == (1 + 1.5 / 2, 1 + 2 / 2)
    middle = fold(sent, before=before, rule="median")[0].buffers["steps"]
    assert (middle.item(), middle.dtype) == (4, torch.int64)


def test_noise_by_hand() -> None:
    """Clipped to 1, summed without weights, over the four that were asked though three answered; z·C = 0.5."""
    model, _ = fold(cohort=4, clip=1.0, noise=0.5)
    drawn = torch.Generator().manual_seed(0)
    noise = [0.5 * torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((2,), (1,))]
    total = [0.6 + 0 + 0, 0.8 + 0 - 12 / 13, 0 + 1 + 5 / 13]
    flat = [*noise[0].tolist(), *noise[1].tolist()]
    start = [1, 1, 0]
    expected = [w + (t + n) / 4 for w, t, n in zip(start, total, flat, strict=True)]
    assert values(model) == pytest.approx(expected, rel=1e-6)


def test_noise_has_the_size_that_the_account_takes() -> None:
    """z·C/m per coordinate around the mean of the updates: 40,000 draws, whose deviation errs by 0.35 %."""
    before = Weights({"a": torch.zeros(40_000)})
    sent = {client: Weights({"a": torch.zeros(40_000)}) for client in (0, 2, 7)}
    model, _ = fold(sent, cohort=10, before=before, clip=2.0, noise=3.0)
    assert model.params["a"].std().item() == pytest.approx(3 * 2 / 10, rel=0.02)
    assert abs(model.params["a"].mean().item()) < 5 * 0.6 / math.sqrt(40_000)


def test_what_one_client_moves_is_bounded_by_what_the_account_takes() -> None:
    """Whatever client 0 sends, the sum moves by at most 2C, the noisy mean by 2C/m: the same noise on both sides."""
    generator = torch.Generator().manual_seed(5)
    before = Weights({"a": torch.randn(100, generator=generator)})
    worst = 0.0
    for size in (1e-3, 1.0, 1e3, 1e6):
        sent = {client: Weights({"a": torch.randn(100, generator=generator) * size}) for client in (0, 2, 7)}
        opposite = {**sent, 0: Weights({"a": 2 * before.params["a"] - sent[0].params["a"]})}
        found = [fold(who, cohort=3, before=before, clip=0.5, noise=1.0)[0].params["a"] for who in (sent, opposite)]
        worst = max(worst, float((found[0].double() - found[1].double()).norm()))
    assert worst == pytest.approx(2 * 0.5 / 3, rel=1e-5)
