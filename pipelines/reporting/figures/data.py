"""The tables behind figures: what tests check, and what is saved beside each figure.

All are in long form, a row per point; means and spreads are over seeds. Fractions stay fractions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from pipelines.reporting.comparison import Comparison
from pipelines.runs.record import RoundRecord, RunRecord, group_by_method

# What is drawn over rounds, and the title of its panel.
PANEL_TITLES = {
    "top1_global": "Global model on the global test set",
    "mean_local": "Mean over clients, own test data",
}
# What is drawn of one run, and what its line is called.
RUN_CURVES = {
    "top1_global": "global model",
    "top1_vote": "vote of clients",
    "mean_local": "mean over clients",
    "pooled_local": "clients, pooled",
}
_POOLED = "Clients on their own test data, pooled"


def over_seeds(runs: Iterable[RunRecord], read: Callable[[RoundRecord], float | None], name: str) -> pd.DataFrame:
    """A value of round records by round, over seeds.

    Returns:
        Columns method, round, ``name`` (the mean), std (sample standard deviation, NaN for one seed), n. Only rounds
        that every seed of a method evaluated, so that a curve never changes its seeds half-way; methods without the
        value have no rows.
    """
    rows: list[tuple[str, int, float, float, int]] = []
    for method, method_runs in group_by_method(runs).items():
        seeds, by_round = set(), defaultdict[int, list[float]](list)
        for run in method_runs:
            for record in run.history:
                value = read(record)
                if value is not None:
                    seeds.add(run.pair)
                    by_round[record.round].append(value)
        rows += (
            (method, number, *_mean_and_std(values), len(values))
            for number, values in sorted(by_round.items())
            if len(values) == len(seeds)
        )
    return pd.DataFrame(rows, columns=["method", "round", name, "std", "n"])


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """By hand: there are thousands of short lists, for each of which a table would take longer than its arithmetic."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def curve_titles(runs: Iterable[RunRecord]) -> dict[str, str]:
    """What is drawn over rounds, with the title of its panel: of :data:`PANEL_TITLES`, and pooled over clients.

    The latter where clients' test sets differ in size; else it is the mean over clients once more.
    """
    apart = any(
        record.pooled_local is not None and record.mean_local is not None and record.pooled_local != record.mean_local
        for run in runs
        for record in run.history
    )
    return PANEL_TITLES | ({"pooled_local": _POOLED} if apart else {})


def run_curves(run: RunRecord) -> list[str]:
    """What is drawn over rounds of one run: all of :data:`RUN_CURVES` that say something of their own."""
    told = curve_titles([run])
    return [metric for metric in RUN_CURVES if metric in told or metric == "top1_vote"]


def curve_data(runs: Iterable[RunRecord], metric: str, smooth: int = 1) -> pd.DataFrame:
    """Accuracy by round: columns method, round, mean, std, n, as :func:`over_seeds` has them.

    Args:
        runs: any methods and seeds.
        metric: field of a round record, such as `top1_global`.
        smooth: with more than 1 there is a column ``smoothed`` too, the mean of so many evaluated rounds up to each (of
            as many as there are in the beginning).
    """
    table = over_seeds(runs, lambda record: getattr(record, metric), "mean")
    if smooth > 1 and not table.empty:
        by_method = table.groupby("method", sort=False)["mean"]
        table["smoothed"] = by_method.transform(lambda means: means.rolling(smooth, min_periods=1).mean())
    return table


def bytes_accuracy_data(runs: Iterable[RunRecord], metric: str) -> pd.DataFrame:
    """Accuracy against cumulative traffic (up + down, all clients), mean over seeds at equal rounds.

    Returns:
        Columns method, round, bytes, accuracy, std, n.
    """
    runs = list(runs)
    accuracy = curve_data(runs, metric).rename(columns={"mean": "accuracy"})
    traffic = over_seeds(runs, lambda record: record.total_bytes, "bytes")
    merged = accuracy.merge(traffic[["method", "round", "bytes"]], on=["method", "round"])
    return merged[["method", "round", "bytes", "accuracy", "std", "n"]]


def tradeoff_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Final accuracy against all bytes of a run (up + down, all clients), mean over seeds.

    Returns:
        Columns metric, method, bytes, accuracy, std (sample standard deviation, NaN for one seed), n; no row where a
        method lacks the accuracy or its bytes are not known.
    """
    rows = []
    for metric in PANEL_TITLES:
        for method, method_runs in group_by_method(runs).items():
            known = [
                (run.bytes_up + run.bytes_down, value)
                for run in method_runs
                if (value := getattr(run, metric)) is not None
                and run.bytes_up is not None
                and run.bytes_down is not None
            ]
            if known:
                sent, values = pd.Series([pair[0] for pair in known]), pd.Series([pair[1] for pair in known])
                rows.append((metric, method, sent.mean(), values.mean(), values.std(), len(known)))
    return pd.DataFrame(rows, columns=["metric", "method", "bytes", "accuracy", "std", "n"])


def curves_table(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """All evaluated rounds of all runs, for plotting tools: a row per run and round.

    Returns:
        Columns method, seed, division (where each seed has several), round, top1_global, top1_vote, mean_local,
        pooled_local (NaN where a method has no such value), bytes (up + down, all clients, cumulative).
    """
    metrics = tuple(RUN_CURVES)
    runs = list(runs)
    divided = any(run.draw is not None for run in runs)
    rows = [
        (
            *(run.method, run.seed, *([run.draw] * divided), record.round),
            *(getattr(record, metric) for metric in metrics),
            record.total_bytes,
        )
        for method_runs in group_by_method(runs).values()
        for run in method_runs
        for record in run.history
    ]
    columns = ["method", "seed", *(["division"] * divided), "round", *metrics, "bytes"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(metrics, float))


def training_loss_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Training-loss terms by round.

    Returns:
        Columns term, method, round, mean, std, n; terms that most methods have come first, then by name.
    """
    runs = list(runs)
    users: dict[str, set[str]] = {}
    for run in runs:
        for term in (term for record in run.history for term in record.train_loss):
            users.setdefault(term, set()).add(run.method)
    terms = sorted(users, key=lambda term: (-len(users[term]), term))
    return stacked({term: over_seeds(runs, _term_reader(term), "mean") for term in terms}, "term")


def _term_reader(term: str) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.train_loss.get(term)


def client_accuracy_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Accuracy of every client in the last evaluated round of every run.

    Returns:
        Columns method, seed, client (position, from 0), accuracy; clients without test data have no row.
    """
    rows = [
        {"method": run.method, "seed": run.seed, "client": client, "accuracy": accuracy}
        for method_runs in group_by_method(runs).values()
        for run in method_runs
        if run.history
        for client, accuracy in enumerate(run.history[-1].local_accuracy)
        if accuracy is not None
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "client", "accuracy"])


def class_accuracy_data(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Class-wise accuracy on the global test set, mean over the seeds that have a value for the class.

    Returns:
        A row per method that reports class accuracies, a column per class, by name if it has one; NaN where no
        seed knows. The index is the method, or "<method> (vote)" for the majority of clients' models.
    """
    runs = list(runs)
    names = next((run.class_names for run in runs if run.class_names), ())
    rows = [
        (f"{run.method}{suffix}", label, value)
        for method_runs in group_by_method(runs).values()
        for suffix, name in (("", "class_acc"), (" (vote)", "class_acc_vote"))
        for run in method_runs
        for label, value in enumerate(getattr(run, name) or ())
    ]
    table = pd.DataFrame(rows, columns=["method", "class", "value"]).astype({"value": float})
    by_class = table.pivot_table(index="method", columns="class", values="value", dropna=False, sort=False)
    found = by_class.sort_index(axis="columns").dropna(how="all").rename_axis(index=None, columns=None)
    return found.rename(columns=dict(enumerate(names)))


def difference_data(comparison: Comparison) -> pd.DataFrame:
    """Paired differences to the baseline.

    Returns:
        Columns metric, method, mean, low, high (NaN for fewer than two common seeds), n, seeds (their differences, by
        ascending seed); a row per method and metric that can be compared.
    """
    rows = [
        (metric, row.method, found.mean, found.low, found.high, found.n, tuple(found.by_seed.values()))
        for metric in PANEL_TITLES
        for row in comparison.methods
        if (found := row.differences[metric]).n
    ]
    columns = ["metric", "method", "mean", "low", "high", "n", "seeds"]
    return pd.DataFrame(rows, columns=columns).astype({"mean": float, "low": float, "high": float})


def stacked(tables: Mapping[Any, pd.DataFrame], key: str) -> pd.DataFrame:
    """Tables of the same columns below each other, with their names in a first column; empty ones are left out."""
    known = [table.assign(**{key: name}) for name, table in tables.items() if not table.empty]
    if not known:
        return pd.DataFrame(columns=[key, "method", "round", "mean", "std", "n"])
    whole = pd.concat(known, ignore_index=True)
    return whole[[key, *(column for column in whole.columns if column != key)]]
