"""Tables by class: accuracy by client (evaluation.md V7), confusion matrix, and averaged bodies (baselines.md 21).

On a stream of tasks a client's test data here include classes that it has not met, which scores leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from flcore.aggregation.mean import average_weights
from flcore.analyses.base import AnalysisResult, FinishedRun, Row, accuracies_by_class
from flcore.io.messages import Weights
from flcore.methods.kit.class_prototypes import nearest_prototype
from flcore.methods.types import PROTOTYPES

MOST_CLIENTS = 200
"""Rows of a figure that can be read; each may cost a pass over the test set."""


def class_heatmap(run: FinishedRun) -> AnalysisResult:
    """Count correct answers by model, test data and class.

    A client's own model is tested on the whole test set and on the client's test data; the global model on each
    client's test data, and in the last row on the whole test set. (FedPG's figure 6b contradicts itself about which
    model it shows.)

    Returns:
        Rows: ``model`` (client id or ``global``), ``test`` (``all`` or ``own``), ``class``, ``correct``, ``total`` and
        ``accuracy`` (None without test samples).
    """
    return _heatmap(run, run.own_model)


def class_heatmap_trained(run: FinishedRun) -> AnalysisResult:
    """Do :func:`class_heatmap` with locally trained models; a client that never trained has no row."""
    return _heatmap(run, run.trained_model, trained=True)


def _heatmap(run: FinishedRun, model_of: Callable[[int], Weights | None], *, trained: bool = False) -> AnalysisResult:
    names, num_clients = run.experiment.dataset.meta.class_names, run.experiment.setting.num_clients
    rows: list[Row] = []

    def add(model: str, test: str, predicted: Tensor, labels: Tensor) -> None:
        rows.extend(accuracies_by_class(model, test, predicted, labels, names))

    shared = run.global_model()
    for client in range(min(num_clients, MOST_CLIENTS)):
        own, (images, labels) = model_of(client), run.client_test(client)
        if own is not None:
            add(str(client), "all", run.predictions(own, run.images, client, trained=trained), run.labels)
            add(str(client), "own", run.predictions(own, images, client, trained=trained), labels)
        elif shared is not None and not trained:
            add(str(client), "own", run.predictions(shared, images), labels)
    if shared is not None:
        add("global", "all", run.predictions(shared, run.images), run.labels)
    return AnalysisResult(rows=tuple(rows), notes=_limit_note(num_clients))


def _limit_note(num_clients: int) -> tuple[str, ...]:
    return (f"The first {MOST_CLIENTS} of {num_clients} clients.",) if num_clients > MOST_CLIENTS else ()


def confusion(run: FinishedRun) -> AnalysisResult:
    """Count test images by true and predicted class, as scored.

    These are the global model's predictions on the whole test set; without a global model, the sum over all clients on
    their own test data.

    Returns:
        Arrays: ``counts`` int64 [K, K], true class by predicted class; ``class_names``. Rows: ``class``, ``predicted``,
        ``count`` and ``share`` of the true class's images, for every pair that occurs.
    """
    names, shared = run.class_names, run.global_model()
    num_classes = len(names)
    counts = torch.zeros(num_classes**2, dtype=torch.int64)

    def add(predicted: Tensor, labels: Tensor) -> None:
        counts.add_(torch.bincount(labels * num_classes + predicted, minlength=num_classes**2))

    if shared is not None:
        note = "Predictions of the global model on the whole test set."
        add(run.predictions(shared, run.images), run.labels)
    else:
        note = "The method has no global model: every client's predictions on its own test data, added up."
        for client in range(run.experiment.setting.num_clients):
            (images, labels), model = run.client_test(client), run.own_model(client)
            if model is not None:
                add(run.predictions(model, images, client), labels)
    table = counts.reshape(num_classes, num_classes)
    totals = table.sum(dim=1).tolist()
    rows = tuple(
        {
            "class": str(names[true]),
            "predicted": str(names[predicted]),
            "count": int(table[true, predicted]),
            "share": int(table[true, predicted]) / totals[true],
        }
        for true, predicted in table.nonzero().tolist()
    )
    return AnalysisResult({"counts": table.numpy(), "class_names": names}, rows, (note,))


def has_bodies_and_prototypes(run: FinishedRun) -> str | None:
    """Require clients with models of their own and a server with prototypes."""
    method = run.experiment.method
    if method.has_global_model:
        return f"{method.name} has a global model"
    return None if PROTOTYPES in run.server else f"the server of {method.name} holds no prototypes"


def averaged_bodies(run: FinishedRun) -> AnalysisResult:
    """Test the nearest prototype under clients' own bodies and, as ``global``, under their mean.

    The mean is weighted by training samples. Nothing in training keeps bodies together, so it may be far worse than
    each of them. FedMLP prints a global accuracy of FedProto without saying which model has it.

    Returns:
        Rows: ``model``, ``test`` (``all``: the whole test set), ``class``, ``correct``, ``total``, ``accuracy``.
    """
    experiment = run.experiment
    names, num_clients = experiment.dataset.meta.class_names, experiment.setting.num_clients
    models = {client: model for client in range(num_clients) if (model := run.own_model(client)) is not None}
    mean = average_weights(models, {client: len(experiment.trainers[client]) for client in models})
    shown = [(str(client), model) for client, model in list(models.items())[:MOST_CLIENTS]]
    rows, shares = [], []
    for name, model in (*shown, ("global", mean)):
        predicted = run.predictions(model, run.images, predict=nearest_prototype)
        rows += accuracies_by_class(name, "all", predicted, run.labels, names)
        shares.append((predicted == run.labels).double().mean().item())
    *of_clients, of_mean = shares
    note = (
        f"Nearest prototype on all test images: {100 * of_mean:.2f} % with the mean of clients' bodies (global), "
        f"{100 * fmean(of_clients):.2f} % in the mean of the bodies shown."
    )
    return AnalysisResult(rows=tuple(rows), notes=(note, *_limit_note(num_clients)))
