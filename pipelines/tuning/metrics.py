"""Metrics that a study may optimise: any number of ``metrics.json``; pruning needs one that every round has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from flcore.core.errors import ConfigError, RunError
from flcore.methods import Method
from pipelines.runs.derived import DERIVED, derived
from pipelines.runs.metrics import check_direction
from pipelines.runs.record import numbers_in

PER_ROUND = ("top1_global", "mean_local", "pooled_local", "mean_local_own_classes", "client_std", "loss_global")
"""Numbers in every record of a history, as pruning requires; null if a method has no such metric."""

FIGURES = (
    *PER_ROUND,
    *("top1_vote", "last10_top1_global", "best_top1_global", "top5_pooled_local", "top5_mean_local"),
    *("bytes_up", "bytes_down", "bytes_up_per_round", "bytes_down_per_round", "scalars_up_per_round"),
    *("bytes_eval_up", "bytes_eval_down", "num_parameters", "steps"),
)
"""Top-level numbers of ``metrics.json`` that can be optimised."""

NESTED = (
    *("tasks", "alternatives", "privacy", "poisoned", "bytes_up_by_kind", "bytes_down_by_kind"),
    *("class_acc", "class_acc_vote", "local_accuracy"),
)
"""Keys with nested numbers, such as ``alternatives.nearest_prototype.top1_global`` or ``class_acc.3``; method and data
decide which.
"""

_OF_A_GLOBAL_MODEL = ("top1_global", "loss_global", "last10_top1_global", "best_top1_global", "class_acc", "macro_acc")
_OF_A_VOTE = ("top1_vote", "class_acc_vote")


def check_metric(name: str, method: Method) -> str:
    """Check a metric's name, as far as possible before a run, and return it.

    Raises:
        ConfigError: no run has such a metric, or none of this method.
    """
    root = name.partition(".")[0]
    if not _can_be_asked(name):
        nested = [f"{key}.<name>" for key in NESTED]
        known = (*FIGURES, *DERIVED)
        raise ConfigError(f"--metric {name}: {_near(name, known)}must be one of {', '.join((*known, *nested))}")
    check_direction(name)
    if not method.has_global_model and root in _OF_A_GLOBAL_MODEL:
        raise ConfigError(
            f"--metric {name}: {method.name} has no global model, so that it would be null; use --metric mean_local"
        )
    if method.score_kind == "ranks" and root == "loss_global":
        raise ConfigError(
            f"--metric {name}: the scores of {method.name} as it is set are no likelihoods, so that it would be null; "
            "use --metric top1_global"
        )
    if not method.has_vote and root in _OF_A_VOTE:
        raise ConfigError(f"--metric {name}: of {method.name} there is no vote, so that it would be null")
    return name


def value_of(name: str, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> float:
    """Return a finished run's value of a metric.

    Raises:
        ConfigError: the metric is missing; names the existing ones, near misses first.
        RunError: it is null.
    """
    further = derived(metrics.get("class_acc"), [(record["round"], record["mean_local"]) for record in history])
    numbers = dict(numbers_in({**metrics, **{key: history[-1][key] for key in PER_ROUND}, **further}))
    if name not in numbers:
        names = [key for key in numbers if _can_be_asked(key) and not key.rpartition(".")[2].isdecimal()]
        raise ConfigError(f"--metric {name}: {_near(name, names)}this method's runs have {', '.join(sorted(names))}")
    value = numbers[name]
    if value is None:
        why = (
            "accuracy still rose at the end, or fewer than 30 rounds were evaluated"
            if name == "rounds_to_convergence"
            else "no model was scored, or its scores are no likelihoods"
            if name == "loss_global"
            else "nobody could be scored"
        )
        raise RunError(f"{name} is null: {why}")
    return value


def _can_be_asked(name: str) -> bool:
    root, _, within = name.partition(".")
    return name in (*FIGURES, *DERIVED) or (root in NESTED and within != "")


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=3)
    return f"did you mean {' or '.join(near)}? " if near else ""
