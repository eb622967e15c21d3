"""Scores of a federation between two rounds (evaluation.md sections 1 and 2).

A method says how it predicts, never how it is scored.
``top1_global``: the global model on the whole test set. ``mean_local``: unweighted mean over clients of each client's
accuracy on its own test data, with the model that answers for it. ``pooled_local``: correct over all clients divided by
samples over all clients; ``mean_local_own_classes``: as ``mean_local``, with answers among the classes that the client
holds in training alone, which tells what a global model loses by answering with classes that a client never has
(gfpl.md section 11). Clients without test data are left out of means and counted. Where data change, a client is
tested on the classes that it has met so far, and its own model as local training left it is scored on the whole global
test set too (`flcore/evaluation/continual.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.engine.client import Worker, private_model
from flcore.errors import DataError
from flcore.evaluation.continual import task_scores
from flcore.experiment import Experiment
from flcore.messages import Weights
from flcore.methods.vocabulary import BATCHNORM, Predict, with_statistics
from flcore.models import load_weights
from flcore.models.averaging import average_weights
from flcore.records import Record, on_device, payload_of

Memories = Callable[[int], Record]


@dataclass(frozen=True)
class Scores:
    """Fractions in [0, 1]; None where a method has no such model, or a client no test data.

    Attributes:
        class_accuracy: per class of the global answer, None for classes without test samples.
        local_accuracy: per client.
        client_std: population standard deviation of ``local_accuracy``.
        alternatives: per other way to predict (:meth:`flcore.methods.base.Method.alternatives`) its ``top1_global``,
            ``mean_local`` and ``pooled_local``.
        tasks: where clients' own models are scored before aggregation: ``tested`` [C], the images of each class in the
            global test set; ``private_correct`` [K, C], those that each client's model gets right;
            ``untrained_clients``, those with the initial model still; ``tasks``, the accuracies that follow
            (:func:`flcore.evaluation.continual.task_scores`).
    """

    top1_global: float | None
    loss_global: float | None
    class_accuracy: list[float | None] | None
    local_accuracy: list[float | None]
    mean_local: float | None
    pooled_local: float | None
    client_std: float | None
    mean_local_own_classes: float | None
    alternatives: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON values; without ``alternatives`` and ``tasks`` where there are none."""
        values = {name: value for name, value in vars(self).items() if name not in ("alternatives", "tasks")}
        return {**values, **({"alternatives": dict(self.alternatives)} if self.alternatives else {}), **self.tasks}


@dataclass(frozen=True)
class _TestData:
    """What to score on: the first ``num_shared`` rows are for the global model; ``clients``: each client's rows."""

    images: Tensor
    labels: Tensor
    clients: list[Tensor]
    num_shared: int

    @property
    def shared_labels(self) -> Tensor:
        return self.labels[: self.num_shared]


class Scorer:
    """Scores a server state with the clients' memories, reusing one worker's module."""

    def __init__(self, worker: Worker) -> None:
        """Lay out the data to score on: test data, or the clients' validation data."""
        self._worker = worker
        self._experiment = worker.experiment
        self._data = _lay_out(worker.experiment)
        self._predict: Predict = worker.experiment.method.predict
        self._met = self._met_classes()

    def score(
        self, server: Record, memories: Memories, *, vote: bool = False, round_number: int | None = None
    ) -> Scores:
        """Score a state. Memories are asked for one client at a time: a large population is never in memory at once.

        Args:
            server: what the server holds.
            memories: client id to what that client remembers.
            vote: for methods without a global model, also take the majority vote of all clients' models as the global
                answer (costs every client's model on the whole test set).
            round_number: after which round; None for the last. Where data change, it says what clients have met.
        """
        method = self._experiment.method
        self._met = self._met_classes(round_number)
        server = on_device(server, self._experiment.config.engine.device)
        if method.data_scope == "union":
            memories = _nothing_remembered  # what trained stands at the server
        scores = self._score_with(method.predict, server, memories, vote=vote)
        others = {
            name: self._score_with(predict, server, memories, vote=False)
            for name, predict in method.alternatives().items()
        }
        kept = ("top1_global", "mean_local", "pooled_local")
        alternatives = {name: {key: getattr(other, key) for key in kept} for name, other in others.items()}
        self._predict = method.predict
        tasks = (
            self._task_scores(server, memories, scores, round_number) if self._experiment.keeps_private_models else {}
        )
        return replace(scores, alternatives=alternatives, tasks=tasks)

    def _task_scores(
        self, server: Record, memories: Memories, scores: Scores, round_number: int | None
    ) -> dict[str, Any]:
        """The counts and accuracies of :attr:`Scores.tasks`."""
        setting, stream = self._experiment.setting, self._experiment.stream
        labels, images = self._data.shared_labels, self._data.images[: self._data.num_shared]
        tested = torch.bincount(labels, minlength=setting.num_classes)
        correct, untrained = [], 0
        for client in range(setting.num_clients):
            memory = memories(client)
            own = private_model(memory)
            untrained += own is None
            weights = with_statistics(own or setting.initial, memory, setting)
            answers = self._scores(weights, images, server, self._classes(client)).argmax(dim=1)
            correct.append(torch.bincount(labels[answers == labels], minlength=setting.num_classes))
        private = torch.stack(correct).numpy()
        found = None
        if scores.class_accuracy is not None and scores.top1_global is not None:
            accuracy = np.array([0.0 if value is None else value for value in scores.class_accuracy])
            found = np.rint(accuracy * tested.numpy()).astype(np.int64)
        number = stream.rounds if round_number is None else round_number
        return {
            "tested": tested.tolist(),
            "private_correct": private.tolist(),
            "untrained_clients": untrained,
            "tasks": task_scores(stream, number, tested.numpy(), private, found),
        }

    def _met_classes(self, round_number: int | None = None) -> Tensor:
        """The classes that each client has met in training after a round, bool [K, C]."""
        stream = self._experiment.stream
        return torch.from_numpy(stream.met(stream.rounds if round_number is None else round_number))

    def _score_with(self, predict: Predict, server: Record, memories: Memories, *, vote: bool) -> Scores:
        data, setting = self._data, self._experiment.setting
        self._predict = predict
        model = self._global_model(server, memories)
        shared: Tensor | None = None
        answers: Tensor | None = None
        loss: float | None = None
        if model is not None:
            shared = self._scores(model, data.images, server, None)
            answers = shared[: data.num_shared].argmax(dim=1)
            loss = float(F.cross_entropy(shared[: data.num_shared], data.shared_labels))
        local = [self._client_correct(k, server, memories(k), shared) for k in range(setting.num_clients)]
        if model is None and vote and self._experiment.method.has_vote:
            answers = self._vote(server, memories)
        correct = None if answers is None else answers == data.shared_labels
        return _summarise(correct, loss, data.shared_labels, local, setting.num_classes)

    def _global_model(self, server: Record, memories: Memories) -> Weights | None:
        """The global model, with what only clients have (upper layers, statistics) averaged over them.

        That never travels; for scoring alone it is averaged as baselines.md section 21 says.
        """
        method, setting = self._experiment.method, self._experiment.setting
        model = method.global_model(server, setting)
        if model is None:
            return None
        missing = [name for name in setting.initial.params if name not in model.params]
        if missing:
            model = self._completed(model, missing, server, memories)
        if self._experiment.batchnorm != "local":
            return model
        remembered = ((k, memories(k)) for k in range(setting.num_clients))
        private = {k: payload_of(Weights, memory, BATCHNORM) for k, memory in remembered if BATCHNORM in memory}
        if not private:
            return model
        sizes = {k: len(self._experiment.trainers[k]) for k in private}
        return Weights(model.params, average_weights(private, sizes).buffers)

    def _completed(self, model: Weights, missing: list[str], server: Record, memories: Memories) -> Weights:
        """The model with the parameters that it lacks: means over all clients of their own, by training samples."""
        method, setting = self._experiment.method, self._experiment.setting
        parts: dict[int, Weights] = {}
        for client in range(setting.num_clients):
            own = method.client_model(server, client, memories(client), setting)
            assert own is not None  # who has no whole global model answers with clients' own
            parts[client] = Weights({name: own.params[name] for name in missing})
        sizes = {client: len(self._experiment.trainers[client]) for client in parts}
        return Weights({**model.params, **average_weights(parts, sizes).params}, model.buffers)

    def _own_model(self, server: Record, client: int, memory: Record) -> Weights | None:
        """The model that answers for one client alone; None where the global one does."""
        method, setting = self._experiment.method, self._experiment.setting
        own = method.client_model(server, client, memory, setting)
        if own is None and self._experiment.batchnorm == "local" and setting.initial.buffers:
            # Everybody has statistics of its own; those of a client that was never sampled are the initial ones.
            shared = method.global_model(server, setting)
            own = None if shared is None else shared.without_buffers()
        return None if own is None else with_statistics(own, memory, setting)

    def _client_correct(
        self, client: int, server: Record, memory: Record, shared: Tensor | None
    ) -> tuple[int, int, int]:
        """(correct, correct among its own classes, tested) of one client; ``shared``: global scores of all images."""
        rows = self._tested_rows(client)
        own = self._own_model(server, client, memory)
        if len(rows) == 0 or (own is None and shared is None):
            return 0, 0, 0
        held, labels = self._classes(client), self._data.labels[rows]
        if own is not None:
            scores = self._scores(own, self._data.images[rows], server, held)
        else:
            assert shared is not None
            scores = shared[rows]
        among_own = scores[:, : len(held)].masked_fill(~held, -torch.inf).argmax(dim=1)
        return int((scores.argmax(dim=1) == labels).sum()), int((among_own == labels).sum()), len(rows)

    def _vote(self, server: Record, memories: Memories) -> Tensor:
        """Majority vote of every client's model on the shared images; ties go to the smaller class id."""
        num_classes, images = self._experiment.setting.num_classes, self._data.images[: self._data.num_shared]
        votes = torch.zeros(self._data.num_shared, num_classes, dtype=torch.int64)
        for client in range(self._experiment.setting.num_clients):
            own = self._own_model(server, client, memories(client))
            if own is not None:
                answers = self._scores(own, images, server, self._classes(client)).argmax(dim=1)
                votes += F.one_hot(answers, num_classes)
        return votes.argmax(dim=1)

    def _classes(self, client: int) -> Tensor:
        return self._met[client]

    def _tested_rows(self, client: int) -> Tensor:
        """A client's test data: where data change, those of the classes that it has met."""
        rows = self._data.clients[client]
        if self._experiment.stream.schedule == "none":
            return rows
        return rows[self._met[client][self._data.labels[rows]]]

    def _scores(self, weights: Weights, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        load_weights(self._worker.module, with_statistics(weights, {}, self._experiment.setting))
        return self._worker.scores(images, server, classes, self._predict)


def _nothing_remembered(client: int) -> Record:
    return Record()


def _lay_out(experiment: Experiment) -> _TestData:
    dataset, partition = experiment.dataset, experiment.partition
    if experiment.config.evaluation.split == "validation":
        own = [torch.from_numpy(client.val.copy()) for client in partition.clients]
        held = torch.unique(torch.cat(own))
        if len(held) == 0:
            raise DataError("no client has a validation sample; raise partition.validation and partition again")
        rows = [torch.searchsorted(held, indices) for indices in own]
        return _TestData(dataset.train.images[held], dataset.train.labels[held], rows, len(held))
    own = [torch.from_numpy(client.test.copy()) for client in partition.clients]
    size = len(dataset.test)
    if partition.test_source == "test":
        return _TestData(dataset.test.images, dataset.test.labels, own, size)
    # Clients tested on their own data: those images stand behind the official test set.
    held = torch.cat(own)
    images = torch.cat([dataset.test.images, dataset.train.images[held]])
    labels = torch.cat([dataset.test.labels, dataset.train.labels[held]])
    rows = list(torch.split(torch.arange(size, size + len(held)), [len(indices) for indices in own]))
    return _TestData(images, labels, rows, size)


def _summarise(
    correct: Tensor | None, loss: float | None, labels: Tensor, local: list[tuple[int, int, int]], num_classes: int
) -> Scores:
    accuracies = [right / tested if tested else None for right, _, tested in local]
    known = np.array([accuracy for accuracy in accuracies if accuracy is not None], dtype=np.float64)
    among_own = [right / tested for _, right, tested in local if tested]
    tested = sum(count for _, _, count in local)
    by_class: list[float | None] | None = None
    if correct is not None:
        totals = torch.bincount(labels, minlength=num_classes).tolist()
        rights = torch.bincount(labels[correct], minlength=num_classes).tolist()
        by_class = [right / total if total else None for right, total in zip(rights, totals, strict=True)]
    return Scores(
        top1_global=None if correct is None else int(correct.sum()) / len(correct),
        loss_global=loss,
        class_accuracy=by_class,
        local_accuracy=accuracies,
        mean_local=float(known.mean()) if len(known) else None,
        pooled_local=sum(right for right, _, _ in local) / tested if tested else None,
        client_std=float(known.std()) if len(known) else None,
        mean_local_own_classes=sum(among_own) / len(among_own) if among_own else None,
    )
