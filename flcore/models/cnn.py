"""The small convolutional networks of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from flcore.core.params import param
from flcore.models.base import Backbone, DropoutMasks, HiddenHead, MaxPool, ModelSpec, dropout, flat_size, max_pool


@dataclass(frozen=True)
class FedGenCnn(ModelSpec, name="fedgen_cnn"):
    """2 conv (stride 2, BatchNorm) + 2 fc; FedGen and FedPA on MNIST, EMNIST, Fashion.

    3×3 convolutions, a linear feature *without* activation. 26,434 parameters for 1×28×28 images and 10 classes
    (fedpa.md section 2). ``projection_dim`` adds a ReLU and a two-layer projection before the head, for FedCSPC.
    """

    feature_dim: int = param(32, "length d of the feature, or e of what a projection reads", low=1)
    projection_dim: int | None = param(None, "length d of a projection, which the head reads then; null: none", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(*_halving(shape[0], 6), *_halving(6, 16), nn.Flatten())
        encoder = nn.Sequential(*convolutions, nn.Linear(flat_size(convolutions, shape), self.feature_dim))
        if self.projection_dim is None:
            return Backbone(encoder, nn.Identity(), nn.Linear(self.feature_dim, num_classes))
        hidden = nn.Linear(self.feature_dim, self.feature_dim)
        projection = nn.Sequential(nn.ReLU(), hidden, nn.ReLU(), nn.Linear(self.feature_dim, self.projection_dim))
        return Backbone(encoder, projection, nn.Linear(self.projection_dim, num_classes))


@dataclass(frozen=True)
class CelebaCnn(ModelSpec, name="celeba_cnn"):
    """3 conv (stride 2, BatchNorm) with pooling + 2 fc; FedGen and FedPA on CelebA.

    25,954 parameters for 3×84×84 images and 2 classes (fedpa.md section 2).
    """

    feature_dim: int = param(32, "length d of the feature", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(
            *(*_halving(shape[0], 16), MaxPool(), *_halving(16, 32), MaxPool()),
            *(*_halving(32, 64), MaxPool(), nn.Flatten()),
        )
        linear = nn.Linear(flat_size(convolutions, shape, cure="84"), self.feature_dim)
        head = nn.Linear(self.feature_dim, num_classes)
        return Backbone(nn.Sequential(*convolutions, linear), nn.Identity(), head, channels_last=True)


def _halving(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()


class DropoutCnn(Backbone):
    """FedProto's network: dropout at 0.5 of whole channels in the encoder, and of features after the tap."""

    dropout_shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"channels": (20,), "features": (50,)}
    rate = 0.5

    def encode(self, images: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Conv-pool-ReLU twice, maybe conv-ReLU, linear-ReLU; channel dropout between convolution 2 and its pooling."""
        first, second, *third, linear = self.encoder.children()
        hidden = second(F.relu(max_pool(first(images))))
        if dropout_masks is not None:
            hidden = dropout(hidden, dropout_masks["channels"], self.rate)
        hidden = F.relu(max_pool(hidden))
        for convolution in third:
            hidden = F.relu(convolution(hidden))
        return F.relu(linear(hidden.flatten(1)))

    def classify(self, features: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """The head sees the feature after dropout; methods see it before (baselines.md section 15)."""
        if dropout_masks is not None and "features" in self.dropout_shapes:
            features = dropout(features, dropout_masks["features"], self.rate)
        return self.head(features)


class ThreeConvDropoutCnn(DropoutCnn):
    """FedMLP's network: three convolutions, dropout of whole channels alone."""

    dropout_shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"channels": (20,)}


@dataclass(frozen=True)
class FedProtoCnn(ModelSpec, name="fedproto_cnn"):
    """2 conv 5×5 with pooling and dropout + 2 fc; FedProto and GFPL on MNIST.

    21,840 parameters for 1×28×28 images and 10 classes (baselines.md section 15).
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return _dropout_cnn(nn.Conv2d(shape[0], 10, 5), shape, num_classes, cure="28 or 32")


@dataclass(frozen=True)
class FemnistCnn(ModelSpec, name="femnist_cnn"):
    """2 conv (3×3, 5×5) with pooling and dropout + 2 fc; FedProto and GFPL on FEMNIST at 128×128.

    849,332 parameters for 1×128×128 images and 62 classes (gfpl.md section 2).
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return _dropout_cnn(nn.Conv2d(shape[0], 10, 3), shape, num_classes, cure="128")


@dataclass(frozen=True)
class FedMlpCnn(ModelSpec, name="fedmlp_cnn"):
    """3 conv (5×5, 5×5, 3×3) with pooling and dropout + 2 fc; FedMLP on MNIST and FEMNIST.

    18,032 parameters for 1×28×28 images and 10 classes (fedmlp.md section 2).
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return _dropout_cnn(nn.Conv2d(shape[0], 10, 5), shape, num_classes, cure="28 or 32", three=True)


def _dropout_cnn(
    first: nn.Conv2d, shape: tuple[int, int, int], num_classes: int, cure: str, three: bool = False
) -> Backbone:
    second = nn.Conv2d(10, 20, 5)
    third = [nn.Conv2d(20, 32, 3)] if three else []
    plain = nn.Sequential(first, MaxPool(), second, MaxPool(), *third, nn.Flatten())
    encoder = nn.Sequential(first, second, *third, nn.Linear(flat_size(plain, shape, cure), 50))
    return (ThreeConvDropoutCnn if three else DropoutCnn)(encoder, nn.Identity(), nn.Linear(50, num_classes))


@dataclass(frozen=True)
class FedCspcCnn(ModelSpec, name="fedcspc_cnn"):
    """2 conv 5×5 with pooling + 2 fc encoder, 2-layer projection, 1-layer head; FedCSPC, MOON.

    92,626 parameters for 3×32×32 images, 10 classes and a projection of 256 (fedcspc.md section 2).
    """

    projection_dim: int = param(256, "length d of the projection, which the head reads", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 6, 5), nn.ReLU(), MaxPool()),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), MaxPool(), nn.Flatten()),
        )
        linear = (nn.Linear(flat_size(convolutions, shape), 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        projection = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, self.projection_dim))
        return Backbone(nn.Sequential(*convolutions, *linear), projection, nn.Linear(self.projection_dim, num_classes))


@dataclass(frozen=True)
class FedAvgCnn(ModelSpec, name="fedavg_cnn"):
    """2 conv 5×5 (32, 64) with pooling + hidden layer + head; the ordinary CNN of federated learning on MNIST.

    McMahan et al.'s (AISTATS 2017) network without padding: 832 + 51,264 + 524,800 + 5,130 = 582,026 parameters for
    1×28×28 images and 10 classes; with ``hidden: 0`` 832 + 51,264 + 10,250 = 62,346.
    """

    hidden: int = param(512, "units of the hidden layer, the feature; 0: the head reads the pooled maps", low=0)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 32, 5), nn.ReLU(), MaxPool()),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), MaxPool(), nn.Flatten()),
        )
        dim = flat_size(convolutions, shape)
        hidden = (nn.Linear(dim, self.hidden), nn.ReLU()) if self.hidden else ()
        encoder = nn.Sequential(*convolutions, *hidden)
        return Backbone(encoder, nn.Identity(), nn.Linear(self.hidden or dim, num_classes))


@dataclass(frozen=True)
class Pixels(ModelSpec, name="pixels"):
    """No hidden layer: the pixels are the features.

    7,850 parameters for 1×28×28 images and 10 classes.
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return Backbone(nn.Flatten(), nn.Identity(), nn.Linear(prod(shape), num_classes))


_WIDTHS = (32, 64, 64, 128, 128)


@dataclass(frozen=True)
class ConvNet5(ModelSpec, name="convnet5"):
    """5 conv 5×5 (BatchNorm, pooling) + head with a hidden layer; FedPG on FEMNIST at 64×64.

    FederatedScope's ``ConvNet5``: blocks of a padded convolution, BatchNorm, ReLU and a 2×2 max-pooling leave 2×2×128 =
    512 values of 64×64 pixels, the feature that prototypes are made of (fedpg.md section 2). 1,947,710 parameters for
    one channel and 62 classes. Methods that solve for a linear head refuse a hidden layer in it.
    """

    hidden: int = param(2048, "units of the head's hidden layer; 0: the head is linear", low=0)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((shape[0], *_WIDTHS)):
            layers += (nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU(), MaxPool())
        blocks = nn.Sequential(*layers, nn.Flatten())
        dim = flat_size(blocks, shape, cure="64")
        head = HiddenHead(dim, self.hidden, num_classes) if self.hidden else nn.Linear(dim, num_classes)
        return Backbone(blocks, nn.Identity(), head, channels_last=True)


@dataclass(frozen=True)
class FedPgCnn(ModelSpec, name="fedpg_cnn"):
    """2 conv 3×3 (BatchNorm, stride 2) + 2 fc; FedPG's figures on digits and MNIST.

    Two padded convolutions (16, 32) with ReLU, a linear layer to d = 64 with ReLU, a linear head (fedpg.md section 11).
    With the 96 running means and variances 106,058 scalars for 28×28 images and 10 classes, and 38,474 for 8×8 images
    with ``first_stride: 1``. The paper states no strides; these give both numbers.
    """

    first_stride: Literal[1, 2] = param(2, "stride of the first convolution; 1 for images of 8×8")
    feature_dim: int = param(64, "length d of the feature", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 16, 3, stride=self.first_stride, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        )
        linear = (nn.Linear(flat_size(convolutions, shape), self.feature_dim), nn.ReLU())
        return Backbone(nn.Sequential(*convolutions, *linear), nn.Identity(), nn.Linear(self.feature_dim, num_classes))


class TwiceDroppedCnn(Backbone):
    """Dropout of single values after the pooling (0.25) and before the head (0.5)."""

    # 64 maps of 14×14, which is what two unpadded 3×3 convolutions and a pooling leave of 32×32.
    dropout_shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"maps": (64 * 14 * 14,), "features": (128,)}

    def encode(self, images: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        maps = self.encoder(images)
        return maps if dropout_masks is None else dropout(maps, dropout_masks["maps"], 0.25)

    def classify(self, features: Tensor, dropout_masks: DropoutMasks | None = None) -> Tensor:
        """Dropout after the feature: methods see it before."""
        return self.head(features if dropout_masks is None else dropout(features, dropout_masks["features"], 0.5))


@dataclass(frozen=True)
class PflCnn(ModelSpec, name="pfl_cnn"):
    """2 conv 3×3 with one pooling, dropout + 2 fc; pfl-research on CIFAR-10.

    ``simple_cnn`` of pfl-research (Granqvist et al., NeurIPS 2024), in its PyTorch form: two unpadded convolutions (32
    and 64 maps) with ReLU, one 2×2 max-pooling, dropout 0.25, a hidden layer of 128 with ReLU, dropout 0.5, a linear
    head; weights drawn as Glorot and Bengio (2010) do, biases as PyTorch does. 1,626,442 parameters for 3×32×32 images
    and 10 classes.
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network for images of 32×32: the first dropout has one value for each of 12,544 outputs."""
        if shape[1:] != (32, 32):
            raise ValueError(f"images of {shape[1]}x{shape[2]} do not fit this model; set data.size to 32")
        encoder = nn.Sequential(
            *(nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()), *(MaxPool(), nn.Flatten())
        )
        model = TwiceDroppedCnn(
            encoder, nn.Sequential(nn.Linear(64 * 14 * 14, 128), nn.ReLU()), nn.Linear(128, num_classes)
        )
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        return model
