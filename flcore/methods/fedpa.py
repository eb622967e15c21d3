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

Privacy: prototypes of rare classes are nearly single features, and label counts are sent as they are. ``min_count``
withholds prototypes of small classes; ``proto_clip`` and ``proto_noise`` bound and blur them, see
`flcore/prototypes/release.py` for what that protects and what it does not: weights and counts still leave the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.generators.features import diversity_loss, fidelity_loss, frozen_head_logits, prototype_pull
from flcore.losses.basic import cross_entropy
from flcore.messages import Arrays, Prototypes
from flcore.methods.fedavg import aggregate
from flcore.methods.fedgen import (
    FLOOR,
    FeatureGeneratorMethod,
    Heads,
    Objective,
    Terms,
    reported,
    uniform_distribution,
)
from flcore.methods.vocabulary import Batch, Context, LocalModel, Phase, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.prototypes import class_means
from flcore.prototypes.fusion import weighted_class_means
from flcore.prototypes.release import clip_to_norm, frequent_classes, noisy_means, privacy_spent
from flcore.records import Record, payload_of
from flcore.schedules import decayed_weight


@dataclass(frozen=True)
class FedPA(FeatureGeneratorMethod):
    """FedAvg with generated features for the head and prototypes for the encoder."""

    name: ClassVar[str] = "fedpa"
    summary: ClassVar[str] = (
        "generated features for the head, prototypes for the encoder, one trained against the other"
    )
    citation: ClassVar[str] = "Jiang et al., IEEE TDSC 2024"
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

    use_ge: bool = param(True, "train the head on generated features (L_ge)", switch=True)
    use_po: bool = param(True, "pull features to the prototypes (L_po)", switch=True)
    use_ad: bool = param(True, "push generated features away from the prototypes (L_ad); needs use_ge", switch=True)
    lambda_ge0: float = param(25.0, "initial weight of L_ge", low=0, search=Search(1, 50, log=True))
    lambda_po0: float = param(5.0, "initial weight of L_po", low=0, search=Search(0.1, 20, log=True))
    lambda_po_floor: float = param(0.15, "smallest weight of L_po", low=0, search=Search(0, 0.5))
    gamma_fid0: float = param(
        25.0, "initial weight of the heads' verdict in the generator's loss", above=0, search=Search(1, 50, log=True)
    )
    gamma_div: float = param(1.0, "weight of the diversity in the generator's loss", low=0, search=Search(0, 5))
    gamma_ad: float = param(0.15, "weight of L_ad in the generator's loss", low=0, search=Search(0, 1))
    decay: float = param(
        0.98, "factor per round of the weights with an initial value", above=0, high=1, search=Search(0.95, 1.0)
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
    proto_mode: Literal["final", "running"] = param(
        "final", "class means of the trained model, or of all mini-batches' features during training"
    )
    min_count: int = param(1, "samples that a class needs for its prototype to be sent", low=0)
    proto_clip: float | None = param(None, "largest norm of what prototypes are made of; null: any", above=0)
    proto_noise: float = param(0.0, "Gaussian noise on prototypes in units of their sensitivity", low=0)
    proto_unit: Literal["sample", "client"] = param(
        "sample", "what clipping and noise protect: one sample, or all of a client's"
    )
    proto_delta: float = param(1e-5, "δ of the (ε, δ) account of noisy prototypes in metrics.json", above=0, below=1)

    def __post_init__(self) -> None:
        """Refuse noise without a bound on what it hides, and choices that the preset would replace."""
        super().__post_init__()
        if self.proto_noise > 0 and self.proto_clip is None:
            raise ValueError("proto_noise needs proto_clip, the norm that the noise is measured against")
        if self.running and self.proto_clip is not None and self.proto_unit == "sample":
            raise ValueError(
                "proto_unit = sample clips the features of single samples once, which running prototypes have several "
                "times; set proto_mode = final or proto_unit = client"
            )

    @property
    def running(self) -> bool:
        """Whether prototypes are made during training."""
        return self.chosen.proto_mode == "running"

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

    def phases(self) -> tuple[Phase, ...]:
        """One, whose features are averaged where prototypes are running ones."""
        return (Phase(note="all" if self.running and (self.pulls or self.pushes) else "none"),)

    def start_server(self, setting: Setting) -> Record:
        """The initial model, an untrained generator and no prototypes, each if it is used."""
        server = super().start_server(setting)
        if not (self.pulls or self.pushes):
            return server
        return {**server, "prototypes": Prototypes.empty(setting.num_classes, setting.feature_dim)}

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The global model, the trained generator with the label distribution, and the prototypes if they pull."""
        message = super().broadcast(server, client, exchange)
        return {**message, "prototypes": server["prototypes"]} if self.pulls else message

    def context(self, turn: Turn) -> Context:
        """The weights of the two terms and the prototypes, fixed during the round."""
        passed = turn.round - 1
        context: dict[str, Any] = {}
        if "generator" in turn.inbox:
            weight = decayed_weight(self.lambda_ge0, self.decay, passed, FLOOR)
            context["lambda_ge"] = weight * self.generated_share(turn)
        if self.pulls and passed > 0:
            prototypes = payload_of(Prototypes, turn.inbox, "prototypes")
            context["lambda_po"] = decayed_weight(self.lambda_po0, self.decay, passed, self.lambda_po_floor)
            context |= {"prototypes": prototypes.means, "present": prototypes.present}
        return context

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Generated features with their labels."""
        return self.generated(turn, steps, generator) if "generator" in turn.inbox else {}

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Cross-entropy, that of generated features (L_ge), and the distance to prototypes (L_po)."""
        features = model.features(batch.images)
        model.note(features)
        terms = {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}
        if "lambda_ge" in context:
            generated = model.beside().classify(batch.draws["features"])
            terms["generated"] = context["lambda_ge"] * cross_entropy(generated, batch.draws["labels"])
        if "lambda_po" in context:
            pull = prototype_pull(
                features,
                batch.labels,
                context["prototypes"],
                context["present"],
                self.po_form,
                weight=batch.weight,
            )
            terms["prototype_pull"] = context["lambda_po"] * pull
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The trained weights with n_k, prototypes and label counts; nothing is remembered.

        Counts: ``held``, of all training samples, weigh prototypes and tell which labels exist; ``drawn``, of the
        mini-batches, weigh heads.
        """
        message, memory = super().reply(turn, trained)
        counts: dict[str, Tensor] = {}
        if self.pulls or self.pushes:
            message = {**message, "prototypes": self.own_prototypes(turn, trained)}
            counts["held"] = turn.counts
        if self.generates:
            counts |= {"held": turn.counts, "drawn": trained.drawn_labels()}
        return ({**message, "label_counts": Arrays(counts)} if counts else message), memory

    def own_prototypes(self, turn: Turn, trained: TrainedClient) -> Prototypes:
        """The mean feature of each class with at least ``min_count`` samples, clipped and noisy if asked for."""
        if self.running:
            own = trained.noted_means()
        else:
            features, labels = trained.features()
            if self.proto_clip is not None and self.proto_unit == "sample":
                features = clip_to_norm(features, self.proto_clip)
            own = class_means(features, labels, turn.setting.num_classes)
        released = frequent_classes(own.present, turn.counts, self.min_count)
        if self.proto_clip is None:
            return Prototypes(torch.where(released.unsqueeze(1), own.means, 0.0), released)
        means = noisy_means(
            own.means,
            turn.counts,
            released,
            turn.stream("prototype noise"),
            max_norm=self.proto_clip,
            noise_multiplier=self.proto_noise,
            unit=self.proto_unit,
        )
        return Prototypes(means, released)

    def privacy(self, releases: int) -> Mapping[str, Any] | None:
        """(ε, δ) of the noisy prototypes alone; weights and counts, which are sent too, are not covered."""
        if self.proto_noise == 0 or not (self.pulls or self.pushes):
            return None
        return {
            "epsilon": privacy_spent(self.proto_noise, releases, self.proto_delta),
            "delta": self.proto_delta,
            "unit": self.proto_unit,
            "releases": releases,
            "covers": "prototypes alone; weights and label counts are sent beside them, unprotected",
        }

    def stages(self) -> Mapping[str, Stage]:
        """Prototypes, generator, aggregate, each if it is used; with ``gen_proto: old`` prototypes come last."""
        fuse: dict[str, Stage] = {"fuse-prototypes": fuse_prototypes} if self.pulls or self.pushes else {}
        train: dict[str, Stage] = {"train-generator": self.train_generator} if self.generates else {}
        if self.chosen.gen_proto == "old":
            return {**train, "aggregate": aggregate, **fuse}
        return {**fuse, **train, "aggregate": aggregate}

    def known_labels(self, server: Record, replies: Mapping[int, Record], setting: Setting) -> Record:
        """``label_distribution``: uniform over the labels that anyone has reported, or by their frequency.

        For frequencies the server keeps every client's latest counts, int64 [N, K], which it sends to nobody.
        """
        held = reported(replies, "held")
        if self.gen_label_dist == "uniform":
            return {"label_distribution": uniform_distribution(server, held)}
        known = torch.zeros(setting.num_clients, setting.num_classes, dtype=torch.int64)
        if "known_counts" in server:
            known = payload_of(Arrays, server, "known_counts")["held"].clone()
        known[sorted(replies)] = held
        chances = known.sum(dim=0).double()
        return {
            "known_counts": Arrays({"held": known}),
            "label_distribution": Arrays({"p": (chances / chances.sum()).float()}),
        }

    def objective(self, server: Record, heads: Heads, round_number: int) -> Objective:
        """γ_fid · L_fid + γ_div · L_div − γ_ad · L_ad."""
        passed = round_number - 1
        gamma_fid = decayed_weight(self.gamma_fid0, self.decay, passed, FLOOR)
        prototypes = payload_of(Prototypes, server, "prototypes") if self.pushes and passed > 0 else None

        def terms(outputs: Tensor, noise: Tensor, labels: Tensor) -> Terms:
            logits = frozen_head_logits(outputs, heads.weight, heads.bias)
            found = {"fidelity": (gamma_fid, fidelity_loss(logits, labels, heads.shares, self.fidelity))}
            if self.gamma_div > 0:
                diversity = diversity_loss(outputs, noise, labels, self.div_mask, self.div_metric)
                found["diversity"] = (self.gamma_div, diversity)
            if prototypes is not None:
                means, present = prototypes.means, prototypes.present
                away = prototype_pull(outputs, labels, means, present, self.po_form, cap=self.ad_cap)
                found["adversarial"] = (-self.gamma_ad, away)
            return found

        return terms

    def generator_facts(self, server: Record, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """``distance``: the RMS of ‖G(ε, ỹ) − φ^ỹ‖ over the samples whose class has a prototype."""
        if "prototypes" not in server:
            return {}
        prototypes = payload_of(Prototypes, server, "prototypes")
        known = prototypes.present[labels]
        if not known.any():
            return {}
        apart = outputs[known] - prototypes.means[labels[known]]
        return {"generator_distance": apart.square().sum(dim=1).mean().sqrt().item()}


def fuse_prototypes(server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
    """φ^c ← Σ_k n_{k,c} φ_k^c / Σ_k n_{k,c} over the clients that sent class c; the others keep theirs."""
    uploads = [payload_of(Prototypes, replies[client], "prototypes") for client in sorted(replies)]
    sent = torch.stack([upload.present for upload in uploads])
    means, present = weighted_class_means(
        torch.stack([upload.means for upload in uploads]).double(), reported(replies, "held") * sent
    )
    previous = payload_of(Prototypes, server, "prototypes")
    fused = torch.where(present.unsqueeze(1), means.float(), previous.means)
    return {**server, "prototypes": Prototypes(fused, previous.present | present)}
