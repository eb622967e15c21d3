"""Prototypes among the features of a client (evaluation.md V4; FedCSPC figure 7).

t-SNE cannot add points to a finished embedding, so features and prototypes are embedded together: the means of k = 1, 2
and 4 clusters of each class of the client, and the server's prototypes, if any. These are means of clients' features,
so the features come from the client's locally trained model, where ``evaluation.private`` keeps it. Prototypes of
the projection's input (FedCSPC) are shown in that space.
"""

from __future__ import annotations

import numpy as np
import torch

from flcore.analyses.base import AnalysisResult, FinishedRun
from flcore.analyses.tsne import embed
from flcore.core.rng import numpy_stream
from flcore.io.messages import Prototypes
from flcore.math.prototypes.clustering import kmeans

NUM_CLUSTERS = (1, 2, 4)
NUM_CLASSES = 2
MOST_PER_CLASS = 500


def tsne_prototypes(run: FinishedRun) -> AnalysisResult:
    """Embed features of the client with the most samples of its two largest classes.

    Returns:
        Arrays: ``embedding`` float [N, 2] of features and prototypes; ``labels`` int [N]; ``clusters`` int [N]: 0 for a
        feature, k for the mean of one of k clusters, -1 for a prototype of the server; ``client`` int [];
        ``class_names``.
    """
    counts = run.experiment.partition.counts
    client = int(np.sort(counts, axis=1)[:, -NUM_CLASSES:].sum(axis=1).argmax())
    # Stable, so that of equal classes the first are taken.
    classes = [int(c) for c in np.argsort(-counts[client], kind="stable")[:NUM_CLASSES] if counts[client, c] > 0]
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
            model, run.training_images(client, label)[:MOST_PER_CLASS]
        )
        parts = [(features, 0)]
        for k in NUM_CLUSTERS:
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
