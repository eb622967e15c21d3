"""A study's definition: configuration, search space, metric and limits; always on validation data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flcore.config.schema import Config
from flcore.config.sections import TrackingConfig
from flcore.core.errors import ConfigError
from pipelines.runs.metrics import lower_is_better
from pipelines.tuning.metrics import PER_ROUND, check_metric
from pipelines.tuning.space import Dimension, Values, space, values_of, with_values, without_keys

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Direction = Literal["maximize", "minimize"]

OBJECTIVES = ("accuracy", "accuracy,bytes")
"""``accuracy`` means the chosen metric, even if it is another one."""
VALIDATION_SHARE = 0.2
_NOT_STORED = ("tracking", "compare", "tune")
"""``tracking`` may contain a password; ``compare.settings`` would override the values in the file."""


@dataclass(frozen=True)
class Problem:
    """A checked study.

    Attributes:
        given: the configuration as given; the best values are written into it.
        config: the same, evaluated on validation data and not logged.
        objective: one of :data:`OBJECTIVES`.
        metric: the optimised metric, such as ``top1_global``; dotted if nested in ``metrics.json``.
        max_bytes: trials that send more do not count as results.
    """

    given: Config
    config: Config
    dimensions: tuple[Dimension, ...]
    objective: str
    metric: str
    max_bytes: int | None = None

    @classmethod
    def of(cls, config: Config, objective: str, metric: str | None = None, max_bytes: int | None = None) -> Problem:
        """Return the search of the method's parameters around a run's configuration.

        ``metric`` None is the global model's accuracy, or the clients' mean accuracy without a global model.

        Raises:
            ConfigError: the objective or metric is unknown, or the method lacks the metric.
        """
        if objective not in OBJECTIVES:
            raise ConfigError(f"--objective {objective}: must be one of {' or '.join(OBJECTIVES)}")
        metric = metric or ("top1_global" if config.method.has_global_model else "mean_local")
        check_metric(metric, config.method)
        checked = on_validation(config)
        return cls(config, checked, space(checked), objective, metric, max_bytes)

    # ---- what is optimised ---------------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        return "minimize" if lower_is_better(self.metric) else "maximize"

    @property
    def directions(self) -> tuple[Direction, ...]:
        return (self.direction, "minimize") if self.objective == "accuracy,bytes" else (self.direction,)

    @property
    def prunes(self) -> bool:
        """True if trials can be pruned: one objective, known after every round."""
        return len(self.directions) == 1 and self.metric in PER_ROUND

    def within(self, bytes: int) -> bool:
        """Return whether a trial that sends this number of bytes may be a result."""
        return self.max_bytes is None or bytes <= self.max_bytes

    # ---- identity ------------------------------------------------------------------------------------------------

    @property
    def space(self) -> dict[str, Any]:
        """The searched values by dotted key, as JSON."""
        return {dimension.key: dimension.describe() for dimension in self.dimensions}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change a study's values except the searched keys, as JSON."""
        whole = without_keys(self.config.identity(), self.space)
        whole |= {"objective": self.objective, "metric": self.metric, "space": self.space, "max_bytes": self.max_bytes}
        whole |= {"tune": self.config.to_mapping()["tune"]}
        return dict(json.loads(json.dumps(whole)))

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The study's name: method and first digits of its hash."""
        return f"{self.config.method.name}-{self.hash[:8]}"

    # ---- values of trials ----------------------------------------------------------------------------------------

    @cached_property
    def _given(self) -> Values:
        return values_of(self.config)

    def config_of(self, values: Values) -> Config:
        """Return the configuration of a trial, from its values by dotted key."""
        return Config.from_mapping(with_values(self.config.to_mapping(), self._other(values)))

    def parameters_with(self, values: Values) -> dict[str, Any]:
        """Return the given configuration with other values, as a parameter file: on all data, scored on test data."""
        mapping = {key: part for key, part in self.given.to_mapping().items() if key not in _NOT_STORED}
        return with_values(mapping, self._other(values))

    def _other(self, values: Values) -> Values:
        """Return the values that differ from the given ones; a base's defaults are not written."""
        return {key: value for key, value in values.items() if value != self._given[key]}

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """Return a trial's value for every key that has an effect; values it already has are kept."""
        values: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.applies({**self._given, **values}):
                values[dimension.key] = dimension.suggest(trial)
        return values

    @property
    def given_values(self) -> dict[str, Any]:
        return self._effective(self._given)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The values of the first trials: those given, then the authors' preset restricted to searched keys.

        The preset is omitted if it changes nothing, or cannot be run.
        """
        preset = {f"method.{name}": value for name, value in self.config.method.AUTHORS.items()}
        searched = {d.key: preset[d.key] for d in self.dimensions if d.key in preset and d.holds(preset[d.key])}
        configured, authors = self.given_values, self._effective({**self._given, **searched})
        if authors == configured:
            return [configured]
        try:
            self.config_of(authors)
        except ConfigError:
            return [configured]
        return [configured, authors]

    def _effective(self, values: Values) -> dict[str, Any]:
        return {dimension.key: values[dimension.key] for dimension in self.dimensions if dimension.applies(values)}


def on_validation(config: Config) -> Config:
    """Return a configuration for trials: scored on validation data, without analyses and tracking."""
    changed = replace(
        config,
        partition=replace(config.partition, validation=config.partition.validation or VALIDATION_SHARE),
        evaluation=replace(config.evaluation, split="validation", analyses=()),
        tracking=TrackingConfig(),
    )
    return Config.from_mapping(changed.to_mapping())
