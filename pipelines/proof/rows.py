"""Check before training that an archive's runs can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flcore.config.sections import CompareConfig
from flcore.core.errors import ConfigError, DataError
from flcore.core.params import build
from pipelines.proof.contents import PROOF, Archive, ArchivedComparison
from pipelines.runs.better import check_direction

_WITHOUT_PARTITION = "central"


def check_rows(archive: Archive) -> None:
    """Refuse what the comparison itself would refuse, once all its runs are trained.

    Raises:
        DataError: no rows; two of one method, seed and division; runs of other data or, for one seed, of another
            partition; or a value that the section ``compare`` does not allow.
    """
    comparison = archive.comparison
    if comparison is None:
        return
    where = f"{archive.file.path}: {PROOF}: comparison"
    if not comparison.rows:
        raise DataError(f"{where}: rows: expected one or more")
    by_name = {run.name: run for run in archive.runs}
    data = by_name[comparison.rows[0][0]].data
    seen: set[tuple[str, int | None, str]] = set()
    partitions: dict[tuple[int | None, str], str] = {}
    for name, row, draw in comparison.rows:
        run = by_name[name]
        pair = (draw, json.dumps(run.config.get("seed")))
        if (row, *pair) in seen:
            raise DataError(f"{where}: rows: {row} appears twice with seed {pair[1]}")
        seen.add((row, *pair))
        if run.data != data:
            raise DataError(f"{where}: rows: {name} has other data than {comparison.rows[0][0]}")
        method = run.config.get("method")
        if isinstance(method, Mapping) and method.get("name") == _WITHOUT_PARTITION:
            continue
        if partitions.setdefault(pair, run.partition) != run.partition:
            raise DataError(f"{where}: rows: {name} has another partition than other runs of seed {pair[1]}")
    try:
        build(CompareConfig, section_of(comparison), "compare")
        for name, claim in comparison.claims.items():
            if claim["metric"]:
                check_direction(claim["metric"], f"compare.claims.{name}: metric")
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error


def section_of(comparison: ArchivedComparison) -> dict[str, Any]:
    """Return the section ``compare`` of a parameter file that makes the same tables."""
    baseline = comparison.baseline.removesuffix(" (tuned)") if comparison.tuning else comparison.baseline
    return {"baseline": baseline, "target_fraction": comparison.target_fraction, "claims": comparison.claims}
