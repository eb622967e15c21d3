"""t-SNE of test features: one global model (V2), several clients' models (V3).

Equally many samples of every class, the same for every model. Several clients' models share one embedding, because
that they put the same images at different places is what the figure is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, class_names
from flcore.analyses.embedding import embed
from flcore.analyses.shown import can_show, caption, clients_shown, images_shown
from flcore.io.messages import Weights

Look = Callable[[Weights, Tensor, int | None], Tensor]
"""(model, uint8 images, the model's client) → [N, d], what is embedded."""


def tsne(run: FinishedRun) -> AnalysisResult:
    """Embed features of the global model, or of several clients' models where there is none.

    Returns:
        Arrays: ``embedding`` float [M, N, 2], ``predictions`` int [M, N], ``labels`` int [N] (the same samples for all
        models), ``models`` text [M], ``accuracies`` float [M] on the whole test set, ``counts`` int [M, K] (training
        samples of the client; of all clients for the global model), ``class_names``.
    """
    outputs = ModelOutputs(run)
    note = "The method has no global model: clients' models, the same images, one embedding."
    return _scored_models(run, outputs, _features(outputs), () if outputs.global_model() else (note,))


def tsne_trained(run: FinishedRun) -> AnalysisResult:
    """As :func:`tsne`, for clients' models as their own training left them (FedPG figure 3)."""
    outputs = ModelOutputs(run)
    note = "Clients' models as their own training left them, the same images, one embedding."
    return _client_models(run, outputs, _features(outputs), (note,), trained=True)


def tsne_projections(run: FinishedRun) -> AnalysisResult:
    """As :func:`tsne`, of what the method compares with a frame or prototypes in place of features (GFPL figure 2)."""
    outputs = ModelOutputs(run)
    return _scored_models(run, outputs, outputs.projections, ("Projections; the same images, one embedding.",))


def _features(outputs: ModelOutputs) -> Look:
    return lambda model, images, client: outputs.features(model, images)


def _scored_models(run: FinishedRun, outputs: ModelOutputs, look: Look, notes: tuple[str, ...]) -> AnalysisResult:
    shared = outputs.global_model()
    if shared is None:
        return _client_models(run, outputs, look, notes)
    arrays = {
        **_embedded(run, outputs, {None: shared}, look),
        "models": np.array(["global model"]),
        "counts": run.experiment.partition.counts.sum(axis=0, keepdims=True),
    }
    return AnalysisResult(arrays, notes=(*notes, *caption(run, arrays["labels"])))


def _client_models(
    run: FinishedRun, outputs: ModelOutputs, look: Look, notes: tuple[str, ...], *, trained: bool = False
) -> AnalysisResult:
    shown = clients_shown(run, outputs.trained_model if trained else outputs.own_model)
    arrays = {
        **_embedded(run, outputs, shown, look, trained=trained),
        "models": np.array([f"client {client}" for client in shown]),
        "counts": run.experiment.partition.counts[list(shown)],
    }
    return AnalysisResult(arrays, notes=(*notes, *caption(run, arrays["labels"], shown)))


def has_projections(run: FinishedRun) -> str | None:
    """Why there are no projections to look at; None where there are."""
    method = run.experiment.method
    if method.projections is None:
        return f"{method.name} compares features themselves, if anything"
    return can_show(run)


def _embedded(
    run: FinishedRun,
    outputs: ModelOutputs,
    models: Mapping[int, Weights] | Mapping[None, Weights],
    look: Look,
    *,
    trained: bool = False,
) -> dict[str, np.ndarray]:
    """Return what all figures share; models are by client, None for the global one."""
    rows = images_shown(run, outputs.labels, len(models))
    images = outputs.images[rows]
    features = [look(model, images, client) for client, model in models.items()]
    predictions = torch.stack(
        [outputs.predictions(model, outputs.images, client, trained=trained) for client, model in models.items()]
    )
    return {
        "embedding": embed(torch.cat(features)).reshape(len(models), len(rows), 2),
        "predictions": predictions[:, rows].numpy(),
        "labels": outputs.labels[rows].numpy(),
        "accuracies": (predictions == outputs.labels).double().mean(dim=1).numpy(),
        "class_names": class_names(run.experiment),
    }
