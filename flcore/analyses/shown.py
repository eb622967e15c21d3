"""Who and what a t-SNE shows: what ``evaluation.tsne_clients``, ``tsne_classes``, ``tsne_samples`` say or leave open.

An image that is shown among all classes is shown where its class is chosen too: the draw of a class knows of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.base import FinishedRun, class_names, equal_per_class, keeps_trained_models
from flcore.analyses.embedding import FEWEST_POINTS
from flcore.config.sections import MOST_TSNE_CLIENTS
from flcore.evaluation.eval_data import eval_data
from flcore.evaluation.model_selection import private_model
from flcore.io.messages import Weights

PER_CLASS = 100
MOST_POINTS = 3000
"""Unless ``evaluation.tsne_samples`` asks for more."""


def clients_shown(run: FinishedRun, model_of: Callable[[int], Weights | None]) -> dict[int, Weights]:
    """The models of the clients that are asked for, or of the first ones; who has none is left out."""
    asked = run.experiment.config.evaluation.tsne_clients
    clients = range(run.experiment.setting.num_clients) if asked is None else asked
    having = ((client, model) for client in clients if (model := model_of(client)) is not None)
    return dict(islice(having, MOST_TSNE_CLIENTS))


def images_shown(run: FinishedRun, labels: Tensor, models: int = 1) -> Tensor:
    """Positions of the test images, int64, equally many of each class, grouped by class.

    Args:
        run: whose configuration says which. labels: of all test images, int64 ``[n]``.
        models: that share an embedding: unless a number is asked for, all together have at most `MOST_POINTS` points.
    """
    evaluation = run.experiment.config.evaluation
    classes = torch.unique(labels) if evaluation.tsne_classes is None else torch.tensor(evaluation.tsne_classes)
    of_those = torch.isin(labels, classes).nonzero().flatten()
    fitting = max(1, min(PER_CLASS, MOST_POINTS // (len(classes) * models)))
    per_class = fitting if evaluation.tsne_samples is None else evaluation.tsne_samples
    return of_those[equal_per_class(labels[of_those], per_class, 0, "t-SNE samples")]


def caption(run: FinishedRun, labels: np.ndarray, clients: Iterable[int] = ()) -> tuple[str, ...]:
    """Notes of what is shown where the configuration chooses it: who is missing, and how many images of what.

    Args:
        run: whose configuration it is.
        labels: of the images that are shown, ``[N]``. clients: who is shown, where clients are.
    """
    evaluation, shown = run.experiment.config.evaluation, set(clients)
    missing = [client for client in evaluation.tsne_clients or () if shown and client not in shown]
    notes = tuple(f"Client {client} has not trained a model yet." for client in missing)
    if evaluation.tsne_classes is None and evaluation.tsne_samples is None:
        return notes
    names, classes = class_names(run.experiment), np.unique(labels).tolist()
    count = len(labels) // len(classes)
    which = "every class" if evaluation.tsne_classes is None else ", ".join(str(names[label]) for label in classes)
    fewer = "" if evaluation.tsne_samples in (None, count) else f", not {evaluation.tsne_samples}: there are no more"
    return (*notes, f"Images of each class: {count}{fewer}; of {which}.")


def can_show(run: FinishedRun) -> str | None:
    """Why there are no images to embed; None where there are."""
    labels = eval_data(run.experiment).shared_labels
    asked = run.experiment.config.evaluation.tsne_classes or ()
    without = [label for label in asked if not (labels == label).any()]
    if without:
        return f"no test image shows class {without[0]} of evaluation.tsne_classes"
    count = len(images_shown(run, labels))
    return None if count >= FEWEST_POINTS else f"a t-SNE needs {FEWEST_POINTS} images, and {count} can be shown"


def can_show_trained(run: FinishedRun) -> str | None:
    """Why there are no clients' models as they were trained, or no images, to show; None where there are."""
    reason, asked = keeps_trained_models(run), run.experiment.config.evaluation.tsne_clients or ()
    if reason is None and asked and all(private_model(run.client_states(client)) is None for client in asked):
        reason = f"of clients {', '.join(map(str, asked))} none has trained a model yet"
    return reason or can_show(run)
