"""Whole runs with an optimiser on the server: order, refusals, the same bytes however run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.io.records import serialise
from flcore.methods import METHODS
from tests.cases import quick


def test_the_fold_comes_first(lab: Any, tmp_path: Path) -> None:
    """Clipped, then their median, then the step: half of the way that the median goes by itself."""
    fold = {"rule": "median", "clip": 0.5}
    start = lab.experiment().setting.initial.params
    ways = []
    for name, more in (("fold", {}), ("half", {"optimizer": "momentum", "server_lr": 0.5})):
        run = lab.run(lab.experiment(aggregation={**fold, **more}, federation__rounds=1), tmp_path / name)
        ways.append({key: value - start[key] for key, value in run.state.server["model"].params.items()})
    for key, way in ways[0].items():
        assert torch.allclose(ways[1][key], way / 2, rtol=1e-4, atol=1e-7)


def test_momentum_of_nothing_is_fedavg(lab: Any, tmp_path: Path) -> None:
    plain = lab.run(lab.experiment(), tmp_path / "plain").state.server["model"]
    how = {"optimizer": "momentum", "momentum": 0.0}
    found = lab.run(lab.experiment(aggregation=how), tmp_path / "found").state.server["model"]
    assert serialise({"model": found}) == serialise({"model": plain})


def test_stacked_it_is_the_same_to_rounding(lab: Any, distance: Any, tmp_path: Path) -> None:
    how = {"aggregation": {"optimizer": "adam", "tau": 0.01}, "local__steps": 2}
    serial = lab.run(lab.experiment(**how), tmp_path / "serial")
    stacked = lab.run(lab.experiment(**how, engine__stack=True), tmp_path / "stacked")
    assert distance(serial.state.server, stacked.state.server) < 1e-3


FOLDING = [name for name, cls in METHODS.items() if "weights" in cls().aggregates]


@pytest.mark.parametrize("name", quick(FOLDING, ("fedavg", "fednova")))
def test_every_stage_that_folds_weights_takes_the_step(lab: Any, name: str, tmp_path: Path) -> None:
    """At a tiny rate the model hardly leaves the place where it began."""
    if METHODS[name].data_scope == "union":
        return
    how = {"method__name": name, "model": lab.model_of(name), "federation__rounds": 1}
    step = {"optimizer": "momentum", "server_lr": 1e-9}
    experiment = lab.experiment(**how, aggregation=step)
    start = experiment.method.start_server(experiment.setting)["model"].params
    after = lab.run(experiment, tmp_path / "run").state.server["model"].params
    assert all(torch.allclose(after[key], value, atol=1e-6) for key, value in start.items() if key in after)


def test_a_run_that_does_not_say_it_keeps_its_name() -> None:
    assert "aggregation" not in Config.from_mapping({"aggregation": {"optimizer": "none"}}).identity()
    assert Config.from_mapping({"aggregation": {"optimizer": "adam"}}).identity()["aggregation"] == {
        "optimizer": "adam"
    }


@pytest.mark.parametrize("name", METHODS)
def test_refused_where_no_stage_folds_weights(name: str) -> None:
    raw = {"method": {"name": name}, "aggregation": {"optimizer": "adam"}}
    method = METHODS[name]()
    if "weights" in method.aggregates and method.data_scope == "client":
        Config.from_mapping(raw)
    else:
        with pytest.raises(ConfigError, match=r"^aggregation\.optimizer = adam: .*; leave optimizer out"):
            Config.from_mapping(raw)
