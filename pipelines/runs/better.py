"""Directions and units of metrics: declared here by name, never guessed.

A name is a key of `metrics.json`, dotted if nested, or a name in MLflow. A metric without a declared direction has no
best value: no table marks it, and nothing searches by it. Without torch.
"""

from __future__ import annotations

import re
from typing import Literal

from flcore.core.errors import ConfigError
from flcore.core.text import shorten

Direction = Literal["higher", "lower"]
MetricUnit = Literal["share", "bytes", "number"]

_ACCURACIES = {
    *("top1_global", "mean_local", "mean_local_own_classes", "pooled_local", "top1_vote", "honest_mean_local"),
    *("last10_top1_global", "best_top1_global", "top5_pooled_local", "top5_mean_local"),
    *("macro_acc", "class_acc", "class_acc_vote", "class_accuracy", "class_accuracy_vote", "local_accuracy"),
    *("a_glo", "a_loc", "a_sel", "a_glo_minority", "a_loc_minority", "a_sel_minority", "a_loc_participants"),
    *("a_glo_vote", "a_glo_vote_minority", "by_task", "by_task_global"),
    *("backward_transfer", "backward_transfer_global"),
}
_LOST_SHARES = {
    *("client_std", "forgetting", "forgetting_global", "roundwise_forgetting", "roundwise_forgetting_clipped"),
}
_BYTES = {
    *("bytes_up", "bytes_down", "bytes_up_per_round", "bytes_down_per_round", "bytes_up_by_kind", "bytes_down_by_kind"),
    *("bytes_eval_up", "bytes_eval_down", "bytes_to_target"),
}
_COSTS = {
    *("loss_global", "epsilon", "rounds_to_convergence", "rounds_to_target"),
    *("scalars_up", "scalars_up_per_round", "num_parameters", "steps", "seconds", "simulated_seconds", "joules"),
}
_RATES = {"steps_per_second"}
_DECLARED: dict[str, Direction] = {
    **dict.fromkeys(sorted(_ACCURACIES | _RATES), "higher"),
    **dict.fromkeys(sorted(_LOST_SHARES | _BYTES | _COSTS), "lower"),
}
_COST_GROUPS = ("time", "energy", "clock", "comm", "loss")
"""MLflow groups in which undeclared metrics are costs."""

_FREE_GROUPS = ("server", "analyses")
"""Groups with names from methods and analyses, which may equal the names above."""

_TO_TARGET = ("rounds_to_target", "bytes_to_target")


def direction(name: str) -> Direction | None:
    """Return the better direction of a metric; None if it is not declared.

    >>> direction("tasks.roundwise_forgetting"), direction("bytes_up_by_kind.model"), direction("tasks/final_a_glo")
    ('lower', 'lower', 'higher')
    >>> direction("time/total"), direction("time/steps_per_second"), direction("error_rate"), direction("server.kl")
    ('lower', 'higher', None, None)
    """
    group = re.split(r"[./]", name)[0]
    declared = _declared(name)
    if declared is not None:
        return _DECLARED[declared]
    return "lower" if "/" in name and group in _COST_GROUPS else None


def lower_is_better(name: str) -> bool:
    """Return whether a metric is declared to be a cost or a loss."""
    return direction(name) == "lower"


def unit(name: str) -> MetricUnit:
    """Return the unit in which a metric is printed.

    >>> unit("top1_global"), unit("bytes_up_by_kind.model"), unit("seconds"), unit("server.kl")
    ('share', 'bytes', 'number', 'number')
    """
    declared = _declared(name)
    return "share" if declared in _ACCURACIES | _LOST_SHARES else "bytes" if declared in _BYTES else "number"


def is_share(name: str) -> bool:
    """Return whether a metric is printed in percent: an accuracy, or a difference of accuracies."""
    return unit(name) == "share"


def check_direction(name: str, key: str = "--metric") -> None:
    """Refuse a metric without a declared direction.

    Args:
        name: of the metric. key: the option or key that names it, for the error.

    Raises:
        ConfigError: its direction is not declared.
    """
    if direction(name) is None:
        raise ConfigError(
            f"{key} {shorten(name)}: whether more or less of it is better is not declared; choose from {', '.join(_DECLARED)}"
        )


def _declared(name: str) -> str | None:
    """Return the declared metric that a name refers to."""
    parts = re.split(r"[./]", name)
    if parts[0] in _FREE_GROUPS:
        return None
    if parts[0] in _TO_TARGET:
        return parts[0]
    for part in reversed(parts):
        # MLflow's names: tasks/final_a_glo, comm/total_bytes_up, tasks/by_task_3.
        plain = re.sub(r"_\d+$", "", re.sub(r"^(final|total)_", "", part))
        if plain in _DECLARED:
            return plain
    return None
