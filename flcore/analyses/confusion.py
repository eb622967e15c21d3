"""Confusion matrix of a finished run's predictions, by class names."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, class_names


def confusion(run: FinishedRun) -> AnalysisResult:
    """Count test images by true and predicted class: the scored predictions.

    These are the global model's on the whole test set; without a global model, all clients' on their own test data,
    added up.

    Returns:
        Arrays: ``counts`` int64 [K, K], true class by predicted class; ``class_names``. Rows: ``class``, ``predicted``,
        ``count`` and ``share`` of the true class's images, for every pair that occurs.
    """
    outputs, names = ModelOutputs(run), class_names(run.experiment)
    counts = torch.zeros(len(names), len(names), dtype=torch.int64)
    shared = outputs.global_model()
    if shared is not None:
        note = "Predictions of the global model on the whole test set."
        counts += confusion_counts(outputs.predictions(shared, outputs.images), outputs.labels, len(names))
    else:
        note = "The method has no global model: every client's predictions on its own test data, added up."
        for client in range(run.experiment.setting.num_clients):
            (images, labels), model = outputs.own_test(client), outputs.own_model(client)
            if model is not None:
                counts += confusion_counts(outputs.predictions(model, images, client), labels, len(names))
    totals = counts.sum(dim=1).tolist()
    rows = tuple(
        {
            "class": str(names[true]),
            "predicted": str(names[predicted]),
            "count": int(counts[true, predicted]),
            "share": int(counts[true, predicted]) / totals[true],
        }
        for true, predicted in counts.nonzero().tolist()
    )
    return AnalysisResult({"counts": counts.numpy(), "class_names": names}, rows, (note,))


def confusion_counts(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return int64 [K, K], true class by predicted class, of predictions and labels int64 [n]."""
    return torch.bincount(labels * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)
