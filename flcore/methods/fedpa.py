"""FedPA (Jiang, Wang, Yang, Shu, Lin, Yi, IEEE TDSC 2024): full-model regularisation by prototypes and a generator.

Extends FedGen (`flcore/methods/fedgen.py`, same notation). t counts rounds from 0, φ are the global prototypes.

Client, from t = 1 on (t = 0 has neither generator nor prototypes, and is FedAvg to the bit):

    L = CE(x, y) + λ_ge · (B_gen/B) · CE(h(G(ε, ỹ)), ỹ) + λ_po · dist(f(x), φ^y)              (Eq. 9 to 12)
    λ_ge = max(1e-4, 25·0.98^t),    λ_po = max(0.15, 5·0.98^t).

The first extra term reaches the head alone, the second the encoder alone. A weight of 0, or a switch, turns a term off
despite its floor. After training a client sends the mean feature of each of its classes and its label counts.

Server: φ^c = Σ_k n_{k,c} φ_k^c / Σ_k n_{k,c} over the sampled clients that sent class c (Algorithm 1); other classes
keep their prototype. Then the generator, as FedGen's, but pushed *away* from the prototypes (Eq. 5 to 8):

    L = γ_fid · L_fid + γ_div · L_div − γ_ad · dist(G(ε, ỹ), φ^ỹ),    γ_fid = max(1e-4, 25·0.98^t), no L_ad at t = 0.

Where paper and code disagree (fedpa.md, sections 4 to 7) parameters choose. Deviations: prototypes come from one pass
in evaluation mode after training (``proto_mode: running`` is the code); samples of classes without φ take no part (the
code has zero rows there); L_fid has no 1/|S|, since its weights sum to 1; labels are those that clients have reported.

L_ad is unbounded without ``ad_cap``: with the defaults generated features move far away from the prototypes (metric
``generator_distance``, the RMS of ‖G(ε, ỹ) − φ^ỹ‖ over a batch).

Privacy: prototypes of rare classes are nearly single features, see `flcore/math/prototypes/release.py`; label counts
are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.params import Search, param
from flcore.core.portable import square_root
from flcore.core.schedules import exponential
from flcore.io.messages import TensorDict
from flcore.io.records import Key, Payloads, Record
from flcore.math.generators.features import diversity_loss, fidelity_loss, frozen_head_logits
from flcore.math.losses.alignment import prototype_pull
from flcore.math.losses.basic import cross_entropy
from flcore.methods import types as fl
from flcore.methods.kit import class_prototypes
from flcore.methods.kit import feature_generator as gen
from flcore.methods.kit.server_training import Terms

KNOWN_COUNTS = Key("known_counts", TensorDict)
"""``held`` int64 [N, K]: every client's latest label counts, at the server alone."""


@dataclass(frozen=True)
class FedPA(
    class_prototypes.RunningPrototypes,
    gen.FeatureGeneratorMethod,
    name="fedpa",
    citation="Jiang et al., IEEE TDSC 2024",
    reduces_to_fedavg={"use_ge": False, "use_po": False},
):
    """Generated features for the head, prototypes for the encoder, one trained against the other."""

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
    RUNNING = "all"

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
        25.0, "initial weight of L_fid", above=0, search=Search(1, 50, log=True, when=lambda m: m.generates)
    )
    gamma_div: float = param(
        1.0, "weight of L_div, the diversity", low=0, search=Search(0, 5, when=lambda m: m.generates)
    )
    gamma_ad: float = param(0.15, "weight of L_ad", low=0, search=Search(0, 1, when=lambda m: m.generates and m.use_ad))
    decay: float = param(
        0.98, "decay per round", above=0, high=1, search=Search(0.95, 1.0, when=lambda m: m.generates or m.pulls)
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
        "both", "label counts sent: of samples held, for prototypes, and drawn, for heads; or held for both (paper)"
    )

    @property
    def generates(self) -> bool:
        return self.use_ge and self.lambda_ge0 > 0

    @property
    def pulls(self) -> bool:
        return self.use_po and self.lambda_po0 > 0

    @property
    def pushes(self) -> bool:
        return self.generates and self.use_ad and self.gamma_ad > 0

    @property
    def sends_prototypes(self) -> bool:
        return self.pulls or self.pushes

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        server = super().start_server(setting)
        return {**server, **class_prototypes.no_prototypes(setting)} if self.sends_prototypes else server

    def broadcast(self, server: Record, client: int, ctx: fl.RoundContext) -> Payloads:
        message = super().broadcast(server, client, ctx)
        return {**message, fl.PROTOTYPES: server[fl.PROTOTYPES]} if self.pulls else message

    def loss_inputs(self, ctx: fl.ClientContext) -> fl.LossInputs:
        inputs: dict[str, Any] = {}
        if gen.FEATURE_GENERATOR in ctx.received:
            weight = exponential(self.lambda_ge0, self.decay, gen.FLOOR)
            inputs["lambda_ge"] = weight(ctx.rounds_done) * self.generated_share(ctx)
        if self.pulls and ctx.rounds_done > 0:
            weight = exponential(self.lambda_po0, self.decay, self.lambda_po_floor)
            inputs |= {"lambda_po": weight(ctx.rounds_done), **class_prototypes.received_prototypes(ctx)}
        return inputs

    def random_inputs(self, ctx: fl.ClientContext, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        return self.generated(ctx, steps, generator) if gen.FEATURE_GENERATOR in ctx.received else {}

    def loss(self, model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
        features = model.features(batch.images)
        model.record_features(features)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "lambda_ge" in inputs:
            terms["generated"] = inputs["lambda_ge"] * gen.generated_cross_entropy(model, batch)
        if "lambda_po" in inputs:
            known = inputs["means"], inputs["present"]
            pull = prototype_pull(features, batch.labels, *known, self.po_form, weight=batch.weight)
            terms["prototype_pull"] = inputs["lambda_po"] * pull
        return terms

    def reply(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> tuple[Payloads, Payloads]:
        """Add prototypes and label counts.

        ``held`` of all training samples weighs prototypes and shows which labels exist; ``drawn`` of mini-batches
        weighs heads.
        """
        message, client_state = super().reply(ctx, trained)
        if not self.sends_prototypes and not self.generates:
            return message, client_state
        counts = {"held": ctx.class_counts}
        if self.generates and self.counts == "both":
            counts["drawn"] = trained.drawn_labels()
        own: Payloads = {fl.PROTOTYPES: self.own_prototypes(ctx, trained)} if self.sends_prototypes else {}
        return {**message, **own, gen.LABEL_COUNTS: TensorDict(counts)}, client_state

    def server_steps(self) -> Mapping[str, fl.ServerStep]:
        fuse: dict[str, fl.ServerStep] = {"fuse-prototypes": fuse_client_prototypes} if self.sends_prototypes else {}
        train: dict[str, fl.ServerStep] = {"train-generator": self.train_generator} if self.generates else {}
        rest = {**train, **super().server_steps()}
        return {**rest, **fuse} if self.gen_proto == "old" else {**fuse, **rest}

    def head_counts(self, replies: fl.Replies) -> Tensor:
        return gen.reported(replies, "drawn" if self.counts == "both" else "held")

    def known_labels(self, server: Record, replies: fl.Replies, setting: fl.FederationContext) -> Payloads:
        """Return ``label_distribution``: uniform over the labels that clients have reported, or by frequency."""
        held = gen.reported(replies, "held")
        if self.gen_label_dist == "uniform":
            return {gen.LABEL_DISTRIBUTION: gen.uniform_distribution(server, held)}
        none = torch.zeros(setting.num_clients, setting.num_classes, dtype=torch.int64)
        known = server.get(KNOWN_COUNTS, TensorDict({"held": none}))["held"].clone()
        known[list(replies)] = held
        chances = known.sum(dim=0).double()
        return {
            KNOWN_COUNTS: TensorDict({"held": known}),
            gen.LABEL_DISTRIBUTION: TensorDict({"p": (chances / chances.sum()).float()}),
        }

    def objective(self, server: Record, heads: gen.Heads, passed: int) -> gen.Objective:
        """Return γ_fid · L_fid + γ_div · L_div − γ_ad · L_ad.

        ``distance``, of weight 0: the RMS of ‖G(ε, ỹ) − φ^ỹ‖ over the samples of classes with a prototype.
        """
        gamma_fid = exponential(self.gamma_fid0, self.decay, gen.FLOOR)(passed)
        prototypes = server.get(fl.PROTOTYPES)

        def loss(outputs: Tensor, noise: Tensor, labels: Tensor) -> Terms:
            logits = frozen_head_logits(outputs, heads.params)
            terms = {"fidelity": (gamma_fid, fidelity_loss(logits, labels, heads.shares, self.fidelity))}
            if self.gamma_div > 0:
                diversity = diversity_loss(outputs, noise, labels, self.div_mask, self.div_metric)
                terms["diversity"] = (self.gamma_div, diversity)
            if prototypes is None:
                return terms
            means, present = prototypes.means, prototypes.present
            if self.pushes and passed > 0:
                away = prototype_pull(outputs, labels, means, present, self.po_form, cap=self.ad_cap)
                terms["adversarial"] = (-self.gamma_ad, away)
            known = present[labels]
            if known.any():
                difference = outputs.detach()[known] - means[labels[known]]
                terms["distance"] = (0.0, square_root(difference.square().sum(dim=1).mean()))
            return terms

        return loss


@fl.aggregates("prototypes")
def fuse_client_prototypes(server: Record, replies: fl.Replies, ctx: fl.RoundContext) -> tuple[Record, fl.Metrics]:
    """Set φ^c to Σ_k n_{k,c} φ_k^c / Σ_k n_{k,c} over the clients that sent class c; others keep theirs."""
    held = {client: counts["held"] for client, counts in replies.of(gen.LABEL_COUNTS).items()}
    return class_prototypes.fused_prototypes(server, replies, ctx, held)
