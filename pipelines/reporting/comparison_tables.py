"""The tables of a comparison; `comparison_files` writes them, `print_table` there shows them on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flcore.core.text import to_yaml
from pipelines.reporting.claims import claims_table
from pipelines.reporting.comparison import STRICT_FRACTION, Comparison, MethodSummary, Tuned
from pipelines.reporting.formats import MISSING, format_bytes, format_percent, listed
from pipelines.reporting.statistics import PairedDifference, Summary, marks
from pipelines.reporting.tables import Column, Table, difference_column, meanings, score_column
from pipelines.reporting.targets import TargetSummary
from pipelines.runs.metrics import heading, meaning
from pipelines.runs.record import COMMUNICATION, TASK_SCORES

MAIN_SCORES = ("top1_global", "top1_vote", "mean_local", "pooled_local")
_FURTHER = ("mean_local_own_classes", "macro_acc", "last10_top1_global", "top5_pooled_local")
# Selected on test data: shown, never ranked.
_SELECTED = ("top5_pooled_local",)
SPREAD_MEANS = "sample standard deviation over n seeds (divides by n - 1); not printed for n = 1."
_DIFFERENCE = (
    "method minus baseline in percentage points, seed by seed, over the seeds both have; in brackets the two-sided "
    "95 % Student-t interval of the mean of these differences (needs two seeds). Each interval stands for itself: of "
    "twenty methods that differ in nothing from the baseline, one would be expected to miss 0. p: of the two-sided "
    "paired t-test, adjusted for all differences of this table by Holm's method. Where each seed is run "
    "on several divisions of the data, the interval is over divisions, of each the mean over its seeds: runs on one "
    "division are not independent."
)
_DF = "degrees of freedom of the intervals: seeds, or divisions where there are several, minus one."
_REACHED = (
    "first evaluated round in which the accuracy named is at or above the target, a fraction of the baseline's "
    "final accuracy with the same seed. The mean is printed only if every seed reaches it, otherwise how many did; "
    "a dash alone where the method has no such accuracy round by round."
)
_SENT = "bytes sent up and down by all clients until that round."
_TUNED = "on validation data, of the configuration's own seed; the runs in the other tables are on test data."


def comparison_tables(comparison: Comparison) -> dict[str, Table]:
    """Return the tables by name: ``accuracy``, ``differences``, ``target``, ``traffic``, ``further``."""
    rows, baseline = comparison.methods, comparison.baseline
    method = Column("method", [row.method for row in rows], is_text=True)
    trials = listed(sorted({tuned.trials for tuned in comparison.tuning}))
    to_target = f"Rounds and bytes to {{:.4g}} % of the final accuracy of {baseline}, seed by seed"
    tables = {
        "accuracy": (
            "Accuracy in %, mean ± std over n seeds",
            (
                Column("n", [row.num_runs for row in rows]),
                *_scores(rows, MAIN_SCORES),
                spread_column([row.scores["client_std"] for row in rows]),
            ),
        ),
        "stream": (
            "On the stream of tasks in %, mean ± std over n seeds",
            _scores(rows, TASK_SCORES if comparison.has_tasks else ()),
        ),
        "differences": (
            f"Difference to {baseline} in percentage points [95 % interval], adjusted p",
            _differences(rows, baseline),
        ),
        "tuning": (
            f"Tuning: {trials} trials of each method over its own and the shared parameters",
            _tuning(comparison.tuning),
        ),
        "target": (to_target.format(100 * comparison.target_fraction), _targets([row.targets for row in rows])),
        "strict_target": (to_target.format(100 * STRICT_FRACTION), _targets([row.strict_targets for row in rows])),
        "traffic": ("Traffic of all clients together", _traffic(rows)),
        "further": ("Further accuracies in %, mean ± std over n seeds", _scores(rows, _FURTHER)),
    }
    first = {"tuning": Column("method", [one.method for one in comparison.tuning], is_text=True)}
    made = {
        name: Table(title, (first.get(name, method), *columns)) for name, (title, columns) in tables.items() if columns
    }
    claims = {"claims": claims_table(comparison.claims)} if comparison.claims else {}
    order = [name for name in ("accuracy", "stream", "differences", "claims", *tables) if name in {**made, **claims}]
    return {name: {**made, **claims}[name] for name in order}


def definitions(tables: Iterable[Table]) -> dict[str, str]:
    """Return the meanings of the columns of these tables."""
    return {**meanings(tables), "±": SPREAD_MEANS}


def _scores(rows: Sequence[MethodSummary], metrics: Iterable[str]) -> list[Column]:
    """Return a column for each of these scores that any method has."""
    return [
        score_column(key, [row.scores[key] for row in rows], () if key in _SELECTED else None)
        for key in metrics
        if any(row.scores[key].n for row in rows)
    ]


def spread_column(spreads: Sequence[Summary]) -> Column:
    """Return the spread over clients, mean over seeds, without its own spread, which readers would confuse with it."""
    key = "client_std"
    texts = [format_percent(spread.mean) for spread in spreads]
    return Column(heading(key), texts, meaning=meaning(key), metric=key)


def _differences(rows: Sequence[MethodSummary], baseline: str) -> list[Column]:
    """Return differences, common seeds and degrees of freedom; no column without a comparison."""
    instead = {index: "baseline" for index, row in enumerate(rows) if row.method == baseline}

    def of(row: MethodSummary) -> PairedDifference:
        """Return the difference over most seeds."""
        return max(row.differences.values(), key=lambda difference: difference.n)

    columns = [
        difference_column(key, [row.differences[key] for row in rows], _DIFFERENCE, instead)
        for key in rows[0].differences
        if any(row.differences[key].n for row in rows)
    ]
    if not columns:
        return []
    common = [MISSING if index in instead else of(row).n for index, row in enumerate(rows)]
    return [*columns, Column("common seeds", common), Column("df", [of(row).df for row in rows], meaning=_DF)]


def _tuning(tuned: Sequence[Tuned]) -> list[Column]:
    """Return the results of each method's study; no columns without tuning."""

    def values(one: Tuned) -> str:
        if one.error is not None:
            return f"none: {one.error}"
        texts = (f"{key} = {f'{v:.4g}' if isinstance(v, float) else to_yaml(v)}" for key, v in one.values.items())
        return ", ".join(texts) or "as given"

    if not tuned:
        return []
    return [
        Column("trials", [one.trials for one in tuned]),
        Column("failed", [one.failed for one in tuned]),
        Column("tuned for", [one.metric for one in tuned], is_text=True),
        Column("as given %", [format_percent(one.given) for one in tuned], meaning=_TUNED),
        Column("best %", [format_percent(one.best) for one in tuned], meaning=_TUNED),
        Column("values found", [values(one) for one in tuned], is_text=True),
    ]


def _targets(rows: Sequence[Mapping[str, TargetSummary]]) -> list[Column]:
    """Return rounds and bytes to the target on each metric with a target; ``rows`` are the targets of each row."""

    def rounds(target: TargetSummary) -> str:
        """Return the mean rounds to target; if some seeds did not reach it, the number that did."""
        if target.rounds.mean is None:
            return f"{MISSING} ({target.reached} of {target.n})" if target.n else MISSING
        spread = "" if target.rounds.std is None else f" ± {target.rounds.std:.1f}"
        return f"{target.rounds.mean:.1f}{spread}"

    measured = [metric for metric in rows[0] if any(row[metric].n for row in rows)]
    by_rounds = [
        Column(
            f"rounds: {heading(metric)}",
            [rounds(row[metric]) for row in rows],
            meaning=_REACHED,
            marks=marks([row[metric].rounds for row in rows], lower_is_better=True),
        )
        for metric in measured
    ]
    by_bytes = [
        Column(
            f"bytes: {heading(metric)}",
            [format_bytes(row[metric].bytes.mean) for row in rows],
            meaning=_SENT,
            marks=marks([row[metric].bytes for row in rows], lower_is_better=True),
        )
        for metric in measured
    ]
    return [*by_rounds, *by_bytes]


def _traffic(rows: Sequence[MethodSummary]) -> list[Column]:
    """Return the measured traffic."""
    lengths = [listed(row.rounds) for row in rows]
    return [
        *([Column("rounds", lengths, is_text=True)] if len(set(lengths)) > 1 else []),
        *(score_column(key, [row.communication[key] for row in rows], ()) for key in COMMUNICATION),
    ]
