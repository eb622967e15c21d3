"""The models of a finished run, and what they make of images."""

from __future__ import annotations

import torch
from torch import Tensor

from flcore.engine.client import Worker
from flcore.evaluation.scoring import Memories, Scorer
from flcore.experiment import Experiment
from flcore.messages import Weights
from flcore.methods.vocabulary import with_statistics
from flcore.models import Backbone, load_weights
from flcore.records import Record, on_device, payload_of

BEFORE_CALIBRATION = ("uncalibrated", "model_before")
"""Names in a server's record of the global model (or the changed part of it) as it was before a calibration."""


def name_before(server: Record) -> str | None:
    """The one of :data:`BEFORE_CALIBRATION` that a record has; None where there was no calibration."""
    return next((name for name in BEFORE_CALIBRATION if name in server), None)


class Answers(Scorer):
    """A scorer that shows its models and their answers instead of scores: analyses look at what is scored.

    Attributes:
        images: the global test images (with ``evaluation.split: validation`` the clients' validation images), uint8.
        labels: theirs, int64.
    """

    def __init__(self, experiment: Experiment, server: Record, memories: Memories) -> None:
        """Build a model; nothing is computed yet."""
        super().__init__(Worker(experiment))
        self.server = on_device(server, experiment.config.engine.device)
        self._memories = memories
        self.images = self._data.images[: self._data.num_shared]
        self.labels = self._data.shared_labels

    def memory(self, client: int) -> Record:
        """What a client remembers; nothing where the only trainer stands at the server."""
        return Record() if self._experiment.method.data_scope == "union" else self._memories(client)

    def global_model(self) -> Weights | None:
        """The model that answers for everybody, with the statistics it is scored with; None where there is none."""
        model = self._global_model(self.server, self.memory)
        return None if model is None else with_statistics(model, {}, self._experiment.setting)

    def own_model(self, client: int) -> Weights | None:
        """The model that answers for this client alone; None where the global one does."""
        return self._own_model(self.server, client, self.memory(client))

    def reference_model(self) -> tuple[Weights, str]:
        """The model whose features are looked at where one is enough, and its name in words."""
        model = self.global_model()
        if model is not None:
            return model, "the global model"
        own = self.own_model(0)
        assert own is not None  # a method without a global model answers with clients' models
        return own, "client 0's model (there is no global one)"

    def uncalibrated_model(self) -> Weights | None:
        """The global model before the server's calibration, where the server kept what it changed."""
        after, name = self.global_model(), name_before(self.server)
        if after is None or name is None:
            return None
        before = payload_of(Weights, self.server, name)
        return Weights({**after.params, **before.params}, {**after.buffers, **before.buffers})

    def own_test(self, client: int) -> tuple[Tensor, Tensor]:
        """Images and labels that a client is scored on."""
        rows = self._data.clients[client]
        return self._data.images[rows], self._data.labels[rows]

    def classes(self, client: int) -> Tensor:
        """What a client holds in training, bool [K]."""
        return self._classes(client)

    def scores(self, weights: Weights, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """The method's scores [N, K] for uint8 images (or floating ones on 0 to 255) [N, C, H, W]."""
        return self._scores(weights, images, self.server, classes)

    def predictions(self, weights: Weights, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """The predicted classes, int64 [N]; without images none."""
        if len(images) == 0:
            return torch.zeros(0, dtype=torch.int64)
        return self.scores(weights, images, classes).argmax(dim=1)

    def logits(self, weights: Weights, images: Tensor) -> Tensor:
        """The network's own logits [N, K], whatever else the method predicts with; of real classes only."""
        module = self.module(weights)
        logits = self._worker.over_images(images, lambda batch: module.classify(module.features(batch)))
        return logits[:, : self._experiment.setting.num_classes].cpu()

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        """Features [N, d], float32 on the CPU."""
        module = self.module(weights)
        return self._worker.over_images(images, module.features).cpu()

    def encoded(self, weights: Weights, images: Tensor) -> Tensor:
        """What the projection reads [N, e], float32 on the CPU; the features where there is no projection."""
        module = self.module(weights)
        return self._worker.over_images(images, module.encode).cpu()

    def module(self, weights: Weights) -> Backbone:
        """The model in evaluation mode; it is the same object for every call, with the weights of the last one."""
        load_weights(self._worker.module, with_statistics(weights, {}, self._experiment.setting))
        return self._worker.module.eval()

    def training_images(self, client: int, label: int) -> Tensor:
        """A client's training images of a class, uint8."""
        own = torch.from_numpy(self._experiment.partition.clients[client].train.copy())
        split = self._experiment.dataset.train
        return split.images[own[split.labels[own] == label]]
