"""What a study asks: which configuration, searched over what, scored by which metric, always on validation data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flcore.config import Config
from flcore.errors import ConfigError
from flcore.sections import TrackingConfig
from pipelines.tuning.space import Dimension, space, with_values

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

OBJECTIVES: Mapping[str, tuple[Literal["maximize", "minimize"], ...]] = {
    "accuracy": ("maximize",),
    "accuracy,bytes": ("maximize", "minimize"),
}
METRICS = ("top1_global", "mean_local", "pooled_local")
"""Accuracies that every record of a history has, which pruning needs."""
VALIDATION_SHARE = 0.2
_NOT_STORED = ("tracking", "compare")
"""``tracking`` may hold a password; ``compare.settings`` would be put over the values in the file."""


@dataclass(frozen=True)
class Problem:
    """A checked study.

    Attributes:
        given: the configuration as given; what a run with the best values starts from.
        config: the same with evaluation on validation data, and without a place to log to.
        dimensions: what is searched.
        objective: a key of :data:`OBJECTIVES`.
        metric: the accuracy that is maximised, one of :data:`METRICS`.
    """

    given: Config
    config: Config
    dimensions: tuple[Dimension, ...]
    objective: str
    metric: str

    @classmethod
    def of(cls, config: Config, objective: str, metric: str | None = None) -> Problem:
        """The search around a configuration.

        Args:
            config: of a run, with the method that is tuned.
            objective: what is optimised.
            metric: the accuracy; None: of the global model, or the clients' mean where there is none.

        Raises:
            ConfigError: there is no such objective or metric, or the method has no such metric.
        """
        if objective not in OBJECTIVES:
            raise ConfigError(f"--objective {objective}: must be one of {' or '.join(OBJECTIVES)}")
        has_global_model = config.method.has_global_model
        metric = metric or ("top1_global" if has_global_model else "mean_local")
        if metric not in METRICS:
            raise ConfigError(f"--metric {metric}: must be one of {', '.join(METRICS)}")
        if metric == "top1_global" and not has_global_model:
            raise ConfigError(
                f"--metric top1_global: {config.method.name} has no global model, so that it would be null; "
                "use --metric mean_local"
            )
        on_validation = replace(
            config,
            partition=replace(config.partition, validation=config.partition.validation or VALIDATION_SHARE),
            evaluation=replace(config.evaluation, split="validation", analyses=()),
            tracking=TrackingConfig(),
        )
        checked = Config.from_mapping(on_validation.to_mapping())
        return cls(config, checked, space(checked), objective, metric)

    @property
    def space(self) -> dict[str, Any]:
        """The values that are searched by dotted key, as JSON."""
        return {dimension.key: dimension.describe() for dimension in self.dimensions}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change a study's values except what it searches, as JSON values."""
        identity = {
            section: {key: value for key, value in values.items() if f"{section}.{key}" not in self.space}
            if isinstance(values, Mapping)
            else values
            for section, values in self.config.identity().items()
        }
        whole = {**identity, "objective": self.objective, "metric": self.metric, "space": self.space}
        return dict(json.loads(json.dumps(whole)))

    @property
    def hash(self) -> str:
        """SHA-256 of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The study's name: method and the beginning of its hash."""
        return f"{self.config.method.name}-{self.hash[:8]}"

    def config_of(self, values: Mapping[str, Any]) -> Config:
        """The configuration of a trial, scored on validation data.

        Args:
            values: by dotted key.

        Raises:
            ConfigError: the values do not go together.
        """
        return Config.from_mapping(with_values(self.config.to_mapping(), values))

    def parameters_with(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The given configuration with other values, as a parameter file has it: on all data, scored on test data."""
        mapping = {key: part for key, part in self.given.to_mapping().items() if key not in _NOT_STORED}
        return with_values(mapping, values)

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """A value for everything that is searched; values that the trial has already stay."""
        return {dimension.key: dimension.suggest(trial) for dimension in self.dimensions}

    @property
    def given_values(self) -> dict[str, Any]:
        """The given configuration's own values, with which the study begins."""
        mapping = self.config.to_mapping()
        split = {dimension.key: dimension.key.partition(".") for dimension in self.dimensions}
        return {key: mapping[section][name] for key, (section, _, name) in split.items()}

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [self.given_values]

    def score(self, metrics: Mapping[str, Any], history: Any) -> float:
        value = history[-1][self.metric]
        if value is None:
            from flcore.errors import RunError

            raise RunError(f"round {history[-1]['round']}: {self.metric} is null: nobody could be scored")
        return float(value)
