"""What a logged model answers: rebuilt from a run's files, wherever `flcore` can be imported.

Stored with every logged model, so it imports nothing but `flcore` and what the model's requirements name. It answers by
the method's own rule of prediction, with the global model; with a client's own (``params={"client": 3}``); or, without
a global model, with the share of clients' models that say each class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.config.schema import Config
from flcore.config.stored import resolve_paths, without_removed
from flcore.core.errors import DataError
from flcore.data.dataset import Dataset, Meta, Split
from flcore.data.partition import Partition
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.model_selection import answers_for_itself, global_model_of, personal_model, scoring_messages
from flcore.evaluation.scores import probabilities
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record, load_record

EVERYBODY = -1
"""In place of a client's number: the global model, or the vote."""


class Predictor:
    """A finished run's models, on the CPU."""

    def __init__(
        self, config: Mapping[str, Any], meta: Mapping[str, Any], partition: Path, server: Path, clients: Path | None
    ) -> None:
        """Rebuild what answers from a run's files; ``clients`` is None where no answer depends on their states."""
        here = {**config, "engine": {**config["engine"], "name": "local", "workers": 0, "device": "cpu"}}
        self._experiment = _without_images(Config.from_mapping(here), meta, Partition.load(partition))
        self._server = load_record(server)[0]
        self._clients = clients
        self._forward = Forward(self._experiment)
        self._global = global_model_of(self._experiment, self._server, self._memory)
        self._held = torch.from_numpy(self._experiment.stream.met(self._experiment.stream.rounds))

    @property
    def default_client(self) -> int:
        """The client that answers by default: all together, or client 0 if clients share no model."""
        return EVERYBODY if self._global is not None or self._experiment.method.has_vote else 0

    def __call__(self, images: np.ndarray, client: int | None = None) -> np.ndarray:
        """Return class probabilities [N, C]; for methods without likelihoods only the order is meaningful.

        Args:
            images: [N, C, H, W], uint8 (0 to 255).
            client: the one that answers; :data:`EVERYBODY`; or None for :attr:`default_client`.
        """
        number = self.default_client if client is None else client
        if not EVERYBODY <= number < self._experiment.setting.num_clients:
            last = self._experiment.setting.num_clients - 1
            raise DataError(f"client = {number}: the run has clients 0 to {last}")
        stored = StoredImages(self._experiment, torch.from_numpy(np.ascontiguousarray(images)))
        return np.asarray(self._answer(stored, number).numpy())

    def _answer(self, images: StoredImages, number: int) -> Tensor:
        weights, known = (None, self._server) if number == EVERYBODY else self._own(number)
        if weights is not None:
            return self._probabilities(weights, images, known, self._held[number])
        if self._global is not None:
            return self._probabilities(self._global, images, self._server, None)
        return self._vote(images)

    def _vote(self, images: StoredImages) -> Tensor:
        """Return the share of clients' models that predict each class."""
        setting = self._experiment.setting
        votes = torch.zeros(len(images), setting.num_classes)
        for client in range(setting.num_clients):
            weights, known = self._own(client)
            assert weights is not None  # who has no global model answers with clients' own
            predicted = self._scores(weights, images, known, self._held[client]).argmax(dim=1)
            votes += F.one_hot(predicted, setting.num_classes)
        return votes / setting.num_clients

    def _probabilities(self, weights: Weights, images: StoredImages, known: Record, classes: Tensor | None) -> Tensor:
        return probabilities(self._scores(weights, images, known, classes), self._experiment.method.score_kind)

    def _scores(self, weights: Weights, images: StoredImages, known: Record, classes: Tensor | None) -> Tensor:
        predictors = {"": self._experiment.method.predict}
        return self._forward.answers(weights, images, predictors, known, classes)[""]

    def _own(self, client: int) -> tuple[Weights | None, Record]:
        """Return a client's own model, and the record that it predicts with."""
        if not answers_for_itself(self._experiment):
            return None, self._server
        (received,), memory = scoring_messages(self._experiment, self._server, [client]), self._memory(client)
        return personal_model(self._experiment, received, memory), memory | received

    def _memory(self, client: int) -> Record:
        path = None if self._clients is None else self._clients / f"{client:04d}.safetensors"
        return Record() if path is None or not path.exists() else load_record(path)[0]


def reads_memories(config: Config, meta: Mapping[str, Any], partition: Path) -> bool:
    """Return whether any answer depends on clients' states."""
    experiment = _without_images(config, meta, Partition.load(partition))
    method = experiment.method
    if method.data_scope == "union":
        return False  # what trained stands at the server
    return answers_for_itself(experiment)


def _without_images(config: Config, meta: Mapping[str, Any], partition: Partition) -> Experiment:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in meta.items()}
    nothing = Split(torch.zeros(0, *values["shape"], dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    return Experiment(config, Dataset(nothing, nothing, Meta(**values)), partition)


class RunModel:
    """:class:`Predictor` as MLflow calls it."""

    def __init__(self, files: Path) -> None:
        stored = json.loads((files / "config.json").read_text(encoding="utf-8"))["config"]
        meta = json.loads((files / "meta.json").read_text(encoding="utf-8"))
        clients = files / "clients"
        self._predict = Predictor(
            resolve_paths(without_removed(stored), files),
            meta,
            files / "partition",
            files / "server.safetensors",
            clients if clients.exists() else None,
        )

    def predict(self, model_input: np.ndarray, params: Mapping[str, Any] | None = None) -> np.ndarray:
        """Return class probabilities [N, C] of images [N, C, H, W]; ``params`` may name the client that answers."""
        return self._predict(model_input, (params or {}).get("client"))
