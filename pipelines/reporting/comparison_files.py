"""A comparison on a terminal and as files: CSV, JSON, Markdown and LaTeX; the same comparison gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelines.reporting.claims import JudgedRow
from pipelines.reporting.comparison import Comparison, MethodSummary, describe
from pipelines.reporting.comparison_tables import MAIN_SCORES, comparison_tables, definitions
from pipelines.reporting.statements import after_correction, statements
from pipelines.reporting.statistics import CONFIDENCE, PairedDifference, Summary
from pipelines.reporting.tables import (
    MARKS_MEAN,
    csv_text,
    json_text,
    latex_table,
    markdown_table,
    print_tables,
    write_texts,
)
from pipelines.runs.record import COMMUNICATION, SCORES, RunRecord

_ON_THE_TERMINAL = ("accuracy", "stream", "differences", "claims", "tuning", "traffic")


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the comparison on a terminal: the answer, accuracy, differences, cost, and what failed."""
    console.print(Text(describe(comparison), style="bold"))
    for sentence in (*statements(comparison), *after_correction(comparison)):
        console.print(Text(sentence))
    tables = comparison_tables(comparison)
    print_tables([tables[name] for name in _ON_THE_TERMINAL if name in tables], console)
    for label, reason in comparison.failed.items():
        console.print(Text(f"Failed: {label}: {reason}", style="red"))
    for note in comparison.notes:
        console.print(Text(f"Note: {note}"))


def write(comparison: Comparison, directory: Path) -> tuple[Path, ...]:
    """Write the comparison for machines and for eyes; the same comparison gives the same bytes.

    Args:
        comparison: what `compare` returned.
        directory: made if it is not there; files of the same names are replaced.

    Returns:
        `comparison.csv` (a row per method), `.json`, `.md`, `.tex`, `runs.csv` (a row per run) and `metrics.json`
        (means by method, for `dvc metrics`). CSV and JSON hold fractions and raw counts (missing: empty, null).
    """
    methods, runs = [_method_values(row) for row in comparison.methods], _run_rows(comparison)
    contents = {
        "comparison.csv": csv_text(methods),
        "comparison.json": json_text(_document(comparison, methods, runs)),
        "comparison.md": markdown(comparison),
        "comparison.tex": latex(comparison),
        "runs.csv": csv_text(runs),
        "metrics.json": json_text({row.method: _means(row) for row in comparison.methods}),
    }
    return write_texts(contents, directory)


def markdown(comparison: Comparison) -> str:
    """Render the comparison as Markdown: its tables, what failed, the notes, and what each column means."""
    lines = [f"# Comparison on {comparison.dataset}", "", describe(comparison), ""]
    if sentences := (*statements(comparison), *after_correction(comparison)):
        lines += [*(f"- {sentence}" for sentence in sentences), ""]
    tables = comparison_tables(comparison).values()
    for table in tables:
        lines += markdown_table(table)
    if comparison.failed:
        lines += ["## Failed runs", "", *(f"- {label}: {reason}" for label, reason in comparison.failed.items()), ""]
    return "\n".join([*lines, *markdown_end(comparison.notes, definitions(tables))]) + "\n"


def markdown_end(notes: Sequence[str], definitions: Mapping[str, str]) -> list[str]:
    """Return the lines below all tables: notes, and meanings of columns and marks."""
    note_lines = ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []
    meant = [f"- **{name}**: {meaning}" for name, meaning in definitions.items()]
    return [*note_lines, "## How to read it", "", *meant, f"- {MARKS_MEAN}"]


def latex(comparison: Comparison) -> str:
    """Return the tables for a paper, which need the package booktabs."""
    lines = [f"% {describe(comparison)} Needs \\usepackage{{booktabs}}.", ""]
    for name, table in comparison_tables(comparison).items():
        lines += latex_table(table, f"{comparison.dataset}-{name}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- for machines


def summary_values(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    """Return means, spreads over seeds and counts as columns."""
    values: dict[str, Any] = {}
    for key, summary in summaries.items():
        # The spread over clients is itself a column's name; its mean over seeds must not be taken for one over clients.
        name = f"{key}_over_clients" if key == "client_std" else key
        values |= {f"{name}_mean": summary.mean, f"{name}_std_over_seeds": summary.std, f"{name}_n": summary.n}
    return values


def mean_values(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    """Return means as columns."""
    return {f"{key}_mean": summary.mean for key, summary in summaries.items()}


def difference_values(differences: Mapping[str, PairedDifference]) -> dict[str, Any]:
    """Return paired differences, their intervals and p-values as columns."""
    columns = ("mean", "std", "ci95_low", "ci95_high", "n", "p", "p_holm")
    return {
        f"{key}_paired_difference_{column}": getattr(difference, column.removeprefix("ci95_"))
        for key, difference in differences.items()
        for column in columns
    }


def _method_values(row: MethodSummary) -> dict[str, Any]:
    """Return all values of a method, also scores and targets that no table shows."""
    target, to_target = row.target, dict[str, Any]()
    for prefix, targets in (("", row.targets), ("99_", row.strict_targets)):
        for metric, one in targets.items():
            name = f"{metric}_rounds_to_{prefix}target"
            to_target |= {f"{name}_mean": one.rounds.mean, f"{name}_std": one.rounds.std, f"{name}_n": one.n}
        to_target |= {f"{metric}_bytes_to_{prefix}target_mean": one.bytes.mean for metric, one in targets.items()}
    return {
        "method": row.method,
        "seeds": " ".join(map(str, row.seeds)),
        "num_seeds": row.num_runs,
        "rounds": " ".join(map(str, row.rounds)),
        **summary_values(row.scores),
        **difference_values(row.differences),
        "target_metric": target.metric,
        "target_seeds_reached": target.reached,
        "target_seeds_with_target": target.n,
        "rounds_to_target_mean": target.rounds.mean,
        "rounds_to_target_std": target.rounds.std,
        "speedup_in_rounds": target.speedup,
        "bytes_to_target_mean": target.bytes.mean,
        **to_target,
        **mean_values(row.communication),
    }


def run_values(run: RunRecord) -> dict[str, Any]:
    """Return identity, scores and costs of a run as columns."""
    names = ("method", "seed", "rounds", "dataset", "partition", "config_hash", *SCORES, "best_round", *COMMUNICATION)
    division = {} if run.draw is None else {"division": run.draw}
    return {name: getattr(run, name) for name in names} | division | dict(run.tasks)


def fingerprints(run: RunRecord) -> dict[str, str | None]:
    """Return the fingerprints of a run as columns."""
    return {"data_fingerprint": run.data_fingerprint, "partition_fingerprint": run.partition_fingerprint}


def _run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    first = {row.method: row.target.metric for row in comparison.methods}
    rows = []
    for run in comparison.runs:
        targets = {metric: by_method[run.method][run.pair] for metric, by_method in comparison.run_targets.items()}
        values = run_values(run) | {"target_metric": first[run.method]}
        for prefix, target in (("", targets[first[run.method]]), *((f"{name}_", one) for name, one in targets.items())):
            values |= {
                f"{prefix}target": target.target,
                f"{prefix}rounds_to_target": target.rounds,
                f"{prefix}bytes_to_target": target.bytes,
            }
        rows.append(values | fingerprints(run))
    return rows


def _document(
    comparison: Comparison, methods: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "dataset": comparison.dataset,
        "partition": comparison.partition,
        "baseline": comparison.baseline,
        "metric": comparison.metric,
        "target_fraction": comparison.target_fraction,
        "confidence": CONFIDENCE,
        "seeds": list(comparison.seeds),
        **({"divisions": list(comparison.draws)} if comparison.draws else {}),
        **({"budget": comparison.budget} if comparison.budget else {}),
        "methods": [
            {
                **values,
                "seeds": list(row.seeds),
                "rounds": list(row.rounds),
                "bytes_up_by_kind_mean": dict(row.bytes_up_by_kind),
                "bytes_down_by_kind_mean": dict(row.bytes_down_by_kind),
            }
            for row, values in zip(comparison.methods, methods, strict=True)
        ],
        "tuning": [asdict(tuned) for tuned in comparison.tuning],
        **({"claims": [_claim(judged) for judged in comparison.claims]} if comparison.claims else {}),
        "runs": list(runs),
        "statements": list(statements(comparison)),
        "notes": list(comparison.notes),
        "failed": dict(comparison.failed),
    }


def _claim(judged: JudgedRow) -> dict[str, Any]:
    difference = {key: getattr(judged.difference, key) for key in ("mean", "low", "high", "n", "p", "p_holm", "p_bh")}
    return {**asdict(judged.claim), "metric": judged.metric, "verdict": judged.verdict, **difference}


def _means(row: MethodSummary) -> dict[str, float]:
    """Return mean scores and costs without missing ones, since DVC compares numbers only."""

    def known(summaries: Mapping[str, Summary], keys: Iterable[str]) -> dict[str, float]:
        return {key: mean for key in keys if (mean := summaries[key].mean) is not None}

    return known(row.scores, (*MAIN_SCORES, "client_std")) | known(row.communication, ("bytes_up", "bytes_down"))
