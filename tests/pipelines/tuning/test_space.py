"""What is searched: every method has a space, every space holds the given values, suggestions have the right type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest

from flcore.config import Config
from flcore.errors import ConfigError
from flcore.methods import METHODS
from flcore.params import Search
from pipelines.tuning.problem import Problem
from pipelines.tuning.space import Dimension, space

SHARED = ["local.lr", "local.momentum", "local.schedule", "local.epochs"]


def _dimension(config: Config, key: str) -> Dimension:
    (found,) = [dimension for dimension in space(config) if dimension.key == key]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_searched_around_what_is_given(config_with: Callable[..., Config], method: str) -> None:
    """DEFECTS B14: from the defaults, null among them, and FedAvg over what all methods share."""
    problem = Problem.of(config_with(method={"name": method}), "accuracy")
    given = problem.given_values
    assert "local.lr" in given
    assert problem.config_of(given) == problem.config
    study = optuna.create_study()
    study.enqueue_trial(given)
    assert problem.suggest(study.ask()) == given


def test_fedavg_is_searched_over_what_all_methods_share(config_with: Callable[..., Config]) -> None:
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
    config_with: Callable[..., Config], mu: float, search: Search
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


def test_a_study_is_named_by_everything_but_what_it_searches(config_with: Callable[..., Config]) -> None:
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
        ("fedproto", "accuracy", "top1_global", "fedproto has no global model"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    config_with: Callable[..., Config], method: str, objective: str, metric: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Problem.of(config_with(method={"name": method}), objective, metric)
