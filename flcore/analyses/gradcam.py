"""GradCAM before and after calibration (evaluation.md 5.2; FedCSPC figure 9; Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, Row, class_names
from flcore.analyses.tsne_calibration import keeps_uncalibrated
from flcore.data.images import normalise
from flcore.models import Backbone

CASES = ("kept right", "mended", "broken", "still wrong")
EXAMPLES = 3
"""Images shown of every case."""


def gradcam(module: Backbone, images: Tensor, classes: Tensor) -> Tensor:
    """Where an image speaks for a class: GradCAM on the last convolution of the encoder.

    A: activations [h, w, m], G = ∂ logit_class/∂A, weight_m = mean of G over space; the map is ReLU(Σ_m weight_m A_m),
    enlarged bilinearly to the image and divided by its maximum. A map that is zero everywhere stays zero.

    Args:
        module: is put into evaluation mode; its parameters need no gradient and get none.
        images: normalised, ``[N, C, H, W]``.
        classes: int64 ``[N]``, whose logit is looked at: the network's own, whatever else the method predicts with.

    Returns:
        ``[N, H, W]`` in [0, 1].

    Raises:
        ValueError: the encoder has no convolution.
    """
    module.eval()
    seen: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(output)
        return output.clone()  # what follows may work in place, and must not change what was kept

    layers = [layer for layer in module.encoder.modules() if isinstance(layer, nn.Conv2d)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.enable_grad():
            logits = module(images.detach().requires_grad_())[1]
            if not seen:
                raise ValueError("GradCAM needs a model with a convolution in its encoder")
            # Samples do not meet in evaluation mode, so the gradient of the sum is every sample's own.
            chosen = logits.gather(1, classes.unsqueeze(1)).sum()
            (gradient,) = torch.autograd.grad(chosen, seen[-1])
    finally:
        for handle in handles:
            handle.remove()
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    maps = (weights * seen[-1].detach()).sum(dim=1, keepdim=True).relu()
    maps = F.interpolate(maps, size=tuple(images.shape[-2:]), mode="bilinear", align_corners=False).squeeze(1)
    highest = maps.amax(dim=(1, 2), keepdim=True)
    return torch.where(highest > 0, maps / torch.where(highest > 0, highest, 1.0), 0.0)


def case_lists(before: Tensor, after: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The four kinds of samples by two models' predictions; together every sample once.

    Args:
        before: predicted classes, int64 ``[N]``. after: likewise. labels: int64 ``[N]``.

    Returns:
        Positions, int64 ascending, of `CASES`: both right, wrong then right, right then wrong, both wrong.
    """
    was, is_now = before == labels, after == labels
    masks = (was & is_now, ~was & is_now, was & ~is_now, ~was & ~is_now)
    return {case: mask.nonzero().flatten() for case, mask in zip(CASES, masks, strict=True)}


def clearest(rows: Tensor, before: Tensor, after: Tensor, count: int) -> Tensor:
    """Of some samples those of the highest margin: the gap between the two largest probabilities, of both models.

    Args:
        rows: positions, int64.
        before: logits ``[N, K]`` of all samples, K >= 2. after: likewise.
        count: how many at most.

    Returns:
        Positions, the highest sum of both margins first; of equal ones the smaller position first.
    """
    margin = torch.zeros(len(rows), dtype=torch.float64)
    for logits in (before, after):
        top = logits[rows].double().softmax(dim=1).topk(2, dim=1).values
        margin += top[:, 0] - top[:, 1]
    return rows[torch.argsort(margin, descending=True, stable=True)[:count]]


def gradcam_cases(run: FinishedRun) -> AnalysisResult:
    """How often each case occurs, and GradCAM of examples under both models.

    Rows: ``case``, ``count``, ``share`` of the test set. Arrays, n examples in the order of the cases: ``images`` uint8
    [n, C, H, W], ``before`` and ``after`` float32 [n, H, W] (maps for the true class), ``labels``,
    ``predicted_before``, ``predicted_after`` int [n], ``cases`` text [n], ``class_names``.
    """
    experiment = run.experiment
    answers = ModelOutputs(run)
    after, before = answers.global_model(), answers.uncalibrated_model()
    assert after is not None and before is not None  # see keeps_uncalibrated
    scores = (answers.logits(before, answers.images), answers.logits(after, answers.images))
    lists = case_lists(scores[0].argmax(1), scores[1].argmax(1), answers.labels)
    shown = {case: clearest(rows, *scores, EXAMPLES) for case, rows in lists.items()}
    chosen = torch.cat(list(shown.values()))
    meta, device = experiment.dataset.meta, experiment.config.engine.device
    images, labels = answers.images[chosen], answers.labels[chosen]
    inputs = normalise(images.to(device), meta.mean, meta.std)
    maps = [gradcam(answers.module(model), inputs, labels.to(device)).cpu().numpy() for model in (before, after)]
    table: tuple[Row, ...] = tuple(
        {"case": case, "count": len(found), "share": len(found) / len(answers.labels)} for case, found in lists.items()
    )
    arrays = {
        "images": images.numpy(),
        "before": maps[0],
        "after": maps[1],
        "labels": labels.numpy(),
        "predicted_before": scores[0][chosen].argmax(1).numpy(),
        "predicted_after": scores[1][chosen].argmax(1).numpy(),
        "cases": np.repeat(CASES, [len(found) for found in shown.values()]),
        "class_names": class_names(experiment),
    }
    return AnalysisResult(
        arrays,
        table,
        ("Maps of the true class's logit; the examples of the highest margin; predictions of the network's own head.",),
    )


def can_compare_maps(run: FinishedRun) -> str | None:
    """Why there are no two models with maps to compare."""
    experiment = run.experiment
    reason = keeps_uncalibrated(run)
    if reason is None and not any(isinstance(layer, nn.Conv2d) for layer in experiment.new_module().encoder.modules()):
        reason = f"{experiment.config.model_spec.name} has no convolution"
    return reason
