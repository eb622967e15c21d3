"""The runs of a comparison: methods and variants, seeds and divisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, listed
from pipelines.plan.grid import show
from pipelines.plan.params import for_entry, without_tracking
from pipelines.plan.spec import ExperimentPlan, RunSpec


def comparison_plan(
    raw: Mapping[str, Any], methods: Sequence[str] | None = None, seeds: Sequence[int] | None = None
) -> ExperimentPlan:
    """Return the validated plan of a comparison.

    Args:
        methods: names of methods and variants; default ``compare.methods``, and all variants that they do not name.
        seeds: default ``compare.seeds``. Each is combined with each of ``compare.partition_seeds``.

    Raises:
        ConfigError: an entry cannot be run, or its data differ from the others'.
    """
    base = Config.from_mapping(raw)
    compare = base.compare
    rows = tuple(methods or compare.methods)
    rows += tuple(name for name in compare.variants if name not in rows)
    draws = compare.partition_seeds or (None,)
    planned = [
        RunSpec(
            Config.from_mapping(for_entry(raw, row, seed, draw)),
            label=", ".join([row] * (row in compare.variants) + [f"division {draw}"] * (draw is not None)),
            row=row if row in compare.variants else "",
            draw=draw,
        )
        for row in rows
        for draw in draws
        for seed in (compare.seeds if seeds is None else seeds)
    ]
    if not planned:
        raise ConfigError("compare: no runs; name at least one method and one seed")
    first = {run.draw: run.config.to_mapping() for run in reversed(planned)}
    for run in planned:
        for section in ("data", "partition"):
            if run.config.to_mapping()[section] != first[run.draw][section]:
                place = f"variants.{run.row}" if run.row else f"settings.{run.config.method.name}"
                raise ConfigError(f"compare.{place}: {section} must be the same for all methods")
    return ExperimentPlan(without_tracking(raw), base, tuple(planned))


def heard_in_part(runs: Sequence[RunSpec]) -> str | None:
    """Return a warning that names rows of one round that train a part of the clients only; None without such rows.

    Rows of more rounds train the other clients later. If all rows have one round, they are comparable.
    """
    if all(run.config.federation.rounds == 1 for run in runs):
        return None
    shares = {
        run.name: run.config.federation.participation
        for run in runs
        if run.config.federation.rounds == 1 and run.config.method.trains == "cohort"
    }
    rows = [row for row, share in shares.items() if share < 1]
    if not rows:
        return None
    return (
        f"federation.participation = {show(shares[rows[0]])}: {listed(rows)} {'has' if len(rows) == 1 else 'have'} one "
        "round, so clients outside its sample never take part; for all clients, name a row with "
        f"--variant NAME={rows[0]},federation.participation=1"
    )
