"""What a sweep runs: all combinations, checked whole, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from pipelines.plan.grid import describe_federation, short_names, sweep_plan
from pipelines.plan.params import for_entry, override

PROX = {"method": {"name": "fedprox"}}


def test_all_combinations_in_the_order_given_each_with_every_seed() -> None:
    planned = sweep_plan(PROX, ["method.mu=0.1,1", "local.epochs=1,2"], seeds=[3, 4])
    assert [tuple(point.values.values()) for point in planned.points] == [(0.1, 1), (0.1, 2), (1.0, 1), (1.0, 2)]
    assert [run.config.seed for run in planned.runs] == [3, 4] * 4
    assert [run.config.method.mu for run in planned.runs] == [0.1] * 4 + [1.0] * 4  # type: ignore[attr-defined]
    assert planned.runs[2].label == "method.mu = 0.1, local.epochs = 2"


def test_points_of_a_list_are_run_as_they_stand() -> None:
    """A point that leaves out a key has it as configured; epochs are 1 by default."""
    listed = [{"method.mu": 0.1}, {"method.mu": 1, "local.epochs": 2}]
    planned = sweep_plan(PROX, [], seeds=[0], listed=listed)
    assert planned.keys == ("method.mu", "local.epochs")
    assert [tuple(point.values.values()) for point in planned.points] == [(0.1, 1), (1.0, 2)]
    with pytest.raises(ConfigError, match="--rows: names whole points; leave out --vary"):
        sweep_plan(PROX, ["local.lr=1"], seeds=[0], listed=listed)
    with pytest.raises(ConfigError, match="--rows: point 1: expected dotted keys with values"):
        sweep_plan(PROX, [], seeds=[0], listed=["method.mu"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="--rows seed: every point is run with every seed"):
        sweep_plan(PROX, [], seeds=[0], listed=[{"seed": 1}])


def test_values_are_yaml_and_are_told_as_the_configuration_reads_them() -> None:
    """1e-3 is text in YAML, and 1 is no float: both come back as what the run has."""
    planned = sweep_plan({}, ["local.lr=1e-3,1", "local.clip=null,5"], seeds=[0])
    assert [point.values["local.lr"] for point in planned.points] == [0.001, 0.001, 1.0, 1.0]
    assert [point.label for point in planned.points][:2] == [
        "local.lr = 0.001, local.clip = null",
        "local.lr = 0.001, local.clip = 5",
    ]


def test_the_configured_point_is_known_wherever_it_stands() -> None:
    """fedprox's own default is 0.01; what a file or ``compare.settings`` says comes first."""
    vary = ["method.mu=0.01,0.5,2"]
    settings = {"compare": {"settings": {"fedprox": {"method.mu": 2}}}}
    for raw, expected in ((PROX, 0.01), (override(PROX, ["method.mu=0.5"]), 0.5), (PROX | settings, 2.0)):
        planned = sweep_plan(raw, vary, seeds=[0])
        assert planned.configured == {"method.mu": expected}
        assert [point.values["method.mu"] for point in planned.points if point.is_configured] == [expected]
    assert not any(point.is_configured for point in sweep_plan(PROX, ["method.mu=1,3"], seeds=[0]).points)


def test_a_point_and_the_run_of_a_comparison_are_the_same_run() -> None:
    raw = {"method": {"name": "fedavg"}, "compare": {"settings": {"fedprox": {"method.mu": 2, "local.lr": 0.5}}}}
    planned = sweep_plan(override(raw, ["method.name=fedprox"]), ["method.mu=1,2"], seeds=[1], baselines=["fedavg"])
    same = [run.config.identity() for run in planned.runs[1:]]
    assert same == [Config.from_mapping(for_entry(raw, method, 1)).identity() for method in ("fedprox", "fedavg")]


def test_seeds_are_those_of_the_comparison_unless_named() -> None:
    assert sweep_plan({"compare": {"seeds": [7, 8]}}, ["local.lr=0.1"]).seeds == (7, 8)


def test_baselines_take_over_what_is_varied_outside_the_method_and_nothing_else() -> None:
    alone = sweep_plan(PROX, ["method.mu=1,2"], seeds=[0, 1], baselines=["local", "fedavg"])
    assert [(p.method, dict(p.values)) for p in alone.points if p.is_baseline] == [("local", {}), ("fedavg", {})]
    beside = sweep_plan(PROX, ["method.mu=1,2", "local.epochs=1,3"], seeds=[0], baselines=["fedavg"])
    assert [p.values for p in beside.points if p.is_baseline] == [{"local.epochs": 1}, {"local.epochs": 3}]
    assert [run.config.local.epochs for run in beside.runs] == [1, 3, 1, 3, 1, 3]
    assert not any(point.is_configured for point in alone.points[2:])


def test_methods_can_be_varied_each_with_its_own_parameters() -> None:
    planned = sweep_plan(override(PROX, ["method.mu=0.5"]), ["method.name=fedprox,fedavg"], seeds=[0])
    assert [run.config.method.name for run in planned.runs] == ["fedprox", "fedavg"]
    assert [point.name for point in planned.points] == ["fedprox", "fedavg"]
    assert [point.is_configured for point in planned.points] == [True, False]


def test_the_federation_is_told_without_what_varies() -> None:
    raw = {"partition": {"name": "dirichlet", "alpha": 0.3, "num_clients": 1, "min_size": 5}}
    base = Config.from_mapping(raw)
    assert describe_federation(base, ()) == "digits, dirichlet partition (alpha 0.3, min_size 5), 1 client"
    assert describe_federation(base, ("partition.alpha",)) == "digits, dirichlet partition (min_size 5), 1 client"
    assert describe_federation(base, ("partition.name", "partition.num_clients")) == "digits"
    names = short_names(["method.mu", "method.name", "local.lr"])
    assert names == {"method.mu": "mu", "method.name": "method.name", "local.lr": "lr"}


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ([], "--vary: name at least one key"),
        (["local.lr"], "--vary local.lr: expected KEY=VALUE,VALUE"),
        (["local.lr="], "--vary local.lr=: expected KEY=VALUE,VALUE"),
        (["local.lr=0.1,,1"], "expected KEY=VALUE,VALUE"),
        (["lokal.lr=1"], "--vary lokal.lr: lokal: unknown key; did you mean 'local'"),
        (["local.learning=1"], "local.learning: unknown key"),
        (["local=1"], "--vary local: expected a section and one key of it"),
        (["seed=0,1"], "--vary seed: every point is run with every seed; name them with --seeds"),
        (["compare.baseline=local,fedavg"], "--vary compare.baseline: changes no result"),
        (["data.name=mnist,digits"], "--vary data.name: a sweep is on one set of images"),
        (["local.lr=0.1", "local.lr=1"], "--vary local.lr: appears twice"),
        (["local.lr=1,0.1,1.0"], "'fedprox, local.lr = 1' and 'fedprox, local.lr = 1' are the same run"),
        (["engine.workers=1,2"], "are the same run"),
        (["method.mu=0.1,-1"], "method.mu = -1: must be >= 0"),
        (["local.epochs=1,two"], "local.epochs = two: expected a whole number >= 1"),
        (["method.weight=1"], "method.weight: fedprox has no such parameter; it belongs to fedproto"),
        (["method.name=fedprox,fedpro"], "method.name = fedpro: must be one of"),
        (
            ["evaluation.split=test,validation", "local.lr=0.1"],
            "needs partition.validation above 0, for example 0.2",
        ),
    ],
)
def test_what_cannot_be_varied_is_refused_with_key_value_and_cure(vary: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_plan(PROX, vary, seeds=[0])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rule_about_several_keys_is_told_with_the_point_that_breaks_it() -> None:
    vary = ["method.head=linear,etf", "method.use_dcs=true,false"]
    with pytest.raises(ConfigError, match=r"needs use_dcs .*\(with method\.head = etf, method\.use_dcs = false\)"):
        sweep_plan({"method": {"name": "gfpl"}}, vary, seeds=[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "--seeds: name at least one seed"),
        ({"seeds": [1, 0, 1]}, "--seeds 1,0,1: a seed appears twice"),
        ({"seeds": [-1]}, "seed = -1: expected a whole number >= 0"),
        ({"baselines": ["fedavgg"]}, "--baselines: fedavgg: unknown method; did you mean 'fedavg'"),
        ({"baselines": ["local", "local"]}, "--baselines local,local: a method appears twice"),
    ],
)
def test_seeds_and_baselines_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_plan(PROX, ["local.lr=0.1"], **({"seeds": [0]} | changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("setting", ["partition.alpha", "data.size"])
def test_a_baseline_on_other_data_is_refused(setting: str) -> None:
    raw = PROX | {"compare": {"settings": {"local": {setting: 9}}}}
    with pytest.raises(ConfigError, match=rf"compare\.settings\.local: {setting.split('.')[0]} must be the same"):
        sweep_plan(raw, ["method.mu=1"], seeds=[0], baselines=["local"])
    assert sweep_plan(raw, ["method.mu=1"], seeds=[0]).runs
