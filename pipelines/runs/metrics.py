"""Metrics: heading, direction, unit and meaning of every figure; declared here by name, never guessed.

A name is that of `metrics.json`, dotted where it is nested, or of MLflow. A figure that is not declared has no best: no
table marks it, and nothing searches by it. Without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flcore.core.errors import ConfigError
from flcore.core.text import shorten

Direction = Literal["higher", "lower"]
MetricUnit = Literal["share", "bytes", "count", "clock", "number"]
"""A share is written in percent, a clock's figure with three digits, any other number with four."""


@dataclass(frozen=True)
class Metric:
    """How a figure is read: its heading in tables, which way it is better, its unit and its meaning."""

    heading: str
    better: Direction
    unit: MetricUnit = "share"
    meaning: str = ""


_VOLUME = "bytes that all clients together send and receive in the whole run, measured, mean over seeds."

METRICS: dict[str, Metric] = {
    "top1_global": Metric(
        "global model",
        "higher",
        meaning="correct / total of the global model on the global test set, last evaluated round.",
    ),
    "top1_vote": Metric(
        "vote of clients' models",
        "higher",
        meaning="where there is no global model: majority vote of all clients' models on the global test set, after "
        "the last round. It takes every client's model for every answer, so it is set against no global model.",
    ),
    "mean_local": Metric(
        "mean over clients",
        "higher",
        meaning="mean over clients of each client's accuracy on its own test data, every client counting the same.",
    ),
    "pooled_local": Metric(
        "clients, pooled",
        "higher",
        meaning="correct answers of all clients / test samples of all clients, every sample counting the same.",
    ),
    "client_std": Metric(
        "std over clients",
        "lower",
        meaning="population standard deviation of the accuracy over the clients of one run, averaged over seeds.",
    ),
    "mean_local_own_classes": Metric(
        "mean over clients, own classes",
        "higher",
        meaning="as the mean over clients, with answers among the classes alone that the client holds in training.",
    ),
    "last10_top1_global": Metric(
        "global model, last 10 rounds",
        "higher",
        meaning="mean over the last ten evaluated rounds (all of them if there are fewer).",
    ),
    "best_top1_global": Metric("global model, best round", "higher"),
    "macro_acc": Metric(
        "global model, mean over classes",
        "higher",
        meaning="mean over the classes of the test set of the global model's accuracy on each: a rare class counts as "
        "much as a frequent one.",
    ),
    "top5_pooled_local": Metric(
        "clients, pooled, best 5 rounds",
        "higher",
        meaning="mean over its five best evaluated rounds, selected on test data: the figure that FedPA's authors "
        "print, for comparison with theirs alone.",
    ),
    "a_glo": Metric(
        "A_glo",
        "higher",
        meaning="global model on the whole global test set; like A_loc and A_sel the mean over the last ten epochs (an "
        "epoch is one round per task), of each its last evaluated round.",
    ),
    "a_glo_vote": Metric(
        "A_glo by vote of clients' models",
        "higher",
        meaning="where there is no global model: majority vote of all clients' models there, likewise.",
    ),
    "a_loc": Metric(
        "A_loc",
        "higher",
        meaning="mean over all clients of each client's own model, as local training left it, on the whole global test "
        "set; a client that was never sampled has the initial model.",
    ),
    "a_sel": Metric("A_sel", "higher", meaning="likewise, on the classes that the client has met so far."),
    "a_glo_minority": Metric(
        "A_glo, minority",
        "higher",
        meaning="on the half of the classes with the fewest training samples; likewise A_loc and A_sel.",
    ),
    "a_glo_vote_minority": Metric("A_glo by vote, minority", "higher"),
    "a_loc_minority": Metric("A_loc, minority", "higher"),
    "a_sel_minority": Metric("A_sel, minority", "higher"),
    "forgetting": Metric(
        "forgetting",
        "lower",
        meaning="how far accuracy on earlier tasks fell from its best, at the end of a blocked schedule, clients' own "
        "models; lower is better. Undefined where tasks return.",
    ),
    "backward_transfer": Metric(
        "backward transfer",
        "higher",
        meaning="accuracy on earlier tasks at the end minus right after each; negative is forgetting.",
    ),
    "roundwise_forgetting": Metric(
        "round-wise forgetting",
        "lower",
        meaning="mean over classes of the global model's best accuracy in earlier rounds minus its last.",
    ),
    **{
        name: Metric(name, "higher")
        for name in (
            *("honest_mean_local", "top5_mean_local", "local_accuracy", "a_loc_participants", "by_task"),
            *("class_acc", "class_acc_vote", "class_accuracy", "class_accuracy_vote", "by_task_global"),
            "backward_transfer_global",
        )
    },
    **{name: Metric(name, "lower") for name in ("forgetting_global", "roundwise_forgetting_clipped")},
    "bytes_up_per_round": Metric("up / round", "lower", "bytes"),
    "bytes_down_per_round": Metric("down / round", "lower", "bytes"),
    "bytes_up": Metric("up, total", "lower", "bytes", _VOLUME),
    "bytes_down": Metric("down, total", "lower", "bytes", _VOLUME),
    **{
        name: Metric(name, "lower", "bytes")
        for name in ("bytes_up_by_kind", "bytes_down_by_kind", "bytes_eval_up", "bytes_eval_down", "bytes_to_target")
    },
    "scalars_up_per_round": Metric(
        "scalars up / round",
        "lower",
        "count",
        "trainable values, prototypes and statistics that all clients together send in a round, measured, mean over "
        "all rounds and over seeds.",
    ),
    "num_parameters": Metric("parameters", "lower", "count"),
    **{name: Metric(name, "lower", "count") for name in ("scalars_up", "steps")},
    **{
        name: Metric(name, "lower", "number")
        for name in ("loss_global", "epsilon", "rounds_to_convergence", "rounds_to_target")
    },
    "seconds": Metric(
        "seconds",
        "lower",
        "clock",
        "of a run's rounds, evaluation with them, as the clock went by where it was made. Runs that shared a machine "
        "made each other slow, and a run that was found again has the seconds of the machine that once made it: for a "
        "ratio that can be told to others take protofl bench.",
    ),
    "evaluation_seconds": Metric("of them evaluation", "lower", "clock", "all evaluations of a run."),
    "seconds_per_round": Metric("seconds / round", "lower", "clock", "without evaluation."),
    "steps_per_second": Metric(
        "steps / s",
        "higher",
        "clock",
        "local steps of all clients divided by the seconds in which clients trained.",
    ),
    "joules": Metric("joules", "lower", "clock", "of the devices that tell what they use; nothing where none does."),
    "simulated_seconds": Metric("simulated_seconds", "lower", "clock"),
}

_COST_GROUPS = ("time", "energy", "clock", "comm", "loss")
"""MLflow groups in which undeclared figures are costs."""

_FREE_GROUPS = ("server", "analyses")
"""Their names are a method's or an analysis's own, and may be those of figures above."""

_TO_TARGET = ("rounds_to_target", "bytes_to_target")


def find_metric(name: str) -> Metric | None:
    """Return the declared metric that a name refers to; None where it is not declared."""
    parts = re.split(r"[./]", name)
    if parts[0] in _FREE_GROUPS:
        return None
    if parts[0] in _TO_TARGET:
        return METRICS[parts[0]]
    for part in reversed(parts):
        # MLflow's names: tasks/final_a_glo, comm/total_bytes_up, tasks/by_task_3.
        plain = re.sub(r"_\d+$", "", re.sub(r"^(final|total)_", "", part))
        if plain in METRICS:
            return METRICS[plain]
    return None


def direction(name: str) -> Direction | None:
    """Return which way a figure is better; None where that is not declared.

    >>> direction("tasks.roundwise_forgetting"), direction("bytes_up_by_kind.model"), direction("tasks/final_a_glo")
    ('lower', 'lower', 'higher')
    >>> direction("time/total"), direction("time/steps_per_second"), direction("error_rate"), direction("server.kl")
    ('lower', 'higher', None, None)
    """
    metric = find_metric(name)
    if metric is not None:
        return metric.better
    return "lower" if "/" in name and re.split(r"[./]", name)[0] in _COST_GROUPS else None


def lower_is_better(name: str) -> bool:
    """Return whether a figure is declared to be a cost, or a loss."""
    return direction(name) == "lower"


def unit(name: str) -> MetricUnit:
    """Return the unit in which people read a figure.

    >>> unit("top1_global"), unit("bytes_up_by_kind.model"), unit("seconds"), unit("server.kl")
    ('share', 'bytes', 'clock', 'number')
    """
    metric = find_metric(name)
    return "number" if metric is None else metric.unit


def heading(name: str) -> str:
    """Return what tables call a figure: its heading where its whole name is declared, else its name."""
    return METRICS[name].heading if name in METRICS else name


def meaning(name: str) -> str:
    """Return what a figure is, in a sentence; empty where none is declared."""
    return METRICS[name].meaning if name in METRICS else ""


def check_direction(name: str, key: str = "--metric") -> None:
    """Refuse, with a ConfigError that names ``key``, to look for the best in a figure without a declared direction."""
    if direction(name) is None:
        raise ConfigError(
            f"{key} {shorten(name)}: whether more or less of it is better is not declared; choose from {', '.join(METRICS)}"
        )
