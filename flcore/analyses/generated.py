"""Generated features: their picture beside real ones (evaluation.md V5) and their distances (V12, FedPA's table V).

The generator answers in evaluation mode for a fixed stream of noise, so that an untrained one gives the same values
in every run that starts from the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, Row, class_names, equal_per_class
from flcore.analyses.embedding import embed
from flcore.analyses.shown import can_show, caption, images_shown
from flcore.core.rng import torch_stream
from flcore.math.prototypes.distances import class_distances, nearest_real

PER_CLASS = 100
MOST_REAL = 200
"""Real training features per class that generated ones are held against: each costs a pass of the model."""


def has_generated_features(run: FinishedRun) -> str | None:
    """Why there is nothing to look at; None where the method generates features from what its server holds."""
    experiment = run.experiment
    if _generated(run, 1) is None:
        return f"the server of {experiment.method.name} holds nothing that generates features"
    return None


def can_show_generated(run: FinishedRun) -> str | None:
    """Why there are no generated features, or no images, to show; None where there are."""
    return has_generated_features(run) or can_show(run)


def tsne_generated(run: FinishedRun) -> AnalysisResult:
    """``embedding`` float [N, 2], ``labels`` int [N], ``generated`` bool [N], ``class_names``."""
    experiment = run.experiment
    answers = ModelOutputs(run)
    model, name = answers.reference_model()
    rows = images_shown(run, answers.labels, 2)
    real, labels = answers.features(model, answers.images[rows]), answers.labels[rows]
    per_class = len(rows) // len(torch.unique(labels))
    made, made_labels = generated_features(run, per_class)
    of_those = torch.isin(made_labels, labels)
    made, made_labels = made[of_those], made_labels[of_those]
    return AnalysisResult(
        {
            "embedding": embed(torch.cat([real, made])),
            "labels": torch.cat([labels, made_labels]).numpy(),
            "generated": np.repeat([False, True], [len(real), len(made)]),
            "class_names": class_names(experiment),
        },
        notes=(f"Real: test features of {name}.", *caption(run, labels.numpy())),
    )


def generator_distances(run: FinishedRun) -> AnalysisResult:
    """Distances as in :func:`class_distances`, of generated and real features, in their space and in a t-SNE of it.

    Columns: ``features`` (generated, real), ``space`` (feature, tsne), ``intra``, ``inter``, ``centroid_inter``, and
    for generated features ``nearest_distance`` and ``nearest_cosine`` to real training features of the class.
    """
    experiment = run.experiment
    answers = ModelOutputs(run)
    model, name = answers.reference_model()
    rows = equal_per_class(answers.labels, PER_CLASS, 0, "t-SNE samples")
    real, real_labels = answers.features(model, answers.images[rows]), answers.labels[rows]
    made, labels = generated_features(run, PER_CLASS)
    split = experiment.dataset.train
    held = torch.unique(torch.cat([torch.from_numpy(client.train.copy()) for client in experiment.partition.clients]))
    trained_on = held[equal_or_fewer(split.labels[held], MOST_REAL)]
    trained = answers.features(model, split.images[trained_on])
    nearest = nearest_real(made, labels, trained, split.labels[trained_on])
    table: list[Row] = []
    for which, features, own in (("generated", made, labels), ("real", real, real_labels)):
        for space in ("feature", "tsne"):
            points = features if space == "feature" else torch.from_numpy(embed(features))
            values = class_distances(points, own)
            if which == "generated" and space == "feature":
                values |= nearest
            columns = ("intra", "inter", "centroid_inter", "nearest_distance", "nearest_cosine")
            table.append({"features": which, "space": space, **{column: values.get(column) for column in columns}})
    notes = (
        f"{PER_CLASS} generated features per class; real: test features of {name}.",
        "t-SNE distances are of each embedding's own scale: no evidence across runs.",
    )
    return AnalysisResult(rows=tuple(table), notes=notes)


def generated_features(run: FinishedRun, per_class: int) -> tuple[Tensor, Tensor]:
    """Features [n, d] and labels [n], on the CPU, always from the same noise.

    Raises:
        ValueError: the method generates none.
    """
    experiment = run.experiment
    found = _generated(run, per_class)
    if found is None:
        raise ValueError(f"{experiment.method.name} generates no features")
    return found[0].cpu(), found[1].cpu()


def equal_or_fewer(labels: Tensor, most: int) -> Tensor:
    """Positions of the first ``most`` samples of every class, ascending."""
    chosen = [(labels == label).nonzero().flatten()[:most] for label in torch.unique(labels).tolist()]
    return torch.cat(chosen).sort().values


def _generated(run: FinishedRun, per_class: int) -> tuple[Tensor, Tensor] | None:
    experiment, server = run.experiment, run.server
    stream = torch_stream(0, "generated features")
    with torch.no_grad():
        return experiment.method.generated_features(server, experiment.setting, per_class, stream)
