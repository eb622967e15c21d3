"""Features from a dictionary of patches: one convolution, soft thresholds, pooling (Coates, Lee, Ng, AISTATS 2011).

Its filters need no labels: they may be fitted by moments and k-means (`flcore/methods/protolda.py`), or be trained by
any method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.core.params import param
from flcore.core.portable import square_root
from flcore.models.base import Backbone, ModelSpec

_ROOT_OFFSET = 1e-6  # keeps the gradient of the square root finite where nothing passes the threshold
_SHARE = 10 / 28  # of an image's side, a patch's: 10 pixels of MNIST's 28
_CACHED = 2**20  # values of a map at a time: larger ones do not stay in the cache, and cost three times as much


class PatchFeatures(nn.Module):
    """Patches of every position, their products with the filters, thresholds, means over a grid of cells.

    ``dictionary`` has filters [K, C, p, p] and a bias [K] for patches of the normalised image, contrast-normalised with
    ``contrast``.
    """

    def __init__(
        self,
        dictionary: nn.Conv2d,
        grid: int,
        threshold: float,
        signs: Literal["absolute", "both"],
        contrast: float | None,
        mirror: bool,
        root: bool,
    ) -> None:
        super().__init__()
        self.dictionary = dictionary
        self.grid, self.threshold, self.signs = grid, threshold, signs
        self.contrast, self.mirror, self.root = contrast, mirror, root

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to features [B, D], D = K·g² or twice that with both signs."""
        rows = self.rows(images.shape, 1)
        if len(images) > rows:
            return torch.cat([self(block) for block in torch.split(images, rows)])
        features = self._features(images)
        return (features + self._features(images.flip(-1))) / 2 if self.mirror else features

    def _features(self, images: Tensor) -> Tensor:
        products = self.products(images)
        if self.signs == "absolute":
            passed = F.relu(products.abs() - self.threshold)
        else:
            passed = torch.cat([F.relu(products - self.threshold), F.relu(-products - self.threshold)], 1)
        pooled = F.adaptive_avg_pool2d(passed, self.grid).flatten(1)
        return square_root(pooled + _ROOT_OFFSET) if self.root else pooled

    def rows(self, shape: Sequence[int], stride: int) -> int:
        """Return the number of images of ``shape`` [..., H, W] per block, at every ``stride``-th position."""
        size = self.dictionary.kernel_size[0]
        positions = math.prod((side - size) // stride + 1 for side in shape[-2:])
        return max(1, _CACHED // (positions * self.dictionary.out_channels))

    def products(self, images: Tensor) -> Tensor:
        """Return every patch times every filter, [B, K, H - p + 1, W - p + 1]."""
        if self.contrast is None:
            found: Tensor = self.dictionary(images)
            return found
        weight, bias = self.dictionary.weight, self.dictionary.bias
        assert bias is not None
        mean, deviation = self._contrast(images, self.contrast)
        # (x - mean) / deviation needs no patch of its own: the mean of a patch is one number for each filter.
        products = F.conv2d(images, weight) - mean * weight.sum((1, 2, 3)).reshape(1, -1, 1, 1)
        return products / deviation + bias.reshape(1, -1, 1, 1)

    def patches(self, images: Tensor, stride: int) -> Tensor:
        """Return the filters' patches at every ``stride``-th position: [B, d, L] with d = C·p²."""
        size = self.dictionary.kernel_size[0]
        found = F.unfold(images, size, stride=stride)
        if self.contrast is None:
            return found
        mean = found.mean(1, keepdim=True)
        variance = found.square().mean(1, keepdim=True) - mean.square()
        return (found - mean) / square_root(variance.clamp_min(0) + self.contrast)

    def _contrast(self, images: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        """Return the mean and deviation of every patch, [B, 1, H - p + 1, W - p + 1]."""
        size = self.dictionary.kernel_size[0]
        mean, square = (
            F.avg_pool2d(values.mean(1, keepdim=True), size, stride=1) for values in (images, images.square())
        )
        return mean, square_root((square - mean.square()).clamp_min(0) + floor)


@dataclass(frozen=True)
class PatchDictionary(ModelSpec, name="patch_dictionary"):
    """One convolution as a dictionary of patches, thresholds, pooling, linear head; ProtoLDA.

    K filters of p×p and g×g cells give D = K·g² features (2·K·g² with both signs). With the defaults and 10 classes
    111·(100 + 1) + 999·10 + 10 = 21,211 parameters for 1×28×28 images.
    """

    atoms: int = param(111, "K, filters of the dictionary", low=1)
    patch: int | None = param(None, "p, side of a patch in pixels; null: 10/28 of the image's", low=1)
    grid: int = param(3, "g, cells in each direction over which features are averaged", low=1)
    threshold: float = param(0.25, "what a product with a filter must exceed to count", low=0)
    signs: Literal["absolute", "both"] = param("absolute", "size of a product alone, or both signs apart (twice D)")
    contrast: float | None = param(
        None, "added to each patch's variance in its normalisation, in normalised pixels; null: none", above=0
    )
    mirror: bool = param(False, "features are means over an image and its mirror image", switch=True)
    root: bool = param(True, "the square root of each feature", switch=True)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network; raise ValueError if a patch, or the grid over positions, does not fit the image."""
        patch = max(1, round(min(shape[1:]) * _SHARE)) if self.patch is None else self.patch
        positions = min(shape[1:]) - patch + 1
        if positions < self.grid:
            raise ValueError(
                f"images of {shape[1]}x{shape[2]} have {max(positions, 0)} positions of a patch in a row; lower patch "
                f"(now {patch}) or grid (now {self.grid})"
            )
        dictionary = nn.Conv2d(shape[0], self.atoms, patch)
        encoder = PatchFeatures(
            dictionary, self.grid, self.threshold, self.signs, self.contrast, self.mirror, self.root
        )
        dim = self.atoms * self.grid**2 * (1 if self.signs == "absolute" else 2)
        return Backbone(encoder, nn.Identity(), nn.Linear(dim, num_classes))
