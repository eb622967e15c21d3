"""A comparison on a terminal and as files: CSV, JSON, Markdown and LaTeX; the same comparison gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelines.reporting.claims import JudgedRow
from pipelines.reporting.comparison import Comparison, describe
from pipelines.reporting.comparison_tables import MAIN_SCORES, comparison_tables, definitions, targets, traffic
from pipelines.reporting.statements import after_correction, statements
from pipelines.reporting.statistics import CONFIDENCE, Summary
from pipelines.reporting.tables import (
    DIFFERENCE,
    MARKS_MEAN,
    SCORE,
    Column,
    Format,
    csv_text,
    json_text,
    latex_table,
    markdown_table,
    print_tables,
    records,
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
    contents = {
        "comparison.csv": csv_text(_method_rows(comparison)),
        "comparison.json": json_text(_document(comparison)),
        "comparison.md": markdown(comparison),
        "comparison.tex": latex(comparison),
        "runs.csv": csv_text(_run_rows(comparison)),
        "metrics.json": json_text(_means(comparison)),
    }
    return write_texts(contents, directory)


def markdown(comparison: Comparison) -> str:
    """Render the comparison as Markdown: its tables, what failed, the notes, and what each column means."""
    lines = [f"# Comparison on {comparison.dataset}", "", describe(comparison), ""]
    if said := (*statements(comparison), *after_correction(comparison)):
        lines += [*(f"- {sentence}" for sentence in said), ""]
    tables = comparison_tables(comparison).values()
    for table in tables:
        lines += markdown_table(table)
    if comparison.failed:
        lines += ["## Failed runs", "", *(f"- {label}: {reason}" for label, reason in comparison.failed.items()), ""]
    return "\n".join([*lines, *markdown_end(comparison.notes, definitions(tables))]) + "\n"


def markdown_end(notes: Sequence[str], definitions: Mapping[str, str]) -> list[str]:
    """The lines below all tables: notes, and what columns and marks mean."""
    noted = ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []
    meant = [f"- **{name}**: {meaning}" for name, meaning in definitions.items()]
    return [*noted, "## How to read it", "", *meant, f"- {MARKS_MEAN}"]


def latex(comparison: Comparison) -> str:
    """The tables for a paper, each on its own; they need the package booktabs."""
    lines = [f"% {describe(comparison)} Needs \\usepackage{{booktabs}}.", ""]
    for name, table in comparison_tables(comparison).items():
        lines += latex_table(table, f"{comparison.dataset}-{name}")
    return "\n".join(lines)


def _columns(comparison: Comparison) -> list[Column]:
    """Everything that is known of methods, for machines: also scores and targets that no table shows."""
    rows = comparison.methods
    target = Format(
        str,
        lambda _, target: {
            "target_metric": target.metric,
            "target_seeds_reached": target.reached,
            "target_seeds_with_target": target.n,
            "rounds_to_target_mean": target.rounds.mean,
            "rounds_to_target_std": target.rounds.std,
            "speedup_in_rounds": target.speedup,
            "bytes_to_target_mean": target.bytes.mean,
        },
    )
    return [
        Column("method", "", [row.method for row in rows]),
        Column("seeds", "", [" ".join(map(str, row.seeds)) for row in rows]),
        Column("num_seeds", "", [row.num_runs for row in rows]),
        Column("rounds", "", [" ".join(map(str, row.rounds)) for row in rows]),
        *(Column(key, "", [row.scores[key] for row in rows], SCORE) for key in rows[0].scores),
        *(Column(key, "", [row.differences[key] for row in rows], DIFFERENCE) for key in rows[0].differences),
        Column("target", "", [row.target for row in rows], target),
        *targets([row.targets for row in rows], rows[0].targets),
        *targets([row.strict_targets for row in rows], rows[0].strict_targets, "99_"),
        *traffic(rows),
    ]


def _method_rows(comparison: Comparison) -> list[dict[str, Any]]:
    return records(_columns(comparison))


def run_values(run: RunRecord) -> dict[str, Any]:
    """What a run is, its scores and its costs as columns."""
    names = ("method", "seed", "rounds", "dataset", "partition", "config_hash", *SCORES, "best_round", *COMMUNICATION)
    division = {} if run.draw is None else {"division": run.draw}
    return {name: getattr(run, name) for name in names} | division | dict(run.tasks)


def fingerprints(run: RunRecord) -> dict[str, str | None]:
    """What a run was made from, as columns."""
    return {"data_fingerprint": run.data_fingerprint, "partition_fingerprint": run.partition_fingerprint}


def _run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    chosen = {row.method: row.target.metric for row in comparison.methods}
    rows = []
    for place, run in enumerate(comparison.runs):
        targets = {metric: of_runs[place] for metric, of_runs in comparison.run_targets.items()}
        target = targets[chosen[run.method]]
        rows.append(
            run_values(run)
            | {
                "target_metric": target.metric,
                "target": target.target,
                "rounds_to_target": target.rounds,
                "bytes_to_target": target.bytes,
            }
            | {
                f"{metric}_{name}": value
                for metric, each in targets.items()
                for name, value in (
                    ("target", each.target),
                    ("rounds_to_target", each.rounds),
                    ("bytes_to_target", each.bytes),
                )
            }
            | fingerprints(run)
        )
    return rows


def _document(comparison: Comparison) -> dict[str, Any]:
    methods = [
        values
        | {
            "seeds": list(row.seeds),
            "rounds": list(row.rounds),
            "bytes_up_by_kind_mean": dict(row.bytes_up_by_kind),
            "bytes_down_by_kind_mean": dict(row.bytes_down_by_kind),
        }
        for row, values in zip(comparison.methods, _method_rows(comparison), strict=True)
    ]
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
        "methods": methods,
        "tuning": [asdict(tuned) for tuned in comparison.tuning],
        **({"claims": [_claim(judged) for judged in comparison.claims]} if comparison.claims else {}),
        "runs": _run_rows(comparison),
        "statements": list(statements(comparison)),
        "notes": list(comparison.notes),
        "failed": dict(comparison.failed),
    }


def _claim(judged: JudgedRow) -> dict[str, Any]:
    difference = {key: getattr(judged.difference, key) for key in ("mean", "low", "high", "n", "p", "p_holm")}
    return {**asdict(judged.claim), "metric": judged.metric, "verdict": judged.verdict, **difference}


def _means(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Mean scores and costs by method; what a method lacks is left out, since DVC compares numbers alone."""

    def known(summaries: Mapping[str, Summary], keys: Iterable[str]) -> dict[str, float]:
        return {key: mean for key in keys if (mean := summaries[key].mean) is not None}

    return {
        row.method: known(row.scores, (*MAIN_SCORES, "client_std"))
        | known(row.communication, ("bytes_up", "bytes_down"))
        for row in comparison.methods
    }
