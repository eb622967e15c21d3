"""What a study asks: which configuration, searched over what, scored by which metric, always on validation data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flcore.config.schema import Config
from flcore.config.sections import TrackingConfig
from flcore.core.errors import ConfigError
from pipelines.runs.better import lower_is_better
from pipelines.tuning.metrics import PER_ROUND, check_metric, value_of
from pipelines.tuning.space import Dimension, Values, space, values_of, with_values, without_keys

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Direction = Literal["maximize", "minimize"]

OBJECTIVES = ("accuracy", "accuracy,bytes")
"""``accuracy`` stands for the metric, whatever it is."""
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
        objective: one of :data:`OBJECTIVES`.
        metric: the figure that is optimised, such as ``top1_global``; dotted where ``metrics.json`` nests it.
        max_bytes: a trial that sends more is no result; None: any may be one.
        max_steps: each trial has as many rounds as so many mini-batches are enough for; None: as many as given.
    """

    given: Config
    config: Config
    dimensions: tuple[Dimension, ...]
    objective: str
    metric: str
    max_bytes: int | None = None
    max_steps: int | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        objective: str,
        metric: str | None = None,
        max_bytes: int | None = None,
        max_steps: int | None = None,
    ) -> Problem:
        """The search around a configuration.

        Args:
            config: of a run, with the method that is tuned.
            objective: what is optimised.
            metric: the figure; None: the accuracy of the global model, or the clients' mean where there is none.
            max_bytes: the most that a result may send.
            max_steps: mini-batches that each trial's clients may train on in all.

        Raises:
            ConfigError: there is no such objective or metric, or the method has no such metric.
        """
        if objective not in OBJECTIVES:
            raise ConfigError(f"--objective {objective}: must be one of {' or '.join(OBJECTIVES)}")
        metric = metric or ("top1_global" if config.method.has_global_model else "mean_local")
        check_metric(metric, config.method)
        checked = on_validation(config)
        return cls(config, checked, space(checked), objective, metric, max_bytes, max_steps)

    # ---- what is optimised ---------------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """Whether more or less of the metric is better."""
        return "minimize" if lower_is_better(self.metric) else "maximize"

    @property
    def directions(self) -> tuple[Direction, ...]:
        return (self.direction, "minimize") if self.objective == "accuracy,bytes" else (self.direction,)

    @property
    def prunes(self) -> bool:
        """Whether trials can be given up on the way: the metric is there after every round, and nothing else counts.

        Nor where trials differ in their rounds: the same one is a different share of each.
        """
        return len(self.directions) == 1 and self.metric in PER_ROUND and self.max_steps is None

    def score(self, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> float:
        """The metric of a finished run.

        Args:
            metrics: the content of its ``metrics.json``. history: its records, oldest first.

        Raises:
            ConfigError: its runs have no such figure; says which they have. RunError: it is null.
        """
        return value_of(self.metric, metrics, history)

    def within(self, bytes: int) -> bool:
        """Whether a trial that sends so much may be a result."""
        return self.max_bytes is None or bytes <= self.max_bytes

    # ---- who asks ------------------------------------------------------------------------------------------------

    @property
    def space(self) -> dict[str, Any]:
        """The values that are searched by dotted key, as JSON."""
        return {dimension.key: dimension.describe() for dimension in self.dimensions}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change a study's values except what it searches, as JSON values."""
        whole = without_keys(self.config.identity(), self.space)
        whole |= {"objective": self.objective, "metric": self.metric, "space": self.space, "max_bytes": self.max_bytes}
        whole |= {} if self.max_steps is None else {"max_steps": self.max_steps}
        return dict(json.loads(json.dumps(whole)))

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The study's name: method and the beginning of its hash."""
        return f"{self.config.method.name}-{self.hash[:8]}"

    # ---- values of trials ----------------------------------------------------------------------------------------

    @cached_property
    def _given(self) -> Values:
        return values_of(self.config)

    def config_of(self, values: Values) -> Config:
        """The configuration of a trial, scored on validation data; what has no value stays as given.

        Args:
            values: by dotted key.

        Raises:
            ConfigError: the values do not go together.
        """
        return Config.from_mapping(with_values(self.config.to_mapping(), self._other(values)))

    def parameters_with(self, values: Values, rounds: int | None = None) -> dict[str, Any]:
        """The given configuration with other values, as a parameter file has it: on all data, scored on test data.

        Args:
            values: by dotted key. rounds: that the trial had, where trials differ in them.
        """
        mapping = {key: part for key, part in self.given.to_mapping().items() if key not in _NOT_STORED}
        own = {} if rounds is None else {"federation.rounds": rounds}
        return with_values(mapping, {**self._other(values), **own})

    def _other(self, values: Values) -> Values:
        """Those that are not given.

        A base's parameter that has its default is thus not written down, and the run is the same as without.
        """
        return {key: value for key, value in values.items() if value != self._given[key]}

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """A value for everything that has an effect beside the others; values that the trial has already stay."""
        found: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.applies({**self._given, **found}):
                found[dimension.key] = dimension.suggest(trial)
        return found

    @property
    def given_values(self) -> dict[str, Any]:
        """The given configuration's own values, of what has an effect there."""
        return self._effective(self._given)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The values of the trials with which every study begins: those given, then those of the authors' preset.

        Of the preset as much as is searched; it is left out where that changes nothing, or cannot be run.
        """
        said = {f"method.{name}": value for name, value in self.config.method.AUTHORS.items()}
        searched = {d.key: said[d.key] for d in self.dimensions if d.key in said and d.holds(said[d.key])}
        given, authors = self.given_values, self._effective({**self._given, **searched})
        if authors == given:
            return [given]
        try:
            self.config_of(authors)
        except ConfigError:
            return [given]
        return [given, authors]

    def _effective(self, values: Values) -> dict[str, Any]:
        return {dimension.key: values[dimension.key] for dimension in self.dimensions if dimension.applies(values)}


def on_validation(config: Config) -> Config:
    """A configuration as trials have it: scored on validation data, without analyses and a place to log to."""
    changed = replace(
        config,
        partition=replace(config.partition, validation=config.partition.validation or VALIDATION_SHARE),
        evaluation=replace(config.evaluation, split="validation", analyses=()),
        tracking=TrackingConfig(),
    )
    return Config.from_mapping(changed.to_mapping())
