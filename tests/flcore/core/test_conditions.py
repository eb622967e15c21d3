"""Conditions on parameters: what holds, what may hold, and what people read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from flcore.core.conditions import Condition, above, among, on


@dataclass(frozen=True)
class Options:
    """A section with a switch, a choice and two weights."""

    use: bool = True
    mode: str = "fast"
    weight: float | None = 0.5
    other: float = 0.0


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        (on("use"), {"use": True}, True),
        (on("use"), {"use": False}, False),
        (among("mode", "fast", None), {"mode": "fast"}, True),
        (among("mode", "fast", None), {"mode": None}, True),
        (among("mode", "fast", None), {"mode": "exact"}, False),
        (above("weight"), {"weight": 0.1}, True),
        (above("weight"), {"weight": 0}, False),
        (above("weight"), {"weight": None}, False),
        (above("weight", 2), {"weight": 2}, False),
        (on("use") & above("weight"), {"use": True, "weight": 1}, True),
        (on("use") & above("weight"), {"use": True, "weight": 0}, False),
        (on("use") | above("weight"), {"use": False, "weight": 1}, True),
        (on("use") | above("weight"), {"use": False, "weight": 0}, False),
    ],
)
def test_values_meet_a_condition_or_do_not(condition: Condition, values: dict[str, Any], holds: bool) -> None:
    assert condition.holds({**values, "something": "else"}) is holds


def test_a_section_is_asked_by_name() -> None:
    condition = on("use") & among("mode", "fast") & (above("weight") | above("other"))
    assert condition.holds_for(Options())
    assert not condition.holds_for(Options(weight=None))
    assert condition.names == ("use", "mode", "weight", "other")
    assert condition.words == "use and mode is fast and (weight > 0 or other > 0)"


def test_of_a_range_both_ends_are_asked() -> None:
    both = on("use") & above("weight", 1)
    assert both.may_hold({"use": (False, True), "weight": (0.0, 1.5)})
    assert not both.may_hold({"use": (False,), "weight": (0.0, 1.5)})
    assert not both.may_hold({"use": (True,), "weight": (0.0, 1.0)})


def test_equal_conditions_are_one_and_the_same_key() -> None:
    assert len({on("a") & above("b"), on("a") & above("b"), on("a") | above("b"), above("b", 1)}) == 3
