"""What is searched: every method has a space, every space holds the given values, suggestions have the right type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.params import Param, Search, declared
from flcore.methods import METHODS
from pipelines.tuning.problem import Problem
from pipelines.tuning.space import Dimension, space, values_of, with_values, without_keys

from .conftest import Configure


def _searched_parameters(method: str) -> list[Param]:
    return [parameter for parameter in declared(METHODS[method]) if parameter.search is not None]


SHARED = ["local.lr", "local.momentum", "local.schedule", "local.epochs"]


def _dimension(config: Config, key: str) -> Dimension:
    (found,) = [dimension for dimension in space(config) if dimension.key == key]
    return found


def test_every_method_is_searched_around_what_is_given(config_with: Configure) -> None:
    """From the defaults, null among them; a key comes after those that its condition asks about.

    ProtoLDA adds up sums: no client takes a step, whose learning rate could be searched.
    """
    for method in METHODS:
        problem = Problem.of(config_with(method={"name": method}), "accuracy")
        given = problem.given_values
        sums_alone = method in ("closed_head", "protolda", "protolda_blocks")
        shared = [] if sums_alone else [key for key in SHARED if key not in problem.config.method.required_config]
        assert [key for key in given if key.startswith("local.")] == shared
        assert problem.starts[0] == given
        assert problem.config_of(given) == problem.config
        study = optuna.create_study()
        study.enqueue_trial(given)
        assert problem.suggest(study.ask()) == given
        dimensions = space(problem.config)
        possible = {key: (value,) for key, value in values_of(problem.config).items()}
        possible |= {dimension.key: dimension.extremes for dimension in dimensions}
        keys = [dimension.key for dimension in dimensions]
        for position, dimension in enumerate(dimensions):
            assert dimension.asks(possible) & {*keys} <= {*keys[:position]}


def test_fedavg_is_searched_over_what_all_methods_share(config_with: Configure) -> None:
    assert [dimension.key for dimension in space(config_with(method={"name": "fedavg"}))] == SHARED
    assert [dimension.key for dimension in space(config_with())] == ["method.mu", *SHARED]
    by_steps = space(config_with(method={"name": "fedavg"}, local={"steps": 7}))
    assert [dimension.key for dimension in by_steps][-1] == "local.steps"
    adam = space(config_with(method={"name": "fedavg"}, local={"optimizer": "adam", "lr": 1e-3}))
    assert [dimension.key for dimension in adam] == ["local.lr", "local.schedule", "local.epochs"]


@pytest.mark.parametrize(
    ("mu", "search"),
    [
        (0.2, Search(1e-3, 1.0, log=True)),
        (5.0, Search(1e-3, 5.0, log=True)),
        # From 10^-3 to 1 in seven steps of 3/7 of a decade.
        (0.0, Search(choices=(0.0, 0.001, 0.00268, 0.0072, 0.0193, 0.0518, 0.139, 0.373, 1.0))),
    ],
)
def test_a_range_is_widened_or_listed_until_it_holds_what_is_given(
    config_with: Configure, mu: float, search: Search
) -> None:
    assert _dimension(config_with(method={"mu": mu}), "method.mu").search == search


@pytest.mark.parametrize(
    ("dimension", "fits"),
    [
        (Dimension("method.k", Search(2, 9), whole=True), lambda v: type(v) is int and 2 <= v <= 9),
        (Dimension("method.k", Search(1, 64, log=True), whole=True), lambda v: type(v) is int and 1 <= v <= 64),
        (Dimension("method.mu", Search(0.01, 1, log=True)), lambda v: type(v) is float and 0.01 <= v <= 1),
        (Dimension("method.on", Search(choices=(None, True))), lambda v: v is None or v is True),
    ],
)
def test_values_have_the_type_of_their_parameter(dimension: Dimension, fits: Callable[[Any], bool]) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert all(fits(dimension.suggest(study.ask())) for _ in range(5))


# ---- conditions --------------------------------------------------------------------------------------------------


def test_what_asks_about_each_other_is_refused(config_with: Configure, monkeypatch: Any) -> None:
    def in_a_circle(config: Config) -> Any:
        yield "local.epochs", Search(1, 3, when=lambda local: local.batch_size > 8), True, config.local
        yield "local.batch_size", Search(8, 32, when=lambda local: local.epochs > 1), True, config.local

    monkeypatch.setattr("pipelines.tuning.space._shared", in_a_circle)
    with pytest.raises(ValueError, match=r"local\.batch_size, local\.epochs: each is searched only where another"):
        space(config_with())


def test_clusters_are_counted_where_they_are_made(config_with: Configure) -> None:
    """FINCH finds their number itself; k-means is told it, for the server and for the memory."""
    problem = Problem.of(config_with(method={"name": "fedmlp"}), "accuracy")
    counts = {"method.num_clusters", "method.local_clusters"}
    assert not counts & problem.given_values.keys()

    def suggested(**own: Any) -> set[str]:
        fixed = {**problem.given_values, **dict.fromkeys(counts, 2), **{f"method.{k}": v for k, v in own.items()}}
        return set(problem.suggest(optuna.trial.FixedTrial(fixed)))

    assert suggested(cluster="kmeans") == problem.given_values.keys() | counts
    for cluster in ("finch", "centred", "none"):
        assert suggested(cluster=cluster) == problem.given_values.keys()
    config = problem.config_of({"method.cluster": "kmeans", "method.num_clusters": 3})
    assert config.to_mapping()["method"]["num_clusters"] == 3


@pytest.mark.parametrize(
    ("method", "gone"),
    [
        ({"name": "fedmlp", "use_memory": False}, {"weight_memory", "kl_temp", "kl_dir", "local_clusters"}),
        ({"name": "fedmlp", "use_semantic": False}, {"alpha", "num_clusters", "minority_fraction"}),
        ({"name": "moon", "mu": 0.0}, set()),  # searched as a list with 0: what hangs on it stays
        ({"name": "gfpl", "use_dcs": False}, {"weight", "projection_dim"}),
        ({"name": "gfpl", "retrain_source": "own"}, {"merge_distance"}),
        ({"name": "fedensemble"}, {"models"}),
        ({"name": "fedproc", "alpha": 0.0}, {"tau"}),
        (
            {"name": "fedpa", "use_ge": False},
            {"lambda_ge0", "gamma_fid0", "gamma_div", "gamma_ad", "gen_steps", "gen_batch", "gen_lr"}
            | {"gen_weight_decay", "gen_hidden", "noise_dim"},
        ),
        ({"name": "fedpa", "use_po": False}, {"lambda_po0", "lambda_po_floor"}),
        ({"name": "fedpg", "use_fa": False}, {"lambda_c", "temperature"}),
        ({"name": "fedcspc", "use_pa": False}, {"n_aug", "lambda_u", "alpha"}),
        ({"name": "fedcspc", "use_lrl": False}, {"kappa", "w_node", "w_angle", "w_edge", "tau_l", "angle_mode"}),
        ({"name": "vhl", "align_epochs": 0}, {"lambda_a", "temperature"}),
    ],
)
def test_what_a_part_that_is_off_would_read_is_not_searched(
    config_with: Configure, method: dict[str, Any], gone: set[str]
) -> None:
    """Against all that the method declares."""
    declared_keys = {p.name for p in _searched_parameters(method["name"])}
    kept = {d.key.removeprefix("method.") for d in space(config_with(method=method)) if d.key.startswith("method.")}
    assert declared_keys - kept == gone


def test_a_weight_of_0_takes_along_what_it_weighs(config_with: Configure) -> None:
    problem = Problem.of(config_with(method={"name": "moon", "mu": 0.0}), "accuracy")
    given = problem.given_values
    assert given["method.mu"] == 0.0
    assert "method.tau" not in given
    drawn = problem.suggest(optuna.trial.FixedTrial({**given, "method.mu": 10.0, "method.tau": 0.3}))
    assert drawn == {**given, "method.mu": 10.0, "method.tau": 0.3}


@pytest.mark.parametrize(
    ("data", "clusters", "projections"),
    [
        # v from 2 to K/2, and d_p not below K (fedmlp.md and gfpl.md, section 10).
        ({"name": "digits"}, (None, 2, 3, 4, 5), (None, 50, 80, 128, 256)),
        ({"name": "celeba"}, None, (None, 50, 80, 128, 256)),  # 2 / 2 is below 2
        # 26 / 2 = 13: eight values from 2 to 13, 11/7 apart: 2, 3.57, 5.14, 6.71, 8.29, 9.86, 11.43, 13
        ({"name": "emnist"}, (None, 2, 4, 5, 7, 8, 10, 11, 13), (None, 50, 80, 128, 256)),
        # 47 / 2 = 23.5: 2 to 23, 3 apart
        ({"name": "emnist", "split": "balanced"}, (None, 2, 5, 8, 11, 14, 17, 20, 23), (None, 50, 80, 128, 256)),
        # 2 to 50, 48/7 apart: 2, 8.86, 15.71, 22.57, 29.43, 36.29, 43.14, 50
        ({"name": "cifar100"}, (None, 2, 9, 16, 23, 29, 36, 43, 50), (None, 128, 256)),
        ({"name": "vireofood172"}, (None, 2, 14, 26, 38, 50, 62, 74, 86), (None, 256)),  # 2 to 86, 12 apart
        ({"name": "imagefolder"}, (None, 2, 3, 4, 5), (None, 50, 80, 128, 256)),  # nobody knows K yet
    ],
)
def test_ranges_follow_the_number_of_classes(
    config_with: Configure,
    data: dict[str, Any],
    clusters: tuple[int | None, ...] | None,
    projections: tuple[int | None, ...],
) -> None:
    def choices(method: str, key: str) -> Any:
        mapping = config_with(method={"name": method}).to_mapping()
        dimensions = {d.key: d for d in space(Config.from_mapping({**mapping, "data": data}))}
        return dimensions[key].search.choices if key in dimensions else None

    assert choices("fedmlp", "method.num_clusters") == clusters
    assert choices("gfpl", "method.projection_dim") == projections


# ---- bases -------------------------------------------------------------------------------------------------------

MU, TAU = "method.base_settings.moon.method.mu", "method.base_settings.moon.method.tau"


def test_a_bases_parameters_are_searched_over_that_base(config_with: Configure) -> None:
    def keys(**method: Any) -> set[str]:
        return {dimension.key for dimension in space(config_with(method=method))}

    alone = keys(name="ccvr")
    assert keys(name="ccvr", base="moon") == alone | {MU, TAU}
    assert keys(name="ccvr", base="fedavg", base_settings={"moon": {"method.mu": 3.0}}) == alone
    below = keys(name="ccvr", base="fedcspc", base_settings={"fedcspc": {"method.base": "fedprox"}})
    assert "method.base_settings.fedcspc.method.base_settings.fedprox.method.mu" in below


def test_values_of_a_base_are_written_where_a_configuration_has_them(config_with: Configure) -> None:
    problem = Problem.of(config_with(method={"name": "ccvr", "base": "moon"}), "accuracy")
    assert (problem.given_values[MU], problem.given_values[TAU]) == (5.0, 0.5)
    assert problem.config_of(problem.given_values) == problem.config  # a default is not written down
    changed = problem.config_of({MU: 1.0, TAU: 0.5})
    assert changed.to_mapping()["method"]["base_settings"] == {"moon": {"method.mu": 1.0}}
    assert problem.parameters_with({MU: 1.0})["method"]["base_settings"] == {"moon": {"method.mu": 1.0}}
    assert Problem.of(changed, "accuracy").name == problem.name


def test_bases_of_bases_are_nested(config_with: Configure) -> None:
    key = "method.base_settings.fedcspc.method.base_settings.fedprox.method.mu"
    settings = {"fedcspc": {"method.base": "fedprox"}}
    config = config_with(method={"name": "ccvr", "base": "fedcspc", "base_settings": settings})
    mapping = with_values(config.to_mapping(), {key: 0.5})
    assert mapping["method"]["base_settings"] == {
        "fedcspc": {"method.base": "fedprox", "method.base_settings": {"fedprox": {"method.mu": 0.5}}}
    }
    assert values_of(Config.from_mapping(mapping))[key] == 0.5
    left = without_keys(mapping, [key])["method"]["base_settings"]
    assert left == {"fedcspc": {"method.base": "fedprox", "method.base_settings": {}}}


# ---- studies -----------------------------------------------------------------------------------------------------


def test_a_study_is_named_by_everything_but_what_it_searches(config_with: Configure) -> None:
    def name(objective: str = "accuracy", metric: str | None = None, **sections: Any) -> str:
        return Problem.of(config_with(**sections), objective, metric).name

    assert name(method={"mu": 0.2}, engine={"workers": 3}, local={"lr": 0.05}) == name()
    others = [
        name(local={"batch_size": 8}),
        name(seed=1),
        name("accuracy,bytes"),
        name(metric="mean_local"),
        name(method={"mu": 5.0}),  # widens what is searched
    ]
    assert len({name(), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("method", "objective", "metric", "said"),
    [
        ("fedprox", "speed", None, "--objective speed: must be one of accuracy or accuracy,bytes"),
        ("fedprox", "accuracy", "f1", "--metric f1: must be one of top1_global, mean_local, pooled_local"),
        ("fedprox", "accuracy", "mean_locl", "--metric mean_locl: did you mean mean_local"),
        ("fedprox", "accuracy", "alternatives", "--metric alternatives: must be one of"),
        ("fedprox", "accuracy", "top1_vote", "of fedprox there is no vote"),
        ("fedproto", "accuracy", "loss_global", "fedproto has no global model"),
        ("fedprox", "accuracy", "privacy.clip", r"--metric privacy\.clip: .*not declared; choose from "),
        ("fedmlp share=extractor", "accuracy", "loss_global", "no likelihoods"),
        ("fedproto", "accuracy", "top1_global", "fedproto has no global model"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    config_with: Configure, method: str, objective: str, metric: str | None, said: str
) -> None:
    name, *changes = method.split()
    with pytest.raises(ConfigError, match=said):
        Problem.of(
            config_with(method={"name": name, **dict(change.split("=") for change in changes)}), objective, metric
        )
