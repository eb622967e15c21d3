"""A comparison for people and machines: tables on a terminal and in Markdown, CSV and JSON files.

For people accuracies are percentages with two decimals and a missing value is a dash; files for machines have
fractions and null or an empty cell. The layout of the tables is made once, for terminal, Markdown and report alike.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.reporting.formats import MISSING, format_bytes, format_count, format_percent, listed, plural
from pipelines.reporting.statistics import (
    CONFIDENCE,
    PAIRED_METRICS,
    PAIRED_TASK_SCORES,
    Comparison,
    MethodSummary,
    PairedDifference,
    Summary,
    TargetSummary,
    marks,
)
from pipelines.runs.record import COMMUNICATION, HEADLINE_METRICS, SCORES, TASK_SCORES, RunRecord

_LOWER_IS_BETTER = ("forgetting", "roundwise_forgetting")
_TASK_TERMS = ("A_glo", "A_loc", "A_sel", "minority", "forgetting", "backward transfer", "round-wise forgetting")
TIED_MARK = "≈"
DEFINITIONS: Mapping[str, str] = {
    "top1_global": "correct / total of the global model on the global test set, last evaluated round.",
    "mean_local": "mean over clients of each client's accuracy on its own test data, every client counting the same.",
    "pooled_local": "correct answers of all clients / test samples of all clients, every sample counting the same.",
    "client_std": "population standard deviation of the accuracy over the clients of one run, averaged over seeds.",
    "mean_local_own_classes": "as mean_local, with answers among the classes alone that the client holds in training.",
    "top5_pooled_local": "mean of pooled_local over its five best evaluated rounds, selected on test data: the figure "
    "that FedPA's authors print, for comparison with theirs alone.",
    "last10_top1_global": "mean of top1_global over the last ten evaluated rounds (all of them if there are fewer).",
    "±": "sample standard deviation over n seeds (divides by n - 1); not printed for n = 1.",
    "difference": (
        "method minus baseline in percentage points, seed by seed, over the seeds both have; in brackets the "
        "two-sided 95 % Student-t interval of the mean of these differences (needs two seeds). "
        "An interval, not a claim of significance."
    ),
    "rounds to target": (
        "first evaluated round at or above the target; the target is a fraction of the baseline's final accuracy with "
        "the same seed. A mean is printed only if every seed reaches it, otherwise how many did. Methods without a "
        "global model have their target on mean_local and take no part in the marks of this column."
    ),
    "bytes to target": "bytes sent up and down by all clients until that round.",
    "A_glo": "global model on the whole global test set; like A_loc and A_sel the mean over the last ten epochs (an "
    "epoch is one round per task), of each its last evaluated round.",
    "A_loc": "mean over all clients of each client's own model, as local training left it, on the whole global test "
    "set; a client that was never sampled has the initial model.",
    "A_sel": "likewise, on the classes that the client has met so far.",
    "minority": "on the half of the classes with the fewest training samples.",
    "forgetting": "how far accuracy on earlier tasks fell from its best, at the end of a blocked schedule, clients' "
    "own models; lower is better. Undefined where tasks return.",
    "backward transfer": "accuracy on earlier tasks at the end minus right after each; negative is forgetting.",
    "round-wise forgetting": "mean over classes of the global model's best accuracy in earlier rounds minus its last.",
    TIED_MARK: "tied with the best (bold) mean: |difference| < pooled standard error of the two means.",
}


def format_summary(summary: Summary) -> str:
    """Mean and spread as percentages: `71.33 ± 1.53`, for n = 1 `71.33`, without a value a dash."""
    spread = "" if summary.std is None else f" ± {format_percent(summary.std)}"
    return format_percent(summary.mean) + spread


def format_difference(difference: PairedDifference) -> str:
    """Paired difference with its interval: `+2.00 [-0.48, +4.48]`; for one seed the mean and why no interval."""
    mean = format_percent(difference.mean, signed=True)
    if difference.mean is None:
        return MISSING
    if difference.low is None or difference.high is None:
        return f"{mean} (n = 1, no interval)"
    return f"{mean} [{format_percent(difference.low, True)}, {format_percent(difference.high, True)}]"


def format_rounds(target: TargetSummary) -> str:
    """Mean rounds to target; where some seed never got there, how many did."""
    if target.rounds.mean is not None:
        spread = "" if target.rounds.std is None else f" ± {target.rounds.std:.1f}"
        return f"{target.rounds.mean:.1f}{spread}"
    return f"{MISSING} ({target.reached} of {target.n})" if target.n else MISSING


@dataclass(frozen=True)
class PrintedTable:
    """A table for eyes; a cell is (text, mark) with mark "best", "tied" or "". The first column is the method."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]


def printed_tables(comparison: Comparison) -> tuple[PrintedTable, ...]:
    """Lay out accuracy, tasks, differences and cost once, for Markdown, the terminal and the HTML report alike."""
    rows = comparison.methods
    accuracy = [
        column("method", [row.method for row in rows]),
        column("n", [str(len(row.seeds)) for row in rows]),
        *(
            column(
                key,
                [score_cell(row.scores[key], len(row.seeds)) for row in rows],
                marks([row.scores[key] for row in rows]),
            )
            for key in HEADLINE_METRICS
        ),
        column("client_std", [format_percent(row.scores["client_std"].mean) for row in rows]),
        column(
            "mean_local_own_classes",
            [score_cell(row.scores["mean_local_own_classes"], len(row.seeds)) for row in rows],
            marks([row.scores["mean_local_own_classes"] for row in rows]),
        ),
        column(
            "last10_top1_global",
            [score_cell(row.scores["last10_top1_global"], len(row.seeds)) for row in rows],
            marks([row.scores["last10_top1_global"] for row in rows]),
        ),
        column("top5_pooled_local", [score_cell(row.scores["top5_pooled_local"], len(row.seeds)) for row in rows]),
    ]
    differences = [
        column("method", [row.method for row in rows]),
        *(
            column(f"Δ {key}", [_difference_cell(row, key, comparison.baseline) for row in rows])
            for key in (*PAIRED_METRICS, *(PAIRED_TASK_SCORES if comparison.has_tasks else ()))
        ),
        column("common seeds", [_common_seeds(row, comparison.baseline) for row in rows]),
    ]
    cost = [
        column("method", [row.method for row in rows]),
        column(
            "rounds to target",
            [format_rounds(row.target) for row in rows],
            marks([_comparable(row, row.target.rounds, comparison) for row in rows], lower_is_better=True),
        ),
        column(
            "bytes to target",
            [format_bytes(row.target.bytes.mean) for row in rows],
            marks([_comparable(row, row.target.bytes, comparison) for row in rows], lower_is_better=True),
        ),
        column("target on", [row.target.metric if row.target.n else MISSING for row in rows]),
        column("up / round", [format_bytes(row.communication["bytes_up_per_round"]) for row in rows]),
        column("down / round", [format_bytes(row.communication["bytes_down_per_round"]) for row in rows]),
        column("up, total", [format_bytes(row.communication["bytes_up"]) for row in rows]),
        column("down, total", [format_bytes(row.communication["bytes_down"]) for row in rows]),
        column("scalars up / round", [format_count(row.communication["scalars_up_per_round"]) for row in rows]),
        column("parameters", [format_count(row.communication["num_parameters"]) for row in rows]),
    ]
    percent = f"{100 * comparison.target_fraction:g} %"
    stream: tuple[PrintedTable, ...] = ()
    if comparison.has_tasks:
        stream = (table_of("On the stream of tasks in %, mean ± std over n seeds", _task_columns(rows)),)
    return (
        table_of("Accuracy in %, mean ± std over n seeds", accuracy),
        *stream,
        table_of(f"Difference to {comparison.baseline} in percentage points [95 % interval]", differences),
        table_of(f"Cost; target = {percent} of the final accuracy of {comparison.baseline}, seed by seed", cost),
    )


def definitions(comparison: Comparison) -> dict[str, str]:
    """What the columns of this comparison mean."""
    return {name: meaning for name, meaning in DEFINITIONS.items() if comparison.has_tasks or name not in _TASK_TERMS}


Column = tuple[str, list[tuple[str, str]]]


def _task_columns(rows: Sequence[MethodSummary]) -> list[Column]:
    columns = [column("method", [row.method for row in rows])]
    for key, name in TASK_SCORES.items():
        summaries = [row.scores[key] for row in rows]
        if any(summary.n for summary in summaries):
            marked = marks(summaries, lower_is_better=key in _LOWER_IS_BETTER)
            columns.append(column(name, [score_cell(row.scores[key], len(row.seeds)) for row in rows], marked))
    return columns


def column(name: str, texts: Sequence[str], cell_marks: Sequence[str] = ()) -> Column:
    """A named column of cells, without marks where none are given."""
    return name, list(zip(texts, cell_marks or [""] * len(texts), strict=True))


def table_of(title: str, columns: Sequence[Column]) -> PrintedTable:
    """A table from its columns."""
    return PrintedTable(
        title, tuple(name for name, _ in columns), tuple(zip(*(cells for _, cells in columns), strict=True))
    )


def score_cell(summary: Summary, runs: int) -> str:
    """A score of a row of so many runs; says for how many if it is not all of them."""
    # The column n counts runs; a score that only some of them have must not borrow it.
    suffix = f" (n = {summary.n})" if summary.n not in (0, runs) else ""
    return format_summary(summary) + suffix


def _comparable(row: MethodSummary, summary: Summary, comparison: Comparison) -> Summary:
    # Reaching a target of another metric is neither faster nor slower than reaching the headline one.
    return summary if row.target.metric == comparison.metric else Summary(None, None, 0)


def _difference_cell(row: MethodSummary, key: str, baseline: str) -> str:
    return "baseline" if row.method == baseline else format_difference(row.differences[key])


def _common_seeds(row: MethodSummary, baseline: str) -> str:
    return MISSING if row.method == baseline else str(max(item.n for item in row.differences.values()))


def describe(comparison: Comparison) -> str:
    """One sentence: how many methods, on what, over which seeds and rounds."""
    methods = plural(len(comparison.methods), "method")
    partition = f", partition {comparison.partition}" if comparison.partition else ""
    return f"{methods} on {comparison.dataset}{partition}, {lengths_and_seeds(comparison.runs)}."


def lengths_and_seeds(runs: Iterable[RunRecord]) -> str:
    """How long runs are, and their seeds: `20 rounds, seeds 0, 1`."""
    runs = list(runs)
    rounds, seeds = sorted({run.rounds for run in runs}), sorted({run.seed for run in runs})
    return f"{listed(rounds)} round{'' if rounds == [1] else 's'}, seed{'' if len(seeds) == 1 else 's'} {listed(seeds)}"


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the comparison on a terminal: accuracy, differences, cost, then the notes.

    Args:
        comparison: what `compare` returned.
        console: where to; narrow consoles wrap cells, nothing is cut.
    """
    console.print(Text(describe(comparison), style="bold"))
    print_printed(printed_tables(comparison), comparison.notes, console)


def print_printed(tables: Iterable[PrintedTable], notes: Iterable[str], console: Console) -> None:
    """Print tables on a terminal, what their marks mean, and notes."""
    for printed in tables:
        table = Table(title=printed.title, title_justify="left", title_style="italic")
        for position, name in enumerate(printed.header):
            table.add_column(name, justify="right" if position else "left", overflow="fold")
        for row in printed.rows:
            table.add_row(*(_terminal_cell(text, mark) for text, mark in row))
        console.print(table)
    console.print(Text(f"Bold: best mean of the column. {TIED_MARK}: {DEFINITIONS[TIED_MARK]}", style="dim"))
    for note in notes:
        console.print(Text(f"Note: {note}"))


def _terminal_cell(text: str, mark: str) -> Text:
    if mark == "best":
        return Text(text, style="bold")
    return Text(f"{text} {TIED_MARK}" if mark == "tied" else text)


def write(comparison: Comparison, directory: Path) -> tuple[Path, ...]:
    """Write the comparison for machines and for eyes; the same comparison gives the same bytes.

    Args:
        comparison: what `compare` returned.
        directory: made if it is not there; files of the same names are replaced.

    Returns:
        `comparison.csv` (a row per method), `comparison.json`, `comparison.md` and `runs.csv` (a row per run).
        CSV and JSON hold fractions and raw counts (missing: empty, null), Markdown percentages (missing: a dash).
    """
    contents = {
        "comparison.csv": csv_text([_method_values(row) for row in comparison.methods]),
        "comparison.json": json_text(_json_document(comparison)),
        "comparison.md": markdown(comparison),
        "runs.csv": csv_text(_run_rows(comparison)),
    }
    return write_texts(contents, directory)


def write_texts(contents: Mapping[str, str], directory: Path) -> tuple[Path, ...]:
    """Write files by name into a folder, which is made if it is not there; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        # newline="" keeps the bytes the same on every platform.
        (directory / name).write_text(text, encoding="utf-8", newline="")
    return tuple(directory / name for name in contents)


def markdown(comparison: Comparison) -> str:
    """Render the comparison as Markdown: its tables, the notes, and what each column means."""
    lines = [f"# Comparison on {comparison.dataset}", "", describe(comparison), ""]
    for printed in printed_tables(comparison):
        lines += markdown_table(printed)
    return "\n".join([*lines, *markdown_end(comparison.notes, definitions(comparison))]) + "\n"


def markdown_table(printed: PrintedTable) -> list[str]:
    """The lines of a table with its title and an empty line behind it."""
    return [
        f"## {printed.title}",
        "",
        _markdown_row(printed.header),
        _markdown_row([":---", *["---:"] * (len(printed.header) - 1)]),
        *(_markdown_row([_markdown_cell(text, mark) for text, mark in row]) for row in printed.rows),
        "",
    ]


def markdown_end(notes: Sequence[str], definitions: Mapping[str, str]) -> list[str]:
    """The lines below all tables: notes, and what columns and marks mean."""
    noted = ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []
    return [*noted, "## How to read it", "", *(f"- `{name}`: {meaning}" for name, meaning in definitions.items())]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _markdown_cell(text: str, mark: str) -> str:
    if mark == "best":
        return f"**{text}**"
    return f"{text} {TIED_MARK}" if mark == "tied" else text


def _method_values(row: MethodSummary) -> dict[str, Any]:
    values: dict[str, Any] = {
        "method": row.method,
        "seeds": " ".join(str(seed) for seed in row.seeds),
        "num_seeds": len(row.seeds),
        "rounds": " ".join(str(rounds) for rounds in row.rounds),
    }
    return (
        values
        | score_values(row.scores)
        | difference_values(row.differences)
        | {
            "target_metric": row.target.metric,
            "target_seeds_reached": row.target.reached,
            "target_seeds_with_target": row.target.n,
            "rounds_to_target_mean": row.target.rounds.mean,
            "rounds_to_target_std": row.target.rounds.std,
            "speedup_in_rounds": row.target.speedup,
            "bytes_to_target_mean": row.target.bytes.mean,
            **{f"{key}_mean": value for key, value in row.communication.items()},
        }
    )


def score_values(scores: Mapping[str, Summary]) -> dict[str, float | None]:
    """Scores over seeds as columns."""
    values: dict[str, float | None] = {}
    for key, summary in scores.items():
        name = f"{key}_over_clients" if key == "client_std" else key
        values |= {f"{name}_mean": summary.mean, f"{name}_std_over_seeds": summary.std, f"{name}_n": summary.n}
    return values


def difference_values(differences: Mapping[str, PairedDifference]) -> dict[str, float | None]:
    """Paired differences as columns."""
    values: dict[str, float | None] = {}
    for key, difference in differences.items():
        prefix = f"{key}_paired_difference"
        values |= {
            f"{prefix}_mean": difference.mean,
            f"{prefix}_std": difference.std,
            f"{prefix}_ci95_low": difference.low,
            f"{prefix}_ci95_high": difference.high,
            f"{prefix}_n": difference.n,
        }
    return values


def run_values(run: RunRecord) -> dict[str, Any]:
    """What a run is, its scores and its costs as columns."""
    names = ("method", "seed", "rounds", "dataset", "partition", "config_hash", *SCORES, "best_round", *COMMUNICATION)
    return {name: getattr(run, name) for name in names} | dict(run.tasks)


def fingerprints(run: RunRecord) -> dict[str, str | None]:
    """What a run was made from, as columns."""
    return {"data_fingerprint": run.data_fingerprint, "partition_fingerprint": run.partition_fingerprint}


def _run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        run_values(run)
        | {
            "target_metric": target.metric,
            "target": target.target,
            "rounds_to_target": target.rounds,
            "bytes_to_target": target.bytes,
        }
        | fingerprints(run)
        for run, target in zip(comparison.runs, comparison.run_targets, strict=True)
    ]


def _json_document(comparison: Comparison) -> dict[str, Any]:
    methods = [
        _method_values(row)
        | {
            "seeds": list(row.seeds),
            "rounds": list(row.rounds),
            "bytes_up_by_kind_mean": dict(row.bytes_up_by_kind),
            "bytes_down_by_kind_mean": dict(row.bytes_down_by_kind),
        }
        for row in comparison.methods
    ]
    return {
        "dataset": comparison.dataset,
        "partition": comparison.partition,
        "baseline": comparison.baseline,
        "metric": comparison.metric,
        "target_fraction": comparison.target_fraction,
        "confidence": CONFIDENCE,
        "seeds": list(comparison.seeds),
        "methods": methods,
        "runs": _run_rows(comparison),
        "notes": list(comparison.notes),
    }


def json_text(document: Mapping[str, Any]) -> str:
    """JSON with sorted keys and rounded floats, so that the same records give the same bytes."""
    return json.dumps(_rounded(dict(document)), indent=1, sort_keys=True, allow_nan=False) + "\n"


def _rounded(value: Any) -> Any:
    """Round floats to 12 decimals: far below any meaning, and the last bits of a mean may differ between machines."""
    if isinstance(value, float):
        return round(value, 12)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with the columns of all rows; floats are rounded as in JSON, None is an empty cell, like what a row lacks."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(dict.fromkeys(chain.from_iterable(rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _rounded(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()
