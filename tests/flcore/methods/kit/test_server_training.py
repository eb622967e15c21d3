"""The one loop of training at the server, by hand on parabolas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flcore.core.optim import Adam, Sgd
from flcore.core.schedules import exponential
from flcore.methods.kit.server_training import Moving, Terms, fit, leaves

T = torch.tensor


def parabola(values: dict[str, Tensor], batch: Tensor) -> Terms:
    """½(w − x)², three times; and the distance, which is only looked at."""
    apart = values["w"] - batch
    return {"square": (3.0, 0.5 * apart.square().sum()), "distance": (0.0, apart.abs().sum())}


def test_steps_on_the_weighted_sum() -> None:
    """w = 1, x = 0 then 1, lr 0.1: gradient 3·1, w = 0.7; gradient 3·(0.7 − 1) = −0.9, w = 0.79.

    Terms are noted unweighted, as they were in front of their step: ½ and 1, then 0.045 and 0.3.
    """
    values = leaves({"w": T([1.0])})
    fitted = fit(Moving(values, Sgd(0.1)), [T([0.0]), T([1.0])], lambda x: parabola(values, x), what="it", cure="lr")
    assert values["w"].item() == pytest.approx(0.79)
    assert fitted.values["w"].item() == pytest.approx(0.79)
    assert not fitted.values["w"].requires_grad
    assert fitted.facts("last_") == pytest.approx({"last_square": 0.045, "last_distance": 0.3})
    assert fitted.facts("", 0, "_first") == pytest.approx({"square_first": 0.5, "distance_first": 1.0})


def test_groups_move_by_their_own_optimisers_and_rates() -> None:
    """Both have gradient 1 at both steps. w: SGD, 0.1 then 0.05. v: Adam, whose steps are its rate: 0.01 and 0.01."""
    w, v = leaves({"w": T([1.0])}), leaves({"v": T([2.0])})
    groups = [Moving(w, Sgd(9.0), exponential(0.1, 0.5)), Moving(v, Adam(0.01))]
    fitted = fit(groups, range(2), lambda _: {"sum": (1.0, w["w"].sum() + v["v"].sum())}, what="it", cure="lr")
    assert w["w"].item() == pytest.approx(0.85)
    assert v["v"].item() == pytest.approx(1.98)
    assert set(fitted.values) == {"w", "v"}


def test_what_no_term_reads_stays() -> None:
    values = leaves({"w": T([1.0]), "unread": T([5.0])})
    fit(Moving(values, Sgd(0.1)), [T([0.0])], lambda x: parabola(values, x), what="it", cure="lr")
    assert values["unread"].item() == 5.0


def test_leaves_are_copies() -> None:
    given = {"w": T([1.0])}
    values = leaves(given)
    fit(Moving(values, Sgd(0.1)), [T([0.0])], lambda x: parabola(values, x), what="it", cure="lr")
    assert given["w"].item() == 1.0
    assert not given["w"].requires_grad


def test_what_diverges_says_what_to_lower() -> None:
    """w = 1, then −3e30, where the square overflows float32 and its gradient does not; then the weight does."""
    values = leaves({"w": T([1.0])})
    with pytest.raises(
        ArithmeticError, match=r"^the toy diverged \(square inf, distance 3e\+30\); lower method\.rate$"
    ):
        fit(
            Moving(values, Sgd(1e30)), [T([0.0])] * 2, lambda x: parabola(values, x), what="the toy", cure="method.rate"
        )
