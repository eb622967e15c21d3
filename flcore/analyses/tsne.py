"""t-SNE of test features: one global model (V2), several clients' models (V3).

Equally many samples of every class, the same for every model. Several clients' models share one embedding, because
that they put the same images at different places is what the figure is for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, class_names
from flcore.analyses.embedding import embed
from flcore.analyses.shown import can_show, caption, clients_shown, images_shown
from flcore.io.messages import Weights

Look = Callable[[Weights, Tensor], Tensor]
"""(model, uint8 images) → [N, d], what is embedded."""


def tsne(run: FinishedRun) -> AnalysisResult:
    """One embedding of all models' features.

    ``embedding`` float [M, N, 2], ``predictions`` int [M, N], ``labels`` int [N] (the same samples for all models),
    ``models`` text [M], ``accuracies`` float [M] on the whole test set, ``counts`` int [M, K] (training samples of the
    client; of all clients for the global model), ``class_names``.
    """
    answers = ModelOutputs(run)
    note = "The method has no global model: clients' models, the same images, one embedding."
    return _of_those_who_answer(run, answers, answers.features, () if answers.global_model() else (note,))


def tsne_trained(run: FinishedRun) -> AnalysisResult:
    """As :func:`tsne`, for clients' models as their own training left them (FedPG figure 3)."""
    answers = ModelOutputs(run)
    note = "Clients' models as their own training left them, the same images, one embedding."
    return _of_clients(run, answers, answers.trained_model, answers.features, (note,))


def tsne_projections(run: FinishedRun) -> AnalysisResult:
    """As :func:`tsne`, of what the method compares with a frame or prototypes in place of features (GFPL figure 2)."""
    answers = ModelOutputs(run)
    return _of_those_who_answer(run, answers, answers.projections, ("Projections; the same images, one embedding.",))


def _of_those_who_answer(run: FinishedRun, answers: ModelOutputs, look: Look, notes: tuple[str, ...]) -> AnalysisResult:
    """The global model, or where there is none clients' own."""
    shared = answers.global_model()
    if shared is None:
        return _of_clients(run, answers, answers.own_model, look, notes)
    looked_at = _looked_at(run, answers, [(shared, None)], look)
    return AnalysisResult(
        {
            **looked_at,
            "models": np.array(["global model"]),
            "counts": run.experiment.partition.counts.sum(axis=0, keepdims=True),
            "class_names": class_names(run.experiment),
        },
        notes=(*notes, *caption(run, looked_at["labels"])),
    )


def _of_clients(
    run: FinishedRun,
    answers: ModelOutputs,
    model_of: Callable[[int], Weights | None],
    look: Look,
    notes: tuple[str, ...],
) -> AnalysisResult:
    """Several clients' models in one embedding."""
    shown = clients_shown(run, model_of)
    looked_at = _looked_at(run, answers, [(model, answers.classes(client)) for client, model in shown.items()], look)
    return AnalysisResult(
        {
            **looked_at,
            "models": np.array([f"client {client}" for client in shown]),
            "counts": run.experiment.partition.counts[list(shown)],
            "class_names": class_names(run.experiment),
        },
        notes=(*notes, *caption(run, looked_at["labels"], shown)),
    )


def has_projections(run: FinishedRun) -> str | None:
    """Why there are no projections to look at; None where there are."""
    method = run.experiment.method
    if method.projections is None:
        return f"{method.name} compares features themselves, if anything"
    return can_show(run)


def _looked_at(
    run: FinishedRun, answers: ModelOutputs, models: list[tuple[Weights, Tensor | None]], look: Look
) -> dict[str, np.ndarray]:
    """Embedding of what ``look`` sees, predictions, labels and accuracies of some models in one embedding."""
    rows = images_shown(run, answers.labels, len(models))
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
