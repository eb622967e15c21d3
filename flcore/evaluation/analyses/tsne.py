"""t-SNE of test features: one global model (V2), several clients' models (V3), before and after calibration (FedCSPC).

Equally many samples of every class, the same for every model. Several clients' models share one embedding, because
that they put the same images at different places is what the figure is for; the models before and after a calibration
get one each, because their feature spaces need not have anything in common.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from flcore.evaluation.analyses.answers import BEFORE_CALIBRATION, Answers
from flcore.evaluation.analyses.base import FinishedRun, Result, class_names, equal_per_class, needs_global_model
from flcore.evaluation.analyses.embedding import embed
from flcore.messages import Weights

Look = Callable[[Weights, Tensor], Tensor]
"""(model, uint8 images) → [N, d], what is embedded."""

PER_CLASS = 100
MOST_POINTS = 3000
MOST_CLIENTS = 4
"""Models of one joint embedding, which have to share its points and its colours."""


def tsne(run: FinishedRun) -> Result:
    """One embedding of all models' features.

    ``embedding`` float [M, N, 2], ``predictions`` int [M, N], ``labels`` int [N] (the same samples for all models),
    ``models`` text [M], ``accuracies`` float [M] on the whole test set, ``counts`` int [M, K] (training samples of the
    client; of all clients for the global model), ``class_names``.
    """
    answers = Answers(run)
    note = "The method has no global model: the first clients' models, the same images, one embedding."
    return _of_those_who_answer(run, answers, answers.features, () if answers.global_model() else (note,))


def tsne_trained(run: FinishedRun) -> Result:
    """As :func:`tsne`, for the first clients' models as their own training left them (FedPG figure 3, FedCSPC 8)."""
    answers = Answers(run)
    note = "The first clients' models as their own training left them, the same images, one embedding."
    return _of_clients(run, answers, answers.trained_model, answers.features, (note,))


def tsne_projections(run: FinishedRun) -> Result:
    """As :func:`tsne`, of what the method compares with a frame or prototypes in place of features (GFPL figure 2)."""
    answers = Answers(run)
    return _of_those_who_answer(run, answers, answers.projections, ("Projections; the same images, one embedding.",))


def _of_those_who_answer(run: FinishedRun, answers: Answers, look: Look, notes: tuple[str, ...]) -> Result:
    """The global model, or where there is none the first clients' own."""
    shared = answers.global_model()
    if shared is None:
        return _of_clients(run, answers, answers.own_model, look, notes)
    return Result(
        {
            **_looked_at(answers, [(shared, None)], look),
            "models": np.array(["global model"]),
            "counts": run.experiment.partition.counts.sum(axis=0, keepdims=True),
            "class_names": class_names(run.experiment),
        },
        notes=notes,
    )


def _of_clients(
    run: FinishedRun,
    answers: Answers,
    model_of: Callable[[int], Weights | None],
    look: Look,
    notes: tuple[str, ...],
) -> Result:
    """The first clients that have a model, in one embedding."""
    asked = ((client, model_of(client)) for client in range(run.experiment.setting.num_clients))
    having = list(islice(((client, model) for client, model in asked if model is not None), MOST_CLIENTS))
    clients = [client for client, _ in having]
    return Result(
        {
            **_looked_at(answers, [(model, answers.classes(client)) for client, model in having], look),
            "models": np.array([f"client {client}" for client in clients]),
            "counts": run.experiment.partition.counts[clients],
            "class_names": class_names(run.experiment),
        },
        notes=notes,
    )


def has_projections(run: FinishedRun) -> str | None:
    """Why there are no projections to look at; None where there are."""
    method = run.experiment.method
    return None if method.projections is not None else f"{method.name} compares features themselves, if anything"


def tsne_calibration(run: FinishedRun) -> Result:
    """As :func:`tsne`, without ``counts``, for the models before and after, each with an embedding of its own."""
    experiment = run.experiment
    answers = Answers(run)
    after, before = answers.global_model(), answers.uncalibrated_model()
    assert after is not None and before is not None  # see keeps_uncalibrated
    rows = sampled(answers)
    # By the network's own head: what else a method answers with belongs to the calibrated model.
    predictions = torch.stack([answers.logits(model, answers.images).argmax(dim=1) for model in (before, after)])
    return Result(
        {
            "embedding": np.stack([embed(answers.features(model, answers.images[rows])) for model in (before, after)]),
            "predictions": predictions[:, rows].numpy(),
            "accuracies": (predictions == answers.labels).double().mean(dim=1).numpy(),
            "labels": answers.labels[rows].numpy(),
            "models": np.array(["before calibration", "after calibration"]),
            "class_names": class_names(experiment),
        },
        notes=("Predictions of the network's own head.",),
    )


def keeps_uncalibrated(run: FinishedRun) -> str | None:
    """Why there is nothing to compare with the calibrated model; None where that state was kept."""
    reason = needs_global_model(run)
    if reason is None and BEFORE_CALIBRATION not in run.before:
        reason = f"{run.experiment.method.name} has no state before a calibration"
    return reason


def sampled(answers: Answers, models: int = 1) -> Tensor:
    """Positions of the test samples to embed, so few that all models together have at most `MOST_POINTS` points."""
    num_classes = len(torch.unique(answers.labels))
    per_class = max(1, min(PER_CLASS, MOST_POINTS // (num_classes * models)))
    return equal_per_class(answers.labels, per_class, 0, "t-SNE samples")


def _looked_at(answers: Answers, models: list[tuple[Weights, Tensor | None]], look: Look) -> dict[str, np.ndarray]:
    """Embedding of what ``look`` sees, predictions, labels and accuracies of some models in one embedding."""
    rows = sampled(answers, len(models))
    images = answers.images[rows]
    features = [look(model, images) for model, _ in models]
    predictions = torch.stack([answers.predictions(model, answers.images, classes) for model, classes in models])
    accuracies = (predictions == answers.labels).double().mean(dim=1)
    return {
        "embedding": embed(torch.cat(features)).reshape(len(models), len(rows), 2),
        "predictions": predictions[:, rows].numpy(),
        "labels": answers.labels[rows].numpy(),
        "accuracies": accuracies.numpy(),
    }
