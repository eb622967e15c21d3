"""The small convolutional network of pfl-research's CIFAR-10 benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from flcore.models.base import Backbone, DropoutMasks, dropout
from flcore.models.pooling import MaxPool


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
class PflCnn:
    """``simple_cnn`` of pfl-research (Granqvist et al., NeurIPS 2024), in its PyTorch form.

    Two unpadded 3×3 convolutions (32 and 64 maps) with ReLU, one 2×2 max-pooling, dropout 0.25, a hidden layer of 128
    with ReLU, dropout 0.5, a linear head; weights drawn as Glorot and Bengio (2010) do, biases as PyTorch does.
    1,626,442 parameters for 3×32×32 images and 10 classes.
    """

    name: ClassVar[str] = "pfl_cnn"
    summary: ClassVar[str] = "2 conv 3×3 with one pooling, dropout + 2 fc; pfl-research on CIFAR-10"

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network for images of ``shape`` (C, 32, 32).

        Raises:
            ValueError: other images; the first dropout has one value for each of 12,544 outputs.
        """
        if shape[1:] != (32, 32):
            raise ValueError(f"images of {shape[1]}x{shape[2]} do not fit this model; set data.size to 32")
        encoder = nn.Sequential(
            *(nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(MaxPool(), nn.Flatten()),
        )
        model = TwiceDroppedCnn(
            encoder, nn.Sequential(nn.Linear(64 * 14 * 14, 128), nn.ReLU()), nn.Linear(128, num_classes)
        )
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        return model
