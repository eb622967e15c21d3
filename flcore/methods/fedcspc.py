"""FedCSPC (Qi, Meng, Chen, Hu, Lin, Meng, ACM MM 2023): the server calibrates the averaged head on clients' prototypes.

E is the encoder, f = E(x) [e], H the projection, z = H(f) [d], F the head. A base method (FedAvg or MOON) trains,
averages and travels as it always does; to it come, each behind its switch:

* CPM. After training a client groups the f of each of its classes by k-means and sends, per cluster, ``n_repeat`` means
  of random subsets (share ``ratio``, without replacement; Eq. 6 and 7). Off (TPG): one mean per class.
* Server, *fuse-prototypes*: u_g^c = plain mean of all prototypes of class c; a class without any keeps the last value.
* LRL, from the second round on (Eq. 2 to 5): base loss + κ·(w_N L_N + w_A L_A + w_E L_E), L_N the cross-entropy of
  cos(f, u_g)/τ_l, L_A and L_E smooth-L1 between the angles and the distances of f and those of the u_g of their labels.
* CA. Server, *calibrate* (Eq. 9, 10, 16): SGD on H and F alone, from the averaged ones, over the prototypes u:

      CE(F(H(u)), y) + η·(L_WCL + L_ACL),

  L_WCL the contrast of H(u) with weight 1 for pairs of one class and two clients or of two classes and one client, 0.5
  for the rest.
* PA, inside it: L_ACL = max(0, ‖H(u_i) − H(u⁺)‖ − ‖H(u_i) − H(u⁻)‖ + α), mean over anchors and ``n_aug`` draws, with
  u⁺ = u_j + λ_u (u_j − u_i), u⁻ = u_i + λ_u (u_k − u_i), j ≠ i of the same class and k of another, of the same client.
* KP. Server, *build-exemplars*: e_c = mean of H(u) over the prototypes of class c that the head gets right, or over all
  where it gets none right. Answers mix the head's with the similarities to exemplars,

      (1 − λ_p)·softmax(F(z)) + λ_p·softmax(cos(z, e)/0.5).

Deviations, fedcspc.md section 7: L_ACL has un-squared norms and a hinge as in the authors' code (Eq. 9 is unbounded); a
σ in the numerator of Eq. 10 is a constant, taken literally; L_N has cosines, L_E distances divided by their mean, both
as in the code; L_A is a mean over triples of three different labels, among the first 32 rows of a mini-batch (its order
is random already); prototypes come from all training samples in evaluation mode and without augmentation (the code: its
shuffled, augmented loader without the last batch, no clusters); absent clients' prototypes are dropped. Rounds of the
learning rate's schedule count from 0.

The exemplars stay at the server, where the global model is scored. With ``feedback: false`` clients receive the average
and the calibrated model only answers. ``model_before`` in the server's record is H and F before calibration.

``aux_ce`` (authors' code, not in the paper): clients add the cross-entropy of one more linear classifier, on f. It is
averaged with the model and answers nothing.

``norm_match`` (ours, section 11; not in the paper): averaging shrinks features, so prototypes of local encoders are too
long for the averaged one. Every client also sends the mean ‖E(x)‖ of its samples under the model it received, one
scalar; calibration and exemplars then see the prototypes times (mean of these over samples)/(mean ‖u‖), fact
``norm_factor``. The u_g of the alignment stay as they are. E lags a round behind: in round 1 it is the initial one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flcore.losses.alignment import angle_loss, edge_loss, extrapolate, triplet_hinge
from flcore.losses.basic import cross_entropy, weighted_mean
from flcore.losses.contrastive import contrastive_terms, prototype_contrast, source_weights, unit_vectors
from flcore.messages import Arrays, Count, Facts, Prototypes, Weights
from flcore.methods.base import Method
from flcore.methods.fedavg import FedAvg
from flcore.methods.moon import Moon
from flcore.methods.vocabulary import Batch, Context, LocalModel, Phase, Predict, Setting, Stage, TrainedClient, Turn
from flcore.models.network import Network, Values
from flcore.params import Search, param
from flcore.prototypes import class_means
from flcore.prototypes.clustering import cluster_prototypes
from flcore.records import Record, on_device, payload_of
from flcore.rng import numpy_stream, torch_stream

CALIBRATED = ("projection.", "head.")
"""What the server trains."""

AUXILIARY = "auxiliary"
"""Name of the extra layer of ``aux_ce``."""

ANGLE_ROWS = 32
"""L_A looks at so many samples of a mini-batch: its triples grow with the cube."""


@dataclass(frozen=True)
class FedCSPC(Method):
    """A base method whose averaged head is calibrated on prototypes of all clients."""

    name: ClassVar[str] = "fedcspc"
    summary: ClassVar[str] = (
        "clustered prototypes go up, the server calibrates the averaged head on them; plugs on a base"
    )
    citation: ClassVar[str] = "Qi et al., ACM MM 2023"

    base: Literal["fedavg", "moon"] = param("fedavg", "method that trains and averages the model")
    base_mu: float = param(5.0, "μ of the base moon", low=0, search=Search(0.1, 10.0, log=True))
    base_tau: float = param(0.5, "τ of the base moon", above=0)

    use_lrl: bool = param(True, "align features with the global prototypes at the clients (LRL)", switch=True)
    use_cpm: bool = param(True, "send several prototypes of clusters (CPM); off: one mean per class (TPG)", switch=True)
    use_ca: bool = param(True, "calibrate projection and head at the server (CA)", switch=True)
    use_pa: bool = param(True, "mixed prototypes in the calibration (PA, L_ACL)", switch=True)
    use_kp: bool = param(True, "answer with the similarities to exemplars too (KP)", switch=True)
    feedback: bool = param(True, "send the calibrated model to the clients; off: the average", switch=True)
    keep_stale: bool = param(
        False, "also use the last prototypes of clients that did not take part in the round", switch=True
    )
    aux_ce: bool = param(
        False, "train a linear classifier of f at the clients too (authors' code, not in the paper)", switch=True
    )
    norm_match: bool = param(
        False, "rescale prototypes to the length of the global model's features (not in the paper)", switch=True
    )

    clusters: int = param(4, "K_c, clusters per class of a client", low=1, search=Search(1, 8))
    n_repeat: int = param(5, "prototypes per cluster", low=1, search=Search(1, 16, log=True))
    ratio: float = param(
        0.5, "r, share of a cluster that a prototype is the mean of", above=0, high=1, search=Search(0.2, 1.0)
    )
    min_cluster: int = param(1, "smaller clusters join the nearest one", low=1)

    kappa: float = param(0.1, "κ, weight of the alignment at the clients", low=0, search=Search(0.005, 1.0, log=True))
    w_node: float = param(1.0, "w_N, weight of the similarities to prototypes", low=0, search=Search(0, 1))
    w_angle: float = param(1.0, "w_A, weight of the angles", low=0, search=Search(0, 1))
    w_edge: float = param(1.0, "w_E, weight of the distances", low=0, search=Search(0, 1))
    tau_l: float = param(0.5, "τ_l, temperature of L_N", above=0, search=Search(0.05, 1.0, log=True))
    angle_mode: Literal["distinct", "all"] = param(
        "distinct", "L_A is a mean over triples of three labels, or over all triples as in the authors' code"
    )
    edge_same: bool = param(True, "L_E also compares samples of equal labels, whose distance should be 0")
    edge_relative: bool = param(True, "L_E compares distances divided by their mean; off: as they are (Eq. 5)")

    eta: float = param(
        0.1, "η, weight of both contrasts in the calibration", low=0, search=Search(0.005, 1.0, log=True)
    )
    tau_g: float = param(0.5, "τ_g, temperature of L_WCL", above=0, search=Search(0.05, 1.0, log=True))
    contrast: Literal["batch", "full"] = param(
        "batch", "L_WCL compares a prototype with its mini-batch, or with all (small sets)"
    )
    n_aug: int = param(5, "mixed partners per prototype and visit", low=1, search=Search(1, 9))
    lambda_u: float = param(0.5, "λ_u, strength of the mixing", low=0, search=Search(0.05, 0.7))
    alpha: float = param(1.0, "α, margin of L_ACL", low=0, search=Search(0.1, 3.0))
    cal_epochs: int = param(100, "passes over the prototypes in a calibration", low=0, search=Search(10, 200))
    cal_batch: int = param(100, "prototypes per step of the calibration", low=1, search=Search(32, 256, log=True))
    cal_lr: float = param(
        0.1, "learning rate of the calibration in the first rounds", above=0, search=Search(1e-3, 0.3, log=True)
    )
    cal_lr_schedule: Literal["rounds", "constant"] = param(
        "rounds", "rounds: a tenth of it after 6 rounds, a hundredth after 41; constant: always cal_lr"
    )
    cal_decay_every: int = param(30, "epochs of a calibration after which its rate falls to a tenth", low=1)
    cal_weight_decay: float = param(1e-5, "weight decay of the calibration", low=0)

    lambda_p: float = param(0.5, "λ_p, share of the exemplars in an answer", low=0, high=1, search=Search(0, 0.9))
    tau_e: float = param(0.5, "temperature of the similarities to exemplars", above=0)
    fusion: Literal["softmax", "minmax", "authors"] = param(
        "softmax", "mix probabilities, values scaled to [0, 1], or (authors) logits with exponentials of similarities"
    )

    @property
    def base_method(self) -> Method:
        """The method that this one plugs on."""
        return Moon(mu=self.base_mu, tau=self.base_tau) if self.base == "moon" else FedAvg()

    @property
    def aligns(self) -> bool:
        """Whether clients use the global prototypes."""
        return self.use_lrl and self.kappa > 0 and self.w_node + self.w_angle + self.w_edge > 0

    @property
    def sends_prototypes(self) -> bool:
        """Whether anybody has a use for prototypes."""
        return self.aligns or self.use_ca or self.use_kp

    @property
    def rescales(self) -> bool:
        """Whether the server rescales prototypes, for which clients send a norm."""
        return self.norm_match and (self.use_ca or self.use_kp)

    # ---- clients -------------------------------------------------------------------------------------------------

    def num_outputs(self, num_classes: int) -> int:
        """The base's."""
        return self.base_method.num_outputs(num_classes)

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, nn.Module]:
        """The base's, and with ``aux_ce`` a linear classifier of f."""
        layers = self.base_method.extra_layers(feature_dim, num_classes, encoded_dim)
        return {**layers, AUXILIARY: nn.Linear(encoded_dim, num_classes)} if self.aux_ce else layers

    def phases(self) -> tuple[Phase, ...]:
        """The base's."""
        return self.base_method.phases()

    def start_server(self, setting: Setting) -> Record:
        """What the base holds, and no prototypes yet."""
        server = self.base_method.start_server(setting)
        if not self.sends_prototypes:
            return server
        image = torch.zeros(1, *setting.image_shape)
        width = setting.network.encode(image, setting.initial.values).shape[1]
        return {**server, "prototypes": Prototypes.empty(setting.num_classes, width)}

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's message, and the global prototypes if they are used."""
        sent = server if self.feedback else {**server, **averaged(server)}
        message = self.base_method.broadcast(sent, client, exchange)
        return {**message, "prototypes": server["prototypes"]} if self.aligns else message

    def begin(self, turn: Turn) -> Weights:
        """As the base."""
        return self.base_method.begin(turn)

    def context(self, turn: Turn) -> Context:
        """The base's constants and, from the second round on, the global prototypes."""
        context: dict[str, Any] = {"base": self.base_method.context(turn)}
        if self.aligns and turn.round > 1:
            prototypes = payload_of(Prototypes, turn.inbox, "prototypes")
            context |= {"prototypes": prototypes.means, "present": prototypes.present}
        return context

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base_method.draws(turn, steps, generator)

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The base's terms, the auxiliary classifier's, and the three of the alignment."""
        base, aligns = context.get("base", {}), "prototypes" in context
        if not (aligns or self.aux_ce):
            return self.base_method.loss(model, batch, base)
        tapped = Tapped(model, batch.images)
        terms = self.base_method.loss(tapped, batch, base)
        if self.aux_ce:
            logits = model.apply_extra(AUXILIARY, tapped.encoded)
            terms["auxiliary"] = cross_entropy(logits, batch.labels, batch.weight)
        if aligns:
            terms |= self.alignment(tapped.encoded, batch, context["prototypes"], context["present"])
        return terms

    def alignment(self, encoded: Tensor, batch: Batch, means: Tensor, present: Tensor) -> dict[str, Tensor]:
        """κ·(w_N L_N + w_A L_A + w_E L_E), term by term."""
        labels, weight = batch.labels, batch.weight
        terms: dict[str, Tensor] = {}
        if self.w_node > 0:
            node = prototype_contrast(encoded, labels, means, present, self.tau_l, weight=weight)
            terms["node"] = self.kappa * self.w_node * node
        if self.w_angle > 0:
            few = slice(ANGLE_ROWS)
            angle = angle_loss(
                encoded[few],
                labels[few],
                means,
                present,
                mode=self.angle_mode,
                weight=None if weight is None else weight[few],
            )
            terms["angle"] = self.kappa * self.w_angle * angle
        if self.w_edge > 0:
            edge = edge_loss(
                encoded,
                labels,
                means,
                present,
                same_label=self.edge_same,
                relative=self.edge_relative,
                weight=weight,
            )
            terms["edge"] = self.kappa * self.w_edge * edge
        return terms

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The base's message and memory, the client's prototypes with their labels, perhaps a norm."""
        message, memory = self.base_method.reply(turn, trained)
        if not self.sends_prototypes:
            return message, memory
        vectors, labels = self.own_prototypes(turn, *trained.encoded())
        message = {**message, "prototypes": Arrays({"labels": labels, "vectors": vectors})}
        if self.rescales:
            message["encoder_norm"] = Arrays({"mean": received_norm(turn, trained)})
        return message, memory

    def own_prototypes(self, turn: Turn, encoded: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Prototypes [q, e] and their labels [q] of encoded samples [n, e] with labels [n]."""
        if not self.use_cpm:
            means = class_means(encoded, labels, turn.setting.num_classes)
            return means.arrays()["means"], means.arrays()["classes"]
        if len(labels) == 0:
            return encoded, labels
        return cluster_prototypes(
            encoded,
            labels,
            lambda label: numpy_stream(turn.setting.seed, "fedcspc prototypes", turn.round, turn.client, label),
            num_clusters=self.clusters,
            ratio=self.ratio,
            repeats=self.n_repeat,
            min_size=self.min_cluster,
        )

    # ---- server --------------------------------------------------------------------------------------------------

    def stages(self) -> Mapping[str, Stage]:
        """The base's, then fuse-prototypes, calibrate and build-exemplars, each if it is used."""
        stages = dict(self.base_method.stages())
        if self.sends_prototypes:
            stages["fuse-prototypes"] = self.fuse_prototypes
        if self.use_ca:
            stages["calibrate"] = self.calibrate
        if self.use_kp:
            stages["build-exemplars"] = self.build_exemplars
        return stages

    def fuse_prototypes(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: ``prototypes``, u_g; with ``keep_stale`` also ``pool``, every client's latest prototypes."""
        pool = pooled(server, replies)
        own = class_means(pool["vectors"], pool["labels"], setting.num_classes)
        previous = payload_of(Prototypes, server, "prototypes")
        fused = torch.where(own.present.unsqueeze(1), own.means, previous.means)
        after = {**server, "prototypes": Prototypes(fused, previous.present | own.present)}
        return {**after, "pool": pool} if self.keep_stale else after

    def calibrate(self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
        """Server stage: ``model`` with calibrated H and F; theirs before it are kept as ``model_before``.

        Raises:
            ArithmeticError: the calibration diverged.
        """
        model = payload_of(Weights, server, "model")
        before = calibrated_part(model)
        pool, norms = self.fitting_pool(server, replies)
        held = on_device({"pool": pool, "before": before}, setting.device)
        stream = torch_stream(setting.seed, "calibrate", round_number)
        vectors, labels, sources = (payload_of(Arrays, held, "pool")[name] for name in ("vectors", "labels", "sources"))
        params, losses = self.fit_head(
            setting.network,
            payload_of(Weights, held, "before"),
            PrototypeSet(vectors, labels, sources),
            self.calibration_rate(round_number),
            stream,
        )
        facts = {f"calibration_{name}": value for name, value in losses.items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in params.values()):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in facts.items())
            raise ArithmeticError(f"the calibration diverged ({shown}); lower method.cal_lr or method.eta")
        known = payload_of(Facts, server, "facts").values if "facts" in server else {}
        facts |= {"prototypes": float(len(labels)), **norms}
        return {
            **server,
            "model": Weights(
                {**model.params, **{name: tensor.cpu() for name, tensor in params.items()}}, model.buffers
            ),
            "model_before": before,
            "facts": Facts({**known, **facts}),
        }

    def fitting_pool(self, server: Record, replies: Mapping[int, Record]) -> tuple[Arrays, dict[str, float]]:
        """The prototypes as calibration and exemplars see them, and facts about their lengths."""
        pool = pooled(server, replies)
        length = float(pool["vectors"].norm(dim=1).mean())
        if not self.rescales:
            return pool, {"prototype_norm": length}
        sizes = [payload_of(Count, replies[client], "num_samples").value for client in sorted(replies)]
        means = [float(payload_of(Arrays, replies[client], "encoder_norm")["mean"]) for client in sorted(replies)]
        target = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / sum(sizes)
        factor = target / length if length > 0 else 1.0
        rescaled = Arrays({**pool.named, "vectors": pool["vectors"] * factor})
        return rescaled, {"prototype_norm": length, "norm_factor": factor}

    def calibration_rate(self, round_number: int) -> float:
        """The learning rate at the beginning of a round's calibration."""
        passed = round_number - 1
        if self.cal_lr_schedule == "constant" or passed <= 5:
            return self.cal_lr
        return self.cal_lr * (0.1 if passed <= 40 else 0.01)

    def fit_head(
        self, network: Network, start: Weights, pool: PrototypeSet, rate: float, stream: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train H and F on prototypes.

        Args:
            network: the model's parts.
            start: H and F to begin with, on the device of the prototypes.
            pool: the prototypes.
            rate: learning rate of the first epochs.
            stream: CPU generator of the order and the partners.

        Returns:
            The trained parameters, and the mean of each term in the last epoch.
        """
        from flcore.optim import Sgd

        params = {name: tensor.clone().requires_grad_() for name, tensor in start.params.items()}
        optimizer = Sgd(rate, weight_decay=self.cal_weight_decay)
        values, moving = {**start.buffers, **params}, list(params.values())
        sums: dict[str, Tensor] = {}
        partners = Partners(pool) if self.mixes else None
        for epoch in range(self.cal_epochs):
            optimizer.lr = rate * 0.1 ** (epoch // self.cal_decay_every)
            order = torch.randperm(len(pool), generator=stream).to(pool.labels.device)
            drawn = partners.draw(self.n_aug, stream) if partners else None
            sums = {}
            for rows in torch.split(order, self.cal_batch):
                terms = self.calibration_loss(network, values, pool, rows, drawn)
                optimizer.step(moving, list(torch.autograd.grad(torch.stack(list(terms.values())).sum(), moving)))
                for name, term in terms.items():
                    sums[name] = sums.get(name, torch.zeros(())) + term.detach() * len(rows)
        means = {name: float(total) / len(pool) for name, total in sums.items()}
        return {name: tensor.detach() for name, tensor in params.items()}, means

    @property
    def mixes(self) -> bool:
        """Whether the calibration has L_ACL."""
        return self.use_pa and self.eta > 0

    def calibration_loss(
        self, network: Network, values: Values, pool: PrototypeSet, rows: Tensor, partners: Drawn | None
    ) -> dict[str, Tensor]:
        """CE + η·(L_WCL + L_ACL) of a mini-batch, term by term.

        Args:
            network: the model's parts. values: H and F.
            pool: all prototypes. rows: int64 [B], those of the mini-batch.
            partners: of all prototypes; None without L_ACL.
        """
        anchors, labels = pool.vectors[rows], pool.labels[rows]
        projected = network.project(anchors, values)
        terms = {"supervised": cross_entropy(network.classify(projected, values), labels)}
        if self.eta > 0:
            terms["contrast"] = self.eta * self.source_contrast(network, values, pool, rows, projected)
        if partners is not None:
            others = partners.rows(rows)
            mixed = extrapolate(
                anchors.unsqueeze(1), pool.vectors[others.same], pool.vectors[others.other], self.lambda_u
            )
            away = network.project(torch.cat(mixed).flatten(0, 1), values)
            positive, negative = away.reshape(2, len(rows), self.n_aug, -1)
            # As many weights as draws: the mean is over anchors and draws.
            usable = others.usable.expand(-1, self.n_aug).to(away.dtype)
            hinge = triplet_hinge(projected.unsqueeze(1), positive, negative, self.alpha, weight=usable)
            terms["mixed"] = self.eta * hinge
        return terms

    def source_contrast(
        self, network: Network, values: Values, pool: PrototypeSet, rows: Tensor, projected: Tensor
    ) -> Tensor:
        """L_WCL of the prototypes at ``rows``, within themselves or among all."""
        if self.contrast == "batch":
            labels, sources = pool.labels[rows], pool.sources[rows]
            losses, counted = contrastive_terms(
                projected, labels, self.tau_g, pair_weights=source_weights(labels, sources)
            )
            return weighted_mean(losses, counted.to(losses.dtype))
        weights = source_weights(pool.labels, pool.sources)
        everything = network.project(pool.vectors, values)
        losses, counted = contrastive_terms(everything, pool.labels, self.tau_g, pair_weights=weights)
        return weighted_mean(losses[rows], counted[rows].to(losses.dtype))

    def build_exemplars(
        self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int
    ) -> Record:
        """Server stage: ``exemplars``, e_c of the model as it now is; none for a class without prototypes."""
        pool, _ = self.fitting_pool(server, replies)
        part = calibrated_part(payload_of(Weights, server, "model"))
        held = on_device({"pool": pool, "model": part}, setting.device)
        values, arrays = payload_of(Weights, held, "model").values, payload_of(Arrays, held, "pool")
        with torch.no_grad():
            projected = setting.network.project(arrays["vectors"], values)
            right = setting.network.classify(projected, values).argmax(dim=1) == arrays["labels"]
        exemplars = best_means(projected, arrays["labels"], right, setting.num_classes)
        return {**server, **on_device({"exemplars": exemplars}, "cpu")}

    # ---- answers -------------------------------------------------------------------------------------------------

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The head's answer, mixed with the exemplars' from the first calibration on; see :func:`fuse`."""
        features = model.features(images)
        logits = model.classify(features)
        cosines = similarities(features, server)
        if cosines is None:
            return logits
        fused = fuse(logits, cosines, self.lambda_p, self.tau_e, self.fusion)
        # Logarithms of probabilities are logits: the loss that is scored beside the accuracy is then the right one.
        return fused.clamp_min(1e-12).log() if self.fusion == "softmax" else fused

    def alternatives(self) -> Mapping[str, Predict]:
        """``network`` (head alone), ``knowledge`` (exemplars alone), ``before_calibration`` (the average's head)."""
        network: dict[str, Predict] = {"network": by_head, "knowledge": by_exemplars} if self.use_kp else {}
        return network | ({"before_calibration": by_head_before} if self.use_ca else {})


class Tapped:
    """A model that encodes the images of a mini-batch once, for the base's loss and for the alignment."""

    def __init__(self, model: LocalModel, images: Tensor) -> None:
        """Encode ``images`` [B, C, H, W]."""
        self._model, self._images = model, images
        self.encoded = model.encode(images)

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name."""
        return self._model.params

    def encode(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images to what the projection reads."""
        if weights is None and images is self._images:
            return self.encoded
        return self._model.encode(images, weights)

    def project(self, encoded: Tensor, weights: Values | None = None) -> Tensor:
        """Encoded images to features."""
        return self._model.project(encoded, weights)

    def features(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """Images to features."""
        if weights is None and images is self._images:
            return self._model.project(self.encoded)
        return self._model.features(images, weights)

    def classify(self, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features to logits."""
        return self._model.classify(features, weights)

    def apply_extra(self, name: str, features: Tensor, weights: Values | None = None) -> Tensor:
        """Features through a layer beside the head."""
        return self._model.apply_extra(name, features, weights)

    def beside(self) -> LocalModel:
        """The model for other inputs."""
        return self._model.beside()

    def note(self, features: Tensor) -> None:
        """To the model."""
        self._model.note(features)


@dataclass(frozen=True)
class PrototypeSet:
    """Prototypes of all clients: ``vectors`` [n, e], ``labels`` int64 [n], ``sources`` int64 [n] (client ids)."""

    vectors: Tensor
    labels: Tensor
    sources: Tensor

    def __len__(self) -> int:
        """How many, n."""
        return len(self.labels)


@dataclass(frozen=True)
class Drawn:
    """Partners of prototypes: ``same`` and ``other`` int64 [n, n_aug], and ``usable`` bool [n, 1].

    ``other`` has another label; where no prototype has one, the row is not usable.
    """

    same: Tensor
    other: Tensor
    usable: Tensor

    def rows(self, rows: Tensor) -> Drawn:
        """The partners of some."""
        return Drawn(self.same[rows], self.other[rows], self.usable[rows])


class Partners:
    """Draws for each prototype u_i partners u_j, u_k from its client's whole set.

    j has the label of i and is not i, unless i is alone: then j = i. k has another label; where the client has only one
    class, k comes from all clients.
    """

    def __init__(self, pool: PrototypeSet) -> None:
        """Lay out the prototypes by client and label, so that every choice is one from a range or two."""
        labels, sources = pool.labels.cpu(), pool.sources.cpu()
        self._device = pool.labels.device
        by_source = _Layout(sources, labels)
        by_label = _Layout(torch.zeros_like(labels), labels)
        self._lonely = (by_source.outside == 0).unsqueeze(1)
        self._usable = (by_label.outside > 0).unsqueeze(1)
        self._by_source, self._by_label = by_source, by_label

    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """``count`` partners of each kind for every prototype."""
        shape = (len(self._usable), count)
        same, other = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        own, any_client = self._by_source.pick_outside(other), self._by_label.pick_outside(other)
        chosen = torch.where(self._lonely, any_client, own)
        return Drawn(
            self._by_source.pick_inside(same).to(self._device), chosen.to(self._device), self._usable.to(self._device)
        )


class _Layout:
    """Items sorted by group and, within it, by label: a label of a group is a range, the rest of the group two."""

    def __init__(self, groups: Tensor, labels: Tensor) -> None:
        cells = groups * (int(labels.max()) + 1) + labels
        self._order = torch.argsort(cells, stable=True)
        self._rank = torch.argsort(self._order)
        self._cell = _bounds(cells[self._order], cells)
        self._group = _bounds(groups[self._order], groups)
        self.outside = (self._group[1] - self._group[0]) - (self._cell[1] - self._cell[0])

    def pick_inside(self, uniform: Tensor) -> Tensor:
        """Per item, from uniform numbers [n, m], others of its group and label; the item itself where it is alone."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = start + (uniform * (end - start - 1)).long()
        alone = end - start == 1
        return self._order[torch.where(alone, start, place + (place >= self._rank.unsqueeze(1)).long())]

    def pick_outside(self, uniform: Tensor) -> Tensor:
        """Per item, from uniform numbers [n, m], items of its group with other labels; any where there is none."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = self._group[0].unsqueeze(1) + (uniform * self.outside.unsqueeze(1)).long()
        place = torch.where(place >= start, place + (end - start), place)
        return self._order[place.clamp_max(len(self._order) - 1)]


def _bounds(ordered: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """First and last-plus-one place of each of ``values`` in ``ordered``."""
    return torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)


def pooled(server: Record, replies: Mapping[int, Record]) -> Arrays:
    """``vectors`` [n, e], ``labels`` [n], ``sources`` [n] of the replies' prototypes, in client-id order.

    If the server holds a ``pool``, clients that did not reply are there with what it has of them.
    """
    own = {client: payload_of(Arrays, replies[client], "prototypes") for client in sorted(replies)}
    parts = [
        {**sent.named, "sources": torch.full((len(sent["labels"]),), client, dtype=torch.int64)}
        for client, sent in own.items()
    ]
    if "pool" in server:
        old = payload_of(Arrays, server, "pool")
        absent = ~torch.isin(old["sources"], torch.tensor(list(own)))
        parts.append({name: tensor[absent] for name, tensor in old.named.items()})
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("labels", "sources", "vectors")}
    order = torch.argsort(joined["sources"], stable=True)
    return Arrays({name: tensor[order] for name, tensor in joined.items()})


def received_norm(turn: Turn, trained: TrainedClient) -> Tensor:
    """float32 [1]: mean ‖E(x)‖ over the client's samples, E of the received model; 0 without samples."""
    received = payload_of(Weights, turn.inbox, "model")
    # Under `model.batchnorm: local` no statistics are received: the client has its own.
    encoded, labels = trained.encoded(Weights(received.params, received.buffers or trained.weights.buffers))
    return encoded.norm(dim=1).sum().reshape(1) / max(len(labels), 1)


def calibrated_part(model: Weights) -> Weights:
    """Projection and head of a model; statistics are copied, since no two payloads of a record may share tensors."""
    return Weights(
        {name: tensor for name, tensor in model.params.items() if name.startswith(CALIBRATED)},
        {name: tensor.clone() for name, tensor in model.buffers.items() if name.startswith(CALIBRATED)},
    )


def averaged(server: Record) -> Record:
    """``model`` as it was before the calibration."""
    if "model_before" not in server:
        return {}
    model, before = payload_of(Weights, server, "model"), payload_of(Weights, server, "model_before")
    return {"model": Weights({**model.params, **before.params}, model.buffers)}


def best_means(projected: Tensor, labels: Tensor, right: Tensor, num_classes: int) -> Prototypes:
    """Per class the mean of ``projected`` [n, d] over its ``right`` rows (bool [n]), or over all where none is."""
    preferred = class_means(projected[right], labels[right], num_classes)
    everything = class_means(projected, labels, num_classes)
    means = torch.where(preferred.present.unsqueeze(1), preferred.means, everything.means)
    return Prototypes(means, everything.present)


def similarities(features: Tensor, server: Record) -> Tensor | None:
    """Cosines [B, K] of features [B, d] to the exemplars, −∞ for classes without; None where there are none at all."""
    if "exemplars" not in server:
        return None
    exemplars = payload_of(Prototypes, server, "exemplars")
    if not exemplars.present.any():
        return None
    cosines = unit_vectors(features) @ unit_vectors(exemplars.means).mT
    return cosines.masked_fill(~exemplars.present, -torch.inf)


def fuse(
    logits: Tensor, cosines: Tensor, share: float, temperature: float, form: Literal["softmax", "minmax", "authors"]
) -> Tensor:
    """Mix the head's answer with the exemplars', [B, K].

    Args:
        logits: ``[B, K]`` of the head.
        cosines: ``[B, K]`` to the exemplars, −∞ where there is none; one of each row is finite.
        share: λ_p, of the exemplars.
        temperature: of the cosines.
        form: ``softmax``: probabilities of both; ``minmax``: both scaled to [0, 1] per row, 0 for classes without an
            exemplar; ``authors``: logits with exp(cosine/temperature), both unscaled (their share is 0.9).
    """
    if form == "softmax":
        return (1 - share) * logits.softmax(1) + share * (cosines / temperature).softmax(1)
    if form == "minmax":
        return (1 - share) * to_unit_range(logits) + share * to_unit_range(cosines)
    return (1 - share) * logits + share * (cosines / temperature).exp()


def to_unit_range(values: Tensor) -> Tensor:
    """Rows of ``values`` [B, K] scaled so that their finite ones fill [0, 1]; 0 for −∞ and for constant rows."""
    low = values.masked_fill(values == -torch.inf, torch.inf).amin(1, keepdim=True)
    span = values.amax(1, keepdim=True) - low
    return ((values - low) / torch.where(span > 0, span, 1.0)).clamp_min(0.0)


def by_head(model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
    """The logits alone."""
    return model.classify(model.features(images))


def by_exemplars(model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
    """The cosines to the exemplars alone; the logits before there are any."""
    features = model.features(images)
    cosines = similarities(features, server)
    return model.classify(features) if cosines is None else cosines


def by_head_before(model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
    """The logits of the average, whose encoder is the same."""
    if "model_before" not in server:
        return by_head(model, images, server, classes)
    before = payload_of(Weights, server, "model_before").values
    return model.classify(model.project(model.encode(images), weights=before), weights=before)
