"""ResNet-18 with a stem for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from flcore.models.base import Backbone
from flcore.params import param

_ENCODED = 512


@dataclass(frozen=True)
class ResNet18:
    """torchvision's ResNet-18 (He et al., CVPR 2016) with random initial weights.

    The small stem (3×3, stride 1, no pooling) has 11,173,962 parameters for 10 classes, the ImageNet stem 11,181,642
    (data.md section 1.4). With ``projection_dim`` FedCSPC's two-layer projection stands before the head: 512 → 512,
    ReLU, → d (fedcspc.md section 2).
    """

    name: ClassVar[str] = "resnet18"
    summary: ClassVar[str] = "ResNet-18, feature 512; FedPG, FedCSPC, FedMLP and GFPL on CIFAR"
    stem: Literal["small", "imagenet"] = param("small", "small: 3×3 stride 1 for images of 28 to 64 pixels")
    projection_dim: int | None = param(None, "length d of a projection, which the head reads then; null: none", low=1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network for images of ``shape`` (C, H, W)."""
        from torchvision.models import resnet18  # seconds to import, and only this model needs it

        network = resnet18(weights=None)
        if self.stem == "small":
            network.conv1 = nn.Conv2d(shape[0], 64, 3, stride=1, padding=1, bias=False)
            network.maxpool = nn.Identity()
        elif shape[0] != 3:
            network.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        network.fc = nn.Identity()
        if self.projection_dim is None:
            return Backbone(network, nn.Identity(), nn.Linear(_ENCODED, num_classes))
        projection = nn.Sequential(nn.Linear(_ENCODED, _ENCODED), nn.ReLU(), nn.Linear(_ENCODED, self.projection_dim))
        return Backbone(network, projection, nn.Linear(self.projection_dim, num_classes))
