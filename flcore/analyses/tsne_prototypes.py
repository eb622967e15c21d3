"""Prototypes over the feature cloud of a client (evaluation.md V4; FedCSPC figure 7).

t-SNE cannot place further points in a finished embedding, so features and all prototypes are embedded together: the
means of k = 1, 2 and 4 clusters of each class of the client, and the server's prototypes where it holds any. These are
means of clients' features: where a global model answers, ``evaluation.private`` keeps the client's own, which is looked
at then. Where they are of what the projection reads, and not of features (FedCSPC), that is the space looked at.
"""

from __future__ import annotations

import numpy as np
import torch

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, class_names
from flcore.analyses.embedding import embed
from flcore.core.rng import numpy_stream
from flcore.io.messages import Prototypes
from flcore.io.records import Record
from flcore.math.prototypes.clustering import kmeans

NUM_CLUSTERS = (1, 2, 4)
NUM_CLASSES = 2
MOST_PER_CLASS = 500


def tsne_prototypes(run: FinishedRun) -> AnalysisResult:
    """The client with the most samples of its two largest classes.

    ``embedding`` float [N, 2] of features and prototypes together; ``labels`` int [N]; ``clusters`` int [N]: 0 for a
    feature, k for the mean of one of k clusters, -1 for a prototype of the server; ``client`` int []; ``class_names``.
    """
    experiment = run.experiment
    answers = ModelOutputs(run)
    counts = experiment.partition.counts
    client = int(np.sort(counts, axis=1)[:, -NUM_CLASSES:].sum(axis=1).argmax())
    # Stable, so that of equal classes the first are taken.
    classes = [int(c) for c in np.argsort(-counts[client], kind="stable")[:NUM_CLASSES] if counts[client, c] > 0]
    own, name = answers.trained_model(client), "the client's model as its training left it"
    if own is None:
        own, name = answers.own_model(client), "the client's own model"
    if own is None:
        own, name = answers.reference_model()
    widths = {payload.means.shape[1] for payload in _prototypes(answers.server)}
    images = answers.training_images(client, classes[0])[:1]
    of_encoder = experiment.setting.feature_dim not in widths and answers.encoded(own, images).shape[1] in widths
    look = answers.encoded if of_encoder else answers.features
    points, labels, clusters = [], [], []
    for label in classes:
        features = look(own, answers.training_images(client, label)[:MOST_PER_CLASS])
        parts = [(features, 0)]
        for k in NUM_CLUSTERS:
            found = kmeans(features, k, numpy_stream(0, "prototypes over features", label, k), restarts=5)
            parts.append((found.centres, k))
        parts += [(rows, -1) for rows in _global(answers.server, label, features.shape[1])]
        for rows, k in parts:
            points.append(rows)
            labels += [label] * len(rows)
            clusters += [k] * len(rows)
    return AnalysisResult(
        {
            "embedding": embed(torch.cat(points)),
            "labels": np.array(labels),
            "clusters": np.array(clusters),
            "client": np.array(client),
            "class_names": class_names(experiment),
        },
        notes=(f"{'Encoded training images' if of_encoder else 'Training features'} of client {client} under {name}.",),
    )


def _global(server: Record, label: int, feature_dim: int) -> list[torch.Tensor]:
    """The server's prototypes [1, d] of a class."""
    return [
        payload.means[label : label + 1].cpu()
        for payload in _prototypes(server)
        if payload.means.shape[1] == feature_dim and payload.present[label]
    ]


def _prototypes(server: Record) -> list[Prototypes]:
    return [payload for payload in server.values() if isinstance(payload, Prototypes)]
