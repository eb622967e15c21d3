"""FedPG's convolutional networks: of its FEMNIST experiments, and a small one of our figures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from torch import nn

from flcore.core.params import param
from flcore.models.base import Backbone, HiddenHead, flat_size
from flcore.models.pooling import MaxPool

_WIDTHS = (32, 64, 64, 128, 128)


@dataclass(frozen=True)
class ConvNet5:
    """FedPG's network for FEMNIST, FederatedScope's ``ConvNet5``: five blocks, then a head with a hidden layer.

    A block is a padded 5×5 convolution, BatchNorm, ReLU and a 2×2 max-pooling; five of them leave 2×2×128 = 512 values
    of 64×64 pixels, the feature that prototypes are made of (fedpg.md section 2). 1,947,710 parameters for one channel
    and 62 classes. ``hidden: 0`` is a linear head. Methods that solve for a linear head refuse a hidden layer in it.
    """

    name: ClassVar[str] = "convnet5"
    summary: ClassVar[str] = "5 conv 5×5 (BatchNorm, pooling) + head with a hidden layer; FedPG on FEMNIST at 64×64"
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
class FedPgCnn:
    """The network of our figures on digits and MNIST (fedpg.md section 11).

    Two padded 3×3 convolutions (16, 32) with BatchNorm and ReLU, a linear layer to d = 64 with ReLU, a linear head.
    With the 96 running means and variances 106,058 scalars for 28×28 images and 10 classes, and 38,474 for 8×8 images
    with ``first_stride: 1``. The paper states no strides; these give both numbers.
    """

    name: ClassVar[str] = "fedpg_cnn"
    summary: ClassVar[str] = "2 conv 3×3 (BatchNorm, stride 2) + 2 fc; FedPG's figures on digits and MNIST"
    first_stride: Literal[1, 2] = param(2, "stride of the first convolution; 1 for images of 8×8")
    feature_dim: int = param(64, "length d of the feature", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 16, 3, stride=self.first_stride, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        )
        linear = (nn.Linear(flat_size(convolutions, shape), self.feature_dim), nn.ReLU())
        return Backbone(nn.Sequential(*convolutions, *linear), nn.Identity(), nn.Linear(self.feature_dim, num_classes))
