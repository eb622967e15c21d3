"""Types of the values in a run's JSON files, so that readers find numbers where they expect them.

A check sum shows that a file is unchanged; this is for files without one, or from other programs. Only values that are
read are checked; null is of every type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flcore.core.errors import DataError
from flcore.core.text import shorten

CURE = "run this method again"
"""Advice for a run with damaged files."""

NUMBER, COUNT, TEXT = "a number", "a whole number", "a text"
NUMBERS = {"*": NUMBER}
_WAYS = {"*": NUMBERS}

HISTORY: Mapping[str, Any] = {
    **dict.fromkeys(("top1_global", "top1_vote", "mean_local", "mean_local_own_classes", "pooled_local"), NUMBER),
    **dict.fromkeys(("client_std", "loss_global", "scalars_up", "simulated_seconds"), NUMBER),
    **dict.fromkeys(("bytes_up", "bytes_down", "bytes_eval_up", "bytes_eval_down", "train_loss", "server"), NUMBERS),
    **dict.fromkeys(("local_accuracy", "class_accuracy"), [NUMBER]),
    "alternatives": _WAYS,
    "round": COUNT,
    "tasks": {"by_task": [NUMBER], "by_task_global": [NUMBER]},
}
"""Types in a record of ``history.jsonl``."""

LEG: Mapping[str, Any] = {
    "round": COUNT,
    **dict.fromkeys(("seconds", "joules", "clients"), NUMBERS),
    **dict.fromkeys(("began_ms", "ended_ms"), COUNT),
}
"""Types in a record of ``timing.jsonl``, and in ``rounds`` of ``timing.json``."""

TIMING: Mapping[str, Any] = {
    "joules": NUMBERS,
    "clients": {"*": NUMBERS},
    "rounds": [LEG],
    "seconds": NUMBERS,
    "steps_per_second": NUMBER,
    "began_ms": COUNT,
    "ended_ms": COUNT,
}
"""Types in ``timing.json``."""

METRICS: Mapping[str, Any] = {
    **dict.fromkeys(("top1_global", "top1_vote", "mean_local", "mean_local_own_classes", "pooled_local"), NUMBER),
    **dict.fromkeys(("client_std", "loss_global", "last10_top1_global", "best_top1_global", "best_round"), NUMBER),
    **dict.fromkeys(("top5_pooled_local", "top5_mean_local", "num_parameters", "scalars_up_per_round"), NUMBER),
    **dict.fromkeys(("bytes_up", "bytes_down", "bytes_up_per_round", "bytes_down_per_round"), NUMBER),
    **dict.fromkeys(("bytes_eval_up", "bytes_eval_down"), NUMBER),
    **dict.fromkeys(("bytes_up_by_kind", "bytes_down_by_kind"), NUMBERS),
    "alternatives": _WAYS,
    "class_acc": [NUMBER],
    "class_acc_vote": [NUMBER],
    "class_names": [TEXT],
    "privacy": {"epsilon": NUMBER, "delta": NUMBER},
    **dict.fromkeys(("seed", "rounds"), COUNT),
    **dict.fromkeys(("method", "dataset", "partition"), TEXT),
    **dict.fromkeys(("config_hash", "data_fingerprint", "partition_fingerprint"), TEXT),
    "tasks": {
        **dict.fromkeys(("forgetting", "backward_transfer", "roundwise_forgetting"), NUMBER),
        "last_epochs": NUMBERS,
        "stage_ends": [{"round": COUNT}],
    },
}
"""Types in ``metrics.json``."""


def check(value: Any, kind: Any, where: str) -> None:
    """Refuse a value from JSON of another type, with a DataError that names the file, and the place in it.

    ``kind`` is :data:`NUMBER`, :data:`COUNT`, :data:`TEXT`, a list with the type of its items, or a mapping with the
    types of keys that may be present, ``*`` for all of them.
    """
    if value is None:
        return
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise _wrong(value, "a list", where)
        for place, item in enumerate(value):
            check(item, kind[0], f"{where}, {place}")
    elif isinstance(kind, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object", where)
        for key in value if "*" in kind else kind.keys() & value.keys():
            check(value[key], kind.get(key, kind.get("*")), f"{where}, {shorten(key, 40)}")
    elif kind == TEXT:
        if not isinstance(value, str):
            raise _wrong(value, kind, where)
    elif isinstance(value, bool) or not isinstance(value, int if kind == COUNT else int | float):
        raise _wrong(value, kind, where)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise _wrong(value, "a number below 2^63", where)


def _wrong(value: Any, kind: str, where: str) -> DataError:
    return DataError(f"{where}: damaged, {shorten(value, 60)} is not {kind}; {CURE}")
