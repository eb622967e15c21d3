"""FedGen (Zhu, Hong, Zhou, ICML 2021): a small generator of features, trained on the clients' heads, teaches clients.

Generator G: (noise ε [z], label y) → feature [d]. h is the model's head, f its encoder, r the round counted from 0.

Server, Adam, ``gen_steps`` steps on batches of ``gen_batch`` (Eq. 4 and the authors' code), y uniform over the classes
that a sampled client drew in this round:

    L = α · mean_i Σ_k ω_{k,y_i} · CE(h_k(G(ε_i, y_i)), y_i) + η · exp(−mean_ij δ_G(i, j) · δ_ε(i, j)),
    ω_{k,c} = (n_{k,c} + 1) / Σ_j (n_{j,c} + 1), n_{k,c}: how often client k drew a sample of class c in this round.

Client from the second round on (Eq. 5; before it nothing has trained the generator, and it is not sent):

    CE(x, y) + γ_r · (B_gen/B) · CE(h(G(ε, ŷ)), ŷ) + β_r · KL(softmax h(G(ε, y)) ‖ softmax h(f(x))),

γ_r = max(1e-4, γ·0.98^r), β_r likewise; ŷ uniform over all classes that a client has reported so far; the KL term's
target is a constant. A weight of 0 switches its term off and is not raised by the floor.

Deviations from the authors' code: noise is normal as in the paper (the code: uniform) and weights belong to samples
(the code multiplies [B] by [B, 1]); ``preset: authors`` brings both back. The student term, whose weight is 0 in the
released configuration, is left out. Generated features pass the head without dropout. Clients report the classes they
drew instead of the server knowing everybody's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from flcore.generators.draws import draw_labels, draw_noise
from flcore.generators.features import (
    diversity_loss,
    fidelity_loss,
    frozen_head_logits,
    label_weights,
    qualified_labels,
    teacher_divergence,
)
from flcore.generators.networks import FeatureGenerator, build_feature_generator, constant_output
from flcore.losses.basic import cross_entropy
from flcore.messages import Arrays, Facts, Weights
from flcore.methods.fedavg import FedAvg, aggregate
from flcore.methods.vocabulary import Batch, Context, LocalModel, Setting, Stage, TrainedClient, Turn
from flcore.models import extract_weights, load_weights
from flcore.optim import AdamState, adam_step
from flcore.params import Search, param
from flcore.prototypes.distances import class_distances
from flcore.records import Record, on_device, payload_of
from flcore.rng import numpy_stream, torch_stream
from flcore.schedules import decayed_weight, exponential_lr

FLOOR = 1e-4
"""Below this a decaying weight does not fall."""

Terms = Mapping[str, tuple[float, Tensor]]
"""By name: weight and value of a term of the generator's loss."""

Objective = Callable[[Tensor, Tensor, Tensor], Terms]
"""Generated features [B, d], the noise [B, z] they are made of, their labels [B] → terms."""


@dataclass(frozen=True)
class Architecture:
    """What a feature generator is apart from its weights.

    Architectures of equal sizes are equal, so that all clients of a leg hand the same constant to their loss.
    """

    noise_dim: int
    num_classes: int
    hidden: int
    feature_dim: int
    network: FeatureGenerator = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Build the network, in evaluation mode, for calls with weights of others."""
        object.__setattr__(self, "network", self.build().eval())

    def build(self, seed: int = 0) -> FeatureGenerator:
        """A generator with weights that follow from ``seed``."""
        return build_feature_generator(
            self.num_classes, self.feature_dim, noise_dim=self.noise_dim, hidden=self.hidden, seed=seed
        )


@dataclass(frozen=True)
class Heads:
    """Linear heads of the S clients that answered, in order of their ids.

    Attributes:
        weight: [S, K, d]. bias: [S, K].
        shares: [S, K], how much each head counts for each class.
    """

    weight: Tensor
    bias: Tensor
    shares: Tensor


@dataclass(frozen=True)
class FeatureGeneratorMethod(FedAvg):
    """FedAvg and a generator of features at the server; a method adds the two losses."""

    AUTHORS: ClassVar[Mapping[str, Any]] = {}

    gen_steps: int = param(50, "steps of the generator's training in a round", low=1, search=Search(10, 200, log=True))
    gen_batch: int = param(32, "generated features per such step", low=2, search=Search(16, 256, log=True))
    gen_lr: float = param(
        3e-4, "Adam's learning rate in the first round; 1e-4 for EMNIST", above=0, search=Search(1e-5, 3e-3, log=True)
    )
    gen_decay: float = param(0.98, "its factor per round", above=0, high=1)
    gen_weight_decay: float = param(
        1e-2, "added to the gradient as gen_weight_decay · w", low=0, search=Search(0, 1e-2)
    )
    gen_hidden: int = param(
        256, "hidden units of the generator; 128 for CelebA", low=1, search=Search(choices=(64, 128, 256, 512))
    )
    noise_dim: int = param(32, "z, length of a noise vector", low=1, search=Search(choices=(8, 16, 32, 64)))
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
    preset: Literal["default", "authors"] = param(
        "default", "authors: where their code differs from the defaults, as in their code"
    )

    def __post_init__(self) -> None:
        """Refuse a choice that the preset would silently replace."""
        if self.preset == "default":
            return
        defaults = {declared.name: declared.default for declared in fields(self)}
        for name, value in self.AUTHORS.items():
            if getattr(self, name) not in (value, defaults[name]):
                raise ValueError(
                    f"preset = authors means {name} = {value}, not {getattr(self, name)}; leave {name} out, or choose "
                    "one by one with preset = default"
                )

    @property
    def chosen(self) -> Self:
        """The method with the preset's values put in."""
        return replace(self, preset="default", **self.AUTHORS) if self.preset == "authors" else self

    @property
    @abstractmethod
    def generates(self) -> bool:
        """Whether clients use the generator at all; else there is none."""

    @abstractmethod
    def objective(self, server: Record, heads: Heads, round_number: int) -> Objective:
        """The generator's loss in a round; what the server holds and the heads lie on one device."""

    def architecture(self, setting: Setting) -> Architecture:
        """The generator's architecture."""
        return Architecture(self.noise_dim, setting.num_classes, self.gen_hidden, setting.feature_dim)

    def start_server(self, setting: Setting) -> Record:
        """The initial model and an untrained generator with its optimiser."""
        server = super().start_server(setting)
        if not self.generates:
            return server
        seed = int(numpy_stream(setting.seed, "generator weights").integers(2**31))
        generator = extract_weights(self.architecture(setting).build(seed))
        return {
            **server,
            "generator": generator,
            "generator_optimizer": Arrays(AdamState.fresh(generator.params).arrays()),
        }

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model and, once it was trained, the generator and the distribution of labels to ask it for."""
        message = super().broadcast(server, client, exchange)
        if "label_distribution" not in server:
            return message
        return {**message, **{name: server[name] for name in ("generator", "label_distribution")}}

    def generated(self, turn: Turn, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Features [steps, B_gen, d] and their labels [steps, B_gen], constants to the client's model."""
        size = self.client_gen_batch or turn.setting.batch_size
        chances = payload_of(Arrays, turn.inbox, "label_distribution")["p"]
        labels = draw_labels(steps * size, chances, generator).to(chances.device)
        noise = draw_noise(steps * size, self.noise_dim, generator, self.chosen.noise).to(chances.device)
        features = self.outputs(payload_of(Weights, turn.inbox, "generator"), turn.setting, noise, labels)
        return {
            "features": features.reshape(steps, size, turn.setting.feature_dim),
            "labels": labels.reshape(steps, size),
        }

    def generated_share(self, turn: Turn) -> float:
        """B_gen / B."""
        return (self.client_gen_batch or turn.setting.batch_size) / turn.setting.batch_size

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Features of every class that clients ask for; before the first training of all."""
        if not self.generates:
            return None
        chances = torch.ones(setting.num_classes, device=setting.device)
        if "label_distribution" in server:
            chances = payload_of(Arrays, server, "label_distribution")["p"]
        labels = (chances > 0).nonzero().flatten().repeat_interleave(count)
        noise = draw_noise(len(labels), self.noise_dim, generator, self.chosen.noise).to(labels.device)
        return self.outputs(payload_of(Weights, server, "generator"), setting, noise, labels), labels

    def outputs(self, weights: Weights, setting: Setting, noise: Tensor, labels: Tensor) -> Tensor:
        """What a generator in evaluation mode makes of noise [B, z] and labels [B]: constants [B, d]."""
        return constant_output(self.architecture(setting).network, weights.params, weights.buffers, noise, labels)

    def known_labels(self, server: Record, replies: Mapping[int, Record], setting: Setting) -> Record:
        """``label_distribution``: for the clients' draws; uniform over the classes that anyone has drawn so far."""
        return {"label_distribution": uniform_distribution(server, reported(replies, "drawn"))}

    def train_generator(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: the generator, some steps further.

        Raises:
            ArithmeticError: the generator diverged.
        """
        drawn = reported(replies, "drawn")
        qualified = qualified_labels(drawn)
        if not qualified.any():
            return server
        stream = torch_stream(setting.seed, "train generator", round_number)
        shape, count = (self.gen_steps, self.gen_batch), self.gen_steps * self.gen_batch
        labels = draw_labels(count, qualified, stream).reshape(shape).to(setting.device)
        noise = draw_noise(count, self.noise_dim, stream, self.chosen.noise).reshape(*shape, -1).to(setting.device)
        local = on_device({name: held for name, held in server.items() if name != "model"}, setting.device)
        network = self.architecture(setting).build().to(setting.device)
        load_weights(network, payload_of(Weights, local, "generator"))
        generator, terms = fit_generator(
            network,
            AdamState.from_arrays(payload_of(Arrays, local, "generator_optimizer").named),
            self.chosen.objective(local, stacked_heads(replies, label_weights(drawn), setting.device), round_number),
            (noise, labels),
            lr=exponential_lr(self.gen_lr, self.gen_decay, round_number - 1),
            weight_decay=self.gen_weight_decay,
        )
        facts = {f"generator_{name}": value.item() for name, (_, value) in terms.items()}
        facts |= self.generator_facts(local, generator.outputs, labels[-1])
        if not all(bool(torch.isfinite(value).all()) for value in generator.weights.params.values()):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in facts.items())
            raise ArithmeticError(f"the generator diverged ({shown}); lower method.gen_lr")
        trained = {"generator": generator.weights, "generator_optimizer": Arrays(generator.optimizer.arrays())}
        after = {**server, **on_device(trained, "cpu"), **self.known_labels(server, replies, setting)}
        return {**after, "facts": Facts(facts | self.quality(after, setting))}

    def quality(self, server: Record, setting: Setting) -> dict[str, float]:
        """Spread of 100 generated features per class and distance between classes (FedPA's table V), same noise always.

        Named ``generated_intra``, ``generated_inter``, ``generated_centroid_inter``.
        """
        made = self.generated_features(server, setting, 100, torch_stream(setting.seed, "generator quality"))
        return {} if made is None else {f"generated_{name}": value for name, value in class_distances(*made).items()}

    def generator_facts(self, server: Record, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """What else to note of the features [B, d] of the last step and their labels [B]."""
        return {}


@dataclass(frozen=True)
class FedGen(FeatureGeneratorMethod):
    """FedAvg whose clients also learn from generated features."""

    name: ClassVar[str] = "fedgen"
    summary: ClassVar[str] = "a server-trained generator of features teaches the clients' heads and models"
    citation: ClassVar[str] = "Zhu et al., ICML 2021"
    AUTHORS: ClassVar[Mapping[str, Any]] = {
        "noise": "uniform",
        "div_metric": "code",
        "fidelity": "authors_broadcast",
    }

    gamma: float = param(
        10.0, "γ, initial weight of the loss on generated features", low=0, search=Search(0.1, 50, log=True)
    )
    beta: float = param(
        10.0,
        "β, initial weight of the divergence from the answer to generated features; 1 for EMNIST",
        low=0,
        search=Search(0.1, 50, log=True),
    )
    decay: float = param(0.98, "factor of both weights per round", above=0, high=1, search=Search(0.95, 1.0))
    alpha: float = param(1.0, "α, weight of the heads' verdict in the generator's loss", above=0)
    eta: float = param(1.0, "η, weight of the diversity in the generator's loss", low=0, search=Search(0, 5))

    @property
    def generates(self) -> bool:
        """Unless both terms are off."""
        return self.gamma > 0 or self.beta > 0

    def context(self, turn: Turn) -> Context:
        """The weights of the two terms and the generator, fixed during the round."""
        if "generator" not in turn.inbox:
            return {}
        gamma, beta = (decayed_weight(weight, self.decay, turn.round - 1, FLOOR) for weight in (self.gamma, self.beta))
        generator = payload_of(Weights, turn.inbox, "generator")
        return {
            "gamma": gamma * self.generated_share(turn),
            "beta": beta,
            "architecture": self.architecture(turn.setting),
            "generator": {"params": generator.params, "buffers": generator.buffers},
        }

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Generated features with their labels, and the noise of the features that stand beside the real samples."""
        if "generator" not in turn.inbox:
            return {}
        drawn = self.generated(turn, steps, generator) if self.gamma > 0 else {}
        if self.beta > 0:
            size = turn.setting.batch_size
            noise = draw_noise(steps * size, self.noise_dim, generator, self.chosen.noise)
            drawn["noise"] = noise.reshape(steps, size, self.noise_dim)
        return drawn

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy, that of generated features, and the divergence of real samples from generated ones."""
        logits = model.classify(model.features(batch.images))
        terms = {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}
        if context.get("gamma", 0.0) > 0:
            generated = model.beside().classify(batch.draws["features"])
            terms["generated"] = context["gamma"] * cross_entropy(generated, batch.draws["labels"])
        if context.get("beta", 0.0) > 0:
            noise = batch.draws["noise"][: batch.labels.shape[0]]
            beside = constant_output(
                context["architecture"].network, **context["generator"], noise=noise, labels=batch.labels
            )
            teacher = model.beside().classify(beside)
            terms["divergence"] = context["beta"] * teacher_divergence(logits, teacher, batch.weight)
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k, and how often each class was drawn; nothing is remembered."""
        message, memory = super().reply(turn, trained)
        if self.generates:
            message = {**message, "label_counts": Arrays({"drawn": trained.drawn_labels()})}
        return message, memory

    def stages(self) -> Mapping[str, Stage]:
        """Train the generator on the uploaded heads, then aggregate."""
        return {"train-generator": self.train_generator, "aggregate": aggregate} if self.generates else super().stages()

    def objective(self, server: Record, heads: Heads, round_number: int) -> Objective:
        """α · fidelity + η · diversity, the same in every round."""

        def terms(outputs: Tensor, noise: Tensor, labels: Tensor) -> Terms:
            logits = frozen_head_logits(outputs, heads.weight, heads.bias)
            found = {"fidelity": (self.alpha, fidelity_loss(logits, labels, heads.shares, self.fidelity))}
            if self.eta > 0:
                found["diversity"] = (self.eta, diversity_loss(outputs, noise, labels, "all", self.div_metric))
            return found

        return terms


@dataclass(frozen=True)
class TrainedGenerator:
    """What a round's training leaves: weights (on the CPU), optimiser, and the features [B, d] of the last step."""

    weights: Weights
    optimizer: AdamState
    outputs: Tensor


def fit_generator(
    network: FeatureGenerator,
    optimizer: AdamState,
    objective: Objective,
    inputs: tuple[Tensor, Tensor],
    *,
    lr: float,
    weight_decay: float,
) -> tuple[TrainedGenerator, Terms]:
    """Adam steps on the weighted sum of the objective's terms.

    Args:
        network: the generator, which is trained in place.
        optimizer: its memory of the rounds before.
        objective: terms of a batch.
        inputs: noise [steps, B, z] and labels [steps, B]; BatchNorm works on batches of at least two.
        lr: learning rate of all steps.
        weight_decay: see :func:`adam_step`.

    Returns:
        What the training leaves, and the terms of its last step.
    """
    network.train()
    params = dict(network.named_parameters())
    for noise, labels in zip(*inputs, strict=True):
        outputs = network(noise, labels)
        terms = objective(outputs, noise, labels)
        loss = torch.stack([weight * value for weight, value in terms.values()]).sum()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        moved, optimizer = adam_step(params, grads, optimizer, lr, weight_decay=weight_decay)
        with torch.no_grad():
            torch._foreach_copy_(list(params.values()), list(moved.values()))
    return TrainedGenerator(extract_weights(network), optimizer, outputs.detach()), terms


def reported(replies: Mapping[int, Record], kind: str) -> Tensor:
    """Label counts of one kind, int64 [S, K], in order of the clients' ids."""
    return torch.stack([payload_of(Arrays, replies[client], "label_counts")[kind] for client in sorted(replies)])


def uniform_distribution(server: Record, counts: Tensor) -> Arrays:
    """``p`` float32 [K]: uniform over the classes of ``counts`` [S, K] and those that had a chance before."""
    seen = qualified_labels(counts)
    if "label_distribution" in server:
        seen = seen | (payload_of(Arrays, server, "label_distribution")["p"] > 0)
    return Arrays({"p": seen / seen.sum()})


def stacked_heads(replies: Mapping[int, Record], shares: Tensor, device: str) -> Heads:
    """The heads of all replies in one tensor each, on a device."""
    models = [payload_of(Weights, replies[client], "model").params for client in sorted(replies)]
    weight, bias = (torch.stack([params[name] for params in models]) for name in ("head.weight", "head.bias"))
    return Heads(weight.to(device), bias.to(device), shares.to(device))
