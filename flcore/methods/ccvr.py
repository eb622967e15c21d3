"""CCVR (Luo, Chen, Hu, Zhang, Liang, Feng, NeurIPS 2021): calibrate the classifier of a finished federated model.

Any method whose clients train one global model that answers by itself may be the base: with the same seed its part of
the run is the base's own run to the bit. When its last round is over, one more leg of that round follows:

1. *all* clients receive the final model w_g and send, per class, the number, mean and unbiased covariance of their
   features (evaluation mode, no augmentation);
2. the server (stage ``calibrate``) merges them exactly into those of the pooled samples,

       μ_c = Σ_k (n_{k,c}/n_c) μ_{k,c},
       Σ_c = Σ_k [(n_{k,c}−1)/(n_c−1)] Σ_{k,c} + Σ_k [n_{k,c}/(n_c−1)] μ_{k,c}μ_{k,c}ᵀ − [n_c/(n_c−1)] μ_cμ_cᵀ,

   in float64, draws M_c virtual features per class from N(μ_c, Σ_c) and trains the head on them, from the trained head
   on, with CE and plain SGD. The body is not touched, and the calibrated head never goes back into training.

The server's record keeps ``model_before``, what answered before, beside ``calibrated``, what answers now; the history
scores the head of before as ``before_calibration``. Facts: the mean loss on the virtual features before and after, how
many features and classes they are.

``tap: hidden``: where features are a linear map z = Wa + b of hidden units a (the last layer of the projection of
FedCSPC's network), statistics of a are sent and mapped on the server, μ_z = Wμ_a + b and Σ_z = WΣ_aWᵀ: the same
Gaussians from 3,655 instead of 33,153 values per class at 84 hidden units and 256 features.

``power`` p takes statistics of sign(f)·|f|^p and draws features through the inverse, so that they may be skewed as
those behind a ReLU are; the head works on features as ever. This is our reading of an optional transform that no paper
at hand describes; 1 is off.

Over FedCSPC, which calibrates projection and head in every round, the head is trained once more at the end; its
exemplars, which do not depend on the head, go on answering with it, and ``before_calibration`` is before CCVR. Over
CReFF the head to start from is its re-trained classifier. Not a base: FedEnsemble, whose answer is its members' and not
the global model's; methods without a global model, or with a part of one. In a stream of tasks the statistics are those
of the last round's task.

Choices: classes with fewer than ``min_count`` samples in all are left out (one sample has no covariance). Covariances
travel as their upper triangle. ``base_settings`` holds the hyper-parameters of bases, written as in
``compare.settings``, for example ``{fedprox: {method.mu: 0.1}}``; other bases run with their defaults. FedPG's authors
calibrate the *best* model of a run; that needs a choice on test data, and is not offered.

Privacy: the mean of a class with one sample is that sample's feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flcore.errors import ConfigError
from flcore.losses.basic import cross_entropy
from flcore.messages import Arrays, Count, Facts, Weights
from flcore.methods.base import Method
from flcore.methods.creff import CReFF
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedcspc import FedCSPC
from flcore.methods.fedgen import FedGen
from flcore.methods.fedhkd import FedHKD
from flcore.methods.fedmlp import FedMLP
from flcore.methods.fedntd import FedNTD
from flcore.methods.fedpa import FedPA
from flcore.methods.fedpg import FedPG
from flcore.methods.fedproc import FedProc
from flcore.methods.fedprox import FedProx
from flcore.methods.moon import Moon
from flcore.methods.vhl import VHL
from flcore.methods.vocabulary import (
    Batch,
    Context,
    Leg,
    LocalModel,
    Phase,
    Predict,
    Setting,
    Stage,
    TrainedClient,
    Turn,
)
from flcore.models.network import Network, Values
from flcore.params import Search, build, param
from flcore.prototypes.gaussians import (
    ClassGaussians,
    class_gaussians,
    map_gaussians,
    merge_gaussians,
    sample_gaussians,
)
from flcore.records import Record, payload_of
from flcore.rng import torch_stream

BASES: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (FedAvg, FedProx, Moon, FedNTD, FedGen, FedPA, FedPG, VHL, FedProc, FedHKD, FedCSPC, CReFF, FedMLP)
}
"""Methods that train a global model which answers by itself."""

COLLECT_LEG = "collect-statistics"

OVER = "training_over"
"""Name, in the server's record, of the round after which training was over."""


@dataclass(frozen=True)
class CCVR(Method):
    """Another method, then a new classifier from class statistics."""

    name: ClassVar[str] = "ccvr"
    summary: ClassVar[str] = "another method, after whose last round the head is retrained on virtual features"
    citation: ClassVar[str] = "Luo et al., NeurIPS 2021"

    base: Literal[
        "fedavg", "fedprox", "moon", "fedntd", "fedgen", "fedpa", "fedpg", "vhl", "fedproc", "fedhkd", "fedcspc",
        "creff", "fedmlp",
    ] = param("fedavg", "the method that trains the model")  # fmt: skip
    base_settings: Mapping[str, Any] = param(
        {}, "per base, dotted keys of its own as in compare.settings: {fedprox: {method.mu: 0.1}}"
    )
    tap: Literal["feature", "hidden"] = param(
        "feature", "statistics of features, or of what the projection's last, linear layer reads"
    )
    per_class: int = param(200, "M_c, virtual features per class", low=1, search=Search(100, 2000, log=True))
    lr: float = param(0.01, "learning rate of the calibration", above=0, search=Search(1e-3, 0.1, log=True))
    epochs: int = param(20, "passes over the virtual features", low=1, search=Search(1, 50, log=True))
    batch_size: int = param(64, "virtual features per mini-batch", low=1)
    power: float = param(1.0, "statistics of sign(f)·|f|^power; 1 leaves features alone", above=0, high=1)
    min_count: int = param(2, "samples that a class needs, over all clients", low=1)

    def __post_init__(self) -> None:
        """Refuse settings that no base has, and a transform that does not commute with the linear layer."""
        if self.tap == "hidden" and self.power != 1:
            raise ValueError("power needs tap = feature: transformed hidden units are not mapped linearly")
        for name in (*self.base_settings, self.base):
            _base_method(name, self.base_settings)

    @cached_property
    def base_method(self) -> Method:
        """The method that trains."""
        return _base_method(self.base, self.base_settings)

    @property
    def calibration_stage(self) -> str:
        """Name of the calibration among the server's stages; a base that calibrates too has the shorter one."""
        return "calibrate-head" if "calibrate" in self.base_method.stages() else "calibrate"

    # ---- the base's part, to the bit ---------------------------------------------------------------------------

    def num_outputs(self, num_classes: int) -> int:
        """The base's."""
        return self.base_method.num_outputs(num_classes)

    def extra_layers(self, feature_dim: int, num_classes: int, encoded_dim: int) -> Mapping[str, torch.nn.Module]:
        """The base's."""
        return self.base_method.extra_layers(feature_dim, num_classes, encoded_dim)

    def start_server(self, setting: Setting) -> Record:
        """The base's.

        Raises:
            ConfigError: the model has no hidden units to take statistics of; or the base, as it is set, no global head.
        """
        if self.tap == "hidden":
            last_linear(setting)
        server = self.base_method.start_server(setting)
        model = self.base_method.global_model(server, setting)
        if model is None or not _head(setting.initial).keys() <= model.params.keys():
            raise ConfigError(f"method.base = {self.base}: its heads stay with the clients, there is none to calibrate")
        return server

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """The base's, and after the last of them the collection of statistics."""
        every = tuple(self.base_method.stages())
        legs = [
            replace(leg, stages=every if leg.stages is None else leg.stages)
            for leg in self.base_method.legs(round_number, setting)
        ]
        if round_number < setting.rounds:
            return tuple(legs)
        legs[-1] = replace(legs[-1], stages=(*(legs[-1].stages or ()), "keep-model"))
        return (*legs, Leg(COLLECT_LEG, who="all", phases=(), stages=(self.calibration_stage,)))

    def phases(self) -> tuple[Phase, ...]:
        """The base's."""
        return self.base_method.phases()

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's message; when training is over the final model alone."""
        if OVER in server:
            return {"model": server["model_before"]}
        return self.base_method.broadcast(server, client, exchange)

    def begin(self, turn: Turn) -> Weights:
        """The base's start; for the statistics the final model."""
        return super().begin(turn) if turn.leg == COLLECT_LEG else self.base_method.begin(turn)

    def context(self, turn: Turn) -> Context:
        """The base's."""
        return self.base_method.context(turn)

    def draws(self, turn: Turn, steps: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base_method.draws(turn, steps, generator)

    def loss(self, model: LocalModel, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The base's."""
        return self.base_method.loss(model, batch, context)

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Record, Record]:
        """The base's reply; when training is over statistics, and what is remembered stays."""
        if turn.leg != COLLECT_LEG:
            return self.base_method.reply(turn, trained)
        return {"statistics": self.statistics(turn, trained)}, turn.memory

    def stages(self) -> Mapping[str, Stage]:
        """The base's, and after the last of them the calibration."""
        return {**self.base_method.stages(), "keep-model": self.keep_model, self.calibration_stage: self.calibrate}

    def client_model(self, server: Record, client: int, memory: Record, setting: Setting) -> Weights | None:
        """The base's."""
        return self.base_method.client_model(server, client, memory, setting)

    def predict(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """The base's way, with whatever head the model has."""
        return self.base_method.predict(model, images, server, classes)

    def alternatives(self) -> Mapping[str, Predict]:
        """The base's, and its own way with the head of before the calibration."""
        return {**self.base_method.alternatives(), "before_calibration": self.predict_before}

    def generated_features(
        self, server: Record, setting: Setting, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        """The base's."""
        return self.base_method.generated_features(server, setting, count, generator)

    # ---- the calibration ---------------------------------------------------------------------------------------

    def global_model(self, server: Record, setting: Setting) -> Weights | None:
        """The calibrated model; before the calibration the base's."""
        if "calibrated" in server:
            return payload_of(Weights, server, "calibrated")
        return self.base_method.global_model(server, setting)

    def predict_before(self, model: LocalModel, images: Tensor, server: Record, classes: Tensor | None) -> Tensor:
        """As the base, with the head of before the calibration."""
        if "calibrated" in server:
            model = WithHead(model, _head(payload_of(Weights, server, "model_before")))
        return self.base_method.predict(model, images, server, classes)

    def statistics(self, turn: Turn, trained: TrainedClient) -> Arrays:
        """Count, mean and upper triangle of the covariance of each of the client's classes, k of them.

        ``classes`` and ``counts`` int64 [k], ``means`` float32 [k, d], ``covariances`` float32 [k, d·(d + 1)/2].
        """
        if self.tap == "hidden":
            encoded, labels = trained.encoded()
            features = hidden_units(encoded, trained.weights, turn.setting)
        else:
            features, labels = trained.features()
            features = signed_power(features, self.power)
        counts = torch.bincount(labels)
        classes = counts.nonzero().flatten()
        upper = torch.triu_indices(features.shape[1], features.shape[1]).unbind()
        own = [of_one_class(features[labels == label]) for label in classes.tolist()]
        return Arrays(
            {
                "classes": classes,
                "counts": counts[classes],
                "means": torch.cat([held.means for held in own]).float(),
                "covariances": torch.stack([held.covariances[0][upper] for held in own]).float(),
            }
        )

    def keep_model(self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
        """Server stage: training is over; what answers now is kept beside what the calibration will make of it."""
        before = self.base_method.global_model(server, setting)
        assert before is not None  # checked at the start
        return {**server, "model_before": _copy(before), OVER: Count(round_number)}

    def calibrate(self, server: Record, replies: Mapping[int, Record], setting: Setting, round_number: int) -> Record:
        """Server stage: the head, trained on virtual features; nothing changes where no class has enough samples."""
        if OVER not in server:
            server = self.keep_model(server, replies, setting, round_number)
        before = payload_of(Weights, server, "model_before")
        features, labels = self.virtual_features(before, replies, setting)
        if len(labels) == 0:
            return server
        features, labels = features.to(setting.device), labels.to(setting.device)
        start = {name: value.to(setting.device) for name, value in _head(before).items()}
        order = torch_stream(setting.seed, "calibration batches")
        head = self.train_head(setting.network, start, features, labels, order)
        with torch.no_grad():
            losses = [float(cross_entropy(setting.network.classify(features, h), labels)) for h in (start, head)]
        facts = {
            **(payload_of(Facts, server, "facts").values if "facts" in server else {}),
            "calibration_loss_before": losses[0],
            "calibration_loss": losses[1],
            "calibration_features": float(len(labels)),
            "calibration_classes": float(len(torch.unique(labels))),
        }
        fresh = _copy(before)
        calibrated = replace(fresh, params={**fresh.params, **{name: value.cpu() for name, value in head.items()}})
        return {**server, "calibrated": calibrated, "facts": Facts(facts)}

    def virtual_features(
        self, model: Weights, replies: Mapping[int, Record], setting: Setting
    ) -> tuple[Tensor, Tensor]:
        """``per_class`` draws [n, d] of every class with enough samples, and their labels."""
        generator = torch_stream(setting.seed, "calibration features")
        uploads = {client: payload_of(Arrays, replies[client], "statistics") for client in sorted(replies)}
        drawn = [(torch.zeros(0, setting.feature_dim), torch.zeros(0, dtype=torch.int64))]
        # Class by class: d² values of everybody's classes at once would not fit into memory.
        for label in range(setting.num_classes):
            own = {client: _received(upload, label) for client, upload in uploads.items()}
            holders = {client: statistics for client, statistics in own.items() if statistics is not None}
            if not holders:
                continue
            merged = merge_gaussians(holders)
            if self.tap == "hidden":
                prefix = last_linear(setting)
                merged = map_gaussians(merged, model.params[f"{prefix}weight"], model.params[f"{prefix}bias"])
            features, _ = sample_gaussians(merged, self.per_class, generator, min_count=self.min_count)
            drawn.append((signed_power(features, 1 / self.power), torch.full((len(features),), label)))
        inputs, labels = zip(*drawn, strict=True)
        return torch.cat(inputs), torch.cat(labels)

    def train_head(
        self, network: Network, head: Values, features: Tensor, labels: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """``epochs`` shuffled passes of plain SGD on the cross-entropy.

        Args:
            network: the model, of which the head is asked.
            head: weight and bias to start from.
            features: [n, d]. labels: int64 [n].
            generator: CPU generator of the order.
        """
        values = {name: value.clone().requires_grad_() for name, value in head.items()}
        for _ in range(self.epochs):
            order = torch.randperm(len(labels), generator=generator).to(labels.device)
            for rows in torch.split(order, self.batch_size):
                loss = cross_entropy(network.classify(features[rows], values), labels[rows])
                grads = torch.autograd.grad(loss, list(values.values()))
                with torch.no_grad():
                    torch._foreach_add_(list(values.values()), list(grads), alpha=-self.lr)
        return {name: value.detach() for name, value in values.items()}


@dataclass(frozen=True)
class WithHead:
    """A model with another head, in evaluation mode."""

    model: LocalModel
    head: Values

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by name, the other head's among them."""
        return {**self.model.params, **self.head}

    def encode(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """The model's."""
        return self.model.encode(images, weights)

    def project(self, encoded: Tensor, weights: Values | None = None) -> Tensor:
        """The model's."""
        return self.model.project(encoded, weights)

    def features(self, images: Tensor, weights: Values | None = None) -> Tensor:
        """The model's."""
        return self.model.features(images, weights)

    def classify(self, features: Tensor, weights: Values | None = None) -> Tensor:
        """Logits of the other head."""
        return self.model.classify(features, self.head if weights is None else weights)

    def apply_extra(self, name: str, features: Tensor, weights: Values | None = None) -> Tensor:
        """The model's."""
        return self.model.apply_extra(name, features, weights)

    def beside(self) -> LocalModel:
        """Likewise."""
        return WithHead(self.model.beside(), self.head)

    def note(self, features: Tensor) -> None:
        """To the model."""
        self.model.note(features)


def last_linear(setting: Setting) -> str:
    """Prefix of the names of the linear layer that ends the model's projection, such as ``projection.2.``.

    Raises:
        ConfigError: the projection does not end in a linear layer with a bias, or there is none.
    """
    params = setting.initial.params
    weights = [name for name in params if name.startswith("projection.") and name.endswith(".weight")]
    prefix = weights[-1].removesuffix("weight") if weights else ""
    bias = f"{prefix}bias"
    if weights and params[weights[-1]].ndim == 2 and bias in params:
        # A layer ends the projection if what is taken off its bias is missing from the features.
        device, network = setting.device, setting.network
        encoded = network.encode(torch.zeros(2, *setting.image_shape, device=device), {})
        shifted = network.project(encoded, {bias: params[bias].to(device) - 100})
        if torch.allclose(shifted + 100, network.project(encoded, {}), atol=1e-3):
            return prefix
    raise ConfigError("method.tap = hidden: the model's projection does not end in a linear layer; use tap=feature")


def hidden_units(encoded: Tensor, weights: Weights, setting: Setting) -> Tensor:
    """What the last layer of the projection reads, [n, h], for encoded images [n, e] on the CPU."""
    prefix, device = last_linear(setting), setting.device
    size = weights.params[f"{prefix}weight"].shape[1]
    # With the identity for its last layer the projection yields what that layer reads.
    identity = {f"{prefix}weight": torch.eye(size), f"{prefix}bias": torch.zeros(size)}
    values = {name: value.to(device) for name, value in {**weights.values, **identity}.items()}
    with torch.no_grad():
        return setting.network.project(encoded.to(device), values).cpu()


def signed_power(values: Tensor, power: float) -> Tensor:
    """sign(v)·|v|^power, element by element; the very values for power 1."""
    return values if power == 1 else values.sign() * values.abs().pow(power)


def of_one_class(features: Tensor) -> ClassGaussians:
    """Statistics of features [n, d] of one class, n >= 1."""
    return class_gaussians(features, torch.zeros(len(features), dtype=torch.int64), 1)


def _received(upload: Arrays, label: int) -> ClassGaussians | None:
    """One client's statistics of a class as a single row; None where it has none."""
    rows = (upload["classes"] == label).nonzero().flatten().tolist()
    if not rows:
        return None
    means = upload["means"][rows].double()
    first, second = torch.triu_indices(means.shape[1], means.shape[1]).unbind()
    covariances = torch.zeros(1, means.shape[1], means.shape[1], dtype=torch.float64)
    covariances[0, first, second] = upload["covariances"][rows[0]].double()
    covariances[0, second, first] = covariances[0, first, second]
    return ClassGaussians(upload["counts"][rows], means, covariances)


def _base_method(name: str, settings: Mapping[str, Any]) -> Method:
    """A base with its hyper-parameters.

    Raises:
        ValueError: no such base, or settings that are not dotted keys of its own.
        ConfigError: a hyper-parameter that it does not have, or a value out of range.
    """
    own = settings.get(name, {})
    if name not in BASES:
        raise ValueError(f"base_settings.{name}: must be one of {', '.join(BASES)}")
    if not isinstance(own, Mapping) or not all(str(key).startswith("method.") for key in own):
        raise ValueError(f"base_settings.{name} = {own}: expected dotted keys with values, such as method.mu: 0.1")
    values = {str(key).removeprefix("method."): value for key, value in own.items()}
    return build(BASES[name], values, f"method.base_settings.{name}")


def _head(weights: Weights) -> dict[str, Tensor]:
    return {name: value for name, value in weights.params.items() if name.startswith("head.")}


def _copy(weights: Weights) -> Weights:
    """Equal weights in memory of their own: records are stored without sharing."""
    return Weights(
        {name: value.clone() for name, value in weights.params.items()},
        {name: value.clone() for name, value in weights.buffers.items()},
    )
