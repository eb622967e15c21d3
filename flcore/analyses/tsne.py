"""t-SNE of features (figures V2 to V4 of evaluation.md): test images, calibration, prototypes.

Equally many images of every class, the same for every model; ``evaluation.tsne_clients``, ``tsne_classes`` and
``tsne_samples`` choose them. The draw of a class does not depend on the other classes. Models of several clients share
one embedding: the figure shows that they put the same images at different places.

Before and after a calibration have an embedding each, because their feature spaces are unrelated (FedCSPC figures 9
and 8). The paper does not define figure 8: "two local models", features of the same test images "before and after
calibration", though a calibration touches no local model. It trains the upper layers H on prototypes from all clients'
encoders E_k, so that H(E_i(x)) and H(E_j(x)) fall together within a class (its section 3). So *after* is H(E_k(x)), a
client's encoder with the layers calibrated in that round, and *before* is the locally trained model, H_k(E_k(x)), since
its features are "extracted by different local models". With the averaged H the two would differ by the calibration
alone, but no client has that model. "The classification accuracy of the model" may be the clients' or the global
model's, so both are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flcore.analyses.base import AnalysisResult, FinishedRun, equal_per_class
from flcore.config.sections import MOST_TSNE_CLIENTS
from flcore.core.rng import numpy_stream
from flcore.evaluation.model_selection import private_model
from flcore.io.messages import Prototypes, Weights
from flcore.math.prototypes.clustering import kmeans

PERPLEXITY = 30
COMPONENTS = 50
ITERATIONS = 1000
FEWEST_POINTS = 4
PER_CLASS = 100
MOST_POINTS = 3000
"""Largest embedding, unless ``evaluation.tsne_samples`` asks for more."""

_PROTOTYPE_CLUSTERS = (1, 2, 4)
_PROTOTYPE_CLASSES = 2
_PROTOTYPE_FEATURES = 500  # per class

STATES = ("before calibration", "after calibration")
NETWORK_HEAD = "Predictions of the network's own head."
"""Other predictors of a method belong to the calibrated model."""

Look = Callable[[Weights, Tensor, int | None], Tensor]
"""(model, uint8 images, the model's client) → [N, d], the vectors to embed."""


def embed(features: Tensor) -> NDArray[np.float64]:
    """Return two coordinates per feature: PCA to 50 dimensions, perplexity 30, started from a PCA, seed 0.

    Args:
        features: [n, d], n >= 4, floating. Not standardised.

    Returns:
        float64 [n, 2]; all zero where all features are equal. Below 91 features the perplexity is (n - 1)/3.

    Raises:
        ValueError: fewer than four features, or values that are not finite.
    """
    # Here, because they take seconds to import.
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    points = features.detach().cpu().numpy().astype(np.float64)
    if len(points) < FEWEST_POINTS:
        raise ValueError(f"t-SNE needs at least {FEWEST_POINTS} features, got {len(points)}")
    if not np.isfinite(points).all():
        raise ValueError("t-SNE needs finite features")
    if (points == points[0]).all():
        return np.zeros((len(points), 2))
    with threadpool_limits(1):
        if points.shape[1] > COMPONENTS and len(points) > COMPONENTS:
            points = PCA(COMPONENTS, svd_solver="full").fit_transform(points)
        model = TSNE(
            perplexity=min(PERPLEXITY, (len(points) - 1) / 3),
            init="pca" if points.shape[1] > 1 else "random",
            max_iter=ITERATIONS,
            random_state=0,
            n_jobs=1,
        )
        return np.asarray(model.fit_transform(points), dtype=np.float64)


# ------------------------------------------------------------------------------------------------- clients and images


def clients_shown(run: FinishedRun, model_of: Callable[[int], Weights | None]) -> dict[int, Weights]:
    """Return the models of the chosen clients, or of the first ones; clients without one are left out."""
    wanted = run.experiment.config.evaluation.tsne_clients
    clients = range(run.experiment.setting.num_clients) if wanted is None else wanted
    models = ((client, model) for client in clients if (model := model_of(client)) is not None)
    return dict(islice(models, MOST_TSNE_CLIENTS))


def images_shown(run: FinishedRun, labels: Tensor, models: int = 1) -> Tensor:
    """Return positions of the test images to show, int64, equally many of each class, grouped by class.

    Args:
        run: its configuration chooses them. labels: of all test images, int64 [n].
        models: the number that share an embedding; by default all together have at most `MOST_POINTS` points.
    """
    evaluation = run.experiment.config.evaluation
    classes = torch.unique(labels) if evaluation.tsne_classes is None else torch.tensor(evaluation.tsne_classes)
    rows = torch.isin(labels, classes).nonzero().flatten()
    fitting = max(1, min(PER_CLASS, MOST_POINTS // (len(classes) * models)))
    per_class = fitting if evaluation.tsne_samples is None else evaluation.tsne_samples
    return rows[equal_per_class(labels[rows], per_class, 0, "t-SNE samples")]


def caption(run: FinishedRun, labels: np.ndarray, clients: Iterable[int] = ()) -> tuple[str, ...]:
    """Return notes on a choice by the configuration: missing clients, number of images and classes.

    Args:
        run: the run. labels: of the images shown, [N]. clients: those shown, if any.
    """
    evaluation, shown = run.experiment.config.evaluation, set(clients)
    missing = [client for client in evaluation.tsne_clients or () if shown and client not in shown]
    notes = tuple(f"Client {client} has not trained a model yet." for client in missing)
    if evaluation.tsne_classes is None and evaluation.tsne_samples is None:
        return notes
    classes = np.unique(labels).tolist()
    count = len(labels) // len(classes)
    names = ", ".join(str(run.class_names[label]) for label in classes)
    which = "every class" if evaluation.tsne_classes is None else names
    fewer = "" if evaluation.tsne_samples in (None, count) else f", not {evaluation.tsne_samples}: there are no more"
    return (*notes, f"Images of each class: {count}{fewer}; of {which}.")


def can_show(run: FinishedRun) -> str | None:
    """Require enough test images of the chosen classes."""
    for label in run.experiment.config.evaluation.tsne_classes or ():
        if not (run.labels == label).any():
            return f"no test image shows class {label} of evaluation.tsne_classes"
    count = len(images_shown(run, run.labels))
    return None if count >= FEWEST_POINTS else f"a t-SNE needs {FEWEST_POINTS} images, and {count} can be shown"


def chosen_client_trained(run: FinishedRun) -> str | None:
    """Require a locally trained model of some chosen client."""
    wanted = run.experiment.config.evaluation.tsne_clients or ()
    if wanted and all(private_model(run.client_states(client)) is None for client in wanted):
        return f"of clients {', '.join(map(str, wanted))} none has trained a model yet"
    return None


def has_projections(run: FinishedRun) -> str | None:
    """Require a method that compares projections."""
    method = run.experiment.method
    return f"{method.name} compares features themselves, if anything" if method.projections is None else None


# ----------------------------------------------------------------------------------------------------------- analyses


def tsne(run: FinishedRun) -> AnalysisResult:
    """Embed features of the global model, or of several clients' models where there is none.

    Returns:
        Arrays: ``embedding`` float [M, N, 2], ``predictions`` int [M, N], ``labels`` int [N] (the same samples for all
        models), ``models`` text [M], ``accuracies`` float [M] on the whole test set, ``counts`` int [M, K] (training
        samples of the client; of all clients for the global model), ``class_names``.
    """
    note = "The method has no global model: clients' models, the same images, one embedding."
    return _scored_models(run, _features(run), () if run.global_model() else (note,))


def tsne_trained(run: FinishedRun) -> AnalysisResult:
    """Do :func:`tsne` for locally trained models (FedPG figure 3)."""
    note = "Clients' models as their own training left them, the same images, one embedding."
    return _embedded(run, clients_shown(run, run.trained_model), _features(run), (note,), trained=True)


def tsne_projections(run: FinishedRun) -> AnalysisResult:
    """Do :func:`tsne` for the vectors that the method compares in place of features (GFPL figure 2)."""
    return _scored_models(run, run.projections, ("Projections; the same images, one embedding.",))


def _features(run: FinishedRun) -> Look:
    return lambda model, images, client: run.features(model, images)


def _scored_models(run: FinishedRun, look: Look, notes: tuple[str, ...]) -> AnalysisResult:
    shared = run.global_model()
    return _embedded(run, clients_shown(run, run.own_model) if shared is None else {None: shared}, look, notes)


def _embedded(
    run: FinishedRun,
    models: Mapping[int, Weights] | Mapping[None, Weights],
    look: Look,
    notes: tuple[str, ...],
    *,
    trained: bool = False,
) -> AnalysisResult:
    """Embed the same images under models by client, None for the global one."""
    rows, counts = images_shown(run, run.labels, len(models)), run.experiment.partition.counts
    clients = [client for client in models if client is not None]
    features = [look(model, run.images[rows], client) for client, model in models.items()]
    predicted = [run.predictions(model, run.images, client, trained=trained) for client, model in models.items()]
    arrays = {
        "embedding": embed(torch.cat(features)).reshape(len(models), len(rows), 2),
        **_scored(run, rows, torch.stack(predicted)),
        "models": np.array([f"client {client}" for client in clients] or ["global model"]),
        "counts": counts[clients] if clients else counts.sum(axis=0, keepdims=True),
    }
    return AnalysisResult(arrays, notes=(*notes, *caption(run, arrays["labels"], clients)))


def _scored(run: FinishedRun, rows: Tensor, predicted: Tensor) -> dict[str, np.ndarray]:
    """Return arrays on the predictions [..., n] of all test images; the figure shows ``rows``."""
    return {
        "predictions": predicted[..., rows].numpy(),
        "labels": run.labels[rows].numpy(),
        "accuracies": (predicted == run.labels).double().mean(dim=-1).numpy(),
        "class_names": run.class_names,
    }


def tsne_calibration(run: FinishedRun) -> AnalysisResult:
    """Embed features of the global model before and after.

    Returns:
        Arrays: ``embedding`` float [2, N, 2], ``predictions`` int [2, N], ``labels`` int [N], ``models`` text [2],
        ``accuracies`` float [2] on the whole test set, ``class_names``.
    """
    rows, models = images_shown(run, run.labels), _before_and_after(run)
    arrays = {
        "embedding": np.stack([embed(run.features(model, run.images[rows])) for model in models]),
        **_scored(run, rows, _by_network_head(run, models)),
        "models": np.array(STATES),
    }
    return AnalysisResult(arrays, notes=(NETWORK_HEAD, *caption(run, arrays["labels"])))


def tsne_calibration_trained(run: FinishedRun) -> AnalysisResult:
    """Embed features of locally trained models, and with the calibrated layers in place of theirs.

    A client outside the round has the encoder of its last one.

    Returns:
        Arrays: ``embedding`` float [2, M, N, 2], ``predictions`` int [2, M, N], ``labels`` int [N], ``models`` text
        [M], ``accuracies`` float [2, M] on the whole test set, ``states`` text [2], ``global_accuracies`` float [2] of
        the global model, ``class_names``.
    """
    shared = before, after = _before_and_after(run)
    trained = clients_shown(run, run.trained_model)
    rows, size = images_shown(run, run.labels, len(trained)), len(trained)
    stages = [list(trained.values()), [with_calibrated_weights(own, before, after) for own in trained.values()]]
    features = [torch.cat([run.features(model, run.images[rows]) for model in stage]) for stage in stages]
    predicted = [_by_network_head(run, [*stage, model]) for stage, model in zip(stages, shared, strict=True)]
    scores = _scored(run, rows, torch.stack(predicted))
    arrays = {
        **scores,
        "embedding": np.stack([embed(points).reshape(size, len(rows), 2) for points in features]),
        "predictions": scores["predictions"][:, :size],
        "accuracies": scores["accuracies"][:, :size],
        "global_accuracies": scores["accuracies"][:, size],
        "models": np.array([f"client {client}" for client in trained]),
        "states": np.array(STATES),
    }
    return AnalysisResult(arrays, notes=(NETWORK_HEAD, *caption(run, arrays["labels"], trained)))


def _by_network_head(run: FinishedRun, models: Sequence[Weights]) -> Tensor:
    return torch.stack([run.logits(model, run.images).argmax(dim=1) for model in models])


def _before_and_after(run: FinishedRun) -> tuple[Weights, Weights]:
    models = run.calibrated_models()
    assert models is not None  # see was_calibrated
    return models


def with_calibrated_weights(own: Weights, before: Weights, after: Weights) -> Weights:
    """Return a client's model with the calibrated layers in place of its own.

    Args:
        own: the client's model.
        before, after: the global models. Each part (encoder, projection, head) in which they differ anywhere is
            replaced whole, with tensors that the calibration left unchanged.
    """
    calibrated = {_part(name) for name, value in after.params.items() if not torch.equal(value, before.params[name])}
    params = {name: (after if _part(name) in calibrated else own).params[name] for name in own.params}
    return Weights(params, own.buffers)


def _part(name: str) -> str:
    return name.partition(".")[0]


def tsne_prototypes(run: FinishedRun) -> AnalysisResult:
    """Embed features and prototypes of the client with the most samples of its two largest classes (FedCSPC figure 7).

    The prototypes are the means of k = 1, 2 and 4 clusters of each of these classes, and the server's, if any. t-SNE
    cannot add points to a finished embedding, so all are embedded together. The server's are means of clients'
    features, so the model is the client's locally trained one, where ``evaluation.private`` keeps it. Prototypes of the
    projection's input (FedCSPC) are shown in that space.

    Returns:
        Arrays: ``embedding`` float [N, 2] of features and prototypes; ``labels`` int [N]; ``clusters`` int [N]: 0 for a
        feature, k for the mean of one of k clusters, -1 for a prototype of the server; ``client`` int [];
        ``class_names``.
    """
    counts = run.experiment.partition.counts
    client = int(np.sort(counts, axis=1)[:, -_PROTOTYPE_CLASSES:].sum(axis=1).argmax())
    # Stable: the first of equal classes are taken.
    classes = [int(c) for c in np.argsort(-counts[client], kind="stable")[:_PROTOTYPE_CLASSES] if counts[client, c] > 0]
    model, name = run.trained_model(client), "the client's model as its training left it"
    if model is None:
        model, name = run.own_model(client), "the client's own model"
    if model is None:
        model, name = run.reference_model()
    known = [payload for payload in run.server.values() if isinstance(payload, Prototypes)]
    widths = {payload.means.shape[1] for payload in known}
    width = run.encoded(model, run.training_images(client, classes[0])[:1]).shape[1]
    of_encoder = run.experiment.setting.feature_dim not in widths and width in widths
    points, labels, clusters = [], [], []
    for label in classes:
        features = (run.encoded if of_encoder else run.features)(
            model, run.training_images(client, label)[:_PROTOTYPE_FEATURES]
        )
        parts = [(features, 0)]
        for k in _PROTOTYPE_CLUSTERS:
            found = kmeans(features, k, numpy_stream(0, "prototypes over features", label, k), restarts=5)
            parts.append((found.centres, k))
        fitting = [payload for payload in known if payload.means.shape[1] == features.shape[1]]
        parts += [(payload.means[label : label + 1].cpu(), -1) for payload in fitting if payload.present[label]]
        for rows, k in parts:
            points.append(rows)
            labels += [label] * len(rows)
            clusters += [k] * len(rows)
    arrays = {
        "embedding": embed(torch.cat(points)),
        "labels": np.array(labels),
        "clusters": np.array(clusters),
        "client": np.array(client),
        "class_names": run.class_names,
    }
    kind = "Encoded training images" if of_encoder else "Training features"
    return AnalysisResult(arrays, notes=(f"{kind} of client {client} under {name}.",))
