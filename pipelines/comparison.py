"""Compare finished runs: means over seeds, paired differences, rounds and bytes to a target accuracy.

Reads what a finished run leaves behind (`metrics.json`, `history.jsonl`) and knows nothing of how it was run. Every
figure is computed here from those records, so a new summary needs no new run. Accuracies are fractions in [0, 1]
until they are printed, then percentages with two decimals. A missing value is None, an empty CSV cell or a dash,
never 0.

Two spreads exist and are never mixed: `±` is the sample standard deviation over seeds (n - 1), `client_std` is the
population standard deviation over the clients of one run, averaged over seeds.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.special import stdtrit

from flcore.errors import ConfigError, DataError, ProtoflError

HEADLINE_METRICS = ("top1_global", "mean_local", "pooled_local")
PAIRED_METRICS = ("top1_global", "mean_local")
PAIRED_TASK_SCORES = ("a_glo", "a_loc", "a_sel")
SCORES = (
    *HEADLINE_METRICS,
    "client_std",
    "mean_local_own_classes",
    "last10_top1_global",
    "best_top1_global",
    "top5_pooled_local",
)
# Of runs on a stream of tasks (flcore/evaluation/continual.py), and what each is called in a table.
TASK_SCORES: Mapping[str, str] = {
    "a_glo": "A_glo",
    "a_loc": "A_loc",
    "a_sel": "A_sel",
    "a_glo_minority": "A_glo, minority",
    "a_loc_minority": "A_loc, minority",
    "a_sel_minority": "A_sel, minority",
    "forgetting": "forgetting",
    "backward_transfer": "backward transfer",
    "roundwise_forgetting": "round-wise forgetting",
}
_LOWER_IS_BETTER = ("forgetting", "roundwise_forgetting")
_TASK_TERMS = ("A_glo", "A_loc", "A_sel", "minority", "forgetting", "backward transfer", "round-wise forgetting")
COMMUNICATION = (
    "bytes_up_per_round",
    "bytes_down_per_round",
    "bytes_up",
    "bytes_down",
    "scalars_up_per_round",
    "num_parameters",
)
CONFIDENCE = 0.95
MISSING = "\u2013"  # en dash
MINUS = "\u2212"
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


@dataclass(frozen=True)
class RoundRecord:
    """One evaluated round of one run; byte counts are cumulative. Round 0 is the state before training."""

    round: int
    participants: tuple[str, ...]
    top1_global: float | None
    loss_global: float | None
    mean_local: float | None
    pooled_local: float | None
    client_std: float | None
    local_accuracy: tuple[float | None, ...]
    class_accuracy: tuple[float | None, ...]
    train_loss: Mapping[str, float | None]
    bytes_up: Mapping[str, float]
    bytes_down: Mapping[str, float]
    tasks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> float:
        """Bytes sent in both directions by all clients up to this round."""
        return sum(self.bytes_up.values()) + sum(self.bytes_down.values())


@dataclass(frozen=True)
class RunRecord:
    """What one finished run says about itself; `directory` only says where to look and is never printed.

    Of runs on a stream of tasks `tasks` has the figures of :data:`TASK_SCORES`, `block_ends` the last round on each
    task of a blocked schedule.
    """

    method: str
    dataset: str
    partition: str | None
    seed: int
    rounds: int
    config_hash: str | None
    data_fingerprint: str | None
    partition_fingerprint: str | None
    top1_global: float | None
    mean_local: float | None
    pooled_local: float | None
    client_std: float | None
    mean_local_own_classes: float | None
    last10_top1_global: float | None
    best_top1_global: float | None
    top5_pooled_local: float | None
    best_round: int | None
    class_acc: tuple[float | None, ...]
    bytes_up: float | None
    bytes_down: float | None
    bytes_up_by_kind: Mapping[str, float]
    bytes_down_by_kind: Mapping[str, float]
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    scalars_up_per_round: float | None
    num_parameters: float | None
    history: tuple[RoundRecord, ...] = ()
    tasks: Mapping[str, float | None] = field(default_factory=dict)
    block_ends: tuple[int, ...] = ()
    directory: Path = field(default=Path(), compare=False)

    @property
    def label(self) -> str:
        """How messages name the run."""
        return f"{self.method} (seed {self.seed})"


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over the n seeds that have a value; std is None for n < 2."""

    mean: float | None
    std: float | None
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Method minus baseline over the n common seeds; `low` and `high` bound the 95 % interval, None for n < 2."""

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class RunTarget:
    """One run on its way to the target: `rounds` and `bytes` are None where it never got there."""

    metric: str
    target: float | None
    rounds: int | None
    bytes: float | None


@dataclass(frozen=True)
class TargetSummary:
    """Rounds and bytes to target over the n seeds that have a target; the means are None unless all reached it."""

    metric: str
    reached: int
    n: int
    rounds: Summary
    bytes: Summary
    speedup: float | None


@dataclass(frozen=True)
class MethodSummary:
    """One row of the comparison: everything about one method over its seeds."""

    method: str
    seeds: tuple[int, ...]
    rounds: tuple[int, ...]
    scores: Mapping[str, Summary]
    differences: Mapping[str, PairedDifference]
    target: TargetSummary
    communication: Mapping[str, float | None]
    bytes_up_by_kind: Mapping[str, float]
    bytes_down_by_kind: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Methods in the order in which they were given, with the runs (by method, then seed) they summarise."""

    dataset: str
    partition: str | None
    baseline: str
    metric: str
    target_fraction: float
    seeds: tuple[int, ...]
    methods: tuple[MethodSummary, ...]
    runs: tuple[RunRecord, ...]
    run_targets: tuple[RunTarget, ...]
    notes: tuple[str, ...]

    @property
    def has_baseline(self) -> bool:
        """Whether there is a run to take differences from."""
        return any(row.method == self.baseline for row in self.methods)

    @property
    def has_tasks(self) -> bool:
        """Whether these are runs on a stream of tasks."""
        return any(run.tasks for run in self.runs)


# ---------------------------------------------------------------------------------------------------------- reading


def load_run(directory: Path) -> RunRecord:
    """Read a finished run.

    Args:
        directory: holds `metrics.json` and `history.jsonl`. Unknown keys are ignored; missing ones become None.

    Returns:
        The record, with the history sorted by round. Non-finite numbers become None.

    Raises:
        DataError: a file is missing or damaged, or `method`, `dataset`, `seed` or `rounds` is not there.
    """
    directory = Path(directory)
    path = directory / "metrics.json"
    metrics = _parse_object(_read_text(path), str(path))
    for key in ("method", "dataset", "seed", "rounds"):
        if metrics.get(key) is None:
            raise DataError(f"{path}: no '{key}'; run this method again.")
    history_path = directory / "history.jsonl"
    lines = enumerate(_read_text(history_path).splitlines(), start=1)
    history = [_round_record(line, f"{history_path}, line {number}") for number, line in lines if line.strip()]
    numbers = {key: _number(metrics.get(key), f"{path}: {key}") for key in (*SCORES, *COMMUNICATION)}
    best_round = _number(metrics.get("best_round"), f"{path}: best_round")
    return RunRecord(
        method=str(metrics["method"]),
        dataset=str(metrics["dataset"]),
        partition=_text(metrics.get("partition")),
        seed=_integer(metrics["seed"], f"{path}: seed"),
        rounds=_integer(metrics["rounds"], f"{path}: rounds"),
        config_hash=_text(metrics.get("config_hash")),
        data_fingerprint=_text(metrics.get("data_fingerprint")),
        partition_fingerprint=_text(metrics.get("partition_fingerprint")),
        best_round=None if best_round is None else int(best_round),
        class_acc=_numbers(metrics.get("class_acc"), f"{path}: class_acc"),
        bytes_up_by_kind=_byte_counts(metrics.get("bytes_up_by_kind"), f"{path}: bytes_up_by_kind"),
        bytes_down_by_kind=_byte_counts(metrics.get("bytes_down_by_kind"), f"{path}: bytes_down_by_kind"),
        history=tuple(sorted(history, key=lambda record: record.round)),
        tasks=_task_values(metrics.get("tasks"), f"{path}: tasks"),
        block_ends=tuple(end["round"] for end in (metrics.get("tasks") or {}).get("stage_ends", ())),
        directory=directory,
        **numbers,
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error.__class__.__name__}); is the run finished?") from error


def _parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: damaged JSON ({error.msg}); run this method again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}; run this method again.")
    return value


def _round_record(line: str, where: str) -> RoundRecord:
    values = _parse_object(line, where)
    if values.get("round") is None:
        raise DataError(f"{where}: no 'round'; run this method again.")
    train_loss = values.get("train_loss") or {}
    return RoundRecord(
        round=_integer(values["round"], f"{where}: round"),
        participants=tuple(str(client) for client in values.get("participants") or ()),
        top1_global=_number(values.get("top1_global"), f"{where}: top1_global"),
        loss_global=_number(values.get("loss_global"), f"{where}: loss_global"),
        mean_local=_number(values.get("mean_local"), f"{where}: mean_local"),
        pooled_local=_number(values.get("pooled_local"), f"{where}: pooled_local"),
        client_std=_number(values.get("client_std"), f"{where}: client_std"),
        local_accuracy=_numbers(values.get("local_accuracy"), f"{where}: local_accuracy"),
        class_accuracy=_numbers(values.get("class_accuracy"), f"{where}: class_accuracy"),
        train_loss={str(term): _number(train_loss[term], f"{where}: train_loss") for term in sorted(train_loss)},
        bytes_up=_byte_counts(values.get("bytes_up"), f"{where}: bytes_up"),
        bytes_down=_byte_counts(values.get("bytes_down"), f"{where}: bytes_down"),
        tasks=values.get("tasks") or {},
    )


def _task_values(values: Any, where: str) -> dict[str, float | None]:
    if not values:
        return {}
    flat = {**values, **values["last_epochs"]}
    return {key: _number(flat.get(key), f"{where}: {key}") for key in TASK_SCORES}


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: expected a number or null, found {value!r}.")
    return value if math.isfinite(value) else None


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{where}: expected an integer, found {value!r}.")
    return value


def _numbers(values: Any, where: str) -> tuple[float | None, ...]:
    return tuple(_number(value, where) for value in values or ())


def _byte_counts(values: Any, where: str) -> dict[str, float]:
    counts = {str(kind): _number(values[kind], where) for kind in sorted(values or {})}
    return {kind: count for kind, count in counts.items() if count is not None}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


# -------------------------------------------------------------------------------------------------------- comparing


def compare(
    runs: Iterable[RunRecord],
    baseline: str = "fedavg",
    metric: str = "top1_global",
    target_fraction: float = 0.95,
) -> Comparison:
    """Summarise runs per method and set every method against the baseline.

    Args:
        runs: in the order in which methods shall appear; seeds are sorted. Methods may lack seeds.
        baseline: method that differences and targets refer to. Without a run of it both are None, and a note says so.
        metric: headline metric for the target: `top1_global`, `mean_local` or `pooled_local`. A method (or baseline)
            that has no such value is compared on `mean_local`.
        target_fraction: target of a seed = this fraction of the baseline's final accuracy with that seed.

    Returns:
        The comparison; its notes name everything that is missing or uneven.

    Raises:
        ConfigError: unknown metric, or a fraction outside (0, 1].
        ProtoflError: no runs, a (method, seed) given twice, or runs that do not belong together: different dataset,
            data fingerprint or partition name, or, for one seed, different partition fingerprints.
    """
    check_metric(metric)
    if not 0 < target_fraction <= 1:
        raise ConfigError(f"target_fraction: {target_fraction} is outside (0, 1].")
    by_method = group_by_method(runs)
    ordered = [run for method_runs in by_method.values() for run in method_runs]
    if not ordered:
        raise ProtoflError("Nothing to compare: no finished run was given; start `protofl compare` with methods.")
    _refuse_mixtures(ordered)

    baseline_runs = {run.seed: run for run in by_method.get(baseline, ())}
    targets = {
        method: [
            _run_target(
                run, baseline_runs.get(run.seed), _target_metric(method_runs, baseline_runs, metric), target_fraction
            )
            for run in method_runs
        ]
        for method, method_runs in by_method.items()
    }
    baseline_rounds = _target_summary(targets[baseline]).rounds.mean if baseline in targets else None
    return Comparison(
        dataset=ordered[0].dataset,
        partition=next((run.partition for run in ordered if run.partition is not None), None),
        baseline=baseline,
        metric=metric,
        target_fraction=target_fraction,
        seeds=tuple(sorted({run.seed for run in ordered})),
        methods=tuple(
            _method_summary(
                method_runs,
                baseline,
                baseline_runs,
                targets[method],
                baseline_rounds,
                tuple(TASK_SCORES) if any(run.tasks for run in ordered) else (),
            )
            for method, method_runs in by_method.items()
        ),
        runs=tuple(ordered),
        run_targets=tuple(target for method_targets in targets.values() for target in method_targets),
        notes=tuple(_notes(by_method, baseline, metric)),
    )


def check_metric(metric: str) -> None:
    """Refuse what is no headline metric.

    Raises:
        ConfigError: it is none.
    """
    if metric not in HEADLINE_METRICS:
        raise ConfigError(f"metric: '{metric}' is unknown; choose from {', '.join(HEADLINE_METRICS)}.")


def group_by_method(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs by method in order of first appearance, each group sorted by seed."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return {method: sorted(group, key=lambda run: run.seed) for method, group in groups.items()}


def summarise(values: Iterable[float | None]) -> Summary:
    """Mean and sample standard deviation of the values that are not None."""
    present = [value for value in values if value is not None]
    if not present:
        return Summary(None, None, 0)
    return Summary(fmean(present), stdev(present) if len(present) > 1 else None, len(present))


def paired_difference(values: Mapping[int, float | None], baseline: Mapping[int, float | None]) -> PairedDifference:
    """Mean of value - baseline over common seeds with its two-sided 95 % Student-t interval.

    Args:
        values: score by seed; seeds whose score is None do not count.
        baseline: the same for the baseline.

    Returns:
        mean ± t(0.975, n - 1) * std / sqrt(n) over the n common seeds; no interval for n < 2.
    """
    differences = []
    for seed in sorted(values.keys() & baseline.keys()):
        value, reference = values[seed], baseline[seed]
        if value is not None and reference is not None:
            differences.append(value - reference)
    summary = summarise(differences)
    if summary.mean is None or summary.std is None:
        return PairedDifference(summary.mean, None, None, None, summary.n)
    half_width = float(stdtrit(summary.n - 1, 0.5 + CONFIDENCE / 2)) * summary.std / math.sqrt(summary.n)
    return PairedDifference(summary.mean, summary.std, summary.mean - half_width, summary.mean + half_width, summary.n)


def summarise_runs(runs: Sequence[RunRecord], keys: Iterable[str]) -> dict[str, Summary]:
    """Mean and spread over runs of each of these fields."""
    return {key: summarise(score(run, key) for run in runs) for key in keys}


def paired_differences(
    runs: Sequence[RunRecord], reference: Sequence[RunRecord], keys: Iterable[str]
) -> dict[str, PairedDifference]:
    """Runs minus reference runs of the same seed, for each of these fields."""
    return {
        key: paired_difference(
            {run.seed: score(run, key) for run in runs}, {run.seed: score(run, key) for run in reference}
        )
        for key in keys
    }


def pooled_standard_error(first: Summary, second: Summary) -> float | None:
    """Standard error of the difference of two means from the pooled variance.

    s_p² = sum (n_i - 1) s_i² / (n_1 + n_2 - 2), result s_p * sqrt(1/n_1 + 1/n_2). None where no seed tells of a spread.
    """
    freedom = first.n + second.n - 2
    if min(first.n, second.n) == 0 or freedom < 1:
        return None
    variance = sum((item.n - 1) * item.std**2 for item in (first, second) if item.std is not None) / freedom
    return math.sqrt(variance * (1 / first.n + 1 / second.n))


def marks(summaries: Sequence[Summary], lower_is_better: bool = False) -> list[str]:
    """Say for each cell of a column whether its mean is "best", "tied" with the best, or "" (neither).

    A column with fewer than two values marks nothing: there is nothing to be better than.
    """
    means = [summary.mean for summary in summaries if summary.mean is not None]
    if len(means) < 2:
        return [""] * len(summaries)
    best_mean = min(means) if lower_is_better else max(means)
    best = next(summary for summary in summaries if summary.mean == best_mean)
    result = []
    for summary in summaries:
        error = pooled_standard_error(summary, best)
        if summary.mean == best_mean:
            result.append("best")
        elif summary.mean is not None and error is not None and abs(summary.mean - best_mean) < error:
            result.append("tied")
        else:
            result.append("")
    return result


def rounds_to_target(history: Iterable[RoundRecord], metric: str, target: float) -> RoundRecord | None:
    """First evaluated round from 1 on whose `metric` is at least the target, or None if there is none."""
    for record in sorted(history, key=lambda record: record.round):
        value = getattr(record, metric)
        # The tolerance keeps 0.95 * 0.8 reachable by 0.76: the product of two fractions is off by a rounding step.
        if record.round >= 1 and value is not None and value >= target - 1e-12:
            return record
    return None


def _refuse_mixtures(runs: Sequence[RunRecord]) -> None:
    first = runs[0]
    partitions: dict[int, RunRecord] = {}
    # A method without a partition (central) has no fingerprint of one; it is no contradiction.
    named = next((run for run in runs if run.partition is not None), first)
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if (run.method, run.seed) in seen:
            raise ProtoflError(
                f"Two runs of {run.label}, fields 'method' and 'seed': give one run per method and seed."
            )
        seen.add((run.method, run.seed))
        for key in ("dataset", "data_fingerprint"):
            _refuse_difference(first, run, key)
        if run.partition is not None:
            _refuse_difference(named, run, "partition")
        if run.partition_fingerprint is not None:
            _refuse_difference(partitions.setdefault(run.seed, run), run, "partition_fingerprint")


def _refuse_difference(first: RunRecord, second: RunRecord, key: str) -> None:
    ours, theirs = getattr(first, key), getattr(second, key)
    if ours != theirs:
        raise ProtoflError(
            f"Cannot compare {first.label} with {second.label}: '{key}' differs ({ours} and {theirs}); "
            "compare only runs made from the same data and, per seed, the same partition."
        )


def _target_metric(runs: Sequence[RunRecord], baseline_runs: Mapping[int, RunRecord], metric: str) -> str:
    has_metric = all(getattr(run, metric) is not None for run in (*runs, *baseline_runs.values()))
    return metric if has_metric else "mean_local"


def _run_target(run: RunRecord, baseline: RunRecord | None, metric: str, fraction: float) -> RunTarget:
    final = None if baseline is None else getattr(baseline, metric)
    if final is None:
        return RunTarget(metric, None, None, None)
    reached = rounds_to_target(run.history, metric, fraction * final)
    if reached is None:
        return RunTarget(metric, fraction * final, None, None)
    return RunTarget(metric, fraction * final, reached.round, reached.total_bytes)


def _target_summary(targets: Sequence[RunTarget], baseline_rounds: float | None = None) -> TargetSummary:
    with_target = [target for target in targets if target.target is not None]
    reached = [target for target in with_target if target.rounds is not None]
    # The mean over only those seeds that got there would flatter a method that often does not.
    everyone = with_target if len(reached) == len(with_target) else []
    rounds = summarise(target.rounds for target in everyone)
    speedup = baseline_rounds / rounds.mean if baseline_rounds is not None and rounds.mean is not None else None
    return TargetSummary(
        metric=targets[0].metric,
        reached=len(reached),
        n=len(with_target),
        rounds=rounds,
        bytes=summarise(target.bytes for target in everyone),
        speedup=speedup,
    )


def _method_summary(
    runs: Sequence[RunRecord],
    baseline: str,
    baseline_runs: Mapping[int, RunRecord],
    targets: Sequence[RunTarget],
    baseline_rounds: float | None,
    task_scores: Sequence[str],
) -> MethodSummary:
    method = runs[0].method
    reference = () if method == baseline else tuple(baseline_runs.values())
    return MethodSummary(
        method=method,
        seeds=tuple(run.seed for run in runs),
        rounds=tuple(sorted({run.rounds for run in runs})),
        scores=summarise_runs(runs, (*SCORES, *task_scores)),
        differences=paired_differences(
            runs, reference, (*PAIRED_METRICS, *(key for key in PAIRED_TASK_SCORES if key in task_scores))
        ),
        target=_target_summary(targets, baseline_rounds),
        communication={key: summary.mean for key, summary in summarise_runs(runs, COMMUNICATION).items()},
        bytes_up_by_kind=_mean_by_kind([run.bytes_up_by_kind for run in runs]),
        bytes_down_by_kind=_mean_by_kind([run.bytes_down_by_kind for run in runs]),
    )


def score(run: RunRecord, key: str) -> float | None:
    """A figure of a run by its name, of a field or in :data:`TASK_SCORES`; None where the run has no such figure."""
    value: float | None = run.tasks.get(key) if key in TASK_SCORES else getattr(run, key)
    return value


def _mean_by_kind(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # A run that never sent a kind sent 0 bytes of it: this zero is measured, not missing.
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: fmean(count.get(kind, 0) for count in counts) for kind in kinds}


def _notes(by_method: Mapping[str, Sequence[RunRecord]], baseline: str, metric: str) -> Iterable[str]:
    seeds = {run.seed for runs in by_method.values() for run in runs}
    baseline_runs = {run.seed: run for run in by_method.get(baseline, ())}
    if not baseline_runs:
        yield f"No run of the baseline {baseline}: no differences, no rounds or bytes to target."
    for method, runs in by_method.items():
        missing = sorted(seeds - {run.seed for run in runs})
        if missing:
            present = listed(run.seed for run in runs)
            yield f"{method} has no run for seed {listed(missing)}; its means are over seed {present}."
        if baseline_runs and method != baseline:
            common = sum(run.seed in baseline_runs for run in runs)
            if common < 2:
                yield f"{method} shares {plural(common, 'seed')} with {baseline}: no interval, two seeds are needed."
        target_metric = _target_metric(runs, baseline_runs, metric)
        if baseline_runs and target_metric != metric:
            lacking = method if any(getattr(run, metric) is None for run in runs) else baseline
            yield f"{lacking} has no {metric}, so the target of {method} is on {target_metric}."
    rounds = sorted({run.rounds for runs in by_method.values() for run in runs})
    if len(rounds) > 1:
        yield f"The runs differ in length ({listed(rounds)} rounds)."


def listed(values: Iterable[object]) -> str:
    """Values with commas between them."""
    return ", ".join(str(value) for value in values)


# ---------------------------------------------------------------------------------------------------------- printing


def format_percent(value: float | None, signed: bool = False) -> str:
    """Fraction as percentage points with two decimals: 0.7133 gives 71.33; None gives a dash."""
    if value is None:
        return MISSING
    return f"{100 * value:{'+' if signed else ''}.2f}".replace("-", MINUS)


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


def format_bytes(count: float | None) -> str:
    """Byte count with a decimal unit: 1234 gives 1.23 kB; None gives a dash."""
    if count is None:
        return MISSING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float | None) -> str:
    """Count with spaces between thousands; None gives a dash."""
    return MISSING if count is None else f"{count:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


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


def plural(count: int, noun: str) -> str:
    """A number with its noun: 1 method, 2 methods."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


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


# ---------------------------------------------------------------------------------------------------------- writing


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
