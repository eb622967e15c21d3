"""Accuracy by client and class (evaluation.md V7; FedPG figure 6b, which contradicts itself on whose model it shows).

Rows are the models that answer for clients. A client's own model is asked about the whole test set and about the
client's own test data; where the global model answers, only the latter differs from client to client. The last row is
the global model on the whole test set.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, Row, accuracies_by_class
from flcore.io.messages import Weights

MOST_CLIENTS = 200
"""More rows than this nobody can read, and each may cost a pass over the test set."""


def class_heatmap(run: FinishedRun) -> AnalysisResult:
    """A row per model, test data and class.

    Columns: ``model`` (client id or ``global``), ``test`` (``all`` or ``own``), ``class``, ``correct``, ``total`` and
    ``accuracy`` (None without test samples).
    """
    answers = ModelOutputs(run)
    return _heatmap(run, answers, answers.own_model)


def class_heatmap_trained(run: FinishedRun) -> AnalysisResult:
    """As :func:`class_heatmap` with each client's model as its own training left it; who never trained has no row."""
    answers = ModelOutputs(run)
    return _heatmap(run, answers, answers.trained_model, trained=True)


def _heatmap(
    run: FinishedRun, answers: ModelOutputs, model_of: Callable[[int], Weights | None], *, trained: bool = False
) -> AnalysisResult:
    experiment = run.experiment
    names, num_clients = experiment.dataset.meta.class_names, experiment.setting.num_clients
    rows: list[Row] = []

    def add(model: str, test: str, predicted: Tensor, labels: Tensor) -> None:
        rows.extend(accuracies_by_class(model, test, predicted, labels, names))

    shared = answers.global_model()
    for client in range(min(num_clients, MOST_CLIENTS)):
        own, (images, labels) = model_of(client), answers.own_test(client)
        if own is not None:
            add(str(client), "all", answers.predictions(own, answers.images, client, trained=trained), answers.labels)
            add(str(client), "own", answers.predictions(own, images, client, trained=trained), labels)
        elif shared is not None and not trained:
            add(str(client), "own", answers.predictions(shared, images), labels)
    if shared is not None:
        add("global", "all", answers.predictions(shared, answers.images), answers.labels)
    return AnalysisResult(rows=tuple(rows), notes=who_is_shown(num_clients))


def who_is_shown(num_clients: int) -> tuple[str, ...]:
    """A note where not all clients have rows."""
    return (f"The first {MOST_CLIENTS} of {num_clients} clients.",) if num_clients > MOST_CLIENTS else ()
