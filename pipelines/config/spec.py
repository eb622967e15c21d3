"""Runs that are set against each other, resolved once: by commands, flows, studies and papers' tables alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from flcore.config.schema import Config
from pipelines.config.params import for_entry


@dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
        config: of the run, checked. label: what messages call it beside method and seed.
        division: a folder below ``partitions`` for its division, where divisions differ from point to point.
        row: what a comparison calls its method; empty: the method's name.
        draw: the seed of its division where a comparison has several for each seed.
    """

    config: Config
    label: str = ""
    division: str = ""
    row: str = ""
    draw: int | None = None

    @property
    def name(self) -> str:
        """Of the row that it belongs to."""
        return self.row or self.config.method.name


@dataclass(frozen=True)
class ExperimentPlan:
    """Runs that are set against each other.

    Attributes:
        parameters: of all runs, as they may be stored: without the address of a store, which may hold a password.
        base: the configuration that they make.
        runs: checked, in the order of the table.
    """

    parameters: Mapping[str, Any]
    base: Config
    runs: tuple[RunSpec, ...]
    kind: ClassVar[Literal["comparison", "sweep"]] = "comparison"

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows, in order."""
        return tuple(dict.fromkeys(run.name for run in self.runs))

    def with_runs(self, runs: Iterable[RunSpec]) -> Self:
        """Return the plan with other runs."""
        return replace(self, runs=tuple(runs))

    def of_row(self, row: str, seed: int | None = None, draw: int | None = None, rounds: int | None = None) -> Config:
        """Return the configuration of a method or variant; with a seed, a division's and rounds instead of its own.

        Raises:
            ConfigError: it cannot be run.
        """
        config = Config.from_mapping(for_entry(self.parameters, row, seed, draw))
        return config if rounds is None else with_rounds(config, rounds)


def with_rounds(config: Config, rounds: int) -> Config:
    """Return a configuration with another number of rounds, checked."""
    from pipelines.config.params import with_values

    return Config.from_mapping(with_values(config.to_mapping(), {"federation.rounds": rounds}))
