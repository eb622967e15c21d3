"""``preset: authors``: what the specifications say of published code, put in, and carried out."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError
from flcore.methods import METHODS
from flcore.methods.kit.preset import AuthorsPreset
from tests.cases import SMALL, quick

CODE: dict[str, dict[str, Any]] = {
    # fedpg.md 2, 4 (cut-off), 5.3 and 7 b to e: the notebook.
    "fedpg": {
        "lambda_c": 20,
        "n_virtual": 256,
        "stop_round": 30,
        "pixel_range": "authors",
        "proto_init": "random",
        "proto_lr": 2e-5,
        "gen_lr": 2e-5,
        "d_form": "zero_rows",
    },
    # fedcspc.md 2 ("Code defaults", "Code adds"), 4.3, 4.5 (the node loss alone), 4.7 (one mean of fewer than
    # five samples), 5.1, 6, 7 b and g.
    "fedcspc": {
        "clusters": 1,
        "ratio": 0.8,
        "few": 5,
        "kappa": 0.5,
        "w_angle": 0,
        "w_edge": 0,
        "angle_mode": "all",
        "aux_ce": True,
        "keep_stale": True,
        "tau_g": 0.07,
        "n_aug": 1,
        "fusion": "authors",
        "lambda_p": 0.9,
    },
    # fedpa.md 4 and 5.
    "fedpa": {
        "noise": "uniform",
        "po_form": "mse",
        "div_mask": "inter",
        "div_metric": "code",
        "gen_proto": "old",
        "gen_label_dist": "uniform",
        "fidelity": "authors_broadcast",
        "proto_mode": "running",
    },
    # baselines.md, sections 6, 8, 9, 13 to 15.
    "fedgen": {"noise": "uniform", "div_metric": "code", "fidelity": "authors_broadcast"},
    "vhl": {"lambda_v": 0.5, "per_class": 5000},
    "feddc": {"correction": "recursive"},
    "fedensemble": {"variant": "permutation", "combine": "probs"},
    "fedhkd": {"distance": "l2", "noise": 2},
    "fedproto": {"proto_mode": "running"},
}
"""Of FedMLP, GFPL and FedProc no code is public. Of the others nothing is disputed, the defaults are the code's, or it
has slips that no preset repeats (baselines.md, sections 4, 10, 19, 20)."""


def test_these_methods_have_one() -> None:
    assert {name for name in METHODS if issubclass(METHODS[name], AuthorsPreset)} == set(CODE)


@pytest.mark.parametrize("name", CODE)
def test_it_puts_the_values_of_the_code_in(name: str, lab: Any) -> None:
    """All other parameters keep their defaults, and what is written of the run says the values that it has."""
    plain, preset = (lab.config(method={"name": name, **own}) for own in ({}, {"preset": "authors"}))
    assert preset.to_mapping()["method"] == plain.to_mapping()["method"] | CODE[name] | {"preset": "authors"}


@pytest.mark.parametrize("name", CODE)
def test_another_choice_beside_it_is_refused(name: str, lab: Any) -> None:
    """Any value that is neither the code's nor the default, which cannot be told from silence."""
    declared = {one.name: one.default for one in fields(METHODS[name])}
    for key, value in CODE[name].items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("noise", "lambda_p"):
            other = value + 1 if isinstance(declared[key], int | None) else value + 0.01
            with pytest.raises(ConfigError, match=rf"preset = authors means {key} = .*; leave {key} out"):
                lab.config(method={"name": name, "preset": "authors", key: other})


@pytest.mark.parametrize("name", quick(CODE, ("fedproto",)))
def test_it_runs(name: str, lab: Any, tmp_path: Path) -> None:
    """Three rounds, so that what a round leaves for the next one is met twice."""
    own = {key: value for key, value in SMALL.get(name, {}).items() if key not in CODE[name]}
    method = {"name": name, "preset": "authors", **own}
    run = lab.run(lab.experiment(method=method, federation__rounds=3, model=lab.model_of(name)), tmp_path)
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert all(math.isfinite(value) for record in run.history for value in record["train_loss"].values())
