"""Generated features among real ones (evaluation.md V5), their distances (V12, FedPA's table V), and virtual images.

Features are drawn from one fixed stream of noise, so an untrained generator gives the same values in every run that
starts from the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.base import AnalysisResult, FinishedRun, Row, equal_per_class
from flcore.analyses.tsne import caption, embed, images_shown
from flcore.core.rng import torch_stream
from flcore.math.prototypes.class_means import class_distances, nearest_real

GENERATED_PER_CLASS = 100
REAL_PER_CLASS = 200
"""Real training features to which generated ones are compared; each costs a pass of the model."""

SHEET_COLUMNS = 12
_GAP = 1  # white pixels between two images


def has_generated_features(run: FinishedRun) -> str | None:
    """Require a server that can generate features."""
    if _generated(run, 1) is None:
        return f"the server of {run.experiment.method.name} holds nothing that generates features"
    return None


def tsne_generated(run: FinishedRun) -> AnalysisResult:
    """Embed generated and real features together.

    Returns:
        Arrays: ``embedding`` float [N, 2], ``labels`` int [N], ``generated`` bool [N], ``class_names``.
    """
    model, name = run.reference_model()
    rows = images_shown(run, run.labels, 2)
    real, labels = run.features(model, run.images[rows]), run.labels[rows]
    generated, of_generated = generated_features(run, len(rows) // len(torch.unique(labels)))
    shown = torch.isin(of_generated, labels)
    arrays = {
        "embedding": embed(torch.cat([real, generated[shown]])),
        "labels": torch.cat([labels, of_generated[shown]]).numpy(),
        "generated": np.repeat([False, True], [len(real), int(shown.sum())]),
        "class_names": run.class_names,
    }
    return AnalysisResult(arrays, notes=(f"Real: test features of {name}.", *caption(run, labels.numpy())))


def generator_distances(run: FinishedRun) -> AnalysisResult:
    """Measure :func:`class_distances` of generated and real features, in their space and in a t-SNE of it.

    Returns:
        Rows: ``features`` (generated, real), ``space`` (feature, tsne), ``intra``, ``inter``, ``centroid_inter``; of
        generated features also ``nearest_distance`` and ``nearest_cosine`` to real training features of the class.
    """
    model, name = run.reference_model()
    rows = equal_per_class(run.labels, GENERATED_PER_CLASS, 0, "t-SNE samples")
    generated, labels = generated_features(run, GENERATED_PER_CLASS)
    split, clients = run.experiment.dataset.train, run.experiment.partition.clients
    samples = torch.unique(torch.cat([torch.from_numpy(client.train.copy()) for client in clients]))
    of_class = [samples[split.labels[samples] == label] for label in torch.unique(split.labels[samples]).tolist()]
    samples = torch.cat([own[:REAL_PER_CLASS] for own in of_class]).sort().values
    trained = run.features(model, split.images[samples])
    nearest = nearest_real(generated, labels, trained, split.labels[samples])
    sets = {"generated": (generated, labels), "real": (run.features(model, run.images[rows]), run.labels[rows])}
    columns = ("intra", "inter", "centroid_inter", "nearest_distance", "nearest_cosine")
    table: list[Row] = []
    for which, (features, classes) in sets.items():
        for space in ("feature", "tsne"):
            points = features if space == "feature" else torch.from_numpy(embed(features))
            values = class_distances(points, classes)
            if (which, space) == ("generated", "feature"):
                values |= nearest
            table.append({"features": which, "space": space, **{column: values.get(column) for column in columns}})
    notes = (
        f"{GENERATED_PER_CLASS} generated features per class; real: test features of {name}.",
        "t-SNE distances are of each embedding's own scale: no evidence across runs.",
    )
    return AnalysisResult(rows=tuple(table), notes=notes)


def generated_features(run: FinishedRun, per_class: int) -> tuple[Tensor, Tensor]:
    """Return features [n, d] and labels [n], on the CPU, from the same noise in every call.

    Raises:
        ValueError: the method generates none.
    """
    found = _generated(run, per_class)
    if found is None:
        raise ValueError(f"{run.experiment.method.name} generates no features")
    return found[0].cpu(), found[1].cpu()


def _generated(run: FinishedRun, per_class: int) -> tuple[Tensor, Tensor] | None:
    stream, experiment = torch_stream(0, "generated features"), run.experiment
    with torch.no_grad():
        return experiment.method.generated_features(run.server, experiment.setting, per_class, stream)


def has_virtual_images(run: FinishedRun) -> str | None:
    """Require virtual images in the last broadcast."""
    missing = run.experiment.method.virtual_images(run.server, run.experiment.setting) is None
    return f"the server of {run.experiment.method.name} holds no virtual images" if missing else None


def virtual_sheet(run: FinishedRun) -> AnalysisResult:
    """Show the virtual images that clients learned from last (FedPG, VHL), a row per class.

    Returns:
        Arrays: ``sheet`` uint8 [H', W', C], C 1 or 3 (see :func:`image_sheet`), and ``class_names`` of its rows.
    """
    images = run.experiment.method.virtual_images(run.server, run.experiment.setting)
    assert images is not None  # see has_virtual_images
    sheet = image_sheet(images, run.experiment.setting.num_classes, SHEET_COLUMNS)
    return AnalysisResult({"sheet": sheet, "class_names": run.class_names})


def image_sheet(images: Tensor, num_classes: int, per_class: int) -> np.ndarray:
    """Return a grid of classes × images, with white lines between images.

    Args:
        images: [K·n, C, H, W] as they travel: uint8, or floating on 0 to 1; class by class, equally many of each.
        num_classes: K.
        per_class: at most n' of every class, the first ones.

    Returns:
        uint8 [K·(H + 1) - 1, n'·(W + 1) - 1, C].
    """
    levels = (255 * images).round() if images.is_floating_point() else images
    pixels = levels.clamp(0, 255).to("cpu", torch.uint8)
    _, channels, height, width = pixels.shape
    rows = pixels.reshape(num_classes, -1, channels, height, width)[:, :per_class]
    sheet = torch.full((num_classes, height + _GAP, rows.shape[1], width + _GAP, channels), 255, dtype=torch.uint8)
    sheet[:, :height, :, :width] = rows.permute(0, 3, 1, 4, 2)
    return sheet.flatten(0, 1).flatten(1, 2)[:-_GAP, :-_GAP].numpy()
