"""By which parameters runs are compared."""

from __future__ import annotations

from typing import Any

import pytest

from flcore.config.schema import Config
from pipelines.runs.compared import compared_by, flatten

PLAIN = {
    "seed",
    *("data.name", "partition.name", "model.name", "method.name"),
    *("partition.num_clients", "partition.alpha", "federation.rounds", "federation.participation"),
    *("local.epochs", "local.steps", "local.batch_size", "local.optimizer", "local.lr"),
}


@pytest.mark.parametrize(
    ("raw", "more"),
    [
        ({}, set()),
        ({"tracking": {"uri": "http://user:secret@host"}, "compare": {"seeds": [7]}, "engine": {"workers": 3}}, set()),
        ({"partition": {"tasks": 2}, "local": {"momentum": 0.5}}, {"partition.tasks", "local.momentum"}),
        ({"local": {"momentum": 0.0}}, set()),
        ({"method": {"name": "moon"}}, {"method.mu", "method.tau"}),
        ({"method": {"name": "fedproto", "min_count": 2}}, {"method.weight", "method.min_count"}),
    ],
    ids=["defaults", "not of the result", "not default", "default said", "what tuning explores", "of the method"],
)
def test_what_says_most_about_a_run(raw: dict[str, Any], more: set[str]) -> None:
    assert set(compared_by(Config.from_mapping(raw))) == PLAIN | more


def test_switches_of_an_ablation_are_there_whatever_their_value() -> None:
    found = compared_by(Config.from_mapping({"method": {"name": "fedpa"}}))
    assert {"method.use_ge", "method.use_po", "method.use_ad"} <= set(found)


def test_what_is_set_in_the_base_of_a_method_is_there() -> None:
    named = {"name": "ccvr", "base": "fedprox", "base_settings": {"fedprox": {"method.mu": 0.1}}}
    found = compared_by(Config.from_mapping({"method": named}))
    assert {"method.base", "method.base_settings.fedprox.method.mu"} <= set(found)


def test_flatten_keeps_every_key_once() -> None:
    nested = {"seed": 3, "partition": {"alpha": 0.1, "seed": None}, "model": {"channels": [8, 16], "options": {}}}
    assert flatten(nested) == {
        "seed": "3",
        "partition.alpha": "0.1",
        "partition.seed": "null",
        "model.channels": "[8, 16]",
        "model.options": "{}",
    }
