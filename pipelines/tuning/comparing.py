"""``protofl compare`` whoever asks for it, a command or a flow: as given, or tuned, and with which budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.config.params import without_tracking
from pipelines.execution.bodies import Operation, Outcome, comparison, comparison_runs
from pipelines.execution.budget import planned_within


def compare_methods(
    raw: Mapping[str, Any],
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    out: Path,
    operation: Operation,
    *,
    tuned: int = 0,
    budget: str = "rounds",
    restart: bool = False,
) -> Outcome:
    """Methods × seeds, then their table.

    Args:
        raw: parameters, not yet checked.
        methods: default ``compare.methods``. seeds: default ``compare.seeds``.
        out: folder of the comparison. operation: how.
        tuned: trials with which each method is tuned first; 0: none is.
        budget: what is equal for all runs: one of :data:`~pipelines.execution.budget.BUDGETS`.
        restart: throw away checkpoints that cannot be used.

    Raises:
        ConfigError: an entry cannot be run, or differs from the others in its data.
        RunError: no run has finished.
    """
    if tuned:
        from pipelines.tuning.tuned import tuned_comparison  # Optuna, which few comparisons need

        return tuned_comparison(raw, methods, seeds, tuned, out, operation, budget=budget, restart=restart)
    spent, planned = planned_within(budget, raw, comparison_runs(raw, methods, seeds), out, operation)
    facts = {"name": out.name, "budget": spent.words}
    return comparison("comparison", without_tracking(raw), planned, out, operation, facts, restart=restart)
