"""CReFF (Shang, Lu, Huang, Wang, IJCAI 2022): FedAvg whose classifier is trained anew on features made by the server.

Client, which receives w_g = (body f, head h) and the re-trained classifier h̃:

1. before its training, for each class c it holds: ∇_h̃ CE(h̃(f(x)), c), mean over 10 draws of up to 32 of its samples;
2. FedAvg's training of w_g with its own head h.

Server: w_g ← FedAvg; G_c ← unweighted mean of the uploaded gradients of class c; *federated features* U_c, 100 per
class, kept from round to round and N(0, 1) at first, take 100 steps of SGD on

    Σ_c D(∇_h̃ CE(h̃(U_c), c), G_c),    D = Σ over rows of the weight of (1 − cos) + (1 − cos of the bias);

then a fresh linear classifier is trained on all of them for 300 epochs: the next h̃. What answers is f with h̃; the
history scores f with h as ``fedavg_head``. Clients that answer for themselves do so with their own h.

Choices: the first h̃ is the initial head (all classifiers begin with random weights). Classes that nobody sampled holds
keep their features; those that nobody ever held keep noise, on which h̃ is trained all the same (the authors' code).
The code passes a wrong name for the features' learning rate; ours is the paper's 0.1. It augments the images whose
gradients are taken (DSA); here they are taken as they are. Gradients of the linear layer are computed in closed form.

Privacy: a class with one sample has its feature in its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flcore.losses.alignment import gradient_distance, linear_gradient
from flcore.losses.basic import cross_entropy
from flcore.messages import Arrays, Facts, Weights
from flcore.methods.fedavg import FedAvg
from flcore.methods.vocabulary import LocalModel, Predict, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.records import Record, payload_of
from flcore.rng import torch_stream

HEAD = ("head.weight", "head.bias")


@dataclass(frozen=True)
class CReFF(FedAvg):
    """FedAvg, and a balanced classifier for its body."""

    name: ClassVar[str] = "creff"
    summary: ClassVar[str] = "FedAvg whose classifier is retrained on features that match the clients' class gradients"
    citation: ClassVar[str] = "Shang et al., IJCAI 2022"

    draws_per_class: int = param(10, "draws over which a class's real gradient is averaged", low=1)
    draw_size: int = param(32, "samples of the class in a draw, at most", low=1)
    per_class: int = param(100, "federated features of each class", low=1, search=Search(10, 200, log=True))
    match_steps: int = param(100, "steps of the features' training in a round", low=0, search=Search(10, 300, log=True))
    feature_lr: float = param(0.1, "learning rate of the features", above=0, search=Search(0.01, 10.0, log=True))
    retrain_epochs: int = param(
        300, "passes over the features in the classifier's training", low=0, search=Search(30, 500, log=True)
    )
    retrain_lr: float = param(0.01, "learning rate of the classifier", above=0, search=Search(1e-3, 0.1, log=True))
    retrain_batch: int = param(32, "features per mini-batch of the classifier's training", low=1)

    def start_server(self, setting: Setting) -> Record:
        """The initial model, its head as h̃ and random features."""
        shape = (setting.num_classes * self.per_class, setting.feature_dim)
        features = torch.randn(shape, generator=torch_stream(setting.seed, "federated features"))
        head = {name: setting.initial.params[name].clone() for name in HEAD}
        return {
            **super().start_server(setting),
            "classifier": Weights(head),
            "features": Arrays({"values": features}),
        }

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model and h̃; the features stay."""
        return {"model": server["model"], "classifier": server["classifier"]}

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k, and the real gradients of the client's classes."""
        message, memory = super().reply(turn, trained)
        received = turn.with_statistics(payload_of(Weights, turn.inbox, "model"))
        gradients = self.real_gradients(turn, *trained.features(received))
        return {**message, "gradients": gradients}, memory

    def real_gradients(self, turn: Turn, features: Tensor, labels: Tensor) -> Arrays:
        """Gradients of h̃ for each of the client's classes, k of them.

        Args:
            turn: the client's turn, with h̃ in its inbox.
            features: of all training samples under the received body, [n, d] on the CPU. labels: int64 [n].

        Returns:
            ``classes`` int64 [k], ``weight`` float32 [k, C, d], ``bias`` float32 [k, C].
        """
        weight, bias = (value.cpu() for value in _classifier(turn.inbox))
        classes = torch.unique(labels)
        weights, biases = weight.new_zeros(len(classes), *weight.shape), bias.new_zeros(len(classes), *bias.shape)
        for row, label in enumerate(classes.tolist()):
            own = features[labels == label]
            stream = turn.stream("real gradients", label)
            draws = [torch.randperm(len(own), generator=stream)[: self.draw_size] for _ in range(self.draws_per_class)]
            # Draws are equally large: the mean of their gradients is the gradient of all of them.
            drawn = own[torch.cat(draws)]
            weights[row], biases[row] = linear_gradient(drawn, torch.full((len(drawn),), label), weight, bias)
        return Arrays({"classes": classes, "weight": weights, "bias": biases})

    def stages(self) -> Mapping[str, Stage]:
        """FedAvg's, then the features, then the classifier."""
        return {
            **super().stages(),
            "match-gradients": self.match_gradients,
            "retrain-classifier": self.retrain_classifier,
        }

    def match_gradients(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: the features of the uploaded classes, moved until their gradients point as the real ones do.

        Facts: the mean over these classes of D before and after, and how many classes nobody uploaded.
        """
        uploads = {client: payload_of(Arrays, replies[client], "gradients") for client in sorted(replies)}
        present, wanted = mean_gradients(uploads, setting.num_classes)
        held = payload_of(Arrays, server, "features")["values"].reshape(setting.num_classes, self.per_class, -1)
        moved = held.clone()
        device = setting.device
        weight, bias = (value.to(device) for value in _classifier(server))
        moved[present], before, after = self.matched(
            held[present].to(device),
            present.to(device),
            (weight, bias),
            (wanted[0][present].to(device), wanted[1][present].to(device)),
        )
        facts = {
            "matching_distance_before": before,
            "matching_distance": after,
            "classes_skipped": float(setting.num_classes - len(present)),
        }
        return {**server, "features": Arrays({"values": moved.flatten(0, 1)}), "facts": Facts(facts)}

    def matched(
        self, features: Tensor, labels: Tensor, classifier: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, float, float]:
        """``match_steps`` steps of SGD on the features of k >= 1 classes.

        Args:
            features: [k, m, d]. labels: int64 [k].
            classifier: weight [C, d] and bias [C] of h̃.
            wanted: real gradients [k, C, d] and [k, C].

        Returns:
            The features on the CPU, and the mean distance per class before the first and after the last step.
        """

        def distance(own: Tensor, label: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            found = linear_gradient(own, label.expand(len(own)), *classifier)
            return gradient_distance(found[0], weight) + gradient_distance(found[1].unsqueeze(0), bias.unsqueeze(0))

        moving, distances = features.detach(), []
        for step in range(self.match_steps + 1):
            moving.requires_grad_()
            per_class = torch.vmap(distance)(moving, labels, *wanted)
            distances.append(per_class.detach())
            if step < self.match_steps:
                (gradient,) = torch.autograd.grad(per_class.sum(), moving)
                moving = moving.detach() - self.feature_lr * gradient
        return moving.detach().cpu(), float(distances[0].mean()), float(distances[-1].mean())

    def retrain_classifier(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: h̃, a fresh linear classifier trained on all features. Fact: its mean loss on them."""
        features = payload_of(Arrays, server, "features")["values"].to(setting.device)
        labels = torch.arange(setting.num_classes, device=setting.device).repeat_interleave(self.per_class)
        bound = 1 / math.sqrt(setting.feature_dim)  # PyTorch's initialisation of a linear layer
        start = torch_stream(setting.seed, "classifier initialisation", round_number)
        weight, bias = (
            ((2 * torch.rand(value.shape, generator=start) - 1) * bound).to(setting.device)
            for value in _classifier(server)
        )
        order = torch_stream(setting.seed, "classifier batches", round_number)
        weight, bias = self.retrained(weight, bias, features, labels, order)
        loss = float(cross_entropy(features @ weight.mT + bias, labels))
        facts = payload_of(Facts, server, "facts").values if "facts" in server else {}
        classifier = Weights(dict(zip(HEAD, (weight.cpu(), bias.cpu()), strict=True)))
        return {**server, "classifier": classifier, "facts": Facts({**facts, "retraining_loss": loss})}

    @torch.no_grad()
    def retrained(
        self, weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """``retrain_epochs`` shuffled passes of plain SGD on the cross-entropy, from a given classifier on.

        Args:
            weight: [C, d]. bias: [C]. features: [n, d]. labels: int64 [n].
            generator: CPU generator of the order.
        """
        # Ten thousand tiny steps: the gradient in closed form, the bias as one more column, buffers that are reused.
        inputs = torch.cat([features, features.new_ones(len(features), 1)], 1)
        targets = torch.zeros(len(features), len(bias), device=features.device).scatter_(1, labels.unsqueeze(1), 1)
        both = torch.cat([weight, bias.unsqueeze(1)], 1)
        for _ in range(self.retrain_epochs):
            order = torch.randperm(len(labels), generator=generator).to(labels.device)
            batches = (torch.split(values[order], self.retrain_batch) for values in (inputs, targets))
            for rows, wanted in zip(*batches, strict=True):
                errors = torch.mm(rows, both.mT).softmax(1).sub_(wanted)
                both.addmm_(errors.mT, rows, alpha=-self.retrain_lr / len(rows))
        return both[:, :-1].contiguous(), both[:, -1].contiguous()

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """FedAvg's body with h̃."""
        model = payload_of(Weights, server, "model")
        return Weights({**model.params, **payload_of(Weights, server, "classifier").params}, model.buffers)

    def predict_fedavg_head(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """Logits of FedAvg's head."""
        head = payload_of(Weights, server, "model").params
        return model.classify(model.features(images), weights={name: head[name] for name in HEAD})

    def alternatives(self) -> Mapping[str, Predict]:
        """FedAvg's answer."""
        return {"fedavg_head": self.predict_fedavg_head}

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The federated features, at most ``count`` of each class."""
        values = payload_of(Arrays, server, "features")["values"].reshape(setting.num_classes, self.per_class, -1)
        taken = values[:, :count]
        labels = torch.arange(setting.num_classes, device=values.device).repeat_interleave(taken.shape[1])
        return taken.flatten(0, 1), labels


def mean_gradients(uploads: Mapping[int, Arrays], num_classes: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Unweighted mean over the clients that uploaded a class, folded in client-id order in float64.

    Args:
        uploads: client id to ``classes`` [k], ``weight`` [k, C, d] and ``bias`` [k, C]; at least one client.
        num_classes: C.

    Returns:
        The classes that somebody uploaded, ascending int64, and float32 gradients [C, C, d] and [C, C], zero for the
        others.
    """
    first = next(iter(uploads.values()))
    weight, bias = (
        torch.zeros(num_classes, *first[name].shape[1:], dtype=torch.float64) for name in ("weight", "bias")
    )
    holders = torch.zeros(num_classes, dtype=torch.float64)
    for client in sorted(uploads):
        upload = uploads[client]
        weight[upload["classes"]] += upload["weight"]
        bias[upload["classes"]] += upload["bias"]
        holders[upload["classes"]] += 1
    shares = holders.clamp_min(1)
    return holders.nonzero().flatten(), ((weight / shares[:, None, None]).float(), (bias / shares[:, None]).float())


def _classifier(record: Record) -> tuple[Tensor, Tensor]:
    """Weight [C, d] and bias [C] of h̃."""
    classifier = payload_of(Weights, record, "classifier")
    return classifier.params[HEAD[0]], classifier.params[HEAD[1]]
