"""Runs of a comparison or sweep, resolved once for commands, flows, studies and papers' tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from flcore.config.schema import Config
from pipelines.plan.params import for_entry


@dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
        label: distinguishes it in messages from others of its method and seed.
        row: its method's name in a comparison; empty: the method's own name.
        draw: the seed of its division, if a comparison has several for each seed.
    """

    config: Config
    label: str = ""
    row: str = ""
    draw: int | None = None

    @property
    def name(self) -> str:
        """Return the name of its row."""
        return self.row or self.config.method.name


@dataclass(frozen=True)
class ExperimentPlan:
    """Runs to compare.

    Attributes:
        parameters: of all runs, as they may be stored: without a store's address, which may hold a password.
        runs: validated, in the order of the table.
    """

    parameters: Mapping[str, Any]
    base: Config
    runs: tuple[RunSpec, ...]
    kind: ClassVar[Literal["comparison", "sweep"]] = "comparison"

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.name for run in self.runs))

    def with_runs(self, runs: Iterable[RunSpec]) -> Self:
        return replace(self, runs=tuple(runs))

    def of_row(self, row: str) -> Config:
        """Return the configuration of a method or variant, with the configured seed; ConfigError: it cannot be run."""
        return Config.from_mapping(for_entry(self.parameters, row, None))
