"""Accuracies and losses from predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.io.messages import Size
from flcore.methods.api import ScoreKind


@dataclass(frozen=True)
class Scores:
    """Fractions in [0, 1]; None where a method has no such model, or a client no test data.

    Attributes:
        loss_global: mean cross-entropy of the global model in nats; None too where its scores are no likelihoods
            (:attr:`flcore.methods.api.Method.score_kind`).
        class_accuracy: of the global model per class, None for classes without test samples.
        local_accuracy: per client.
        client_std: population standard deviation of ``local_accuracy``.
        top1_vote: of the majority vote of all clients' models, where requested and defined.
        class_accuracy_vote: its accuracy by class.
        alternatives: per other way to predict (:meth:`flcore.methods.api.Method.predictors`) its ``top1_global``,
            ``mean_local`` and ``pooled_local``.
        tasks: where locally trained models are scored: ``tested`` [C], test images per class; ``private_correct``
            [K, C], correct ones by client; ``untrained_clients``, how many still have the initial model; ``tasks``, the
            accuracies (:func:`flcore.evaluation.continual.task_scores`).
        down: cost of the scoring messages by kind. up: of clients' contributions to the global model.
    """

    top1_global: float | None
    loss_global: float | None
    class_accuracy: list[float | None] | None
    local_accuracy: list[float | None]
    mean_local: float | None
    pooled_local: float | None
    client_std: float | None
    mean_local_own_classes: float | None
    top1_vote: float | None = None
    class_accuracy_vote: list[float | None] | None = None
    alternatives: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)
    down: Mapping[str, Size] = field(default_factory=dict)
    up: Mapping[str, Size] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """Return JSON values without traffic; votes, ``alternatives`` and ``tasks`` only where there are some."""
        optional = ("top1_vote", "class_accuracy_vote", "alternatives", "tasks", "down", "up")
        values = {name: value for name, value in vars(self).items() if name not in optional}
        if self.top1_vote is not None:
            values |= {"top1_vote": self.top1_vote, "class_accuracy_vote": self.class_accuracy_vote}
        return {**values, **({"alternatives": dict(self.alternatives)} if self.alternatives else {}), **self.tasks}

    @property
    def headline(self) -> dict[str, float | None]:
        """Return the accuracies that are kept of an alternative predictor."""
        return {name: getattr(self, name) for name in ("top1_global", "mean_local", "pooled_local")}


def right_answers(scores: Tensor, labels: Tensor, held: Tensor) -> Tensor:
    """Return int64 [3]: correct, correct among the classes held (bool [K]), and total."""
    if not len(labels):
        return torch.zeros(3, dtype=torch.int64)
    among_own = scores[:, : len(held)].masked_fill(~held, -torch.inf).argmax(dim=1)
    right = (scores.argmax(dim=1) == labels).sum()
    return torch.stack([right, (among_own == labels).sum(), torch.tensor(len(labels))])


def probabilities(scores: Tensor, kind: ScoreKind) -> Tensor:
    """Return the class probabilities [N, K] of scores; of ``ranks`` a softmax, which keeps their order alone."""
    return scores if kind == "probabilities" else scores.softmax(dim=1)


def mean_loss(scores: Tensor, kind: ScoreKind, labels: Tensor) -> float | None:
    """Return the mean cross-entropy in nats of scores [N, K] of a kind; None where they are no likelihoods.

    Probabilities below the least normal float32 count as that.
    """
    if kind == "ranks":
        return None
    if kind == "logits":
        return float(F.cross_entropy(scores, labels))
    return float(F.nll_loss(scores.clamp_min(torch.finfo(torch.float32).tiny).log(), labels))


def summarised(
    scores: Tensor | None,
    votes: Tensor | None,
    labels: Tensor,
    local: list[tuple[int, int, int]],
    num_classes: int,
    kind: ScoreKind = "logits",
) -> Scores:
    """Return all figures of one predictor.

    Args:
        scores: of the global model, float32 [N, K]; the shared images come first. None without one.
        votes: int64 [N, C] of clients' models, or None.
        labels: int64 [n] of the shared images.
        local: (correct, correct among its own classes, tested) by client.
        num_classes: C.
        kind: of the scores.
    """
    accuracies = [right / tested if tested else None for right, _, tested in local]
    known = np.array([accuracy for accuracy in accuracies if accuracy is not None], dtype=np.float64)
    among_own = [right / tested for _, right, tested in local if tested]
    tested = sum(count for _, _, count in local)
    shared = None if scores is None else scores[: len(labels)]
    top1, by_class = _accuracies(shared, labels, num_classes)
    top1_vote, by_class_vote = _accuracies(votes, labels, num_classes)  # ties go to the smaller class id
    return Scores(
        top1_global=top1,
        loss_global=None if shared is None else mean_loss(shared, kind, labels),
        class_accuracy=by_class,
        local_accuracy=accuracies,
        mean_local=float(known.mean()) if len(known) else None,
        pooled_local=sum(right for right, _, _ in local) / tested if tested else None,
        client_std=float(known.std()) if len(known) else None,
        mean_local_own_classes=sum(among_own) / len(among_own) if among_own else None,
        top1_vote=top1_vote,
        class_accuracy_vote=by_class_vote,
    )


def _accuracies(
    scores: Tensor | None, labels: Tensor, num_classes: int
) -> tuple[float | None, list[float | None] | None]:
    """Return the accuracy of scores [n, K], and by class; None for classes without samples."""
    if scores is None:
        return None, None
    correct = scores.argmax(dim=1) == labels
    totals = torch.bincount(labels, minlength=num_classes).tolist()
    rights = torch.bincount(labels[correct], minlength=num_classes).tolist()
    by_class = [right / total if total else None for right, total in zip(rights, totals, strict=True)]
    return int(correct.sum()) / len(correct), by_class
