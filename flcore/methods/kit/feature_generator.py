"""A generator of features at the server, trained on clients' heads; shared by FedGen and FedPA.

G: (noise ε [z], label y) → feature [d]. The server trains it in every round, with labels uniform over the classes that
a client of the round drew; Adam's moments persist. Clients receive it from the second round on, with a distribution of
labels. To them its features are constants, which pass the head without dropout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from flcore.core.optim import Adam
from flcore.core.params import Search, param
from flcore.core.rng import numpy_stream, torch_stream
from flcore.core.schedules import exponential
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.math.generators.features import label_weights, qualified_labels
from flcore.math.generators.networks import (
    FeatureGenerator,
    build_feature_generator,
    constant_output,
    draw_labels,
    draw_noise,
)
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.class_means import class_distances
from flcore.methods import types as fl
from flcore.methods.fedavg import FedAvg
from flcore.methods.kit.preset import AuthorsPreset
from flcore.methods.kit.server_training import Moving, Terms, fit
from flcore.models import extract_weights, load_weights

FEATURE_GENERATOR = Key("generator", Weights)
GENERATOR_OPTIMIZER = Key("generator_optimizer", TensorDict)
"""Adam's moments, see :meth:`flcore.core.optim.Adam.state`."""

LABEL_DISTRIBUTION = Key("label_distribution", TensorDict)
"""``p`` float32 [K]: distribution of the clients' generated labels."""

LABEL_COUNTS = Key("label_counts", TensorDict)
"""A client's samples by class, int64 [K]: ``drawn`` in mini-batches of the round, ``held`` in its training data."""

GENERATES = attrgetter("generates")
"""Condition of a search range: there is a generator."""

FLOOR = 1e-4
"""Lower bound of a decaying weight."""

Objective = Callable[[Tensor, Tensor, Tensor], Terms]
"""(generated features [B, d], their noise [B, z], their labels [B]) → terms."""


@dataclass(frozen=True)
class Architecture:
    """Architecture of a feature generator. Equal sizes are equal, so that all clients share a loss constant."""

    noise_dim: int
    num_classes: int
    hidden: int
    feature_dim: int
    network: FeatureGenerator = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Build the network in evaluation mode, once, for calls with other weights."""
        object.__setattr__(self, "network", self.build().eval())

    def build(self, seed: int = 0) -> FeatureGenerator:
        return build_feature_generator(
            self.num_classes, self.feature_dim, noise_dim=self.noise_dim, hidden=self.hidden, seed=seed
        )


@dataclass(frozen=True)
class Heads:
    """Heads of the S clients that answered, in order of their ids.

    Attributes:
        params: [S, ...] by name within a head, see :func:`flcore.math.generators.features.frozen_head_logits`.
        shares: [S, K], weight of each head for each class.
    """

    params: Mapping[str, Tensor]
    shares: Tensor


@dataclass(frozen=True)
class FeatureGeneratorMethod(AuthorsPreset, FedAvg):
    """FedAvg and a generator of features at the server; a method adds the two losses."""

    gen_steps: int = param(
        50, "steps of the generator's training in a round", low=1, search=Search(10, 200, log=True, when=GENERATES)
    )
    gen_batch: int = param(
        32, "generated features per such step", low=2, search=Search(16, 256, log=True, when=GENERATES)
    )
    gen_lr: float = param(
        3e-4, "Adam's initial rate; 1e-4 for EMNIST", above=0, search=Search(1e-5, 3e-3, log=True, when=GENERATES)
    )
    gen_decay: float = param(0.98, "its factor per round", above=0, high=1)
    gen_weight_decay: float = param(
        1e-2, "added to the gradient as gen_weight_decay · w", low=0, search=Search(0, 1e-2, when=GENERATES)
    )
    gen_hidden: int = param(
        256, "hidden units; 128 for CelebA", low=1, search=Search(choices=(64, 128, 256, 512), when=GENERATES)
    )
    noise_dim: int = param(
        32, "z, length of a noise vector", low=1, search=Search(choices=(8, 16, 32, 64), when=GENERATES)
    )
    noise: Literal["uniform", "normal"] = param("normal", "noise: uniform on [0, 1), or standard normal")
    client_gen_batch: int | None = param(
        None, "B_gen, generated features per local step; null: as many as local.batch_size", low=1
    )
    fidelity: Literal["element_wise", "authors_broadcast"] = param(
        "element_wise", "weights of heads belong to samples, or are averaged by mistake as in the authors' code"
    )
    div_metric: Literal["code", "norms"] = param(
        "code", "distances of the diversity term: mean absolute and mean squared differences, or Euclidean norms"
    )

    @property
    @abstractmethod
    def generates(self) -> bool:
        """True if there is a generator."""

    @abstractmethod
    def objective(self, server: Record, heads: Heads, passed: int) -> Objective:
        """Return the generator's loss after ``passed`` rounds; server state and heads are on one device."""

    def architecture(self, setting: fl.FederationContext) -> Architecture:
        return Architecture(self.noise_dim, setting.num_classes, self.gen_hidden, setting.feature_dim)

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        if not self.generates:
            return server
        seed = int(numpy_stream(setting.seed, "generator weights").integers(2**31))
        generator = extract_weights(self.architecture(setting).build(seed))
        fresh = TensorDict(Adam(self.gen_lr).state(generator.params))
        return {**server, FEATURE_GENERATOR: generator, GENERATOR_OPTIMIZER: fresh}

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        extra = (FEATURE_GENERATOR, LABEL_DISTRIBUTION) if LABEL_DISTRIBUTION in server else ()
        return {**super().broadcast(server, client, ctx), **server.only(*extra)}

    def generated(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return features [steps, B_gen, d] and labels [steps, B_gen]."""
        size = self.client_gen_batch or ctx.setting.batch_size
        chances = ctx.received[LABEL_DISTRIBUTION]["p"]
        labels = draw_labels(steps * size, chances, generator).to(chances.device)
        noise = draw_noise(steps * size, self.noise_dim, generator, self.noise).to(chances.device)
        features = self.outputs(ctx.received[FEATURE_GENERATOR], ctx.setting, noise, labels)
        dim = ctx.setting.feature_dim
        return {"features": features.reshape(steps, size, dim), "labels": labels.reshape(steps, size)}

    def generated_share(self, ctx: fl.ClientContext) -> float:
        """Return B_gen / B."""
        return (self.client_gen_batch or ctx.setting.batch_size) / ctx.setting.batch_size

    def outputs(self, weights: Weights, setting: fl.FederationContext, noise: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's outputs [B, d] in evaluation mode, as constants."""
        return constant_output(self.architecture(setting).network, weights.params, weights.buffers, noise, labels)

    def train_generator(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Take ``gen_steps`` steps. Metrics: the terms in the last one, and :meth:`quality`.

        Raises:
            ArithmeticError: the generator diverged.
        """
        drawn = self.head_counts(replies)
        qualified = qualified_labels(drawn)
        if not qualified.any():
            return server, {}
        setting, stream = ctx.setting, ctx.stream("train generator")
        shape, count = (self.gen_steps, self.gen_batch), self.gen_steps * self.gen_batch
        labels = draw_labels(count, qualified, stream).reshape(shape).to(setting.device)
        noise = draw_noise(count, self.noise_dim, stream, self.noise).reshape(*shape, -1).to(setting.device)

        held = on_device(server.without(fl.MODEL), setting.device)
        network = self.architecture(setting).build().to(setting.device).train()
        load_weights(network, held[FEATURE_GENERATOR])
        params = dict(network.named_parameters())
        optimizer = Adam(exponential(self.gen_lr, self.gen_decay)(ctx.rounds_done), self.gen_weight_decay)
        optimizer.restore(params, held[GENERATOR_OPTIMIZER].named)
        heads = stacked_heads(replies, label_weights(drawn), setting.device)
        objective = self.objective(held, heads, ctx.rounds_done)
        fitted = fit(
            Moving(params, optimizer),
            zip(noise, labels, strict=True),
            lambda batch: objective(network(*batch), *batch),
            what="the generator",
            cure="method.gen_lr",
        )
        moments = TensorDict(optimizer.state(params))
        trained = Record({FEATURE_GENERATOR: extract_weights(network), GENERATOR_OPTIMIZER: moments})
        after = server | on_device(trained, "cpu") | self.known_labels(server, replies, setting)
        return after, fitted.facts("generator_") | self.quality(after, setting)

    def head_counts(self, replies: fl.Replies) -> Tensor:
        """Return the counts that weigh clients' heads, int64 [S, K]."""
        return reported(replies, "drawn")

    def known_labels(self, server: Record, replies: fl.Replies, setting: fl.FederationContext) -> Payloads:
        """Return the label distribution: uniform over the classes that any client has drawn so far."""
        return {LABEL_DISTRIBUTION: uniform_distribution(server, reported(replies, "drawn"))}

    def quality(self, server: Record, setting: fl.FederationContext) -> dict[str, float]:
        """Return spread and distances of 100 features per class (FedPA's table V), always of the same noise."""
        made = self.generated_features(server, setting, 100, torch_stream(setting.seed, "generator quality"))
        return {} if made is None else {f"generated_{name}": value for name, value in class_distances(*made).items()}

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Return features of every class in the label distribution; before the first training, of all classes."""
        if not self.generates:
            return None
        held = on_device(server.only(FEATURE_GENERATOR, LABEL_DISTRIBUTION), setting.device)
        everything = TensorDict({"p": torch.ones(setting.num_classes, device=setting.device)})
        chances = held.get(LABEL_DISTRIBUTION, everything)["p"]
        labels = (chances > 0).nonzero().flatten().repeat_interleave(count)
        noise = draw_noise(len(labels), self.noise_dim, generator, self.noise).to(labels.device)
        return self.outputs(held[FEATURE_GENERATOR], setting, noise, labels), labels


def generated_cross_entropy(model: fl.LocalModel, batch: fl.Batch) -> Tensor:
    """Return CE(h(G(ε, ŷ)), ŷ) on the step's generated features; its gradient reaches the head h alone."""
    return cross_entropy(
        model.for_extra_inputs().classify(batch.random_inputs["features"]), batch.random_inputs["labels"]
    )


def reported(replies: fl.Replies, kind: str) -> Tensor:
    """Return label counts of one kind, int64 [S, K], in order of the clients' ids."""
    return torch.stack([counts[kind] for counts in replies.of(LABEL_COUNTS).values()])


def uniform_distribution(server: Record, counts: Tensor) -> TensorDict:
    """Return ``p`` float32 [K]: uniform over the classes of ``counts`` [S, K] and earlier ones."""
    seen = qualified_labels(counts)
    if LABEL_DISTRIBUTION in server:
        seen = seen | (server[LABEL_DISTRIBUTION]["p"] > 0)
    return TensorDict({"p": seen / seen.sum()})


def stacked_heads(replies: fl.Replies, shares: Tensor, device: str) -> Heads:
    """Return the heads of all replies, on a device."""
    heads = [weights.part("head.").params for weights in replies.of(fl.MODEL).values()]
    params = {name.removeprefix("head."): torch.stack([own[name] for own in heads]).to(device) for name in heads[0]}
    return Heads(params, shares.to(device))
