"""t-SNE before and after a server's calibration: of the global model, and of local models (FedCSPC figures 9 and 8).

Before and after get an embedding each, because their feature spaces need not have anything in common.

What figure 8 shows is not written out: "two local models", and features of the same test images "before and after
calibration". A calibration touches no local model. It trains the upper layers H and F on prototypes out of all clients'
encoders E_k, so that H(E_i(x)) and H(E_j(x)) fall together for images of a class (section 3 of the paper). So here
*after* is a client's encoder below what the server calibrated in that round, H(E_k(x)), which is what it is trained
for; *before* is the client's model as its training left it, H_k(E_k(x)), for the figure's features are "extracted by
different local models". With the averaged H in its place the two would differ by the calibration alone, but that is
nobody's model. The accuracy of the global model is shown beside the clients', as "the classification accuracy of the
model" may be either.
"""

from __future__ import annotations

import numpy as np
import torch

from flcore.analyses.answers import BEFORE_CALIBRATION, ModelOutputs, is_calibrated
from flcore.analyses.base import AnalysisResult, FinishedRun, class_names, needs_global_model
from flcore.analyses.embedding import embed
from flcore.analyses.shown import can_show, can_show_trained, caption, clients_shown, images_shown
from flcore.io.messages import Weights

STATES = ("before calibration", "after calibration")
OWN_HEAD = "Predictions of the network's own head."
"""What else a method answers with belongs to the calibrated model."""


def tsne_calibration(run: FinishedRun) -> AnalysisResult:
    """The global model before and after.

    ``embedding`` float [2, N, 2], ``predictions`` int [2, N], ``labels`` int [N], ``models`` text [2], ``accuracies``
    float [2] on the whole test set, ``class_names``.
    """
    answers = ModelOutputs(run)
    rows = images_shown(run, answers.labels)
    models = _global_models(answers)
    predictions = torch.stack([answers.logits(model, answers.images).argmax(dim=1) for model in models])
    return AnalysisResult(
        {
            "embedding": np.stack([embed(answers.features(model, answers.images[rows])) for model in models]),
            "predictions": predictions[:, rows].numpy(),
            "accuracies": (predictions == answers.labels).double().mean(dim=1).numpy(),
            "labels": answers.labels[rows].numpy(),
            "models": np.array(STATES),
            "class_names": class_names(run.experiment),
        },
        notes=(OWN_HEAD, *caption(run, answers.labels[rows].numpy())),
    )


def tsne_calibration_trained(run: FinishedRun) -> AnalysisResult:
    """Clients' models as their training left them, and with the calibrated layers in place of their own.

    M clients in one embedding before and in one after: ``embedding`` float [2, M, N, 2], ``predictions`` int [2, M, N],
    ``labels`` int [N], ``models`` text [M], ``accuracies`` float [2, M] on the whole test set, ``states`` text [2],
    ``global_accuracies`` float [2] of the global model, ``class_names``. A client that was not in the round has the
    encoder of its last turn.
    """
    answers = ModelOutputs(run)
    before, after = _global_models(answers)
    trained = clients_shown(run, answers.trained_model)
    rows = images_shown(run, answers.labels, len(trained))
    images, count = answers.images[rows], len(trained)
    # The global model stands behind the clients': its accuracy is shown, its features are not.
    stages = (
        [*trained.values(), before],
        [*(with_calibrated_weights(own, before, after) for own in trained.values()), after],
    )
    features = [torch.cat([answers.features(model, images) for model in stage[:count]]) for stage in stages]
    predictions = torch.stack(
        [torch.stack([answers.logits(model, answers.images).argmax(dim=1) for model in stage]) for stage in stages]
    )
    accuracies = (predictions == answers.labels).double().mean(dim=2).numpy()
    return AnalysisResult(
        {
            "embedding": np.stack([embed(points).reshape(count, len(rows), 2) for points in features]),
            "predictions": predictions[:, :count, rows].numpy(),
            "accuracies": accuracies[:, :count],
            "global_accuracies": accuracies[:, count],
            "labels": answers.labels[rows].numpy(),
            "models": np.array([f"client {client}" for client in trained]),
            "states": np.array(STATES),
            "class_names": class_names(run.experiment),
        },
        notes=(OWN_HEAD, *caption(run, answers.labels[rows].numpy(), trained)),
    )


def with_calibrated_weights(own: Weights, before: Weights, after: Weights) -> Weights:
    """A client's model with the calibrated layers in place of its own.

    Args:
        own: the client's model.
        before: the global model before the calibration. after: the same after it. Parts of the network (encoder,
            projection, head) in which they differ anywhere are taken whole: a tensor that a calibration happens to
            leave as it was belongs to its layers all the same.
    """
    calibrated = {_part(name) for name, value in after.params.items() if not torch.equal(value, before.params[name])}
    params = {name: (after if _part(name) in calibrated else own).params[name] for name in own.params}
    return Weights(params, own.buffers)


def keeps_uncalibrated(run: FinishedRun) -> str | None:
    """Why there is nothing to compare with the calibrated model; None where there was a calibration."""
    reason, method = needs_global_model(run), run.experiment.method
    if reason is None and not is_calibrated(method, run.server):
        known = BEFORE_CALIBRATION in method.predictors()
        reason = f"{method.name} " + ("did not calibrate then" if known else "has no state before a calibration")
    return reason


def can_show_calibration(run: FinishedRun) -> str | None:
    """Why there are no two global models, or no images, to show; None where there are."""
    return keeps_uncalibrated(run) or can_show(run)


def can_show_calibration_trained(run: FinishedRun) -> str | None:
    """Why there are no local models before and after, or no images, to show; None where there are."""
    return keeps_uncalibrated(run) or can_show_trained(run)


def _global_models(answers: ModelOutputs) -> tuple[Weights, Weights]:
    """Before and after the calibration; see :func:`keeps_uncalibrated`."""
    before, after = answers.uncalibrated_model(), answers.global_model()
    assert before is not None and after is not None
    return before, after


def _part(name: str) -> str:
    return name.partition(".")[0]
