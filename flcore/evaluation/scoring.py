"""Score a federation between two rounds (evaluation.md sections 1 and 2).

A method says how it predicts, never how it is scored.

- ``top1_global``: the global model on the whole test set. ``top1_vote``: the majority vote of all clients' models,
  for methods without a global model (baselines.md section 21).
- ``mean_local``: unweighted mean over clients of the accuracy on their own test data. ``pooled_local``: correct
  answers of all clients over their samples. Clients without test data are left out and counted.
- ``mean_local_own_classes``: as ``mean_local``, answering only among the client's training classes, which shows what
  a global model loses by answering with others (gfpl.md section 11).

Where data change, a client is tested on the classes met so far, and its locally trained model is also scored on the
global test set (`flcore/evaluation/continual.py`).

A client answers from its scoring message and its own state; the global model answers at the server. Any worker can
answer a task (a block of shared images, or a client), with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.evaluation.continual import task_scores
from flcore.evaluation.eval_data import eval_data
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.model_selection import (
    ClientStates,
    answers_for_itself,
    contribution,
    global_model,
    missing_of,
    personal_model,
    private_model,
    scoring_messages,
)
from flcore.evaluation.scores import Scores, right_answers, summarised
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import cost
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Record, SharedOnDevice, on_device
from flcore.methods.types import MODEL, Predict, with_statistics

Share = Callable[["EvalRequest", Sequence["EvalTask"]], Sequence[Record] | None]
"""Let workers answer the tasks of a request, in order; None to answer them in this process."""

MAIN = ""
"""Name of the method's own predictor."""

ANSWERS = Key("answers", TensorDict)
"""Results of a task. Shared images: ``<way>/scores`` float32 [n, K]. A client: ``<way>/correct`` int64 [3] (correct,
correct among its own classes, tested) where its own model answers; ``private`` int64 [C], correct answers of its
locally trained model by class; ``votes`` int64 [N], that model's predictions; ``trained``, 1 if it ever trained."""


@dataclass(frozen=True)
class EvalRequest:
    """A scoring of one state.

    Attributes:
        round: the round just finished, which decides the classes that clients have met.
        vote: take the majority vote of clients' models.
        missing: parameters that the server's model lacks; clients send their own.
    """

    round: int
    vote: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """One task of a scoring: a client, or a range of the shared images.

    Attributes:
        client: None for a range.
        block: first row, and the one after the last.
        known: the client's scoring message, or the server's record.
        model: the global model, for a range.
    """

    client: int | None = None
    block: tuple[int, int] = (0, 0)
    known: Record = field(default_factory=Record)
    model: Weights | None = None


class Scorer:
    """Scores states of the federation."""

    def __init__(self, experiment: Experiment) -> None:
        """Lay out the data to score on: test data, or the clients' validation data."""
        self._experiment = experiment
        self._answerer = Answerer(experiment)
        self._data = self._answerer.data

    # ---- the whole -----------------------------------------------------------------------------------------------

    def score(
        self,
        server: Record,
        client_states: ClientStates,
        *,
        vote: bool = False,
        round_number: int | None = None,
        share: Share | None = None,
    ) -> Scores:
        """Score a state with every predictor of its method.

        Args:
            server: the server's record.
            client_states: client id to its state; read one client at a time, and only where it matters.
            vote: without a global model, also take the majority vote (every client's model on the whole test set).
            round_number: the round just finished; None for the last.
            share: lets workers answer; None answers here.
        """
        experiment, server = self._experiment, Record(server)
        method, model = experiment.method, experiment.method.global_model(server)
        request = EvalRequest(
            experiment.setting.rounds if round_number is None else round_number,
            vote=method.has_vote and (vote or experiment.keeps_private_models),
            missing=missing_of(experiment, model),
        )

        def answered(parts: Sequence[EvalTask]) -> Iterable[Record]:
            answers = share(request, parts) if share is not None and parts else None
            return answers or (self._answerer.answer(request, part, client_states) for part in parts)

        clients = self._client_parts(request, server)
        found = list(zip(clients, answered(clients), strict=True))
        uploads = {part.client: answer.without(ANSWERS) for part, answer in found if part.client is not None}
        by_client = {part.client: answer[ANSWERS] for part, answer in found if part.client is not None}
        model = global_model(experiment, model, uploads)
        shared = [answer[ANSWERS] for answer in answered(self._blocks(server, model))]
        scores = self._put_together(request, shared, by_client)
        down, up = cost((part.known for part in clients), experiment), cost(uploads.values(), experiment)
        return replace(scores, down=down, up=up)

    def _blocks(self, server: Record, model: Weights | None) -> list[EvalTask]:
        """Return tasks for the global model; none without one."""
        size = self._experiment.config.evaluation.batch_size
        starts = range(0, max(len(self._data.images), 1), size) if model is not None else ()
        return [EvalTask(None, (start, start + size), server, model) for start in starts]

    def _client_parts(self, request: EvalRequest, server: Record) -> list[EvalTask]:
        """Return tasks for clients that answer themselves, each with its scoring message."""
        experiment, clients = self._experiment, range(self._experiment.setting.num_clients)
        private = experiment.keeps_private_models
        if answers_for_itself(experiment) or (private and not experiment.trains_models):
            sent = scoring_messages(experiment, server, clients, request.round)
            return [EvalTask(client, known=message) for client, message in zip(clients, sent, strict=True)]
        return [EvalTask(client) for client in clients] if private else []

    def images_asked(self, request: EvalRequest, parts: Sequence[EvalTask]) -> int:
        """Return the number of predictions, all models together."""
        private = self._data.num_shared if request.vote or self._experiment.keeps_private_models else 0
        own = [len(self._data.clients[part.client]) + private for part in parts if part.client is not None]
        return sum(own) + sum(part.block[1] - part.block[0] for part in parts)

    # ---- putting together ----------------------------------------------------------------------------------------

    def _put_together(
        self, request: EvalRequest, shared: Sequence[TensorDict], by_client: Mapping[int, TensorDict]
    ) -> Scores:
        labels, num_classes = self._data.shared_labels, self._experiment.setting.num_classes
        votes = None
        if not shared and request.vote:
            votes = torch.zeros(self._data.num_shared, num_classes, dtype=torch.int64)
            for found in by_client.values():
                votes += F.one_hot(found["votes"], num_classes)
        results = {}
        for way in self._answerer.ways:
            scores = torch.cat([found[f"{way}/scores"] for found in shared]) if shared else None
            local = [self._local(request, client, way, scores, by_client) for client in range(len(self._data.clients))]
            # Accuracies are all that is kept of alternative predictors.
            kind = self._experiment.method.score_kind if way == MAIN else "ranks"
            results[way] = summarised(scores, votes if way == MAIN else None, labels, local, num_classes, kind)
        main = results.pop(MAIN)
        others = {way: scores.headline for way, scores in results.items()}
        tasks = self._task_scores(request, main, by_client) if self._experiment.keeps_private_models else {}
        return replace(main, alternatives=others, tasks=tasks)

    def _local(
        self,
        request: EvalRequest,
        client: int,
        way: str,
        scores: Tensor | None,
        by_client: Mapping[int, TensorDict],
    ) -> tuple[int, int, int]:
        """Return (correct, correct among its own classes, tested)."""
        own = by_client[client].named.get(f"{way}/correct") if client in by_client else None
        if own is None:
            if scores is None:
                return 0, 0, 0
            rows = self._answerer.tested_rows(request, client)
            own = right_answers(scores[rows], self._data.labels[rows], self._answerer.met(request)[client])
        right, among_own, tested = own.tolist()
        return right, among_own, tested

    def _task_scores(self, request: EvalRequest, main: Scores, by_client: Mapping[int, TensorDict]) -> dict[str, Any]:
        """Return :attr:`Scores.tasks`."""
        setting, stream = self._experiment.setting, self._experiment.stream
        tested = torch.bincount(self._data.shared_labels, minlength=setting.num_classes).numpy()
        private = torch.stack([by_client[client]["private"] for client in range(setting.num_clients)]).numpy()

        def counts(accuracies: list[float | None] | None) -> np.ndarray | None:
            if accuracies is None:
                return None
            known = np.array([0.0 if value is None else value for value in accuracies])
            return np.rint(known * tested).astype(np.int64)

        shared, vote = counts(main.class_accuracy), counts(main.class_accuracy_vote)
        return {
            "tested": tested.tolist(),
            "private_correct": private.tolist(),
            "untrained_clients": sum(int(found["trained"][0]) == 0 for found in by_client.values()),
            "tasks": task_scores(stream, request.round, tested, private, shared, vote),
        }


class Answerer:
    """Answers tasks of a scoring; never sees the server's record or other clients."""

    def __init__(self, experiment: Experiment) -> None:
        """Lay out the data to score on, and build a model."""
        self._experiment = experiment
        self._forward = Forward(experiment)
        data = eval_data(experiment)
        self.data = replace(data, images=data.images.to(experiment.config.engine.device))
        self._there = SharedOnDevice(experiment.config.engine.device)
        self._met_by: tuple[int, Tensor] | None = None

    def answer(self, request: EvalRequest, part: EvalTask, client_states: ClientStates) -> Record:
        """Return :data:`ANSWERS`; for a client also its contribution to the global model.

        Args:
            request: what is scored. part: its task.
            client_states: client id to its state; read only for the task's client.
        """
        if part.client is not None:
            received, client_state = self._there.of([part.known, client_states(part.client)])
            found = self._ask_client(request, part.client, received, client_state)
            sent = contribution(self._experiment, part.client, received, client_state, request.missing)
            return Record({ANSWERS: TensorDict(found), **on_device(sent, "cpu")})
        assert part.model is not None
        (known,) = self._there.of([part.known])
        images = StoredImages(self._experiment, self.data.images[slice(*part.block)])
        answers = self._forward.answers(part.model, images, self.ways, known, None)
        return Record({ANSWERS: TensorDict({f"{way}/scores": scores for way, scores in answers.items()})})

    @property
    def ways(self) -> dict[str, Predict]:
        """The method's predictors by name, :data:`MAIN` first."""
        method = self._experiment.method
        return {MAIN: method.predict, **method.predictors()}

    def _ask_client(
        self, request: EvalRequest, client: int, received: Record, client_state: Record
    ) -> dict[str, Tensor]:
        held, known = self.met(request)[client], client_state | received
        own, rows = personal_model(self._experiment, received, client_state), self.tested_rows(request, client)
        there = held.to(self._experiment.config.engine.device)
        found: dict[str, Tensor] = {}
        ways = self.ways
        if self._experiment.method.ignores_model:
            ways.pop(MAIN, None)  # answered for the shared images
        if own is not None and ways:
            images = StoredImages(self._experiment, self.data.images[rows])
            for way, scores in self._forward.answers(own, images, ways, known, there).items():
                found[f"{way}/correct"] = right_answers(scores, self.data.labels[rows], held)
        if self._experiment.keeps_private_models or (request.vote and own is not None):
            found |= self._ask_private(own, received, client_state, there)
        return found

    def _ask_private(
        self, own: Weights | None, received: Record, client_state: Record, held: Tensor
    ) -> dict[str, Tensor]:
        """Score the locally trained model on the global test set; the global model where clients never train."""
        setting, trained = self._experiment.setting, private_model(client_state)
        if trained is None and not self._experiment.trains_models:
            trained = received.get(MODEL)
        weights = own
        if self._experiment.keeps_private_models:
            weights = with_statistics(trained or setting.initial, client_state, setting)
        assert weights is not None
        images = StoredImages(self._experiment, self.data.images[: self.data.num_shared])
        way = {MAIN: self._experiment.method.predict_private}
        answers = self._forward.answers(weights, images, way, client_state | received, held)[MAIN].argmax(dim=1)
        labels = self.data.shared_labels
        correct = torch.bincount(labels[answers == labels], minlength=setting.num_classes)
        return {"private": correct, "votes": answers, "trained": torch.tensor([int(trained is not None)])}

    def met(self, request: EvalRequest) -> Tensor:
        """Return the classes that each client has met in training, bool [K, C]."""
        # Cached: otherwise an evaluation would be quadratic in clients.
        if self._met_by is None or self._met_by[0] != request.round:
            self._met_by = (request.round, torch.from_numpy(self._experiment.stream.met(request.round)))
        return self._met_by[1]

    def tested_rows(self, request: EvalRequest, client: int) -> Tensor:
        """Return a client's test rows; where data change, only classes that it has met."""
        rows = self.data.clients[client]
        if self._experiment.stream.schedule == "none":
            return rows
        return rows[self.met(request)[client][self.data.labels[rows]]]
