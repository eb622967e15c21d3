"""CCVR (Luo, Chen, Hu, Zhang, Liang, Feng, NeurIPS 2021): calibrate the classifier of a finished federated model.

The base is any method that trains one global model which predicts by itself; with the same seed its run is the base's
own to the bit. After its last round one more exchange of that round follows:

1. *all* clients receive the final model w_g and send, per class, the number, mean and unbiased covariance of their
   features (evaluation mode, no augmentation);
2. the server step ``calibrate`` merges them exactly into the statistics of the pooled samples,

       μ_c = Σ_k (n_{k,c}/n_c) μ_{k,c},
       Σ_c = Σ_k [(n_{k,c}−1)/(n_c−1)] Σ_{k,c} + Σ_k [n_{k,c}/(n_c−1)] μ_{k,c}μ_{k,c}ᵀ − [n_c/(n_c−1)] μ_cμ_cᵀ,

   in float64, draws M_c virtual features per class from N(μ_c, Σ_c) and trains the head on them, starting from the
   trained head, with CE and plain SGD. The body is unchanged.

Predictions with the old head are scored as ``before_calibration``.

``tap: hidden``: if features are a linear map z = Wa + b of hidden units a (the last layer of the projection of
FedCSPC's network), statistics of a are sent and mapped on the server, μ_z = Wμ_a + b and Σ_z = WΣ_aWᵀ: the same
Gaussians from 3,655 instead of 33,153 values per class at 84 hidden units and 256 features.

``power`` p takes statistics of sign(f)·|f|^p and draws features through the inverse, so that they may be skewed as
after a ReLU. This is our reading of an optional transform that no paper at hand describes; 1 is off.

Over FedCSPC the head is trained once more at the end; its exemplars still mix into predictions, and
``before_calibration`` is before CCVR. Over CReFF the first head is its re-trained classifier. In a stream of tasks the
statistics are of the last task.

Choices: classes with fewer than ``min_count`` samples in all are left out (one sample has no covariance). Covariances
travel as their upper triangle. FedPG's authors calibrate the *best* model of a run, which needs a choice on test data.

Privacy: the mean of a class with one sample is that sample's feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.core.optim import Sgd
from flcore.core.params import Search, param
from flcore.core.portable import square_root
from flcore.core.rng import torch_stream
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes import gaussians
from flcore.methods import types as fl
from flcore.methods.kit.new_head import NewHead
from flcore.methods.kit.server_training import Moving, Terms, fit, leaves

STATISTICS = Key("statistics", TensorDict)
"""A client's k classes: ``classes`` and ``counts`` int64 [k], ``means`` float32 [k, d] and ``covariances`` float32
[k, d·(d + 1)/2]."""


@dataclass(frozen=True)
class CCVR(NewHead, name="ccvr", citation="Luo et al., NeurIPS 2021"):
    """Another method, then a head retrained on virtual features after the last round."""

    collect_leg = "collect-statistics"
    head_slot: ClassVar[Key[Weights]] = Key("calibrated_head", Weights)
    scored_before = "before_calibration"

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
        """Refuse a transform that does not commute with the linear layer."""
        super().__post_init__()
        if self.tap == "hidden" and self.power != 1:
            raise ValueError("power needs tap = feature: transformed hidden units are not mapped linearly")

    @property
    def head_step(self) -> str:
        """Name of the step: another one if the base has a step ``calibrate``."""
        return "calibrate-head" if "calibrate" in self.base_method.server_steps() else "calibrate"

    def start_server(self, setting: fl.FederationContext) -> Payloads:
        if self.tap == "hidden":
            last_linear(setting)
        return super().start_server(setting)

    def statistics(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Payloads:
        if self.tap == "hidden":
            encoded, labels = trained.encoded()
            features = hidden_units(encoded, trained.weights, ctx.setting)
        else:
            features, labels = trained.features()
            features = signed_power(features, self.power)
        counts = torch.bincount(labels)
        classes = counts.nonzero().flatten()
        # Class by class, here and at the server: d² values of all classes at once would not fit into memory.
        each = [gaussians.class_gaussian(features[labels == label]) for label in classes]
        means = torch.cat([gaussian.means for gaussian in each]).float()
        covariances = torch.cat([gaussians.upper_triangles(gaussian.covariances) for gaussian in each]).float()
        sent = {"classes": classes, "counts": counts[classes], "means": means, "covariances": covariances}
        return {STATISTICS: TensorDict(sent)}

    def new_head(
        self, model: Weights, replies: fl.Replies, setting: fl.FederationContext
    ) -> tuple[Weights | None, fl.Metrics]:
        """Return the head, trained on virtual features; None without a class of enough samples.

        Metrics: the mean loss on the virtual features before and after, and the numbers of features and classes.

        Raises:
            ArithmeticError: the calibration diverged.
        """
        features, labels = (drawn.to(setting.device) for drawn in self.virtual_features(model, replies, setting))
        if len(labels) == 0:
            return None, {}
        head = leaves(model.part("head.").params, setting.device)

        def loss(rows: Tensor | slice) -> Terms:
            return {"loss": (1.0, cross_entropy(setting.network.classify(features[rows], head), labels[rows]))}

        def batches() -> Iterator[Tensor]:
            stream = torch_stream(setting.seed, "calibration batches")
            for _ in range(self.epochs):
                yield from torch.split(torch.randperm(len(labels), generator=stream).to(labels.device), self.batch_size)

        before = loss(slice(None))["loss"][1].item()
        fitted = fit(Moving(head, Sgd(self.lr)), batches(), loss, what="the calibration", cure="method.lr")
        facts = {
            "calibration_loss_before": before,
            "calibration_loss": loss(slice(None))["loss"][1].item(),
            "calibration_features": len(labels),
            "calibration_classes": len(torch.unique(labels)),
        }
        return Weights(fitted.values), facts

    def virtual_features(
        self, model: Weights, replies: fl.Replies, setting: fl.FederationContext
    ) -> tuple[Tensor, Tensor]:
        """Draw ``per_class`` features [n, d] of every class with enough samples; return them with labels."""
        generator = torch_stream(setting.seed, "calibration features")
        drawn = [(torch.zeros(0, setting.feature_dim), torch.zeros(0, dtype=torch.int64))]
        last = last_linear(setting) if self.tap == "hidden" else None
        for label in range(setting.num_classes):
            sent = ((client, received(upload, label)) for client, upload in replies.of(STATISTICS).items())
            holders = {client: statistics for client, statistics in sent if statistics is not None}
            if not holders:
                continue
            merged = gaussians.merge_gaussians(holders)
            if last is not None:
                merged = gaussians.map_gaussians(merged, model.params[f"{last}weight"], model.params[f"{last}bias"])
            features, _ = gaussians.sample_gaussians(merged, self.per_class, generator, min_count=self.min_count)
            drawn.append((signed_power(features, 1 / self.power), torch.full((len(features),), label)))
        inputs, labels = zip(*drawn, strict=True)
        return torch.cat(inputs), torch.cat(labels)


def received(upload: TensorDict, label: int) -> gaussians.ClassGaussians | None:
    """Return one client's statistics of a class as a single row, if it has any."""
    row = upload["classes"] == label
    if not row.any():
        return None
    covariances = gaussians.from_upper_triangles(upload["covariances"][row].double())
    return gaussians.ClassGaussians(upload["counts"][row], upload["means"][row].double(), covariances)


def last_linear(setting: fl.FederationContext) -> str:
    """Return the prefix of the linear layer that ends the model's projection, such as ``projection.2.``.

    Raises:
        ConfigError: the projection does not end in a linear layer with a bias, or there is none.
    """
    params = setting.initial.params
    weights = [name for name in params if name.startswith("projection.") and name.endswith(".weight")]
    prefix = weights[-1].removesuffix("weight") if weights else ""
    bias = f"{prefix}bias"
    if weights and params[weights[-1]].ndim == 2 and bias in params:
        # A layer ends the projection if a shift of its bias appears in the features.
        device, network = setting.device, setting.network
        encoded = network.encode(torch.zeros(2, *setting.image_shape, device=device), {})
        shifted = network.project(encoded, {bias: params[bias].to(device) - 100})
        if torch.allclose(shifted + 100, network.project(encoded, {}), atol=1e-3):
            return prefix
    raise ConfigError("method.tap = hidden: the model's projection does not end in a linear layer; use tap=feature")


def hidden_units(encoded: Tensor, weights: Weights, setting: fl.FederationContext) -> Tensor:
    """Return the input [n, h] of the projection's last layer, for encoded images [n, e]."""
    prefix, device = last_linear(setting), setting.device
    size = weights.params[f"{prefix}weight"].shape[1]
    # With the identity for its last layer the projection yields what that layer reads.
    identity = {f"{prefix}weight": torch.eye(size), f"{prefix}bias": torch.zeros(size)}
    values = {name: value.to(device) for name, value in {**weights.values, **identity}.items()}
    with torch.no_grad():
        return setting.network.project(encoded.to(device), values)


def signed_power(values: Tensor, power: float) -> Tensor:
    """Return sign(v)·|v|^power, element by element; the very values for power 1."""
    if power == 1:
        return values
    return values.sign() * (square_root(values.abs()) if power == 0.5 else values.abs().pow(power))
