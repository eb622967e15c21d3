"""Long tables of runs, which figures and CSV files are made from: a row per run, round and metric.

Means and spreads are over seeds. Fractions stay fractions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from pipelines.reporting.comparison import Comparison
from pipelines.runs.record import RoundRecord, RunRecord, group_by_method

RUN_CURVES = ("top1_global", "top1_vote", "mean_local", "pooled_local")
"""Accuracies of a round."""

_LOSS, _BY_TASK = "loss.", "by_task."
"""Before the name of a loss term and the number of a task, which are metrics of a round too."""


def rounds_frame(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Return the evaluated rounds of runs: columns metric, method, run, round and value; no row for a missing value.

    ``bytes`` are cumulative, in both directions.
    """
    rows = [
        (metric, method, str(run.pair), record.round, value)
        for method, method_runs in group_by_method(runs).items()
        for run in method_runs
        for record in run.history
        for metric, value in _values(record)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=["metric", "method", "run", "round", "value"]).astype({"value": float})


def _values(record: RoundRecord) -> Iterator[tuple[str, float | None]]:
    yield from ((metric, getattr(record, metric)) for metric in RUN_CURVES)
    yield "bytes", record.total_bytes
    yield from ((f"{_LOSS}{term}", value) for term, value in record.train_loss.items())
    for name, value in record.tasks.items():
        if isinstance(value, list):
            yield from ((f"{name}.{task}", one) for task, one in enumerate(value, start=1))
        else:
            yield name, value


def over_seeds(rounds: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return means over seeds by metric, method and round.

    Returns:
        Columns metric, method, round, mean, std (sample standard deviation, NaN for one seed), n. Only rounds that all
        seeds of a method evaluated, so that a curve never changes its seeds half-way.
    """
    known = rounds[rounds["metric"].isin(metrics)]
    of_method = known.groupby(["metric", "method"]).agg(runs=("run", "nunique"))
    grouped = known.groupby(["metric", "method", "round"], sort=False)["value"]
    table = grouped.agg(mean="mean", std="std", n="count").reset_index().join(of_method, on=["metric", "method"])
    whole = table[table["n"] == table["runs"]].drop(columns="runs")
    return whole.sort_values(
        "metric", key=lambda names: names.map(list(metrics).index), kind="stable", ignore_index=True
    )


def curve_metrics(rounds: pd.DataFrame) -> list[str]:
    """Return the accuracies to draw over rounds: of the global model, the mean over clients, and clients pooled.

    The last where clients' test sets differ in size; else it equals the mean over clients.
    """
    clients = rounds[rounds["metric"].isin(["mean_local", "pooled_local"])]
    wide = clients.pivot(index=["method", "run", "round"], columns="metric", values="value").dropna()
    apart = wide.shape[1] == 2 and (wide["mean_local"] != wide["pooled_local"]).any()
    return ["top1_global", "mean_local", *(["pooled_local"] if apart else [])]


def smoothed(table: pd.DataFrame, window: int) -> pd.DataFrame:
    """Add a column ``smoothed``: the mean of so many evaluated rounds up to each; of a window of one none."""
    if window > 1 and not table.empty:
        means = table.groupby(["metric", "method"], sort=False)["mean"]
        table["smoothed"] = means.transform(lambda values: values.rolling(window, min_periods=1).mean())
    return table


def bytes_accuracy(rounds: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return accuracy against cumulative traffic, mean over seeds at equal rounds.

    Returns:
        Columns metric, method, round, bytes, accuracy, std, n.
    """
    accuracy = over_seeds(rounds, metrics).rename(columns={"mean": "accuracy"})
    traffic = over_seeds(rounds, ["bytes"]).rename(columns={"mean": "bytes"})[["method", "round", "bytes"]]
    merged = accuracy.merge(traffic, on=["method", "round"])
    return merged[["metric", "method", "round", "bytes", "accuracy", "std", "n"]]


def training_losses(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return training-loss terms by round: columns term, method, round, mean, std, n; the most common terms first."""
    losses = rounds[rounds["metric"].str.startswith(_LOSS)]
    users = losses.groupby("metric")["method"].nunique()
    terms = sorted(users.index, key=lambda term: (-users[term], term))
    table = over_seeds(losses, terms).rename(columns={"metric": "term"})
    return table.assign(term=table["term"].str.removeprefix(_LOSS))


def task_accuracy(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracy of clients' own models on the classes of each task; a task has rows once it has begun.

    Returns:
        Columns task (from 1), method, round, mean, std, n.
    """
    names = rounds.loc[rounds["metric"].str.startswith(_BY_TASK), "metric"].unique()
    table = over_seeds(rounds, sorted(names, key=lambda name: int(name.removeprefix(_BY_TASK))))
    return table.rename(columns={"metric": "task"}).assign(task=table["metric"].str.removeprefix(_BY_TASK).astype(int))


def curves_table(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Return all evaluated rounds of all runs, for plotting tools: a row per run and round.

    Returns:
        Columns method, seed, division (where each seed has several), round, top1_global, top1_vote, mean_local,
        pooled_local (NaN where a method has no such value), bytes (up + down, all clients, cumulative).
    """
    runs = list(runs)
    divided = any(run.draw is not None for run in runs)
    rows = [
        (
            *(run.method, run.seed, *([run.draw] * divided), record.round),
            *(getattr(record, metric) for metric in RUN_CURVES),
            record.total_bytes,
        )
        for method_runs in group_by_method(runs).values()
        for run in method_runs
        for record in run.history
    ]
    columns = ["method", "seed", *(["division"] * divided), "round", *RUN_CURVES, "bytes"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(RUN_CURVES, float))


def tradeoff(runs: Iterable[RunRecord], metrics: Iterable[str]) -> pd.DataFrame:
    """Return final accuracy against all bytes of a run (up + down, all clients), mean over seeds.

    Returns:
        Columns metric, method, bytes, accuracy, std (sample standard deviation, NaN for one seed), n; no row where a
        method lacks the accuracy or its bytes are not known.
    """
    runs = [run for method_runs in group_by_method(runs).values() for run in method_runs]
    rows = [
        (metric, run.method, run.bytes_up + run.bytes_down, value)
        for metric in metrics
        for run in runs
        if (value := getattr(run, metric)) is not None and run.bytes_up is not None and run.bytes_down is not None
    ]
    table = pd.DataFrame(rows, columns=["metric", "method", "bytes", "accuracy"])
    grouped = table.groupby(["metric", "method"], sort=False)
    return grouped.agg(
        bytes=("bytes", "mean"), accuracy=("accuracy", "mean"), std=("accuracy", "std"), n=("accuracy", "count")
    ).reset_index()


def client_accuracy(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Return the accuracy of every client in the last evaluated round of every run.

    Returns:
        Columns method, seed, client (position, from 0), accuracy; clients without test data have no row.
    """
    rows = [
        (run.method, run.seed, client, accuracy)
        for method_runs in group_by_method(runs).values()
        for run in method_runs
        if run.history
        for client, accuracy in enumerate(run.history[-1].local_accuracy)
        if accuracy is not None
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "client", "accuracy"])


def class_accuracy(runs: Iterable[RunRecord]) -> pd.DataFrame:
    """Return class-wise accuracy on the global test set, mean over the seeds that have a value for the class.

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
    accuracies = by_class.sort_index(axis="columns").dropna(how="all").rename_axis(index=None, columns=None)
    return accuracies.rename(columns=dict(enumerate(names)))


def differences(comparison: Comparison, metrics: Iterable[str]) -> pd.DataFrame:
    """Return paired differences to the baseline.

    Returns:
        Columns metric, method, mean, low, high (NaN for fewer than two common seeds), n; a row per method and metric
        that can be compared.
    """
    rows: list[Mapping[str, Any]] = [
        {
            "metric": metric,
            "method": row.method,
            "mean": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "n": difference.n,
        }
        for metric in metrics
        for row in comparison.methods
        if (difference := row.differences[metric]).n
    ]
    table = pd.DataFrame(rows, columns=["metric", "method", "mean", "low", "high", "n"])
    return table.astype({"mean": float, "low": float, "high": float})
