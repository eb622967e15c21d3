"""The record of a finished run: the values that comparisons, tables and figures take from its folder.

A missing value is None. Two accuracies on the global test set are never mixed: ``top1_global`` is of one model,
``top1_vote`` of the majority vote of all clients' models, if there is no such model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flcore.core.errors import ConfigError, DataError
from pipelines.runs import kinds
from pipelines.runs.derived import derived
from pipelines.runs.folder import RunFolder

HEADLINE_METRICS = ("top1_global", "mean_local", "pooled_local")
SCORES = (
    *HEADLINE_METRICS,
    "top1_vote",
    "client_std",
    "mean_local_own_classes",
    "last10_top1_global",
    "best_top1_global",
    "top5_pooled_local",
)
TASK_SCORES = (
    *("a_glo", "a_glo_vote", "a_loc", "a_sel", "a_glo_minority", "a_glo_vote_minority", "a_loc_minority"),
    *("a_sel_minority", "forgetting", "backward_transfer", "roundwise_forgetting"),
)
"""Scores on a stream of tasks (flcore/evaluation/continual.py)."""
COMMUNICATION = (
    "bytes_up_per_round",
    "bytes_down_per_round",
    "bytes_up",
    "bytes_down",
    "scalars_up_per_round",
    "num_parameters",
)

_NAMES = ("method", "dataset", "partition", "seed", "rounds", "config_hash", "data_fingerprint", "partition_fingerprint")

Pair = int | tuple[int, int]
"""Key by which runs are compared: the seed, or the seed of the division and the seed."""


def in_order(pairs: Iterable[Pair]) -> list[Pair]:
    """Return pairs by division, then seed."""
    return sorted(pairs, key=lambda pair: pair if isinstance(pair, tuple) else (pair,))


def pair_name(pair: Pair) -> str:
    """Return the name in messages: the seed, with the division if there are several."""
    return f"{pair[1]} on division {pair[0]}" if isinstance(pair, tuple) else str(pair)


@dataclass(frozen=True)
class RoundRecord:
    """One evaluated round of one run; byte counts are cumulative. The first round is 1."""

    round: int
    participants: tuple[str, ...]
    top1_global: float | None
    top1_vote: float | None
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
        """Return the bytes sent in both directions by all clients up to this round."""
        return sum(self.bytes_up.values()) + sum(self.bytes_down.values())


@dataclass(frozen=True)
class RunRecord:
    """The record of one finished run, which is in `folder`.

    `draw` is the seed of its division if each seed is compared on several. `figures` are all numbers of its
    ``metrics.json``, dotted if nested, and the derived ones (:mod:`pipelines.runs.derived`). For runs on a stream of
    tasks, `tasks` has the scores of :data:`TASK_SCORES`; `block_ends` is the last round on each task of a blocked
    schedule. `privacy` is the account of differential privacy, `poisoned` names simulated attackers and the scores of
    the other clients; both are empty for most runs. `method` is the run's row, `registered` the method's own name.
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
    top1_vote: float | None
    mean_local: float | None
    pooled_local: float | None
    client_std: float | None
    mean_local_own_classes: float | None
    last10_top1_global: float | None
    best_top1_global: float | None
    top5_pooled_local: float | None
    best_round: int | None
    class_acc: tuple[float | None, ...]
    class_acc_vote: tuple[float | None, ...]
    class_names: tuple[str, ...]
    bytes_up: float | None
    bytes_down: float | None
    bytes_up_by_kind: Mapping[str, float]
    bytes_down_by_kind: Mapping[str, float]
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    scalars_up_per_round: float | None
    num_parameters: float | None
    history: tuple[RoundRecord, ...] = ()
    registered: str = ""
    privacy: Mapping[str, Any] = field(default_factory=dict)
    poisoned: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, float | None] = field(default_factory=dict)
    block_ends: tuple[int, ...] = ()
    folder: RunFolder = field(default=RunFolder(Path()), compare=False, repr=False)
    figures: Mapping[str, float | None] = field(default_factory=dict, compare=False, repr=False)
    draw: int | None = None

    @property
    def pair(self) -> Pair:
        """Return the key by which it is compared with runs of other methods."""
        return self.seed if self.draw is None else (self.draw, self.seed)

    @property
    def label(self) -> str:
        return f"{self.method} (seed {pair_name(self.pair)})"


def record_of(run: RunFolder) -> RunRecord:
    """Return the record of a finished run. Unknown keys are ignored; missing values and infinite numbers become None.

    Raises:
        DataError: a file is missing or damaged, or lacks `method`, `dataset`, `seed` or `rounds`.
    """
    metrics, history = run.metrics, [_round_record(values) for values in run.history]
    return replace(record_from(metrics, str(run.files.metrics), history), folder=run)


def record_from(metrics: Mapping[str, Any], place: str, history: Sequence[RoundRecord] = ()) -> RunRecord:
    """Return the record of ``metrics.json`` with checked types and, if given, a history; ``place`` is for messages."""
    for key in ("method", "dataset", "seed", "rounds"):
        if metrics.get(key) is None:
            raise DataError(f"{place}: no '{key}'; {kinds.CURE}")
    values: dict[str, Any] = {key: metrics.get(key) for key in _NAMES}
    values |= {key: _finite(metrics.get(key)) for key in (*SCORES, *COMMUNICATION)}
    values |= {key: _all_finite(metrics.get(key)) for key in ("class_acc", "class_acc_vote")}
    values |= {key: _by_kind(metrics.get(key)) for key in ("bytes_up_by_kind", "bytes_down_by_kind")}
    values |= {key: metrics.get(key) or {} for key in ("privacy", "poisoned")}
    best_round, tasks = _finite(metrics.get("best_round")), metrics.get("tasks") or {}
    in_tasks = tasks and {**tasks, **(tasks.get("last_epochs") or {})}
    return RunRecord(
        **values,
        registered=metrics["method"],
        best_round=None if best_round is None else int(best_round),
        class_names=tuple(metrics.get("class_names") or ()),
        history=tuple(history),
        tasks={key: _finite(in_tasks.get(key)) for key in TASK_SCORES if in_tasks},
        block_ends=tuple(end["round"] for end in tasks.get("stage_ends", ())),
        figures={
            **dict(numbers_in(metrics)),
            **derived(values["class_acc"], [(one.round, one.mean_local) for one in history]),
        },
    )


def _round_record(values: Mapping[str, Any]) -> RoundRecord:
    numbers = ("top1_global", "top1_vote", "loss_global", "mean_local", "pooled_local", "client_std")
    train_loss = values.get("train_loss") or {}
    return RoundRecord(
        round=values["round"],
        participants=tuple(map(str, values.get("participants") or ())),
        local_accuracy=_all_finite(values.get("local_accuracy")),
        class_accuracy=_all_finite(values.get("class_accuracy")),
        train_loss={term: _finite(train_loss[term]) for term in sorted(train_loss)},
        bytes_up=_by_kind(values.get("bytes_up")),
        bytes_down=_by_kind(values.get("bytes_down")),
        tasks=values.get("tasks") or {},
        **{key: _finite(values.get(key)) for key in numbers},
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _all_finite(values: Iterable[float | None] | None) -> tuple[float | None, ...]:
    return tuple(map(_finite, values or ()))


def _by_kind(counts: Mapping[str, float | None] | None) -> dict[str, float]:
    finite = {kind: _finite(count) for kind, count in sorted((counts or {}).items())}
    return {kind: count for kind, count in finite.items() if count is not None}


def check_metric(metric: str) -> None:
    """Refuse a metric that is not in HEADLINE_METRICS.

    Raises:
        ConfigError: it is not.
    """
    if metric not in HEADLINE_METRICS:
        raise ConfigError(f"metric: '{metric}' is unknown; choose from {', '.join(HEADLINE_METRICS)}.")


def group_by_method(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs by method in order of first appearance, each group sorted by division and seed."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return {
        method: sorted(group, key=lambda run: (-1 if run.draw is None else run.draw, run.seed))
        for method, group in groups.items()
    }


def score(run: RunRecord, key: str) -> float | None:
    """Return a number of a run by name: a field, one of :data:`TASK_SCORES`, or another metric; None if it has none."""
    if key in TASK_SCORES:
        return run.tasks.get(key)
    value: float | None = getattr(run, key) if hasattr(run, key) else run.figures.get(key)
    return value


def numbers_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a record by name, dotted if nested, lists by position; null is None."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{name}.")
        elif isinstance(value, list):
            yield from numbers_in({str(place): item for place, item in enumerate(value)}, f"{name}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def is_measured(run: RunRecord, metric: str) -> bool:
    """Return whether a run's history has a metric; else no round can be named in which it was reached.

    A vote of clients' models, for example, is evaluated once, after the last round.
    """
    return any(getattr(record, metric) is not None for record in run.history)
