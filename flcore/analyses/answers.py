"""The models of a finished run and their outputs."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from flcore.analyses.base import FinishedRun
from flcore.evaluation.eval_data import eval_data
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.model_selection import global_model_of, personal_model, private_model, scoring_messages
from flcore.io.messages import Weights
from flcore.io.records import Record, on_device
from flcore.methods.api import Method
from flcore.methods.kit.on_top import WrapperMethod
from flcore.methods.types import Predict, with_statistics
from flcore.models.base import Backbone

BEFORE_CALIBRATION = "before_calibration"
"""The answer before a server's calibration (:meth:`flcore.methods.api.Method.predictors`)."""


def is_calibrated(method: Method, server: Record) -> TypeGuard[WrapperMethod]:
    """Return whether the server holds a calibrated model and the one before it."""
    if BEFORE_CALIBRATION not in method.predictors() or not isinstance(method, WrapperMethod):
        return False
    return method.global_model(server) is not method.base_model(server)


class ModelOutputs:
    """A run's models and their outputs, the same as are scored.

    Attributes:
        images: the global test images (with ``evaluation.split: validation`` the clients' validation images), uint8.
        labels: theirs, int64.
    """

    def __init__(self, run: FinishedRun) -> None:
        """Build a model; nothing is computed yet."""
        self._run, self._experiment = run, run.experiment
        self._forward = Forward(run.experiment)
        self._data = eval_data(run.experiment)
        self.server = on_device(run.server, run.experiment.config.engine.device)
        self.images = self._data.images[: self._data.num_shared]
        self.labels = self._data.shared_labels

    def client_state(self, client: int) -> Record:
        """Return a client's state; empty where training is centralised."""
        return Record() if self._experiment.method.data_scope == "union" else self._run.client_states(client)

    def global_model(self) -> Weights | None:
        """Return the global model with the statistics that it is scored with; None where there is none."""
        return global_model_of(self._experiment, self.server, self.client_state)

    def own_model(self, client: int) -> Weights | None:
        """Return the model that answers for this client alone; None where the global one or an ensemble does."""
        if self._experiment.method.ignores_model:
            return None
        (received,) = scoring_messages(self._experiment, self.server, [client])
        return personal_model(self._experiment, received, self.client_state(client))

    def trained_model(self, client: int) -> Weights | None:
        """Return a client's locally trained model; None before its first training, or where runs do not keep it."""
        client_state = on_device(self.client_state(client), self._experiment.config.engine.device)
        trained = private_model(client_state)
        return None if trained is None else with_statistics(trained, client_state, self._experiment.setting)

    def reference_model(self) -> tuple[Weights, str]:
        """Return one model to look at, and its name in words."""
        model = self.global_model()
        if model is not None:
            return model, "the global model"
        own = self.own_model(0)
        assert own is not None  # a method without a global model answers with clients' models
        return own, "client 0's model (there is no global one)"

    def uncalibrated_model(self) -> Weights | None:
        """Return the global model before the server's calibration; None where there was none."""
        method = self._experiment.method
        if not is_calibrated(method, self.server):
            return None
        return global_model_of(self._experiment, self.server, self.client_state, method.base_model(self.server))

    def own_test(self, client: int) -> tuple[Tensor, Tensor]:
        """Return images and labels that a client is scored on."""
        rows = self._data.clients[client]
        return self._data.images[rows], self._data.labels[rows]

    def classes(self, client: int) -> Tensor:
        """Return the classes that a client has met in training, bool [K]."""
        stream = self._experiment.stream
        return torch.from_numpy(stream.met(stream.rounds))[client]

    def predictions(
        self, weights: Weights, images: Tensor, client: int | None = None, *, trained: bool = False
    ) -> Tensor:
        """Return the predicted classes, int64 [N], as scoring does.

        Args:
            weights: of the model. images: uint8 (or floating ones on 0 to 255) [N, C, H, W].
            client: its owner; None for the global model, which answers at the server.
            trained: the client's model is as its training left it.
        """
        method = self._experiment.method
        return self.predictions_by(method.predict_private if trained else method.predict, weights, images, client)

    def predictions_by(self, way: Predict, weights: Weights, images: Tensor, client: int | None = None) -> Tensor:
        """Return the classes that score highest in a given way to predict, int64 [N]."""
        if len(images) == 0:
            return torch.zeros(0, dtype=torch.int64)
        return self._asked(way, weights, images, client).argmax(dim=1)

    def projections(self, weights: Weights, images: Tensor, client: int | None = None) -> Tensor:
        """Return what the method compares with a frame or prototypes in place of features, [N, p]."""
        projected = self._experiment.method.projections
        assert projected is not None  # see has_projections
        return self._asked(projected, weights, images, client)

    def _asked(self, way: Predict, weights: Weights, images: Tensor, client: int | None) -> Tensor:
        known, held, device = self.server, None, self._experiment.config.engine.device
        if client is not None:
            (received,) = scoring_messages(self._experiment, self.server, [client])
            known, held = on_device(self.client_state(client), device) | received, self.classes(client).to(device)
        return self._forward.answers(weights, StoredImages(self._experiment, images), {"": way}, known, held)[""]

    def logits(self, weights: Weights, images: Tensor) -> Tensor:
        """Return the network's own logits [N, K] of real classes, whatever the method predicts with."""
        return self._part(weights, images, "logits")[:, : self._experiment.setting.num_classes]

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        """Return features [N, d], float32 on the CPU."""
        return self._part(weights, images, "features")

    def encoded(self, weights: Weights, images: Tensor) -> Tensor:
        """Return the projection's input [N, e], float32 on the CPU; the features where there is no projection."""
        return self._part(weights, images, "encode")

    def _part(self, weights: Weights, images: Tensor, part: str) -> Tensor:
        return self._forward.part(weights, StoredImages(self._experiment, images), part).cpu()

    def module(self, weights: Weights) -> Backbone:
        """Return the model in evaluation mode; the same object for every call, with the weights of the last one."""
        return self._forward.with_weights(with_statistics(weights, {}, self._experiment.setting))

    def training_images(self, client: int, label: int) -> Tensor:
        """Return a client's training images of a class, uint8."""
        own = torch.from_numpy(self._experiment.partition.clients[client].train.copy())
        split = self._experiment.dataset.train
        return split.images[own[split.labels[own] == label]]
