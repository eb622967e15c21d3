"""What an analysis is, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flcore.core.rng import torch_stream
from flcore.evaluation.model_selection import ClientStates, private_model
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

Row = Mapping[str, str | int | float | None]


@dataclass(frozen=True)
class AnalysisResult:
    """The data of an analysis; a figure is drawn from these and nothing else.

    Attributes:
        arrays: by name, numbers or text (never objects).
        rows: a table; all rows have the same columns.
        notes: sentences that a reader of the figure must know.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left.

    Attributes:
        experiment: the run.
        server: what the server holds.
        client_states: client id to what that client remembers.
    """

    experiment: Experiment
    server: Record
    client_states: ClientStates


@dataclass(frozen=True)
class Analysis:
    """One analysis.

    Attributes:
        summary: one line.
        compute: run → data.
        applies: run → None, or why it cannot be analysed so.
    """

    summary: str
    compute: Callable[[FinishedRun], AnalysisResult]
    applies: Callable[[FinishedRun], str | None]


def always(run: FinishedRun) -> str | None:
    """For analyses that every run allows."""
    return None


def keeps_trained_models(run: FinishedRun) -> str | None:
    """For analyses of clients' models as their own training left them, before anything was averaged."""
    if not run.experiment.keeps_private_models:
        return "clients' own models are kept where evaluation.private is true"
    clients = range(run.experiment.setting.num_clients)
    if all(private_model(run.client_states(client)) is None for client in clients):
        return "no client has trained a model yet"
    return None


def needs_global_model(run: FinishedRun) -> str | None:
    """For analyses of the model that answers for everybody."""
    experiment, server = run.experiment, run.server
    method = experiment.method
    if method.has_global_model and method.global_model(server) is not None:
        return None
    return f"{method.name} has no global model"


def equal_per_class(labels: Tensor, per_class: int, seed: int, purpose: str) -> Tensor:
    """Positions of equally many samples of every class that occurs, int64, grouped by class, ascending within one.

    Args:
        labels: int64 ``[n]``.
        per_class: of each at most; as many as the smallest class has, if that is fewer.
        seed: of the choice. purpose: names its stream.
    """
    classes = torch.unique(labels).tolist()
    count = min(per_class, int(torch.bincount(labels)[classes].min()))
    chosen = []
    for label in classes:
        own = (labels == label).nonzero().flatten()
        order = torch.randperm(len(own), generator=torch_stream(seed, purpose, label))
        chosen.append(own[order[:count]].sort().values)
    return torch.cat(chosen)


def accuracies_by_class(model: str, test: str, predicted: Tensor, labels: Tensor, names: Sequence[str]) -> list[Row]:
    """A row per class: ``model``, ``test``, ``class``, ``correct``, ``total``, ``accuracy`` (None without samples).

    Args:
        model, test: whose answers to what, in words.
        predicted, labels: int64 ``[n]``.
        names: of the classes.
    """
    rights = torch.bincount(labels[predicted == labels], minlength=len(names)).tolist()
    totals = torch.bincount(labels, minlength=len(names)).tolist()
    return [
        {
            "model": model,
            "test": test,
            "class": name,
            "correct": right,
            "total": total,
            "accuracy": right / total if total else None,
        }
        for name, right, total in zip(names, rights, totals, strict=True)
    ]


def class_names(experiment: Experiment) -> np.ndarray:
    """Names of the classes as text ``[K]``."""
    return np.array(experiment.dataset.meta.class_names, dtype=np.str_)
