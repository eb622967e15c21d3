"""FedPG (Xue, Zhang, Chen, Meng): a generator at the server, guided by class prototypes, makes images for all clients.

Client (fedpg.md section 4; virtual images (x', y') from the second round on, f features, SC the supervised contrastive
loss, sg a constant):

    CE(x, y) + w_v · CE(x', y') + λ_c · [SC(f(x) ∪ sg f(x')) + 0.1 · SC(f(x'))];

afterwards P_{k,c} = mean feature of ``support`` training images of class c (Eq. 4), un-normalised, with the client's
own trained model. Weights, n_k and prototypes go up.

Server: weights averaged over the sampled clients (Eq. 2); P_c = unweighted mean of the P_{k,c} of this round (Eq. 5);
then ``gen_steps`` steps of Adam, fresh in every round, on batches of uniform labels, through the new global model,
which is frozen and in evaluation mode: z = f(G(ε, y)), ε uniform on [0, 1),

    L_G = CE(−s · ‖z − P'_c‖², y) + λ_s · mean ‖z − P'_y‖² + d(P', P)        (Eq. 6 to 10),
    d(P', P) = mean over c of −log softmax_c(−s · ‖P'_c − P_i‖²)_i;

then ``n_virtual`` images of every class, the same for every client of the next round. Nothing is trained after the last
round.

Where paper and code disagree (section 7) the defaults are: the ordinary softmax (a: ``dce_denominator``), squared
distances times s = 2 (b: ``dce_dist``, ``dce_scale``), P' = P fixed (c: with ``proto_init: random``, drawn anew every
round, and both learning rates 2e-5 it is the code, whose P' never comes near P; with ``proto_lr`` = 0, d has no
gradient and is only logged), a generator learning rate of 2e-4 (n), missing classes masked out of d (e: ``d_form:
zero_rows`` is the code), a mean over them (``d_reduction``), SC with detached virtual features and a tenth of it on
virtual images alone, as in the code and as in VHL (f, g, p). The model really is frozen (d: in the code it drifts).
Virtual images are put on the scale of the real ones, whatever statistics those are normalised with (``pixel_range:
authors`` is the code's mismatch), and virtual batches are shuffled in every pass (the code repeats the first one).
Supports are drawn with replacement where a class has more images, else all are taken (as in the code).

Labels travel beside the images, 8 bytes each. Which classes a client sends prototypes of says which it holds; means of
one or two samples are nearly single features: ``min_proto_samples`` holds those back (l). A round in which no class has
ever had a prototype trains nothing. With no client term on, no virtual images are sent and the model is FedAvg's. The
frozen model reads the averaged BatchNorm statistics; under ``model.batchnorm: local`` the server has none but the
initial ones, and the images are of little use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.generators.draws import draw_noise
from flcore.generators.images import (
    dce_loss,
    guided_targets,
    nearest_prototype_accuracy,
    prototype_loss,
    prototype_match,
    random_targets,
    squared_distances,
)
from flcore.generators.networks import ImageGenerator, build_image_generator, constant_output
from flcore.messages import Arrays, Count, Facts, Prototypes, Weights
from flcore.methods.fedavg import FedAvg
from flcore.methods.virtual_images import (
    VirtualLoss,
    as_input,
    class_major_labels,
    cycled_positions,
    pixel_map,
    virtual_context,
)
from flcore.methods.vocabulary import Batch, Context, LocalModel, Setting, Stage, TrainedClient, Turn
from flcore.models import extract_weights, load_weights
from flcore.optim import FusedAdam
from flcore.params import Search, param
from flcore.prototypes import average_prototypes, class_means
from flcore.prototypes.distances import class_distances
from flcore.prototypes.release import frequent_classes
from flcore.records import Record, on_device, payload_of
from flcore.rng import numpy_stream, torch_stream
from flcore.schedules import step_lr

GENERATOR_BETAS = (0.5, 0.999)
"""Of Adam (fedpg.md section 5)."""

_BLOCK = 256  # images that go through a network at a time
_MEASURED = 16  # images per class whose distances are measured: pairs grow with the square


@dataclass(frozen=True)
class FedPG(FedAvg):
    """FedAvg whose clients also learn from images that a generator makes at the server."""

    name: ClassVar[str] = "fedpg"
    summary: ClassVar[str] = "a prototype-guided image generator at the server supplies shared virtual images"
    citation: ClassVar[str] = "Xue, Zhang, Chen, Meng: A Privacy-friendly and Universal Method for Solving non-IID Data"

    w_v: float = param(
        1.0, "weight of the virtual images' cross-entropy", low=0, search=Search(choices=(0.1, 0.2, 0.5, 1.0))
    )
    lambda_c: float = param(
        1.0, "λ_c, weight of the contrastive part (paper: 1, best at 10)", low=0, search=Search(0.1, 50.0, log=True)
    )
    use_ct: bool = param(True, "LT-ct: the virtual images' cross-entropy (classifier tuning)", switch=True)
    use_fa: bool = param(True, "LT-fa: the contrastive part (feature alignment)", switch=True)
    use_d: bool = param(True, "GT-d: d(P', P) in the generator's loss; without effect at proto_lr = 0", switch=True)
    use_lp: bool = param(True, "GT-p: the prototype loss in the generator's loss", switch=True)
    n_virtual: int = param(64, "virtual images per class", low=1, search=Search(choices=(64, 128, 256, 512, 1024)))
    virtual_batch: int = param(64, "virtual images per local step", low=2, search=Search(choices=(16, 32, 64, 128)))
    virtual_dtype: Literal["float32", "uint8"] = param("float32", "how a virtual image's pixels travel")
    pixel_range: Literal["data", "authors"] = param(
        "data", "virtual images on the scale of the real ones, or taken for -1 to 1 as in the code"
    )
    temperature: float = param(0.07, "T of the contrastive part", above=0, search=Search(0.05, 0.5, log=True))
    base_temperature: float | None = param(0.07, "T0: the contrastive part counts T/T0; null: as T", above=0)
    virtual_sc_weight: float = param(0.1, "share of the contrast of virtual images alone (code; paper: 0)", low=0)
    detach: bool = param(True, "virtual features are constants in the contrast with real ones (code)", switch=True)
    passes: Literal["separate", "joint"] = param("separate", "real and virtual images pass the model apart or together")
    generator: Literal["fc", "cnn"] = param(
        "fc", "five-layer fully connected, or convolutional", search=Search(choices=("fc", "cnn"))
    )
    noise_dim: int = param(512, "z, length of a noise vector", low=1)
    gen_steps: int = param(
        300, "steps of the generator's training in a round", low=0, search=Search(50, 1000, log=True)
    )
    gen_batch: int = param(128, "generated images per such step", low=2)
    gen_lr: float = param(
        2e-4, "Adam's learning rate in a round's first step; code 2e-5", above=0, search=Search(2e-5, 2e-3, log=True)
    )
    gen_decay: float = param(0.95, "factor of both learning rates per gen_decay_every steps", above=0, high=1)
    gen_decay_every: int = param(20, "steps between two decays", low=1)
    lambda_s: float = param(0.001, "λ_s, weight of the prototype loss", low=0, search=Search(1e-4, 1e-1, log=True))
    dce_scale: float = param(2.0, "s, inverse temperature of distances", above=0, search=Search(0.01, 4.0, log=True))
    dce_dist: Literal["squared", "l2"] = param("squared", "distances to virtual prototypes: squared, or their root")
    dce_denominator: Literal["all", "negatives"] = param(
        "all", "softmax over all classes, or as Eq. 8 is printed without the own one, which has no lower bound"
    )
    d_form: Literal["softmax", "zero_rows", "l2"] = param(
        "softmax", "d(P', P): over present classes; with a zero row for missing ones (code); mean squared distance"
    )
    d_reduction: Literal["mean", "sum"] = param("mean", "d(P', P): mean over classes (code) or their sum (paper)")
    proto_init: Literal["global", "random"] = param(
        "global", "P' starts at the global prototypes, or at N(0, 1) anew in every round (code)"
    )
    proto_lr: float = param(
        0.0,
        "Adam's learning rate of P'; 0 keeps it where it starts; code: gen_lr",
        low=0,
        search=Search(choices=(0.0, 1e-5, 1e-4)),
    )
    support: int = param(20, "m, training images behind a client's prototype", low=1, search=Search(1, 100, log=True))
    min_proto_samples: int = param(1, "a prototype of fewer images is held back", low=1)
    stop_round: int | None = param(None, "last round with virtual images; null: all rounds (code 30)", low=1)
    gate: float = param(
        0.0, "virtual images are sent from this nearest-prototype accuracy on; 0: always", low=0, high=1
    )

    def __post_init__(self) -> None:
        """Refuse a threshold that no prototype can meet."""
        if self.min_proto_samples > self.support:
            raise ValueError(
                f"min_proto_samples = {self.min_proto_samples}: prototypes are made of support = {self.support} "
                "images at most, so that none would ever be sent"
            )

    @property
    def client_loss(self) -> VirtualLoss:
        """What clients minimise."""
        return VirtualLoss(
            cross_entropy=self.w_v if self.use_ct else 0.0,
            contrast=self.lambda_c if self.use_fa else 0.0,
            alone=self.virtual_sc_weight,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            detach=self.detach,
            joint=self.passes == "joint",
        )

    def architecture(self, setting: Setting, seed: int = 0) -> ImageGenerator:
        """The generator, with weights that follow from ``seed``."""
        return build_image_generator(
            self.generator, setting.num_classes, setting.image_shape, noise_dim=self.noise_dim, seed=seed
        )

    def start_server(self, setting: Setting) -> Record:
        """The initial model, an untrained generator, and nothing to send of it."""
        seed = int(numpy_stream(setting.seed, "generator weights").integers(2**31))
        return {
            **super().start_server(setting),
            "generator": extract_weights(self.architecture(setting, seed)),
            "prototypes": Prototypes.empty(setting.num_classes, setting.feature_dim),
            "shipping": Count(0),
        }

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model and, where there are any for this round, the virtual images."""
        message = super().broadcast(server, client, exchange)
        if not payload_of(Count, server, "shipping").value:
            return message
        return {**message, "virtual": server["virtual"]}

    def context(self, turn: Turn) -> Context:
        """The virtual images, fixed during the round."""
        if "virtual" not in turn.inbox:
            return {}
        virtual = payload_of(Arrays, turn.inbox, "virtual")
        return {
            "virtual": virtual_context(turn.setting, virtual["images"], virtual["labels"], pixel_range=self.pixel_range)
        }

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Which virtual images go with each step."""
        if "virtual" not in turn.inbox:
            return {}
        size = turn.setting.num_classes * self.n_virtual
        return {"virtual": cycled_positions(size, self.virtual_batch, steps, generator)}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy of real and of virtual images, and the contrastive part."""
        if "virtual" not in context:
            return super().loss(model, batch, context)
        return self.client_loss.terms(model, batch, context["virtual"])

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k and, up to ``stop_round``, prototypes; nothing is remembered."""
        message, memory = super().reply(turn, trained)
        if self.stop_round is not None and turn.round > self.stop_round:
            return message, memory
        prototypes = support_means(
            *trained.features(), turn.setting.num_classes, self.support, turn.stream("fedpg support")
        )
        behind = turn.counts.clamp_max(self.support)
        released = frequent_classes(prototypes.present, behind.to(prototypes.present.device), self.min_proto_samples)
        means = torch.where(released.unsqueeze(1), prototypes.means, 0.0)
        return {**message, "prototypes": Prototypes(means, released)}, memory

    def stages(self) -> Mapping[str, Stage]:
        """Average weights and prototypes, train the generator, make the next round's images."""
        return {
            **super().stages(),
            "aggregate-prototypes": aggregate_prototypes,
            "train-generator": self.train_generator,
            "generate-images": self.generate_images,
        }

    def train_generator(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: the generator, ``gen_steps`` steps further; the model stays as it is.

        Raises:
            ArithmeticError: the generator diverged.
        """
        idle = {name: payload for name, payload in server.items() if name != "facts"} | {"shipping": Count(0)}
        if not self._prepares_images(server, setting, round_number):
            return idle
        local = on_device(server, setting.device)
        prototypes = payload_of(Prototypes, local, "prototypes")
        targets = self._initial_targets(local, setting, torch_stream(setting.seed, "fedpg targets", round_number))
        weights, targets, first, last = self._fit(
            payload_of(Weights, local, "generator"),
            targets.to(setting.device),
            prototypes,
            payload_of(Weights, local, "model").values,
            setting,
            torch_stream(setting.seed, "fedpg generator", round_number),
        )
        facts = {f"generator_{name}_first": value.item() for name, value in first.items()}
        facts |= {f"generator_{name}_last": value.item() for name, value in last.items()}
        if not all(bool(torch.isfinite(value).all()) for value in (*weights.values.values(), targets)):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in facts.items())
            raise ArithmeticError(f"the generator diverged ({shown}); lower method.gen_lr")
        facts |= self._target_facts(targets, prototypes)
        trained = {"generator": weights, "targets": Arrays({"means": targets})}
        return {**idle, **on_device(trained, "cpu"), "facts": Facts(facts)}

    def generate_images(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: the virtual images of the next round, and what the global model makes of them."""
        if not self._prepares_images(server, setting, round_number):
            return server
        local = on_device(server, setting.device)
        images = self._images(local, setting, self.n_virtual, torch_stream(setting.seed, "fedpg images", round_number))
        if self.virtual_dtype == "uint8":
            images = (255 * images).round().to(torch.uint8)
        labels = class_major_labels(setting.num_classes, images)
        facts = self._image_facts(images, labels, local, setting)
        ships = self.client_loss.is_on and facts["nearest_prototype_accuracy"] >= self.gate
        virtual = Arrays({"images": images.cpu(), "labels": labels.cpu()})
        earlier = payload_of(Facts, server, "facts").values
        facts = {**earlier, **facts, "shipped": float(ships)}
        return {**server, "virtual": virtual, "shipping": Count(int(ships)), "facts": Facts(facts)}

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Features of new images of every class, by the global model; None before the generator was trained."""
        if "targets" not in server:
            return None
        images = self._images(server, setting, count, generator)
        features, _ = self._answers(images, server, setting)
        return features, class_major_labels(setting.num_classes, images)

    def _prepares_images(self, server: Record, setting: Setting, round_number: int) -> bool:
        """Whether the next round is one with virtual images, and there is something for them to aim at."""
        last = setting.rounds if self.stop_round is None else min(setting.rounds, self.stop_round)
        return round_number < last and ("targets" in server or bool(_prototypes(server).present.any()))

    def _initial_targets(self, server: Record, setting: Setting, generator: torch.Generator) -> Tensor:
        prototypes = _prototypes(server)
        if self.proto_init == "random":
            return random_targets(setting.num_classes, setting.feature_dim, generator)
        previous = payload_of(Arrays, server, "targets")["means"] if "targets" in server else None
        return guided_targets(prototypes.means, prototypes.present, previous, generator)

    def _fit(
        self,
        weights: Weights,
        targets: Tensor,
        prototypes: Prototypes,
        model: Mapping[str, Tensor],
        setting: Setting,
        stream: torch.Generator,
    ) -> tuple[Weights, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The trained generator, P', and the unweighted terms of the first and the last step."""
        network = self.architecture(setting).to(setting.device).train()
        load_weights(network, weights)
        own = [*network.parameters()]
        aims = targets.clone().requires_grad_(self.proto_lr > 0)
        optimizer, target_optimizer = FusedAdam(own, GENERATOR_BETAS), FusedAdam([aims], GENERATOR_BETAS)
        scale_and_shift = pixel_map(setting, torch.float32, setting.device, self.pixel_range)
        drawn = torch.randint(setting.num_classes, (self.gen_steps, self.gen_batch), generator=stream)
        first: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        for step, labels in enumerate(drawn.to(setting.device)):
            noise = draw_noise(self.gen_batch, self.noise_dim, stream).to(setting.device)
            made = as_input(_pixels(network(noise, labels)), *scale_and_shift)
            terms = self._terms(setting.network.features(made, model), labels, aims, prototypes)
            total = torch.stack([weight * value for weight, value in terms.values() if weight > 0]).sum()
            grads = torch.autograd.grad(total, [*own, aims] if self.proto_lr > 0 else own)
            decay = step_lr(1.0, self.gen_decay, self.gen_decay_every, step)
            optimizer.step(grads[: len(own)], self.gen_lr * decay)
            if self.proto_lr > 0:
                target_optimizer.step(grads[-1:], self.proto_lr * decay)
            last = {name: value.detach() for name, (_, value) in terms.items()}
            first = first or last
        return extract_weights(network), aims.detach(), first, last

    def _terms(
        self, features: Tensor, labels: Tensor, targets: Tensor, prototypes: Prototypes
    ) -> dict[str, tuple[float, Tensor]]:
        """Weight and value of every term of L_G."""
        terms = {
            "dce": (
                1.0,
                dce_loss(
                    features,
                    labels,
                    targets,
                    scale=self.dce_scale,
                    distance=self.dce_dist,
                    denominator=self.dce_denominator,
                ),
            ),
            "pull": (self.lambda_s if self.use_lp else 0.0, prototype_loss(features, labels, targets)),
        }
        if self.use_d and self.proto_lr > 0:
            terms["match"] = (1.0, self._match(targets, prototypes))
        return terms

    def _match(self, targets: Tensor, prototypes: Prototypes) -> Tensor:
        return prototype_match(
            targets,
            prototypes.means,
            prototypes.present,
            scale=self.dce_scale,
            reduction=self.d_reduction,
            form=self.d_form,
        )

    def _images(self, server: Record, setting: Setting, per_class: int, stream: torch.Generator) -> Tensor:
        """Pixels [C·n, ...] on 0 to 1, class by class; what the server holds lies on the setting's device."""
        generator = payload_of(Weights, server, "generator")
        network = self.architecture(setting).eval().to(setting.device)
        noise = draw_noise(setting.num_classes * per_class, self.noise_dim, stream).to(setting.device)
        labels = class_major_labels(setting.num_classes, noise)
        blocks = zip(torch.split(noise, _BLOCK), torch.split(labels, _BLOCK), strict=True)
        made = [constant_output(network, generator.params, generator.buffers, *block) for block in blocks]
        return _pixels(torch.cat(made))

    @torch.no_grad()
    def _answers(self, images: Tensor, server: Record, setting: Setting) -> tuple[Tensor, Tensor]:
        """Features and logits of virtual images as clients get them, by the global model."""
        model = payload_of(Weights, server, "model").values
        scale_and_shift = pixel_map(setting, images.dtype, images.device, self.pixel_range)
        blocks = [
            setting.network.features(as_input(block, *scale_and_shift), model) for block in torch.split(images, _BLOCK)
        ]
        features = torch.cat(blocks)
        return features, setting.network.classify(features, model)

    def _target_facts(self, targets: Tensor, prototypes: Prototypes) -> dict[str, float]:
        """``match`` d(P', P), ``target_shift`` ‖P' − P‖/‖P‖, and ``prototype_spread``, P from P, mean and squared."""
        held = prototypes.present
        facts = {"match": self._match(targets, prototypes).item()}
        means = prototypes.means[held]
        length = torch.linalg.vector_norm(means)
        if length > 0:
            facts["target_shift"] = (torch.linalg.vector_norm(targets[held] - means) / length).item()
        if len(means) > 1:
            pairs = len(means) * (len(means) - 1)
            facts["prototype_spread"] = squared_distances(means, means).sum().item() / pairs
        return facts

    def _image_facts(self, images: Tensor, labels: Tensor, server: Record, setting: Setting) -> dict[str, float]:
        """Whether the images help: where their features z lie, and what the global head says (fedpg.md section 5.3)."""
        features, logits = self._answers(images, server, setting)
        prototypes = _prototypes(server)
        nearest = nearest_prototype_accuracy(features, labels, prototypes.means, prototypes.present)
        facts = {
            "nearest_prototype_accuracy": nearest.item(),
            "head_accuracy": (logits.argmax(dim=1) == labels).float().mean().item(),
        }
        known = prototypes.present[labels]
        if known.any():
            facts["prototype_distance"] = prototype_loss(features[known], labels[known], prototypes.means).item()
        some = torch.arange(len(labels), device=labels.device) % self.n_virtual < _MEASURED
        distances = class_distances(features[some], labels[some])
        return facts | {f"virtual_{name}": value for name, value in distances.items()}


def aggregate_prototypes(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """P_c ← mean of P_{k,c} over this round's clients that sent class c; classes nobody sent are absent."""
    uploads = dict(_uploads(replies))
    if not uploads:
        return server
    nothing = Prototypes.empty(setting.num_classes, setting.feature_dim)
    return {**server, "prototypes": average_prototypes(uploads, nothing)}


def support_means(
    features: Tensor, labels: Tensor, num_classes: int, support: int, generator: torch.Generator
) -> Prototypes:
    """The mean feature of some samples of every class present (Eq. 4).

    Args:
        features: ``[n, d]`` of all samples.
        labels: int64 ``[n]``.
        num_classes: C.
        support: m: of a class with more samples, m are drawn with replacement; of the others all count.
        generator: a CPU generator.
    """
    chosen = [torch.zeros(0, dtype=torch.int64)]
    for label in range(num_classes):
        own = (labels == label).nonzero().flatten()
        drawn = torch.randint(len(own), (support,), generator=generator) if len(own) > support else slice(None)
        chosen.append(own[drawn])
    rows = torch.cat(chosen)
    return class_means(features[rows], labels[rows], num_classes)


def _uploads(replies: Mapping[int, Record]) -> Iterator[tuple[int, Prototypes]]:
    for client, message in replies.items():
        if "prototypes" in message:
            yield client, payload_of(Prototypes, message, "prototypes")


def _prototypes(server: Record) -> Prototypes:
    return payload_of(Prototypes, server, "prototypes")


def _pixels(made: Tensor) -> Tensor:
    """The generator's -1 to 1 on the scale 0 to 1."""
    return (made + 1) / 2
