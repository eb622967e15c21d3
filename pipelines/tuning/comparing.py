"""``protofl compare`` for commands and flows: as given, or tuned."""

from __future__ import annotations

from pathlib import Path

from flcore.core.errors import ConfigError
from flcore.io.locks import run_lock
from flcore.methods import Method
from pipelines.execution.bodies import comparison
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.plan.spec import ExperimentPlan
from pipelines.reporting.claims import claims_of
from pipelines.runs.ownership import claim_folder
from pipelines.runs.record import TASK_SCORES
from pipelines.tuning.metrics import check_metric


def check_claims(plan: ExperimentPlan, *, tuned: bool = False) -> None:
    """Refuse claims that these runs cannot decide, before any of them starts; ``tuned`` adds rows.

    Raises:
        ConfigError: a claim names a row that is not compared, or a metric that its runs lack.
    """
    methods: dict[str, Method] = {run.name: run.config.method for run in plan.runs}
    if tuned:
        methods |= {f"{name} (tuned)": method for name, method in methods.items()}
    for claim in claims_of(plan.base.compare.claims):
        key = f"compare.claims.{claim.name}"
        for row in (claim.better, claim.than):
            if row not in methods:
                raise ConfigError(
                    f"{key}: {row} is not compared; one of {', '.join(methods)}, or name it with --methods"
                )
            if claim.metric is None or claim.metric in TASK_SCORES:
                continue
            try:
                check_metric(claim.metric, methods[row])
            except ConfigError as error:
                raise ConfigError(f"{key}: {str(error).replace('--metric', 'metric')}") from error


def compare_methods(plan: ExperimentPlan, out: Path, operation: Operation, *, tuned: int = 0) -> Outcome:
    """Run methods × seeds, then write their table; ``tuned`` is the number of trials to tune each method with first.

    Raises:
        ConfigError: an entry cannot be run, or its data differ from the others'; or the folder contains something else.
        RunError: no run has finished, or another command is using the folder.
    """
    claim_folder("comparison", out)  # first, since studies write into it
    if tuned:  # several processes may share studies, so no lock
        from pipelines.tuning.tuned import tuned_comparison  # Optuna, which few comparisons need

        return tuned_comparison(plan, tuned, out, operation)
    with run_lock(out):  # a second command would take runs from this one, which would report them as failed
        return comparison(plan, out, operation, {"name": out.name})
