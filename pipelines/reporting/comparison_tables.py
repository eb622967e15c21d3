"""The tables of a comparison; `comparison_files` writes them, `print_table` there shows them on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flcore.core.text import to_yaml
from pipelines.reporting.claims import claims_table
from pipelines.reporting.comparison import STRICT_FRACTION, Comparison, MethodSummary, Tuned
from pipelines.reporting.formats import MISSING, format_bytes, listed
from pipelines.reporting.statistics import Summary, marks
from pipelines.reporting.tables import (
    DIFFERENCE,
    MEAN_BYTES,
    MEAN_COUNT,
    PERCENT,
    SCORE,
    SPREAD,
    WORDS,
    Column,
    Format,
    Table,
    meanings,
)
from pipelines.reporting.targets import TargetSummary
from pipelines.runs.better import lower_is_better
from pipelines.runs.record import COMMUNICATION, TASK_SCORES

# What a score is called above a column, and what it is.
HEADINGS: Mapping[str, str] = {
    "top1_global": "global model",
    "top1_vote": "vote of clients' models",
    "mean_local": "mean over clients",
    "pooled_local": "clients, pooled",
    "client_std": "std over clients",
    "mean_local_own_classes": "mean over clients, own classes",
    "last10_top1_global": "global model, last 10 rounds",
    "macro_acc": "global model, mean over classes",
    "top5_pooled_local": "clients, pooled, best 5 rounds",
    **TASK_SCORES,
}
DEFINITIONS: Mapping[str, str] = {
    "top1_global": "correct / total of the global model on the global test set, last evaluated round.",
    "top1_vote": "where there is no global model: majority vote of all clients' models on the global test set, after "
    "the last round. It takes every client's model for every answer, so it is set against no global model.",
    "mean_local": "mean over clients of each client's accuracy on its own test data, every client counting the same.",
    "pooled_local": "correct answers of all clients / test samples of all clients, every sample counting the same.",
    "client_std": "population standard deviation of the accuracy over the clients of one run, averaged over seeds.",
    "mean_local_own_classes": "as the mean over clients, with answers among the classes alone that the client holds in "
    "training.",
    "top5_pooled_local": "mean over its five best evaluated rounds, selected on test data: the figure that FedPA's "
    "authors print, for comparison with theirs alone.",
    "last10_top1_global": "mean over the last ten evaluated rounds (all of them if there are fewer).",
    "macro_acc": "mean over the classes of the test set of the global model's accuracy on each: a rare class counts as "
    "much as a frequent one.",
    "a_glo": "global model on the whole global test set; like A_loc and A_sel the mean over the last ten epochs (an "
    "epoch is one round per task), of each its last evaluated round.",
    "a_glo_vote": "where there is no global model: majority vote of all clients' models there, likewise.",
    "a_loc": "mean over all clients of each client's own model, as local training left it, on the whole global test "
    "set; a client that was never sampled has the initial model.",
    "a_sel": "likewise, on the classes that the client has met so far.",
    "a_glo_minority": "on the half of the classes with the fewest training samples; likewise A_loc and A_sel.",
    "forgetting": "how far accuracy on earlier tasks fell from its best, at the end of a blocked schedule, clients' "
    "own models; lower is better. Undefined where tasks return.",
    "backward_transfer": "accuracy on earlier tasks at the end minus right after each; negative is forgetting.",
    "roundwise_forgetting": "mean over classes of the global model's best accuracy in earlier rounds minus its last.",
}
SPREAD_MEANS = "sample standard deviation over n seeds (divides by n - 1); not printed for n = 1."
_DIFFERENCE = (
    "method minus baseline in percentage points, seed by seed, over the seeds both have; in brackets the two-sided "
    "95 % Student-t interval of the mean of these differences (needs two seeds). Each interval stands for itself: of "
    "twenty methods that differ in nothing from the baseline, one would be expected to miss 0. p: of the two-sided "
    "paired t-test, adjusted for all differences of this table by Holm's method. Where each seed is run "
    "on several divisions of the data, the interval is over divisions, of each the mean over its seeds: runs on one "
    "division are not independent."
)
_TO_TARGET = "Rounds and bytes to {:.4g} % of the final accuracy of {}, seed by seed"
MAIN_SCORES = ("top1_global", "top1_vote", "mean_local", "pooled_local")
_FURTHER = ("mean_local_own_classes", "macro_acc", "last10_top1_global", "top5_pooled_local")
# Selected on test data: told, never ranked.
_SELECTED = ("top5_pooled_local",)


def comparison_tables(comparison: Comparison) -> dict[str, Table]:
    """The tables by name: ``accuracy``, ``differences``, ``target``, ``traffic``, ``further``; perhaps others."""
    rows, baseline = comparison.methods, comparison.baseline
    measured = [metric for metric in comparison.run_targets if any(row.targets[metric].n for row in rows)]
    method = Column("method", "method", [row.method for row in rows], WORDS)
    tables = {
        "accuracy": Table(
            "Accuracy in %, mean ± std over n seeds",
            (
                method,
                Column("num_seeds", "n", [row.num_runs for row in rows]),
                *(column for key in MAIN_SCORES if (column := _score(rows, key))),
                Column(
                    "client_std",
                    HEADINGS["client_std"],
                    [row.scores["client_std"] for row in rows],
                    SPREAD,
                    DEFINITIONS["client_std"],
                ),
            ),
        ),
        "stream": Table(
            "On the stream of tasks in %, mean ± std over n seeds",
            (method, *(column for key in TASK_SCORES if comparison.has_tasks and (column := _score(rows, key)))),
        ),
        "differences": Table(
            f"Difference to {baseline} in percentage points [95 % interval], adjusted p",
            (method, *_differences(rows, baseline)),
        ),
        "claims": claims_table(comparison.claims) if comparison.claims else Table("", ()),
        "tuning": Table(_tuning_title(comparison), _tuning(comparison)),
        "target": Table(
            _TO_TARGET.format(100 * comparison.target_fraction, baseline),
            (method, *targets([row.targets for row in rows], measured)),
        ),
        "strict_target": Table(
            _TO_TARGET.format(100 * STRICT_FRACTION, baseline),
            (method, *targets([row.strict_targets for row in rows], measured if rows[0].strict_targets else (), "99_")),
        ),
        "traffic": Table("Traffic of all clients together", (method, *traffic(rows))),
        "further": Table(
            "Further accuracies in %, mean ± std over n seeds",
            (method, *(column for key in _FURTHER if (column := _score(rows, key)))),
        ),
    }
    return {name: table for name, table in tables.items() if len(table.columns) > 1}


def _tuning_title(comparison: Comparison) -> str:
    trials = sorted({tuned.trials for tuned in comparison.tuning})
    return f"Tuning: {listed(trials)} trials of each method over its own and the shared parameters"


def _tuning(comparison: Comparison) -> tuple[Column, ...]:
    """What each method's study found; no columns where nothing was tuned."""
    tuned = comparison.tuning
    if not tuned:
        return ()

    def words(one: Tuned) -> str:
        if one.error is not None:
            return f"none: {one.error}"
        told = {
            key: f"{value:.4g}" if isinstance(value, float) else to_yaml(value) for key, value in one.values.items()
        }
        return ", ".join(f"{key} = {value}" for key, value in told.items()) or "as given"

    scored = "on validation data, of the configuration's own seed; the runs in the other tables are on test data."
    return (
        Column("method", "method", [one.method for one in tuned], WORDS),
        Column("trials", "trials", [one.trials for one in tuned]),
        Column("failed", "failed", [one.failed for one in tuned]),
        Column("metric", "tuned for", [one.metric for one in tuned], WORDS),
        Column("given", "as given %", [one.given for one in tuned], PERCENT, scored),
        Column("best", "best %", [one.best for one in tuned], PERCENT, scored),
        Column("values", "values found", [words(one) for one in tuned], WORDS),
    )


def _score(rows: Sequence[MethodSummary], key: str) -> Column | None:
    """The column of a score; None where no method has it."""
    summaries = [row.scores[key] for row in rows]
    if not any(summary.n for summary in summaries):
        return None
    marked = [] if key in _SELECTED else marks(summaries, lower_is_better=lower_is_better(key))
    return Column(key, HEADINGS[key], summaries, SCORE, DEFINITIONS.get(key, ""), marked)


def _differences(rows: Sequence[MethodSummary], baseline: str) -> list[Column]:
    """Where nothing can be compared, no column."""
    own = {place: "baseline" for place, row in enumerate(rows) if row.method == baseline}
    columns = [
        Column(key, f"Δ {HEADINGS[key]}", [row.differences[key] for row in rows], DIFFERENCE, _DIFFERENCE, instead=own)
        for key in rows[0].differences
        if any(row.differences[key].n for row in rows)
    ]
    if not columns:
        return []
    common = [max(item.n for item in row.differences.values()) for row in rows]
    return [*columns, Column("", "common seeds", common, instead=dict.fromkeys(own, MISSING))]


def _rounds_text(target: TargetSummary) -> str:
    """Mean rounds to target; where some seed never got there, how many did."""
    if target.rounds.mean is not None:
        spread = "" if target.rounds.std is None else f" ± {target.rounds.std:.1f}"
        return f"{target.rounds.mean:.1f}{spread}"
    return f"{MISSING} ({target.reached} of {target.n})" if target.n else MISSING


def targets(rows: Sequence[Mapping[str, TargetSummary]], metrics: Iterable[str], prefix: str = "") -> list[Column]:
    """Rounds and bytes to the target on each of these metrics; of each row its targets by metric."""
    metrics = list(metrics)

    def column(metric: str, what: str, format: Format, meaning: str) -> Column:
        targets = [row[metric] for row in rows]
        costs: list[Summary] = [getattr(target, what) for target in targets]
        marked = marks(costs, lower_is_better=True)
        key = f"{metric}_{what}_to_{prefix}target"
        return Column(key, f"{what}: {HEADINGS[metric]}", targets, format, meaning, marked)

    rounds = Format(
        _rounds_text,
        lambda key, target: {f"{key}_mean": target.rounds.mean, f"{key}_std": target.rounds.std, f"{key}_n": target.n},
    )
    volume = Format(
        lambda target: format_bytes(target.bytes.mean),
        lambda key, target: {f"{key}_mean": target.bytes.mean},
    )
    reached = (
        "first evaluated round in which the accuracy named is at or above the target, a fraction of the baseline's "
        "final accuracy with the same seed. The mean is printed only if every seed reaches it, otherwise how many did; "
        "a dash alone where the method has no such accuracy round by round."
    )
    sent = "bytes sent up and down by all clients until that round."
    return [
        *(column(metric, "rounds", rounds, reached) for metric in metrics),
        *(column(metric, "bytes", volume, sent) for metric in metrics),
    ]


def traffic(rows: Sequence[MethodSummary]) -> list[Column]:
    """What was sent, measured."""
    headings = {
        "bytes_up_per_round": "up / round",
        "bytes_down_per_round": "down / round",
        "bytes_up": "up, total",
        "bytes_down": "down, total",
        "scalars_up_per_round": "scalars up / round",
        "num_parameters": "parameters",
    }
    lengths = [listed(row.rounds) for row in rows]
    return [
        *([Column("rounds", "rounds", lengths, WORDS)] if len(set(lengths)) > 1 else []),
        *(
            Column(
                key,
                headings[key],
                [row.communication[key] for row in rows],
                MEAN_BYTES if key.startswith("bytes") else MEAN_COUNT,
            )
            for key in COMMUNICATION
        ),
    ]


def definitions(tables: Iterable[Table]) -> dict[str, str]:
    """What the columns of these tables mean."""
    return {**meanings(tables), "±": SPREAD_MEANS}
