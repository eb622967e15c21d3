"""Scores of a federation between two rounds (evaluation.md sections 1 and 2).

A method says how it predicts, never how it is scored.
``top1_global``: the global model on the whole test set. ``mean_local``: unweighted mean over clients of each client's
accuracy on its own test data, with the model that answers for it. ``pooled_local``: correct over all clients divided by
samples over all clients; ``mean_local_own_classes``: as ``mean_local``, with answers among the classes that the client
holds in training alone, which tells what a global model loses by answering with classes that a client never has
(gfpl.md section 11). Clients without test data are left out of means and counted. ``top1_vote``: where there is no
global model, the majority vote of all clients' models (baselines.md section 21), a thing of its own. Where data change,
a client is tested on the classes that it has met so far, and its own model as local training left it is scored on the
whole global test set too (`flcore/evaluation/continual.py`).

Scoring is made of *parts* (blocks of the shared images, or a client) that any worker can answer, each by itself and
with the same bits; putting them together is all that one process has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.evaluation.answering import Memories, global_model, has_own_statistics, own_model, private_model
from flcore.evaluation.continual import task_scores
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.scored_data import scored_data
from flcore.evaluation.scores import Scores, right_answers, summarised
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record, on_device
from flcore.methods.types import Predict, with_statistics

Share = Callable[["Request", Sequence["Part"]], Iterable[Mapping[str, Tensor]]]
"""Has workers answer the parts of a request, in their order."""

MAIN = ""
"""Name of the method's own way to predict, among all ways."""


@dataclass(frozen=True)
class Request:
    """What to score.

    Attributes:
        ways: names of the ways to answer; :data:`MAIN` and those of :meth:`flcore.methods.api.Method.alternatives`,
            or of :meth:`flcore.methods.api.Method.score_before`.
        round: after which round; None for the last. Where data change, it says what clients have met.
        vote: whether the majority vote of clients' models is taken where there is no global model.
        private: whether clients' own models are scored on the global test set.
    """

    ways: tuple[str, ...] = (MAIN,)
    round: int | None = None
    vote: bool = False
    private: bool = False


@dataclass(frozen=True)
class Part:
    """A piece of a scoring: a range of the shared images for the global model, or some clients."""

    blocks: tuple[int, int] = (0, 0)
    clients: tuple[int, ...] = ()


class Scorer:
    """Scores server states with the clients' memories, in one module."""

    def __init__(self, experiment: Experiment) -> None:
        """Lay out the data to score on: test data, or the clients' validation data."""
        self._experiment = experiment
        self._forward = Forward(experiment)
        self._data = scored_data(experiment)
        self._server: tuple[Record | None, Record] = (None, Record())
        self._model: tuple[Request, Weights] | None = None
        self._met_by: tuple[int, Tensor] | None = None

    # ---- the whole -----------------------------------------------------------------------------------------------

    def score(
        self,
        server: Record,
        memories: Memories,
        *,
        vote: bool = False,
        round_number: int | None = None,
        share: Share | None = None,
    ) -> Scores:
        """Score a state in every way that its method answers.

        Args:
            server: what the server holds.
            memories: client id to what that client remembers; asked for one client at a time, and only where what it
                remembers matters: a large population is never in memory at once.
            vote: for methods without a global model, also take the majority vote of all clients' models (costs every
                client's model on the whole test set).
            round_number: after which round; None for the last. Where data change, it says what clients have met.
            share: has workers answer the parts; None answers them here.
        """
        ways = (MAIN, *self._experiment.method.alternatives())
        private = self._experiment.keeps_private_models
        vote = self._experiment.method.has_vote and (vote or private)
        return self.scored(Request(ways, round_number, vote, private), server, memories, share)

    def scored(
        self,
        request: Request,
        server: Record,
        memories: Memories,
        share: Share | None = None,
    ) -> Scores:
        """Score a state as a request says; the first way is the main one."""
        parts = self.parts(request, server)
        if share is None:
            answered: Iterable[Mapping[str, Tensor]] = (self.answer(request, part, server, memories) for part in parts)
        else:
            answered = share(request, parts)
        return self._put_together(request, list(zip(parts, answered, strict=True)))

    def parts(self, request: Request, server: Record) -> list[Part]:
        """The pieces of a scoring, in order."""
        method, setting = self._experiment.method, self._experiment.setting
        clients = [Part(clients=(client,)) for client in range(setting.num_clients)]
        if method.global_model(server) is None:
            return clients
        size = self._experiment.config.evaluation.batch_size
        shared = [Part(blocks=(start, start + size)) for start in range(0, max(len(self._data.images), 1), size)]
        return shared + (clients if self._asks_clients(request) else [])

    def _asks_clients(self, request: Request) -> bool:
        """Whether anything of a client is looked at beside the global model's answers."""
        return not self._experiment.method.has_global_model or self._reads_memories(request)

    def _reads_memories(self, request: Request) -> bool:
        """Whether what clients remember matters; else it is not asked for: it may lie in thousands of files."""
        method = self._experiment.method
        return method.answers_from_memory or has_own_statistics(self._experiment) or request.private

    def images_asked(self, request: Request, parts: Sequence[Part]) -> int:
        """How many answers to images the parts are, all models together."""
        private = self._data.num_shared if request.private or request.vote else 0
        own = [len(self._data.clients[client]) + private for part in parts for client in part.clients]
        return sum(own) + sum(part.blocks[1] - part.blocks[0] for part in parts)

    # ---- a part --------------------------------------------------------------------------------------------------

    def answer(self, request: Request, part: Part, server: Record, memories: Memories) -> dict[str, Tensor]:
        """What a part's models say.

        Returns:
            Of shared images ``<way>/scores`` float32 [n, K]. Of a client ``<way>/correct`` int64 [3] (right, right
            among its own classes, tested) where a model of its own answers, and not as everybody's does; ``private``
            int64 [C], the right answers of its own model by class, ``votes`` int64 [N], that model's answers, and
            ``trained``, 1 if it ever trained.
        """
        if self._experiment.method.data_scope == "union":
            memories = _nothing_remembered  # what trained stands at the server
        server = self._on_device(server)
        if part.clients:
            (client,) = part.clients
            memory = memories(client) if self._reads_memories(request) else Record()
            return self._ask_client(request, client, server, memory)
        model = self._global_model(request, server, memories)
        images = StoredImages(self._experiment, self._data.images[slice(*part.blocks)])
        found = self._forward.answers(model, images, self._ways(request), server, None, part.blocks)
        return {f"{way}/scores": scores for way, scores in found.items()}

    def _on_device(self, server: Record) -> Record:
        if server is not self._server[0]:
            self._server, self._model = (server, on_device(server, self._experiment.config.engine.device)), None
        return self._server[1]

    def _global_model(self, request: Request, server: Record, memories: Memories) -> Weights:
        # Once per request, which comes anew with each part to a worker: it may be made of what all clients remember.
        if self._model is None or self._model[0] != request:
            model = global_model(self._experiment, server, memories)
            assert model is not None  # else there are no parts of shared images
            self._model = (request, model)
        return self._model[1]

    def _ways(self, request: Request) -> dict[str, Predict]:
        method = self._experiment.method
        named = {MAIN: method.predict, **method.alternatives()}
        named |= {label: before.predict or method.predict for label, before in method.score_before().items()}
        return {way: named[way] for way in request.ways}

    def _ask_client(self, request: Request, client: int, server: Record, memory: Record) -> dict[str, Tensor]:
        held = self._met(request)[client]
        own, rows = own_model(self._experiment, server, client, memory), self._tested_rows(request, client)
        device = self._experiment.config.engine.device
        found: dict[str, Tensor] = {}
        ways = self._ways(request)
        if self._experiment.method.answers_alike:
            ways.pop(MAIN, None)  # said of the shared images, which are all there are
        if own is not None and ways:
            images = StoredImages(self._experiment, self._data.images[rows])
            name = ("client", client, len(rows))  # a range of the shared images is two numbers as well
            answers = self._forward.answers(own, images, ways, server, held.to(device), name)
            for way, scores in answers.items():
                found[f"{way}/correct"] = right_answers(scores, self._data.labels[rows], held)
        if request.private or (request.vote and own is not None):
            found |= self._ask_private(server, memory, own, held, request)
        return found

    def _ask_private(
        self, server: Record, memory: Record, own: Weights | None, held: Tensor, request: Request
    ) -> dict[str, Tensor]:
        """A client's own model, as its training left it, on the global test set; the global one where nobody trains."""
        setting, trained = self._experiment.setting, private_model(memory)
        if trained is None and not self._experiment.trains_models:
            trained = self._experiment.method.global_model(server)
        weights = with_statistics(trained or setting.initial, memory, setting) if request.private else own
        assert weights is not None
        images = StoredImages(self._experiment, self._data.images[: self._data.num_shared])
        way = {MAIN: self._experiment.method.predict_private}
        held = held.to(self._experiment.config.engine.device)
        answers = self._forward.answers(weights, images, way, server, held)[MAIN].argmax(dim=1)
        labels = self._data.shared_labels
        correct = torch.bincount(labels[answers == labels], minlength=setting.num_classes)
        return {"private": correct, "votes": answers, "trained": torch.tensor([int(trained is not None)])}

    # ---- who is tested on what -----------------------------------------------------------------------------------

    def _met(self, request: Request) -> Tensor:
        """Return the classes that each client has met in training, bool [K, C]."""
        stream = self._experiment.stream
        number = stream.rounds if request.round is None else request.round
        # Every client asks: computed for each, an evaluation would cost the square of the number of clients.
        if self._met_by is None or self._met_by[0] != number:
            self._met_by = (number, torch.from_numpy(stream.met(number)))
        return self._met_by[1]

    def _tested_rows(self, request: Request, client: int) -> Tensor:
        """A client's test data: where data change, those of the classes that it has met."""
        rows = self._data.clients[client]
        if self._experiment.stream.schedule == "none":
            return rows
        return rows[self._met(request)[client][self._data.labels[rows]]]

    # ---- putting together ----------------------------------------------------------------------------------------

    def _put_together(self, request: Request, answered: Sequence[tuple[Part, Mapping[str, Tensor]]]) -> Scores:
        shared = [found for part, found in answered if not part.clients]
        by_client = {part.clients[0]: found for part, found in answered if part.clients}
        labels, num_classes = self._data.shared_labels, self._experiment.setting.num_classes
        votes = None
        if not shared and request.vote:
            votes = torch.zeros(self._data.num_shared, num_classes, dtype=torch.int64)
            for found in by_client.values():
                votes += F.one_hot(found["votes"], num_classes)
        results = {}
        for way in request.ways:
            scores = torch.cat([found[f"{way}/scores"] for found in shared]) if shared else None
            local = [self._local(request, client, way, scores, by_client) for client in range(len(self._data.clients))]
            votes_here = votes if way == request.ways[0] else None
            # Of other ways accuracies alone are kept.
            kind = self._experiment.method.score_kind if way == MAIN else "ranks"
            results[way] = summarised(scores, votes_here, labels, local, num_classes, kind)
        main = results[request.ways[0]]
        others = {way: results[way].headline for way in request.ways[1:]}
        tasks = self._task_scores(request, main, by_client) if request.private else {}
        return Scores(**{**vars(main), "alternatives": others, "tasks": tasks})

    def _local(
        self,
        request: Request,
        client: int,
        way: str,
        scores: Tensor | None,
        by_client: Mapping[int, Mapping[str, Tensor]],
    ) -> tuple[int, int, int]:
        """(correct, correct among its own classes, tested) of one client."""
        own = by_client.get(client, {}).get(f"{way}/correct")
        if own is None:
            if scores is None:
                return 0, 0, 0
            rows = self._tested_rows(request, client)
            own = right_answers(scores[rows], self._data.labels[rows], self._met(request)[client])
        right, among_own, tested = own.tolist()
        return right, among_own, tested

    def _task_scores(
        self, request: Request, main: Scores, by_client: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[str, Any]:
        """The counts and accuracies of :attr:`Scores.tasks`."""
        setting, stream = self._experiment.setting, self._experiment.stream
        tested = torch.bincount(self._data.shared_labels, minlength=setting.num_classes).numpy()
        private = torch.stack([by_client[client]["private"] for client in range(setting.num_clients)]).numpy()
        number = stream.rounds if request.round is None else request.round

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
            "tasks": task_scores(stream, number, tested, private, shared, vote),
        }


def _nothing_remembered(client: int) -> Record:
    return Record()
