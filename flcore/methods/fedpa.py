"""FedPA (Jiang, Wang, Yang, Shu, Lin, Yi, IEEE TDSC 2024): full-model regularisation by prototypes and a generator.

On top of FedGen (`flcore/methods/fedgen.py`, whose notation this keeps). t counts rounds from 0, φ are the global
prototypes, Φ is the head, Π the encoder.

Client, from t = 1 on (before it there is neither generator nor prototype; t = 0 is FedAvg to the bit):

    L = CE(x, y) + λ_ge · (B_gen/B) · CE(h(G(ε, ỹ)), ỹ) + λ_po · dist(f(x), φ^y)              (Eq. 9 to 12)
    λ_ge = max(1e-4, 25·0.98^t),    λ_po = max(0.15, 5·0.98^t).

The first extra term reaches Φ alone, the second Π alone. A weight of 0, or a switch, turns a term off, floor or not.
After training a client sends the mean feature of each of its classes and its label counts.

Server: φ^c = Σ_k n_{k,c} φ_k^c / Σ_k n_{k,c} over the sampled clients that sent class c (Algorithm 1); a class nobody
sent keeps its prototype. Then the generator, as FedGen's, but pushed *away* from the prototypes (Eq. 5 to 8):

    L = γ_fid · L_fid + γ_div · L_div − γ_ad · dist(G(ε, ỹ), φ^ỹ),    γ_fid = max(1e-4, 25·0.98^t), no L_ad at t = 0.

Choices where paper and code disagree (fedpa.md, sections 4 to 7), each a parameter:
``po_form`` dist is the mean square over d (code), or the un-squared norm (paper). ``div_mask`` which pairs the
diversity counts: of equal labels (paper), different ones (code), all. ``gen_proto`` whether the generator sees this
round's prototypes (paper) or the last one's (code). ``noise`` uniform (code) or normal (paper). ``gen_label_dist`` ỹ
uniform over the labels that any client reported (code), or by frequency (paper). ``fidelity`` weights of samples, or
the code's mistake. ``preset: authors`` sets ``div_mask: inter``, ``gen_proto: old``,
``fidelity: authors_broadcast`` and ``proto_mode: running``.

Deviations: prototypes come from one pass in evaluation mode after training; ``proto_mode: running`` averages the
features of all mini-batches while the weights move, as the code does. Where φ is missing a sample takes no part (the
code has zero rows there, which pull to the origin); L_fid has no 1/|S|, since its weights sum to 1 already; labels are
those that clients have reported so far, the server looks at nobody's data.

``ad_cap`` bounds L_ad, which is otherwise unbounded: with the defaults generated features run far away from the
prototypes (``generator_distance`` in the history, the RMS of ‖G(ε, ỹ) − φ^ỹ‖ over a batch). Training survives that.

Prototypes of rare classes are nearly single features, which ``min_count``, ``proto_clip`` and ``proto_noise`` withhold,
bound and blur (`flcore/math/prototypes/release.py`); label counts are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.core.schedules import Exponential
from flcore.io.messages import TensorDict
from flcore.io.records import Key, Payloads, Record
from flcore.math.generators.features import diversity_loss, fidelity_loss, frozen_head_logits
from flcore.math.losses.alignment import prototype_pull
from flcore.math.losses.basic import cross_entropy
from flcore.methods.kit.class_prototypes import (
    RunningPrototypes,
    fused_prototypes,
    no_prototypes,
    received_prototypes,
)
from flcore.methods.kit.feature_generator import (
    FEATURE_GENERATOR,
    FLOOR,
    LABEL_COUNTS,
    LABEL_DISTRIBUTION,
    FeatureGeneratorMethod,
    Heads,
    Objective,
    generated_cross_entropy,
    reported,
    uniform_distribution,
)
from flcore.methods.kit.server_training import Terms
from flcore.methods.types import (
    PROTOTYPES,
    Batch,
    ClientContext,
    FederationContext,
    LocalModel,
    LossInputs,
    Metrics,
    Replies,
    RoundContext,
    ServerStep,
    TrainedClient,
    folds,
)

KNOWN_COUNTS = Key("known_counts", TensorDict)
"""``held`` int64 [N, K]: every client's latest label counts, which the server sends to nobody."""


@dataclass(frozen=True)
class FedPA(RunningPrototypes, FeatureGeneratorMethod):
    """FedAvg with generated features for the head and prototypes for the encoder."""

    name: ClassVar[str] = "fedpa"
    summary: ClassVar[str] = (
        "generated features for the head, prototypes for the encoder, one trained against the other"
    )
    citation: ClassVar[str] = "Jiang et al., IEEE TDSC 2024"
    reduces_to_fedavg: ClassVar[Mapping[str, Any] | None] = {"use_ge": False, "use_po": False}
    AUTHORS: ClassVar[Mapping[str, Any]] = {
        "noise": "uniform",
        "po_form": "mse",
        "div_mask": "inter",
        "div_metric": "code",
        "gen_proto": "old",
        "gen_label_dist": "uniform",
        "fidelity": "authors_broadcast",
        "proto_mode": "running",
    }
    RUNNING: ClassVar[Literal["all", "last_pass"]] = "all"

    use_ge: bool = param(True, "train the head on generated features (L_ge)", switch=True)
    use_po: bool = param(True, "pull features to the prototypes (L_po)", switch=True)
    use_ad: bool = param(True, "push generated features away from the prototypes (L_ad); needs use_ge", switch=True)
    lambda_ge0: float = param(
        25.0, "initial weight of L_ge", low=0, search=Search(1, 50, log=True, when=lambda m: m.use_ge)
    )
    lambda_po0: float = param(
        5.0, "initial weight of L_po", low=0, search=Search(0.1, 20, log=True, when=lambda m: m.use_po)
    )
    lambda_po_floor: float = param(
        0.15, "smallest weight of L_po", low=0, search=Search(0, 0.5, when=lambda m: m.pulls)
    )
    gamma_fid0: float = param(
        25.0,
        "initial weight of the heads' verdict in the generator's loss",
        above=0,
        search=Search(1, 50, log=True, when=lambda m: m.generates),
    )
    gamma_div: float = param(
        1.0, "weight of the diversity in the generator's loss", low=0, search=Search(0, 5, when=lambda m: m.generates)
    )
    gamma_ad: float = param(
        0.15,
        "weight of L_ad in the generator's loss",
        low=0,
        search=Search(0, 1, when=lambda m: m.generates and m.use_ad),
    )
    decay: float = param(
        0.98,
        "factor per round of the weights with an initial value",
        above=0,
        high=1,
        search=Search(0.95, 1.0, when=lambda m: m.generates or m.pulls),
    )
    ad_cap: float | None = param(
        None, "a generated feature's L_ad, in the unit of po_form, stops counting here; null: never", above=0
    )
    noise: Literal["uniform", "normal"] = param("uniform", "noise: uniform on [0, 1), or standard normal")
    po_form: Literal["mse", "l2"] = param(
        "mse", "distance to prototypes in L_po and L_ad: mean square over the feature, or un-squared norm"
    )
    div_mask: Literal["intra", "inter", "all"] = param(
        "intra", "pairs that the diversity counts: of equal labels, of different ones, or all"
    )
    gen_proto: Literal["new", "old"] = param("new", "prototypes that the generator sees: of this round, or the last")
    gen_label_dist: Literal["uniform", "frequency"] = param(
        "uniform", "labels of the clients' generated features: uniform over those known, or by frequency"
    )
    counts: Literal["both", "held"] = param(
        "both",
        "label counts sent: of samples held, for prototypes, and drawn, for heads; or held ones for both (paper)",
    )

    @property
    def generates(self) -> bool:
        """Whether L_ge is on."""
        return self.use_ge and self.lambda_ge0 > 0

    @property
    def pulls(self) -> bool:
        """Whether L_po is on."""
        return self.use_po and self.lambda_po0 > 0

    @property
    def pushes(self) -> bool:
        """Whether L_ad is on."""
        return self.generates and self.use_ad and self.gamma_ad > 0

    @property
    def sends_prototypes(self) -> bool:
        """Whether anybody looks at prototypes."""
        return self.pulls or self.pushes

    def start_server(self, setting: FederationContext) -> Payloads:
        """The initial model, an untrained generator and no prototypes, each if it is used."""
        server = super().start_server(setting)
        return {**server, **no_prototypes(setting)} if self.sends_prototypes else server

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        """The global model, the trained generator with the label distribution, and the prototypes if they pull."""
        message = super().broadcast(server, client, ctx)
        return {**message, PROTOTYPES: server[PROTOTYPES]} if self.pulls else message

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        """The weights of the two terms and the prototypes, fixed during the round."""
        inputs: dict[str, Any] = {}
        if FEATURE_GENERATOR in ctx.received:
            weight = Exponential(self.lambda_ge0, self.decay, FLOOR)
            inputs["lambda_ge"] = weight(ctx.rounds_done) * self.generated_share(ctx)
        if self.pulls and ctx.rounds_done > 0:
            weight = Exponential(self.lambda_po0, self.decay, self.lambda_po_floor)
            inputs |= {"lambda_po": weight(ctx.rounds_done), **received_prototypes(ctx)}
        return inputs

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Generated features with their labels."""
        return self.generated(ctx, steps, generator) if FEATURE_GENERATOR in ctx.received else {}

    def loss(self, model: LocalModel, batch: Batch, inputs: LossInputs) -> dict[str, Tensor]:
        """Cross-entropy, that of generated features (L_ge), and the distance to prototypes (L_po)."""
        features = model.features(batch.images)
        model.note(features)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "lambda_ge" in inputs:
            terms["generated"] = inputs["lambda_ge"] * generated_cross_entropy(model, batch)
        if "lambda_po" in inputs:
            known = inputs["means"], inputs["present"]
            pull = prototype_pull(features, batch.labels, *known, self.po_form, weight=batch.weight)
            terms["prototype_pull"] = inputs["lambda_po"] * pull
        return terms

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The trained weights with n_k, prototypes and label counts; nothing is remembered.

        Counts: ``held``, of all training samples, weigh prototypes and tell which labels exist; ``drawn``, of the
        mini-batches, weigh heads, unless one vector has to do for both.
        """
        message, client_state = super().reply(ctx, trained)
        counts: dict[str, Tensor] = {}
        if self.sends_prototypes:
            message = {**message, PROTOTYPES: self.own_prototypes(ctx, trained)}
            counts["held"] = ctx.class_counts
        if self.generates:
            counts["held"] = ctx.class_counts
            if self.counts == "both":
                counts["drawn"] = trained.drawn_labels()
        return ({**message, LABEL_COUNTS: TensorDict(counts)} if counts else message), client_state

    def server_steps(self) -> Mapping[str, ServerStep]:
        """Prototypes, generator, aggregate, each if it is used; with ``gen_proto: old`` prototypes come last."""
        fuse: dict[str, ServerStep] = {"fuse-prototypes": fuse_client_prototypes} if self.sends_prototypes else {}
        train: dict[str, ServerStep] = {"train-generator": self.train_generator} if self.generates else {}
        if self.gen_proto == "old":
            return {**train, **super().server_steps(), **fuse}
        return {**fuse, **train, **super().server_steps()}

    def head_counts(self, replies: Replies) -> Tensor:
        return reported(replies, "drawn" if self.counts == "both" else "held")

    def known_labels(self, server: Record, replies: Replies, setting: FederationContext) -> Payloads:
        """``label_distribution``: uniform over the labels that anyone has reported, or by their frequency."""
        held = reported(replies, "held")
        if self.gen_label_dist == "uniform":
            return {LABEL_DISTRIBUTION: uniform_distribution(server, held)}
        nobody = torch.zeros(setting.num_clients, setting.num_classes, dtype=torch.int64)
        known = server.get(KNOWN_COUNTS, TensorDict({"held": nobody}))["held"].clone()
        known[list(replies)] = held
        chances = known.sum(dim=0).double()
        return {
            KNOWN_COUNTS: TensorDict({"held": known}),
            LABEL_DISTRIBUTION: TensorDict({"p": (chances / chances.sum()).float()}),
        }

    def objective(self, server: Record, heads: Heads, passed: int) -> Objective:
        """γ_fid · L_fid + γ_div · L_div − γ_ad · L_ad.

        ``distance``, only looked at: the RMS of ‖G(ε, ỹ) − φ^ỹ‖ over the samples whose class has a prototype.
        """
        gamma_fid = Exponential(self.gamma_fid0, self.decay, FLOOR)(passed)
        prototypes = server.get(PROTOTYPES)

        def terms(outputs: Tensor, noise: Tensor, labels: Tensor) -> Terms:
            logits = frozen_head_logits(outputs, heads.params)
            found = {"fidelity": (gamma_fid, fidelity_loss(logits, labels, heads.shares, self.fidelity))}
            if self.gamma_div > 0:
                diversity = diversity_loss(outputs, noise, labels, self.div_mask, self.div_metric)
                found["diversity"] = (self.gamma_div, diversity)
            if prototypes is None:
                return found
            means, present = prototypes.means, prototypes.present
            if self.pushes and passed > 0:
                away = prototype_pull(outputs, labels, means, present, self.po_form, cap=self.ad_cap)
                found["adversarial"] = (-self.gamma_ad, away)
            known = present[labels]
            if known.any():
                apart = outputs.detach()[known] - means[labels[known]]
                found["distance"] = (0.0, apart.square().sum(dim=1).mean().sqrt())
            return found

        return terms


@folds("prototypes")
def fuse_client_prototypes(server: Record, replies: Replies, ctx: RoundContext) -> tuple[Record, Metrics]:
    """φ^c ← Σ_k n_{k,c} φ_k^c / Σ_k n_{k,c} over the clients that sent class c; the others keep theirs."""
    held = {client: counts["held"] for client, counts in replies.of(LABEL_COUNTS).items()}
    return fused_prototypes(server, replies, ctx, held)
