"""What is left of personal models when their bodies are averaged (baselines.md, section 21).

A method without a global model whose server holds class prototypes could still answer for everybody: by the mean of
clients' bodies, weighted by training samples, and the nearest global prototype. Nothing keeps bodies together, so that
the mean may be far worse than each of them; FedMLP prints a global accuracy of FedProto and does not say whose.
"""

from __future__ import annotations

from statistics import fmean

from flcore.aggregation.mean import average_weights
from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, accuracies_by_class
from flcore.analyses.class_heatmap import MOST_CLIENTS, who_is_shown
from flcore.methods.kit.class_prototypes import nearest_prototype
from flcore.methods.types import PROTOTYPES


def has_bodies_and_prototypes(run: FinishedRun) -> str | None:
    """For methods whose clients answer with models of their own, and whose server holds prototypes."""
    method = run.experiment.method
    if method.has_global_model:
        return f"{method.name} has a global model"
    if PROTOTYPES not in run.server:
        return f"the server of {method.name} holds no prototypes"
    return None


def averaged_bodies(run: FinishedRun) -> AnalysisResult:
    """A row per model and class: clients' own bodies, and as ``global`` their mean, each with the nearest prototype.

    Columns: ``model``, ``test`` (``all``: the whole test set), ``class``, ``correct``, ``total``, ``accuracy``.
    """
    answers, experiment = ModelOutputs(run), run.experiment
    names, clients = experiment.dataset.meta.class_names, range(experiment.setting.num_clients)
    models = {client: model for client in clients if (model := answers.own_model(client)) is not None}
    mean = average_weights(models, {client: len(experiment.trainers[client]) for client in models})
    shown = dict(list(models.items())[:MOST_CLIENTS])
    rows, shares = [], []
    for name, model in (*((str(client), model) for client, model in shown.items()), ("global", mean)):
        predicted = answers.predictions_by(nearest_prototype, model, answers.images)
        rows += accuracies_by_class(name, "all", predicted, answers.labels, names)
        shares.append((predicted == answers.labels).double().mean().item())
    *own, of_mean = shares
    notes = (
        f"Nearest prototype on all test images: {100 * of_mean:.2f} % with the mean of clients' bodies (global), "
        f"{100 * fmean(own):.2f} % in the mean of the bodies shown.",
        *who_is_shown(len(clients)),
    )
    return AnalysisResult(rows=tuple(rows), notes=notes)
