"""CReFF (Shang, Lu, Huang, Wang, IJCAI 2022): FedAvg with a classifier re-trained on features that the server makes.

Client, which receives w_g = (body f, head h) and the re-trained classifier h̃:

1. before its training, for each class c it holds: ∇_h̃ CE(h̃(f(x)), c), mean over 10 draws of up to 32 of its samples;
2. FedAvg's training of w_g with its own head h.

Server: w_g ← FedAvg; G_c ← unweighted mean of the uploaded gradients of class c; *federated features* U_c, 100 per
class, kept from round to round and N(0, 1) at first, take 100 steps of SGD on

    Σ_c D(∇_h̃ CE(h̃(U_c), c), G_c),    D = Σ over rows of the weight of (1 − cos) + (1 − cos of the bias);

then a fresh linear classifier is trained on all of them for 300 epochs: the next h̃. f with h̃ predicts; f with h is
scored as ``fedavg_head``. Clients predict with their own h.

Choices: the first h̃ is the initial head. Classes without a sampled holder keep their features; those without any
holder keep noise, on which h̃ is trained too (the authors' code). The authors augment the images for these gradients
(DSA), ours does not. Gradients of the linear layer are computed in closed form.

Privacy: a class with one sample has its feature in its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flcore.core.optim import Sgd
from flcore.core.params import Search, param
from flcore.core.rng import torch_stream
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads, Record
from flcore.math.losses.basic import cross_entropy, gradient_distance, linear_gradient
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.server_training import Moving, Terms, fit, leaves

CLASSIFIER = Key("classifier", Weights)
"""h̃."""

FEATURES = Key("features", TensorDict)
"""``values`` float32 [C·m, d]: the federated features, grouped by class."""

GRADIENTS = Key("gradients", TensorDict)
"""A client's real gradients, see :meth:`CReFF.real_gradients`."""

Gradients = tuple[Tensor, ...]
"""Weight [C, d] and bias [C] of a classifier, or gradients of both."""


@dataclass(frozen=True)
class CReFF(FedAvg, name="creff", citation="Shang et al., IJCAI 2022", needs_linear_head=True):
    """FedAvg with a classifier retrained on features that match the clients' class gradients."""

    draws_per_class: int = param(10, "draws over which a class's real gradient is averaged", low=1)
    draw_size: int = param(32, "samples of the class in a draw, at most", low=1)
    per_class: int = param(
        100, "features of each class", low=1, search=Search(10, 200, log=True, when=lambda m: m.retrain_epochs > 0)
    )
    match_steps: int = param(
        100, "features' steps a round", low=0, search=Search(10, 300, log=True, when=lambda m: m.retrain_epochs > 0)
    )
    feature_lr: float = param(
        0.1,
        "learning rate of the features",
        above=0,
        search=Search(0.01, 10.0, log=True, when=lambda m: m.retrain_epochs > 0 and m.match_steps > 0),
    )
    retrain_epochs: int = param(
        300, "passes over the features in the classifier's training", low=0, search=Search(30, 500, log=True)
    )
    retrain_lr: float = param(
        0.01, "the classifier's rate", above=0, search=Search(1e-3, 0.1, log=True, when=lambda m: m.retrain_epochs > 0)
    )
    retrain_batch: int = param(32, "features per mini-batch of the classifier's training", low=1)

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        shape = (setting.num_classes * self.per_class, setting.feature_dim)
        features = torch.randn(shape, generator=torch_stream(setting.seed, "federated features"))
        head = setting.initial.part("head.")
        return {**super().start_server(setting), CLASSIFIER: head, FEATURES: TensorDict({"values": features})}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return server.only(fl.MODEL, CLASSIFIER)

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        features, labels = trained.features(ctx.with_statistics(ctx.received[fl.MODEL]))
        return {**message, GRADIENTS: self.real_gradients(ctx, features, labels)}, client_state

    def real_gradients(self, ctx: fl.ClientContext, features: Tensor, labels: Tensor) -> TensorDict:
        """Return gradients of h̃ for each of the client's k classes.

        Args:
            ctx: with h̃ received.
            features: of all training samples under the received body, [n, d]. labels: int64 [n].

        Returns:
            ``classes`` int64 [k], ``weight`` float32 [k, C, d], ``bias`` float32 [k, C].
        """
        weight, bias = _classifier(ctx.received)
        classes = torch.unique(labels)
        weights, biases = weight.new_zeros(len(classes), *weight.shape), bias.new_zeros(len(classes), *bias.shape)
        for row, label in enumerate(classes.tolist()):
            own = features[labels == label]
            stream = ctx.stream("real gradients", label)
            draws = [torch.randperm(len(own), generator=stream)[: self.draw_size] for _ in range(self.draws_per_class)]
            # Draws are equally large: the mean of their gradients is the gradient of all of them.
            drawn = own[torch.cat(draws).to(own.device)]
            weights[row], biases[row] = linear_gradient(drawn, labels.new_full((len(drawn),), label), weight, bias)
        return TensorDict({"classes": classes, "weight": weights, "bias": biases})

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        steps = {"match-gradients": self.match_gradients, "retrain-classifier": self.retrain_classifier}
        return {**super().server_steps(), **steps}

    def match_gradients(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Move the features of the uploaded classes until their gradients point as the real ones do.

        Metrics: the mean of D over these classes before and after, and the number of classes without an upload.
        """
        classes, device = ctx.setting.num_classes, ctx.setting.device
        present, gradients = mean_gradients(replies.of(GRADIENTS), classes)
        features = server[FEATURES]["values"].reshape(classes, self.per_class, -1).clone()
        features[present], before, after = self.matched(
            features[present].to(device),
            present.to(device),
            classifier=tuple(value.to(device) for value in _classifier(server)),
            wanted=tuple(value[present].to(device) for value in gradients),
        )
        facts = {"matching_distance_before": before, "matching_distance": after}
        facts["classes_skipped"] = float(classes - len(present))
        return server | {FEATURES: TensorDict({"values": features.flatten(0, 1)})}, facts

    def matched(
        self, features: Tensor, labels: Tensor, classifier: Gradients, wanted: Gradients
    ) -> tuple[Tensor, float, float]:
        """Take ``match_steps`` steps of SGD on features [k, m, d] of classes ``labels`` [k] towards ``wanted``.

        Returns:
            The features on the CPU, and the mean distance per class before the first and after the last step.
        """
        values = leaves({"features": features})

        def class_distance(own: Tensor, label: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ours = linear_gradient(own, label.expand(len(own)), *classifier)
            return gradient_distance(ours[0], weight) + gradient_distance(ours[1].unsqueeze(0), bias.unsqueeze(0))

        def distances() -> Tensor:
            return torch.vmap(class_distance)(values["features"], labels, *wanted)

        def terms(step: int) -> Terms:
            return {"matching": (1.0, distances().sum())}

        before = float(distances().detach().mean())
        moving, what = Moving(values, Sgd(self.feature_lr)), "the training of federated features"
        fitted = fit(moving, range(self.match_steps), terms, what=what, cure="method.feature_lr")
        return fitted.values["features"].cpu(), before, float(distances().detach().mean())

    def retrain_classifier(
        self, server: Record, replies: fl.Replies, ctx: fl.RoundContext
    ) -> tuple[Record, fl.Metrics]:
        """Train h̃, a fresh linear classifier, on all features. Metric: its mean loss on them."""
        setting = ctx.setting
        features = server[FEATURES]["values"].to(setting.device)
        labels = torch.arange(setting.num_classes, device=setting.device).repeat_interleave(self.per_class)
        bound = 1 / math.sqrt(setting.feature_dim)  # PyTorch's initialisation of a linear layer
        start = ctx.stream("classifier initialisation")
        weight, bias = (
            ((2 * torch.rand(value.shape, generator=start) - 1) * bound).to(setting.device)
            for value in _classifier(server)
        )
        weight, bias = self.retrained(weight, bias, features, labels, ctx.stream("classifier batches"))
        loss = float(cross_entropy(features @ weight.mT + bias, labels))
        classifier = Weights({"head.weight": weight.cpu(), "head.bias": bias.cpu()})
        return server | {CLASSIFIER: classifier}, {"retraining_loss": loss}

    @torch.no_grad()
    def retrained(
        self, weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Train a classifier by ``retrain_epochs`` shuffled passes of plain SGD on the cross-entropy.

        Shapes: weight [C, d], bias [C], features [n, d], labels int64 [n]. ``generator``: CPU stream of the order.
        """
        # Not `fit`: ten thousand tiny steps, ten times faster with the gradient in closed form and the bias as one more
        # column. Softmax regression has bounded gradients, so nothing diverges here.
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

    def global_model(self, server: Record) -> Weights | None:
        return server[fl.MODEL].with_params(server[CLASSIFIER])

    def scoring_message(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        return self.broadcast(server, client, ctx)

    def predict_fedavg_head(
        self, model: fl.LocalModel, images: Tensor, known: Record, classes: Tensor | None
    ) -> Tensor:
        return model.classify(model.features(images), weights=known[fl.MODEL].part("head.").params)

    def predictors(self) -> Mapping[str, fl.Predict]:
        return {"fedavg_head": self.predict_fedavg_head}

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the federated features, at most ``count`` of each class."""
        taken = server[FEATURES]["values"].reshape(setting.num_classes, self.per_class, -1)[:, :count]
        labels = torch.arange(setting.num_classes, device=taken.device).repeat_interleave(taken.shape[1])
        return taken.flatten(0, 1), labels


def mean_gradients(uploads: Mapping[int, TensorDict], num_classes: int) -> tuple[Tensor, Gradients]:
    """Return uploaded classes, ascending int64, and their mean gradients over clients: float32 [C, C, d] and [C, C].

    Means are unweighted, summed in client-id order in float64; zero for other classes. ``uploads`` has at least one
    client.
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


def _classifier(record: Record) -> Gradients:
    classifier = record[CLASSIFIER].params
    return classifier["head.weight"], classifier["head.bias"]
