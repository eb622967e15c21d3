"""The form of every model: images → encoder → (projection) → feature of stated dimension → head → logits.

The *feature* is the head's input; methods read it, and may add their own layers. Names of parameters begin with
``encoder.``, ``projection.``, ``head.`` or ``extra.``, by which a method shares, keeps or freezes them. Models draw no
random numbers: dropout takes uniform numbers as an argument, so that a step gives the same result in any engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.core.registry import Named
from flcore.io.messages import Weights

DropoutMasks = Mapping[str, Tensor]
"""Uniform numbers by dropout site: what is drawn beforehand for the dropout of a step."""


class HiddenHead(nn.Linear):
    """A head of two layers: a hidden layer with ReLU (``head.hidden``), then ``head.weight`` and ``head.bias``."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__(hidden, outputs)
        self.hidden = nn.Linear(features, hidden)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.relu(self.hidden(input)))


class Backbone(nn.Module):
    """An encoder, a projection (identity if there is none), a linear head, and a method's own layers.

    Attributes:
        feature_dim: d, the length of a feature. encoded_dim: e, the length of the projection's input; d without one.
        dropout_shapes: per dropout site the shape of one sample's uniform numbers.
        channels_last: see :func:`laid_out`.
    """

    dropout_shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __init__(
        self, encoder: nn.Module, projection: nn.Module, head: nn.Linear, *, channels_last: bool = False
    ) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.encoder, self.projection, self.head = encoder, projection, head
        self.extra = nn.ModuleDict()
        self.feature_dim = head.hidden.in_features if isinstance(head, HiddenHead) else head.in_features
        reads = (layer.in_features for layer in projection.modules() if isinstance(layer, nn.Linear))
        self.encoded_dim = next(reads, self.feature_dim)
        self.num_classes = head.out_features

    def encode(self, images: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Map normalised images ``[B, C, H, W]`` to the projection's input ``[B, e]``; masks only in training."""
        return self.encoder(images)

    def project(self, encoded: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Map to features ``[B, d]``."""
        return self.projection(encoded)

    def features(self, images: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        return self.project(self.encode(images, dropout_masks), dropout_masks)

    def classify(self, features: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Map features to logits ``[B, K]``."""
        return self.head(features)

    def apply_extra(self, name: str, features: Tensor) -> Tensor:
        """Map features ``[B, d]`` by the method's own layer ``name``, without dropout."""
        return self.extra[name](features)

    def call_part(self, part: str, inputs: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Call one of the methods above by its name, or the layer of ``extra.<name>``."""
        if part.startswith("extra."):
            return self.apply_extra(part.removeprefix("extra."), inputs)
        answer: Tensor = getattr(self, part)(inputs, dropout_masks)
        return answer

    def forward(self, images: Tensor, dropout_masks: DropoutMasks | None = None) -> tuple[Tensor, Tensor]:
        """Return features and logits of a batch."""
        features = self.features(images, dropout_masks)
        return features, self.classify(features, dropout_masks)


class ModelSpec(Named, ABC):
    """A model's hyper-parameters, able to build it; the summary names the architecture and its users."""

    @abstractmethod
    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network for images of ``shape`` (C, H, W)."""


def dropout(values: Tensor, masks: Tensor, rate: float) -> Tensor:
    """Zero entries with ``masks`` (uniform in [0, 1), shared by trailing dimensions) below ``rate``; rescale the rest.

    Rows of ``values`` after the last of ``masks`` are unchanged.
    """
    keep = (masks[: values.shape[0]] >= rate).to(values.dtype) / (1.0 - rate)
    unchanged = values.shape[0] - keep.shape[0]
    if unchanged:
        keep = torch.cat([keep, keep.new_ones(unchanged, *keep.shape[1:])])
    return values * keep.reshape(keep.shape + (1,) * (values.ndim - keep.ndim))


def laid_out(module: Backbone, device: str) -> Backbone:
    """Convert a module in place to channels-last on a CPU if it asks for that: faster for one client at a time.

    On a CPU with AVX-512 its steps are 1.1 (ResNet-18) to 1.7 times (CelebA's) as fast. `fedcspc_cnn` and `pfl_cnn`
    would gain a tenth; compiled steps gain more. :func:`snapshot` is contiguous anyway.
    """
    if device == "cpu" and module.channels_last:
        module.to(memory_format=torch.channels_last)
    return module


def snapshot(module: nn.Module) -> Weights:
    """Return a contiguous, detached copy of a module's parameters and persistent buffers, on the same device."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    persistent = module.state_dict()
    named = ((name, tensor) for name, tensor in module.named_buffers() if name in persistent)
    params = {name: copied(tensor) for name, tensor in module.named_parameters()}
    return Weights(params, {name: copied(tensor) for name, tensor in named})


def extract_weights(module: nn.Module) -> Weights:
    """Return the :func:`snapshot` of a module on the CPU."""
    own = snapshot(module)
    params, buffers = ({name: tensor.cpu() for name, tensor in part.items()} for part in (own.params, own.buffers))
    return Weights(params, buffers)


@torch.no_grad()
def widen_head(module: Backbone, outputs: int) -> None:
    """Give a model's head more outputs, in place: the first ones keep their weights, the others are drawn as usual."""
    head, wide = module.head, nn.Linear(module.head.in_features, outputs)
    wide.weight[: module.num_classes] = head.weight
    wide.bias[: module.num_classes] = head.bias
    head.weight, head.bias, head.out_features = wide.weight, wide.bias, outputs
    module.num_classes = outputs


@torch.no_grad()
def load_weights(module: nn.Module, weights: Weights) -> None:
    """Copy parameters and buffers into a module in place; raise KeyError for a name that the module does not have."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for name, tensor in weights.params.items():
        params[name].copy_(tensor)
    for name, tensor in weights.buffers.items():
        buffers[name].copy_(tensor)


def flat_size(encoder: nn.Module, shape: tuple[int, int, int], cure: str = "28 or 32") -> int:
    """Return the number of values that an encoder ending in a flattening layer has per image of ``shape`` (C, H, W).

    Raises:
        ValueError: the image is too small for the encoder; ``cure`` names values of ``data.size`` that are large
            enough.
    """
    was_training = encoder.training
    try:
        with torch.no_grad():
            return encoder.eval()(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise ValueError(
            f"images of {shape[1]}x{shape[2]} are too small for this model; set data.size to {cure}"
        ) from error
    finally:
        encoder.train(was_training)


def max_pool(maps: Tensor) -> Tensor:
    """Return the non-overlapping 2×2 maximum of maps [..., H, W], [..., H // 2, W // 2]: ``F.max_pool2d(maps, 2)``.

    The same values, NaN included, and the same errors. PyTorch records the place of each maximum even without
    gradients; on a CPU that takes 7 to 12 times as long as two elementwise maxima. With gradients PyTorch's is used,
    which gives a tie's gradient to the first, and which the compiler of steps looks for.
    """
    height, width = maps.shape[-2:]
    if torch.is_grad_enabled() or maps.device.type != "cpu" or min(height, width) < 2:
        return F.max_pool2d(maps, 2)
    height, width = height - height % 2, width - width % 2
    rows = torch.maximum(maps[..., 0:height:2, :width], maps[..., 1:height:2, :width])
    return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class MaxPool(nn.MaxPool2d):
    """:func:`max_pool` as a layer."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        return max_pool(input)
