"""A finished run as analyses see it, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flcore.core.rng import torch_stream
from flcore.evaluation.eval_data import ScoredData, eval_data
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.model_selection import (
    ClientStates,
    global_model_of,
    personal_model,
    private_model,
    scoring_messages,
)
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record, on_device
from flcore.methods.kit.on_top import WrapperMethod
from flcore.methods.types import Predict, with_statistics
from flcore.models.base import Backbone

Row = Mapping[str, str | int | float | None]

BEFORE_CALIBRATION = "before_calibration"
"""The predictor before a server's calibration (:meth:`flcore.methods.api.Method.predictors`)."""


@dataclass(frozen=True)
class AnalysisResult:
    """The data of an analysis, the only source of its figure.

    Attributes:
        arrays: numbers or text by name.
        rows: a table; all rows have the same columns.
        notes: sentences for the figure's reader.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinishedRun:
    """The models of a finished run and their outputs, the same as are scored.

    Images are uint8, or floating on 0 to 255, [N, C, H, W]. ``client`` is the owner of a model; None for the global
    model, which answers at the server.

    Attributes:
        experiment: the run.
        server: the server's record.
        client_states: client id to its state.
    """

    experiment: Experiment
    server: Record
    client_states: ClientStates

    @cached_property
    def _data(self) -> ScoredData:
        return eval_data(self.experiment)

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self.experiment)

    @cached_property
    def _server(self) -> Record:
        return on_device(self.server, self.experiment.config.engine.device)

    @property
    def images(self) -> Tensor:
        """The global test images (with ``evaluation.split: validation`` the clients' validation images)."""
        return self._data.images[: self._data.num_shared]

    @property
    def labels(self) -> Tensor:
        """The labels of :attr:`images`, int64."""
        return self._data.shared_labels

    @property
    def class_names(self) -> np.ndarray:
        """Names of the classes as text [K]."""
        return np.array(self.experiment.dataset.meta.class_names, dtype=np.str_)

    def client_state(self, client: int) -> Record:
        """Return a client's state; empty where training is centralised."""
        return Record() if self.experiment.method.data_scope == "union" else self.client_states(client)

    def global_model(self) -> Weights | None:
        """Return the global model with the statistics that it is scored with; None where there is none."""
        return global_model_of(self.experiment, self._server, self.client_state)

    def own_model(self, client: int) -> Weights | None:
        """Return the model that answers for this client alone; None where the global one or an ensemble does."""
        if self.experiment.method.ignores_model:
            return None
        (received,) = scoring_messages(self.experiment, self._server, [client])
        return personal_model(self.experiment, received, self.client_state(client))

    def trained_model(self, client: int) -> Weights | None:
        """Return a client's locally trained model; None before its first training, or where runs do not keep it."""
        client_state = on_device(self.client_state(client), self.experiment.config.engine.device)
        trained = private_model(client_state)
        return None if trained is None else with_statistics(trained, client_state, self.experiment.setting)

    def reference_model(self) -> tuple[Weights, str]:
        """Return one model to look at, and its name in words."""
        model = self.global_model()
        if model is not None:
            return model, "the global model"
        own = self.own_model(0)
        assert own is not None  # a method without a global model answers with clients' models
        return own, "client 0's model (there is no global one)"

    def calibrated_models(self) -> tuple[Weights, Weights] | None:
        """Return the global models before and after the server's calibration; None where there was none."""
        method = self.experiment.method
        if BEFORE_CALIBRATION not in method.predictors() or not isinstance(method, WrapperMethod):
            return None
        base = method.base_model(self._server)
        if method.global_model(self._server) is base:
            return None
        before, after = global_model_of(self.experiment, self._server, self.client_state, base), self.global_model()
        return None if before is None or after is None else (before, after)

    def client_test(self, client: int) -> tuple[Tensor, Tensor]:
        """Return images and labels of a client's test data, of classes that it has not met too."""
        rows = self._data.clients[client]
        return self._data.images[rows], self._data.labels[rows]

    def training_images(self, client: int, label: int) -> Tensor:
        """Return a client's training images of a class, uint8."""
        rows = torch.from_numpy(self.experiment.partition.clients[client].train.copy())
        split = self.experiment.dataset.train
        return split.images[rows[split.labels[rows] == label]]

    def predictions(
        self,
        weights: Weights,
        images: Tensor,
        client: int | None = None,
        *,
        trained: bool = False,
        predict: Predict | None = None,
    ) -> Tensor:
        """Return the predicted classes, int64 [N], as scoring does.

        Args:
            weights: of the model. images: N of them. client: the model's owner.
            trained: the model is a locally trained one.
            predict: another predictor than the method's.
        """
        method = self.experiment.method
        if len(images) == 0:
            return torch.zeros(0, dtype=torch.int64)
        way = predict or (method.predict_private if trained else method.predict)
        return self._outputs(way, weights, images, client).argmax(dim=1)

    def projections(self, weights: Weights, images: Tensor, client: int | None = None) -> Tensor:
        """Return the vectors [N, p] that the method compares with a frame or prototypes in place of features."""
        projected = self.experiment.method.projections
        assert projected is not None  # see has_projections
        return self._outputs(projected, weights, images, client)

    def _outputs(self, way: Predict, weights: Weights, images: Tensor, client: int | None) -> Tensor:
        known, classes, device = self._server, None, self.experiment.config.engine.device
        if client is not None:
            (received,) = scoring_messages(self.experiment, self._server, [client])
            known = on_device(self.client_state(client), device) | received
            stream = self.experiment.stream
            classes = torch.from_numpy(stream.met(stream.rounds))[client].to(device)
        return self._forward.answers(weights, StoredImages(self.experiment, images), {"": way}, known, classes)[""]

    def logits(self, weights: Weights, images: Tensor) -> Tensor:
        """Return the network's own logits [N, K] of real classes, even if the method predicts otherwise."""
        return self._part(weights, images, "logits")[:, : self.experiment.setting.num_classes]

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        """Return features [N, d], float32 on the CPU."""
        return self._part(weights, images, "features")

    def encoded(self, weights: Weights, images: Tensor) -> Tensor:
        """Return the projection's input [N, e], float32 on the CPU; the features where there is no projection."""
        return self._part(weights, images, "encode")

    def _part(self, weights: Weights, images: Tensor, part: str) -> Tensor:
        return self._forward.part(weights, StoredImages(self.experiment, images), part).cpu()

    def module(self, weights: Weights) -> Backbone:
        """Return the model in evaluation mode; the same object for every call, with the weights of the last one."""
        return self._forward.with_weights(with_statistics(weights, {}, self.experiment.setting))


Condition = Callable[[FinishedRun], str | None]
"""Run → the reason against an analysis; None: it is possible."""


@dataclass(frozen=True)
class Analysis:
    """One analysis; a run allows it if all its conditions do."""

    compute: Callable[[FinishedRun], AnalysisResult]
    conditions: tuple[Condition, ...] = ()

    def refusal(self, run: FinishedRun) -> str | None:
        """Return why a run cannot be analysed so; None: it can."""
        return next((reason for condition in self.conditions if (reason := condition(run)) is not None), None)


def keeps_trained_models(run: FinishedRun) -> str | None:
    """Require a locally trained model of some client."""
    if not run.experiment.keeps_private_models:
        return "clients' own models are kept where evaluation.private is true"
    clients = range(run.experiment.setting.num_clients)
    if all(private_model(run.client_states(client)) is None for client in clients):
        return "no client has trained a model yet"
    return None


def has_global_model(run: FinishedRun) -> str | None:
    """Require a global model."""
    method = run.experiment.method
    if method.has_global_model and method.global_model(run.server) is not None:
        return None
    return f"{method.name} has no global model"


def was_calibrated(run: FinishedRun) -> str | None:
    """Require a calibrated global model and the one before it."""
    method = run.experiment.method
    if BEFORE_CALIBRATION not in method.predictors():
        return f"{method.name} has no state before a calibration"
    return f"{method.name} did not calibrate then" if run.calibrated_models() is None else None


def equal_per_class(labels: Tensor, per_class: int, seed: int, purpose: str) -> Tensor:
    """Return positions of equally many samples of every class that occurs, int64, grouped by class, then ascending.

    Args:
        labels: int64 [n].
        per_class: at most; the size of the smallest class, if that is less.
        seed: of the draw. purpose: the name of its stream.
    """
    classes = torch.unique(labels).tolist()
    count = min(per_class, int(torch.bincount(labels)[classes].min()))
    drawn = []
    for label in classes:
        rows = (labels == label).nonzero().flatten()
        order = torch.randperm(len(rows), generator=torch_stream(seed, purpose, label))
        drawn.append(rows[order[:count]].sort().values)
    return torch.cat(drawn)


def accuracies_by_class(model: str, test: str, predicted: Tensor, labels: Tensor, names: Sequence[str]) -> list[Row]:
    """Return a row per class: ``model``, ``test``, ``class``, ``correct``, ``total``, ``accuracy`` (None without any).

    Args:
        model, test: names of the model and of its test data.
        predicted, labels: int64 [n].
        names: of the classes.
    """
    rights = torch.bincount(labels[predicted == labels], minlength=len(names)).tolist()
    totals = torch.bincount(labels, minlength=len(names)).tolist()
    return [
        {"model": model, "test": test, "class": name, "correct": right, "total": total,
         "accuracy": right / total if total else None}
        for name, right, total in zip(names, rights, totals, strict=True)
    ]  # fmt: skip
