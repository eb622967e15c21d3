"""The record of a finished run, read from `metrics.json` and `history.jsonl`.

A missing value is None. Two accuracies on the global test set are never mixed: ``top1_global`` is of one model,
``top1_vote`` of the majority vote of all clients' models, if there is no such model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flcore.core.errors import ConfigError, DataError
from flcore.io.files import read_json, read_lines
from flcore.experiment.run_folder import check_seal
from pipelines.runs import kinds
from pipelines.runs.derived import derived

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
    """The record of one finished run; `directory` is for error messages only and never printed in results.

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
    directory: Path = field(default=Path(), compare=False)
    figures: Mapping[str, float | None] = field(default_factory=dict, compare=False, repr=False)
    draw: int | None = None

    @property
    def pair(self) -> Pair:
        """Return the key by which it is compared with runs of other methods."""
        return self.seed if self.draw is None else (self.draw, self.seed)

    @property
    def label(self) -> str:
        """Return the run's name in messages."""
        return f"{self.method} (seed {pair_name(self.pair)})"


def load_run(directory: Path) -> RunRecord:
    """Read a finished run.

    Args:
        directory: with `metrics.json` and `history.jsonl`. Unknown keys are ignored; missing ones become None.

    Returns:
        The record, with the history sorted by round. Non-finite numbers become None.

    Raises:
        DataError: a file is missing or damaged, or lacks `method`, `dataset`, `seed` or `rounds`.
    """
    directory = Path(directory)
    path = directory / "metrics.json"
    check_seal(directory)
    metrics = read_json(path, kinds.CURE)
    kinds.check(metrics, kinds.METRICS, str(path))
    for key in ("method", "dataset", "seed", "rounds"):
        if metrics.get(key) is None:
            raise DataError(f"{path}: no '{key}'; {kinds.CURE}")
    history_path = directory / "history.jsonl"
    lines = enumerate(read_lines(history_path, kinds.CURE), start=1)
    history = [_round_record(values, f"{history_path}, line {number}") for number, values in lines]
    class_acc = _numbers(metrics.get("class_acc"), f"{path}: class_acc")
    numbers = {key: _number(metrics.get(key), f"{path}: {key}") for key in (*SCORES, *COMMUNICATION)}
    best_round = _number(metrics.get("best_round"), f"{path}: best_round")
    return RunRecord(
        method=str(metrics["method"]),
        registered=str(metrics["method"]),
        dataset=str(metrics["dataset"]),
        partition=_text(metrics.get("partition")),
        seed=_integer(metrics["seed"], f"{path}: seed"),
        rounds=_integer(metrics["rounds"], f"{path}: rounds"),
        config_hash=_text(metrics.get("config_hash")),
        data_fingerprint=_text(metrics.get("data_fingerprint")),
        partition_fingerprint=_text(metrics.get("partition_fingerprint")),
        best_round=None if best_round is None else int(best_round),
        class_acc=class_acc,
        class_acc_vote=_numbers(metrics.get("class_acc_vote"), f"{path}: class_acc_vote"),
        class_names=tuple(map(str, metrics.get("class_names") or ())),
        bytes_up_by_kind=_byte_counts(metrics.get("bytes_up_by_kind"), f"{path}: bytes_up_by_kind"),
        bytes_down_by_kind=_byte_counts(metrics.get("bytes_down_by_kind"), f"{path}: bytes_down_by_kind"),
        history=tuple(sorted(history, key=lambda record: record.round)),
        privacy=metrics.get("privacy") or {},
        poisoned=metrics.get("poisoned") or {},
        tasks=_task_values(metrics.get("tasks"), f"{path}: tasks"),
        block_ends=tuple(end["round"] for end in (metrics.get("tasks") or {}).get("stage_ends", ())),
        directory=directory,
        draw=None,
        figures={
            **dict(numbers_in(metrics)),
            **derived(class_acc, [(one.round, one.mean_local) for one in history]),
        },
        **numbers,
    )


def load_identity(directory: Path) -> dict[str, Any] | None:
    """Return the configuration's part that identifies a run, nested; None if there is no ``config.json``.

    Raises:
        DataError: the file is damaged.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        return None
    identity = read_json(path, kinds.CURE).get("identity")
    if not isinstance(identity, dict):
        raise DataError(f"{path}: no object 'identity'; {kinds.CURE}")
    return identity


def load_compared_by(directory: Path) -> frozenset[str] | None:
    """Return the dotted keys by which a run is compared (`pipelines/runs/compared.py`); None if none are recorded.

    Raises:
        DataError: ``config.json`` is damaged.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        return None
    keys = (read_json(path, kinds.CURE).get("environment") or {}).get("compared_by")
    return None if keys is None else frozenset(keys)


def _round_record(values: Mapping[str, Any], where: str) -> RoundRecord:
    kinds.check(values, kinds.HISTORY, where)
    if values.get("round") is None:
        raise DataError(f"{where}: no 'round'; {kinds.CURE}")
    train_loss = values.get("train_loss") or {}
    return RoundRecord(
        round=_integer(values["round"], f"{where}: round"),
        participants=tuple(str(client) for client in values.get("participants") or ()),
        top1_global=_number(values.get("top1_global"), f"{where}: top1_global"),
        top1_vote=_number(values.get("top1_vote"), f"{where}: top1_vote"),
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
