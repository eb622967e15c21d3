"""GradCAM before and after calibration (evaluation.md 5.2; FedCSPC figure 9; Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.analyses.base import AnalysisResult, FinishedRun, Row
from flcore.data.images import normalise
from flcore.models import Backbone

CASES = ("kept right", "mended", "broken", "still wrong")
EXAMPLES = 3
"""Images shown of every case."""


def gradcam(module: Backbone, images: Tensor, classes: Tensor) -> Tensor:
    """Return GradCAM maps on the last convolution of the encoder, [N, H, W] in [0, 1].

    A: activations [h, w, m], G = ∂ logit_class/∂A, weight_m = mean of G over space; the map is ReLU(Σ_m weight_m A_m),
    enlarged bilinearly to the image and divided by its maximum. A map that is zero everywhere stays zero.

    Args:
        module: is put into evaluation mode; its parameters need no gradient and get none.
        images: normalised, [N, C, H, W].
        classes: int64 [N]; the maps are of the network's own logits of these.

    Raises:
        ValueError: the encoder has no convolution.
    """
    module.eval()
    seen: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(output)
        return output.clone()  # later layers may work in place

    layers = [layer for layer in module.encoder.modules() if isinstance(layer, nn.Conv2d)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.enable_grad():
            logits = module(images.detach().requires_grad_())[1]
            if not seen:
                raise ValueError("GradCAM needs a model with a convolution in its encoder")
            # Samples are independent in evaluation mode, so the gradient of the sum holds each gradient.
            (gradient,) = torch.autograd.grad(logits.gather(1, classes.unsqueeze(1)).sum(), seen[-1])
    finally:
        for handle in handles:
            handle.remove()
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    maps = (weights * seen[-1].detach()).sum(dim=1, keepdim=True).relu()
    maps = F.interpolate(maps, size=tuple(images.shape[-2:]), mode="bilinear", align_corners=False).squeeze(1)
    highest = maps.amax(dim=(1, 2), keepdim=True)
    return torch.where(highest > 0, maps / torch.where(highest > 0, highest, 1.0), 0.0)


def case_lists(before: Tensor, after: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return ascending positions by case, int64: both right, wrong then right, right then wrong, both wrong.

    Args:
        before, after: predicted classes, int64 [N]. labels: int64 [N].
    """
    was, is_now = before == labels, after == labels
    masks = (was & is_now, ~was & is_now, was & ~is_now, ~was & ~is_now)
    return {case: mask.nonzero().flatten() for case, mask in zip(CASES, masks, strict=True)}


def clearest(rows: Tensor, before: Tensor, after: Tensor, count: int) -> Tensor:
    """Return the ``count`` positions of highest margin (first class minus second), added up over both models.

    Args:
        rows: positions, int64; of equal margins the smaller position comes first.
        before, after: logits [N, K] of all samples, K >= 2.
    """
    margin = torch.zeros(len(rows), dtype=torch.float64)
    for logits in (before, after):
        top = logits[rows].double().softmax(dim=1).topk(2, dim=1).values
        margin += top[:, 0] - top[:, 1]
    return rows[torch.argsort(margin, descending=True, stable=True)[:count]]


def gradcam_cases(run: FinishedRun) -> AnalysisResult:
    """Count each case, and map examples under both models.

    Returns:
        Rows: ``case``, ``count``, ``share`` of the test set. Arrays, n examples in the order of the cases: ``images``
        uint8 [n, C, H, W], ``before`` and ``after`` float32 [n, H, W] (maps for the true class), ``labels``,
        ``predicted_before``, ``predicted_after`` int [n], ``cases`` text [n], ``class_names``.
    """
    models = run.calibrated_models()
    assert models is not None  # see was_calibrated
    before, after = (run.logits(model, run.images) for model in models)
    lists = case_lists(before.argmax(1), after.argmax(1), run.labels)
    shown = {case: clearest(rows, before, after, EXAMPLES) for case, rows in lists.items()}
    chosen = torch.cat(list(shown.values()))
    meta, device = run.experiment.dataset.meta, run.experiment.config.engine.device
    images, labels = run.images[chosen], run.labels[chosen]
    inputs = normalise(images.to(device), meta.mean, meta.std)
    maps = [gradcam(run.module(model), inputs, labels.to(device)).cpu().numpy() for model in models]
    table: tuple[Row, ...] = tuple(
        {"case": case, "count": len(rows), "share": len(rows) / len(run.labels)} for case, rows in lists.items()
    )
    arrays = {
        "images": images.numpy(),
        "before": maps[0],
        "after": maps[1],
        "labels": labels.numpy(),
        "predicted_before": before[chosen].argmax(1).numpy(),
        "predicted_after": after[chosen].argmax(1).numpy(),
        "cases": np.repeat(CASES, [len(rows) for rows in shown.values()]),
        "class_names": run.class_names,
    }
    note = "Maps of the true class's logit; the examples of the highest margin; predictions of the network's own head."
    return AnalysisResult(arrays, table, (note,))


def has_convolution(run: FinishedRun) -> str | None:
    """Require a convolution in the encoder."""
    if any(isinstance(layer, nn.Conv2d) for layer in run.experiment.new_module().encoder.modules()):
        return None
    return f"{run.experiment.config.model_spec.name} has no convolution"
