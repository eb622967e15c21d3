"""Cases of a test that are quick enough for every run of the suite, the others marked slow; and settings for that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

SMALL: Mapping[str, Mapping[str, Any]] = {
    "ccvr": {"per_class": 20, "epochs": 2},
    "creff": {"per_class": 5, "match_steps": 2, "retrain_epochs": 2},
    "fedcspc": {"cal_epochs": 2, "n_aug": 1, "clusters": 2, "n_repeat": 2},
    "fedgen": {"gen_steps": 3, "gen_batch": 8},
    "fedpa": {"gen_steps": 3, "gen_batch": 8},
    "fedpg": {"gen_steps": 3, "gen_batch": 8, "noise_dim": 4, "n_virtual": 5, "virtual_batch": 8},
    "gfpl": {"interval": 1, "first_exchange": 1, "components": 2},
    "protolda_distilled": {"teacher": {"model.atoms": 6, "model.patch": 5, "model.grid": 2}},
    "vhl": {"per_class": 5, "virtual_batch": 8},
}
"""Parameters that leave a method's server, or what it makes of its own, little work."""


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
