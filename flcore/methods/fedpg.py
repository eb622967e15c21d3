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

then ``n_virtual`` images of every class, the same for every client of the next round; none after the last round.

Where paper and code disagree: section 7; parameters choose. With ``proto_lr`` = 0, the default, P' = P, and d has no
gradient and is only logged. Supports are drawn with replacement if a class has more images, else all are taken. Virtual
batches are shuffled in every pass (the code repeats the first one). With no client term on, no virtual images are sent
and the model is FedAvg's. Under ``model.batchnorm: local`` the server has only the initial statistics.

Privacy (l): means of one or two images are nearly single features. ``min_count`` holds back prototypes of fewer images,
min(samples of the class, ``support``). Clipping and noise protect all of a client's images (``proto_unit: client``): a
support drawn with replacement may contain an image up to m times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.io.messages import Count, Prototypes, TensorDict
from flcore.io.records import Key, Payloads, Record, on_device
from flcore.math.generators import images as guidance
from flcore.math.prototypes.class_means import support_means
from flcore.methods import types as fl
from flcore.methods.kit.class_prototypes import ReleasesPrototypes, fused_prototypes, no_prototypes
from flcore.methods.kit.image_generator import IMAGE_GENERATOR, SHIPPING, ImageGeneratorMethod
from flcore.methods.kit.preset import AuthorsPreset
from flcore.methods.kit.server_training import Terms, leaves
from flcore.methods.kit.virtual_images import VIRTUAL, VirtualLoss, global_features

TARGETS = Key("targets", TensorDict)
"""``means`` [K, d]: P' of the last training."""


@dataclass(frozen=True)
class FedPG(
    AuthorsPreset,
    ReleasesPrototypes,
    ImageGeneratorMethod,
    name="fedpg",
    citation="Xue, Zhang, Chen, Meng: A Privacy-friendly and Universal Method for Solving non-IID Data",
):
    """A prototype-guided image generator at the server supplies shared virtual images."""

    # The notebook's; their script has 50 images of a class, w_v 0.5 and λ_c 0.1.
    AUTHORS: ClassVar[Mapping[str, Any]] = {
        "lambda_c": 20.0,
        "n_virtual": 256,
        "pixel_range": "authors",
        "proto_init": "random",
        "proto_lr": 2e-5,
        "gen_lr": 2e-5,
        "d_form": "zero_rows",
        "stop_round": 30,
    }

    w_v: float = param(
        1.0, "weight of virtual images' CE", low=0, search=Search(choices=(0.1, 0.2, 0.5, 1.0), when=lambda m: m.use_ct)
    )
    lambda_c: float = param(
        1.0, "λ_c, weight of the contrast", low=0, search=Search(0.1, 50.0, log=True, when=lambda m: m.use_fa)
    )
    use_ct: bool = param(True, "LT-ct: the virtual images' cross-entropy (classifier tuning)", switch=True)
    use_fa: bool = param(True, "LT-fa: the contrastive part (feature alignment)", switch=True)
    use_d: bool = param(True, "GT-d: d(P', P) in the generator's loss; without effect at proto_lr = 0", switch=True)
    use_lp: bool = param(True, "GT-p: the prototype loss in the generator's loss", switch=True)
    temperature: float = param(
        0.07, "T of the contrastive part", above=0, search=Search(0.05, 0.5, log=True, when=lambda m: m.aligns)
    )
    base_temperature: float | None = param(0.07, "T0: the contrastive part counts T/T0; null: as T", above=0)
    virtual_sc_weight: float = param(0.1, "share of the contrast of virtual images alone (code; paper: 0)", low=0)
    detach: bool = param(True, "virtual features are constants in the contrast with real ones (code)", switch=True)
    passes: Literal["separate", "joint"] = param("separate", "real and virtual images pass the model apart or together")
    lambda_s: float = param(
        0.001,
        "λ_s, weight of the prototype loss",
        low=0,
        search=Search(1e-4, 1e-1, log=True, when=lambda m: m.trains_generator and m.use_lp),
    )
    dce_scale: float = param(
        2.0, "s, scale of distances", above=0, search=Search(0.01, 4.0, log=True, when=lambda m: m.trains_generator)
    )
    dce_dist: Literal["squared", "l2"] = param("squared", "distances to virtual prototypes: squared, or their root")
    dce_denominator: Literal["all", "negatives"] = param(
        "all", "softmax over all classes, or as Eq. 8 is printed without the own one, which has no lower bound"
    )
    d_form: Literal["softmax", "zero_rows", "l2"] = param(
        "softmax", "d(P', P): over present classes; with a zero row for missing ones (code); mean squared distance"
    )
    d_reduction: Literal["mean", "sum"] = param("mean", "d(P', P): mean over classes (code) or their sum (paper)")
    proto_init: Literal["global", "random"] = param(
        "global", "P' starts at the global prototypes, or in every round at N(0, 1) (code)"
    )
    proto_lr: float = param(
        0.0,
        "Adam's learning rate of P'; 0 keeps it where it starts; code: gen_lr",
        low=0,
        # Below every gen_lr of the search: section 7c.
        search=Search(choices=(0.0, 1e-5), when=lambda m: m.trains_generator),
    )
    support: int = param(
        20,
        "m, training images in a client's prototype",
        low=1,
        search=Search(1, 100, log=True, when=lambda m: m.shows and (m.gen_steps > 0 or m.gate > 0)),
    )
    stop_round: int | None = param(None, "last round with virtual images; null: all rounds (code 30)", low=1)
    gate: float = param(
        0.0, "virtual images are sent from this nearest-prototype accuracy on; 0: always", low=0, high=1
    )

    def __post_init__(self) -> None:
        """Refuse a threshold that no prototype can meet, and a bound that does not hold."""
        super().__post_init__()
        if self.min_count > self.support:
            raise ValueError(
                f"min_count = {self.min_count}: prototypes have support = {self.support} images at most; none is sent"
            )
        if self.proto_clip is not None and self.protected == "sample":
            raise ValueError(
                "proto_unit = sample: supports are drawn with replacement and may hold an image several times; "
                "set proto_unit = client"
            )

    @property
    def tunes(self) -> bool:
        return self.use_ct and self.w_v > 0

    @property
    def aligns(self) -> bool:
        return self.use_fa and self.lambda_c > 0

    @property
    def shows(self) -> bool:
        return self.tunes or self.aligns

    @property
    def trains_generator(self) -> bool:
        return self.shows and self.gen_steps > 0

    @property
    def client_loss(self) -> VirtualLoss:
        return VirtualLoss(
            cross_entropy=self.w_v if self.tunes else 0.0,
            contrast=self.lambda_c if self.aligns else 0.0,
            alone=self.virtual_sc_weight,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            detach=self.detach,
            joint=self.passes == "joint",
        )

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        return {**super().start_server(setting), **no_prototypes(setting)}

    def is_over(self, ctx: fl.RoundContext) -> bool:
        return self.stop_round is not None and ctx.round > self.stop_round

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        """Send virtual images up to ``stop_round``; without replies a round leaves the last ones at the server."""
        message = Record(super().broadcast(server, client, ctx))
        return message.without(VIRTUAL) if self.is_over(ctx) else message

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        if "virtual" not in inputs:
            return super().loss(model, batch, inputs)
        return self.client_loss.terms(model, batch, inputs["virtual"])

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        message, client_state = super().reply(ctx, trained)
        if self.is_over(ctx):
            return message, client_state
        stream = ctx.stream("fedpg support")
        own = support_means(*trained.features(), ctx.setting.num_classes, self.support, stream)
        return {
            **message,
            fl.PROTOTYPES: self.release(ctx, own, ctx.class_counts.clamp_max(self.support)),
        }, client_state

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        return super().privacy(releases if self.stop_round is None else min(releases, self.stop_round))

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        generate = {"train-generator": self.train_generator, "generate-images": self.generate_images}
        return {**super().server_steps(), "aggregate-prototypes": aggregate_supports, **generate}

    def prepares_images(self, server: Record, ctx: fl.RoundContext) -> bool:
        rounds = ctx.setting.rounds
        last = rounds if self.stop_round is None else min(rounds, self.stop_round)
        return ctx.round < last and (TARGETS in server or bool(server[fl.PROTOTYPES].present.any()))

    def train_generator(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Take ``gen_steps`` steps of the generator.

        Raises:
            ArithmeticError: the generator diverged.
        """
        server |= {SHIPPING: Count(0)}
        if not self.prepares_images(server, ctx):
            return server, {}
        held = on_device(server.without(VIRTUAL), ctx.setting.device)
        prototypes, start = held[fl.PROTOTYPES], self.first_targets(held, ctx.stream("fedpg targets"))
        moving = leaves({"targets": start})
        weights, fitted = self.fit_generator(
            held,
            ctx.setting,
            ctx.stream("fedpg generator"),
            lambda features, labels: self.terms(features, labels, moving["targets"], prototypes),
            targets=(moving, self.proto_lr),
        )
        targets = moving["targets"].detach()
        trained = on_device(Record({IMAGE_GENERATOR: weights, TARGETS: TensorDict({"means": targets})}), "cpu")
        facts = fitted.facts("generator_", 0, "_first") | fitted.facts("generator_", -1, "_last")
        facts["match"] = self.match(targets, prototypes).item()
        return server | trained, facts | guidance.target_facts(targets, prototypes.means, prototypes.present)

    def first_targets(self, held: Record, stream: torch.Generator) -> Tensor:
        """Return the initial P' of a training, [K, d]."""
        means, present = held[fl.PROTOTYPES].means, held[fl.PROTOTYPES].present
        if self.proto_init == "random":
            return guidance.random_targets(len(means), means.shape[1], stream).to(means.device)
        return guidance.guided_targets(means, present, held[TARGETS]["means"] if TARGETS in held else None, stream)

    def terms(self, features: Tensor, labels: Tensor, targets: Tensor, prototypes: Prototypes) -> Terms:
        """Return L_G of generated images' features [B, d]."""
        scale, distance, denominator = self.dce_scale, self.dce_dist, self.dce_denominator
        dce = guidance.dce_loss(features, labels, targets, scale=scale, distance=distance, denominator=denominator)
        pull = guidance.prototype_loss(features, labels, targets)
        terms = {"dce": (1.0, dce), "pull": (self.lambda_s if self.use_lp else 0.0, pull)}
        if self.use_d and self.proto_lr > 0:
            terms["match"] = (1.0, self.match(targets, prototypes))
        return terms

    def match(self, targets: Tensor, prototypes: Prototypes) -> Tensor:
        """Return d(P', P)."""
        means, present, reduction = prototypes.means, prototypes.present, self.d_reduction
        return guidance.prototype_match(
            targets, means, present, scale=self.dce_scale, reduction=reduction, form=self.d_form
        )

    def generate_images(self, server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
        """Make the next round's virtual images. Metrics: the global model's predictions for them."""
        if not self.prepares_images(server, ctx):
            return server, {}
        setting = ctx.setting
        held = on_device(server.only(fl.MODEL, fl.PROTOTYPES, IMAGE_GENERATOR), setting.device)
        model, prototypes = held[fl.MODEL], held[fl.PROTOTYPES]
        virtual = self.virtual_set(held, setting, ctx.stream("fedpg images"))
        features = global_features(setting, virtual["images"], model, self.pixel_range)
        logits = setting.network.classify(features, model.values)
        facts = guidance.image_facts(features, logits, virtual["labels"], prototypes.means, prototypes.present)
        ships = self.client_loss.is_on and facts["nearest_prototype_accuracy"] >= self.gate
        made = on_device(Record({VIRTUAL: virtual}), "cpu") | {SHIPPING: Count(int(ships))}
        return server | made, {**facts, "shipped": float(ships)}

    def generated_features(
        self, server: Record, setting: fl.FederationContext, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """Return features of new images by the global model; None before the generator was trained."""
        return super().generated_features(server, setting, count, generator) if TARGETS in server else None


@fl.aggregates("prototypes")
def aggregate_supports(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Set P_c to the mean of P_{k,c} over this round's clients that sent class c; other classes are absent."""
    return fused_prototypes(server, replies, ctx, keep=False)
