"""Cases of a test that are quick enough for every run of the suite; the others are marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], always: Collection[Any] | int) -> list[Any]:
    """Mark all cases slow but some.

    Args:
        cases: as ``pytest.mark.parametrize`` takes them.
        always: the cases that are not slow, or how many of the first ones are not.
    """
    listed = list(cases)
    kept = listed[:always] if isinstance(always, int) else always
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in listed
    ]
