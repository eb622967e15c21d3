"""``protofl compare`` whoever asks for it, a command or a flow: as given, or tuned, and with which budget."""

from __future__ import annotations

from pathlib import Path

from flcore.core.errors import ConfigError
from flcore.io.locks import run_lock
from flcore.methods import Method
from pipelines.config.spec import ExperimentPlan
from pipelines.execution.bodies import comparison
from pipelines.execution.budget import within_budget
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.reporting.claims import claims_of
from pipelines.runs.ownership import claim_folder
from pipelines.runs.record import TASK_SCORES
from pipelines.tuning.metrics import check_metric


def check_claims(plan: ExperimentPlan, *, tuned: bool = False) -> None:
    """Refuse claims that these runs can say nothing of, which would be known only when all of them have ended.

    Args:
        plan: of the comparison.
        tuned: whether each row is also compared as it was tuned.

    Raises:
        ConfigError: a claim is of a row that is not compared, or of a figure that its runs do not have.
    """
    methods: dict[str, Method] = {run.name: run.config.method for run in plan.runs}
    if tuned:
        methods |= {f"{name} (tuned)": method for name, method in methods.items()}
    for claim in claims_of(plan.base.compare.claims):
        place = f"compare.claims.{claim.name}"
        for row in (claim.better, claim.than):
            if row not in methods:
                raise ConfigError(
                    f"{place}: {row} is not compared; one of {', '.join(methods)}, or name it with --methods"
                )
            if claim.metric is None or claim.metric in TASK_SCORES:
                continue
            try:
                check_metric(claim.metric, methods[row])
            except ConfigError as error:
                raise ConfigError(f"{place}: {str(error).replace('--metric', 'metric')}") from error


def compare_methods(
    plan: ExperimentPlan,
    out: Path,
    operation: Operation,
    *,
    tuned: int = 0,
    budget: str = "rounds",
    restart: bool = False,
) -> Outcome:
    """Methods × seeds, then their table.

    Args:
        plan: of the comparison.
        out: its folder. operation: how.
        tuned: trials with which each method is tuned first; 0: none is.
        budget: what is equal for all runs: one of :data:`~pipelines.execution.budget.BUDGETS`.
        restart: throw away what cannot be used: checkpoints, and damaged results.

    Raises:
        ConfigError: an entry cannot be run, or differs from the others in its data; or the folder holds something else.
        RunError: no run has finished, or another command is at work in the folder.
    """
    claim_folder("comparison", out)  # here, since budget and studies have their places in it
    if tuned:  # several processes may share studies
        from pipelines.tuning.tuned import tuned_comparison  # Optuna, which few comparisons need

        return tuned_comparison(plan, tuned, out, operation, budget=budget, restart=restart)
    with run_lock(out):  # a second command would take runs from this one, which would call them failed
        spent, fitted = within_budget(budget, plan, out, operation)
        return comparison(fitted, out, operation, {"name": out.name, "budget": spent.words}, restart=restart)
