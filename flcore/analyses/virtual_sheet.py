"""The virtual images that clients learned from last (FedPG, VHL): one row per class."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flcore.analyses.base import AnalysisResult, FinishedRun, class_names

IMAGES_PER_CLASS = 12
_GAP = 1  # white pixels between two images


def has_virtual_images(run: FinishedRun) -> str | None:
    """Why there is nothing to look at; None where clients learned from virtual images."""
    if _virtual_images(run) is not None:
        return None
    return f"the server of {run.experiment.method.name} holds no virtual images"


def virtual_sheet(run: FinishedRun) -> AnalysisResult:
    """``sheet`` uint8 [H', W', C], C 1 or 3 (see :func:`image_sheet`), and ``class_names`` of its rows.

    Raises:
        ValueError: the method has none.
    """
    images = _virtual_images(run)
    if images is None:
        raise ValueError(f"{run.experiment.method.name} has no virtual images")
    sheet = image_sheet(images, run.experiment.setting.num_classes, IMAGES_PER_CLASS)
    return AnalysisResult({"sheet": sheet, "class_names": class_names(run.experiment)})


def _virtual_images(run: FinishedRun) -> Tensor | None:
    return run.experiment.method.virtual_images(run.server, run.experiment.setting)


def image_sheet(images: Tensor, num_classes: int, per_class: int) -> np.ndarray:
    """A grid of classes × images.

    Args:
        images: ``[K·n, C, H, W]`` as they travel: uint8, or floating on 0 to 1; class by class, equally many of each.
        num_classes: K.
        per_class: the first so many of every class, or all n if that is fewer.

    Returns:
        uint8 ``[K·(H + 1) - 1, n'·(W + 1) - 1, C]`` with white lines between images.
    """
    levels = (255 * images).round() if images.is_floating_point() else images
    pixels = levels.clamp(0, 255).to("cpu", torch.uint8)
    _, channels, height, width = pixels.shape
    rows = pixels.reshape(num_classes, -1, channels, height, width)[:, :per_class]
    sheet = torch.full((num_classes, height + _GAP, rows.shape[1], width + _GAP, channels), 255, dtype=torch.uint8)
    sheet[:, :height, :, :width] = rows.permute(0, 3, 1, 4, 2)
    return sheet.flatten(0, 1).flatten(1, 2)[:-_GAP, :-_GAP].numpy()
