"""VHL's images of an untrained StyleGAN2 (Karras et al., CVPR 2020): noise with structure, and a class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.math.generators.images import scaled_to_bytes

WIDTH = 32
MAPPING_LAYERS = 8


def style_virtual_images(
    num_classes: int, per_class: int, shape: tuple[int, int, int], generator: torch.Generator, *, std: float = 0.5
) -> Tensor:
    """Return VHL's virtual set, uint8 ``[K·n, C, H, W]``, class-major, made by one network with random weights.

    A latent mean per class from N(0, I), n samples each from N(mean, std²), scaled with the minimum and maximum of the
    *whole set* to 0..255 and rounded. Everything is on the CPU. ``shape`` is (C, H, W).
    """
    network = StyleNetwork.drawn(shape, generator)
    means = torch.randn(num_classes, 1, WIDTH, generator=generator)
    latents = means + std * torch.randn(num_classes, per_class, WIDTH, generator=generator)
    return scaled_to_bytes(network, latents)


@dataclass(frozen=True, eq=False)
class StyleNetwork:
    """The synthesis network of StyleGAN2 at its initialisation, 32 maps wide where theirs has 512.

    Biases, and the strengths of the noise per pixel, start at 0 there, and are left out. Each size has one convolution;
    sizes double up to the image's from 4 pixels, or fewer.

    Attributes:
        sizes: (height, width) of each stage.
        mapping: weights [WIDTH, WIDTH] of the layers from latents to styles. start: constant maps [1, WIDTH, h, w].
        convolutions, to_image: by stage, the weights of a convolution and of its modulation by the style.
    """

    sizes: tuple[tuple[int, int], ...]
    mapping: tuple[Tensor, ...]
    start: Tensor
    convolutions: tuple[tuple[Tensor, Tensor], ...]
    to_image: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def drawn(cls, shape: tuple[int, int, int], generator: torch.Generator) -> Self:
        """Draw all weights from N(0, 1/inputs), for images of ``shape`` (C, H, W)."""
        channels, *size = shape
        sizes = [(size[0], size[1])]
        while max(sizes[0]) > 4:
            sizes.insert(0, ((sizes[0][0] + 1) // 2, (sizes[0][1] + 1) // 2))

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / math.sqrt(math.prod(shape[1:]))

        return cls(
            tuple(sizes),
            tuple(drawn(WIDTH, WIDTH) for _ in range(MAPPING_LAYERS)),
            torch.randn(1, WIDTH, *sizes[0], generator=generator),
            tuple((drawn(WIDTH, WIDTH, 3, 3), drawn(WIDTH, WIDTH)) for _ in sizes),
            tuple((drawn(channels, WIDTH, 1, 1), drawn(WIDTH, WIDTH)) for _ in sizes),
        )

    def __call__(self, latents: Tensor) -> Tensor:
        """Return images ``[n, C, H, W]``, without bounds, of latents ``[n, WIDTH]``."""
        style = latents * latents.square().mean(dim=1, keepdim=True).add(1e-8).rsqrt()
        for weight in self.mapping:
            style = activated(style @ weight.T)
        maps, image = self.start.expand(len(latents), -1, -1, -1), torch.zeros(())
        for size, convolution, to_image in zip(self.sizes, self.convolutions, self.to_image, strict=True):
            maps = activated(modulated(enlarged(maps, size), style, *convolution, demodulate=True))
            pixels = modulated(maps, style, *to_image, demodulate=False)
            image = pixels if image.dim() == 0 else enlarged(image, size) + pixels
        return image


def modulated(maps: Tensor, style: Tensor, weight: Tensor, modulation: Tensor, *, demodulate: bool) -> Tensor:
    """Convolve maps ``[n, M, h, w]``, scaled by 1 + A·style, with ``weight`` ``[O, M, k, k]``; A is ``modulation``.

    ``demodulate`` divides each output by the norm of its weights, scaled likewise.
    """
    scales = 1 + style @ modulation.T
    made = F.conv2d(maps * scales[:, :, None, None], weight, padding=weight.shape[-1] // 2)
    if not demodulate:
        return made
    norms = scales.square() @ weight.square().sum(dim=(2, 3)).T
    return made * norms.add(1e-8).rsqrt()[:, :, None, None]


def activated(values: Tensor) -> Tensor:
    """Return the leaky ReLU of slope 0.2, times √2, which keeps the mean square."""
    return F.leaky_relu(values, 0.2) * math.sqrt(2)


def enlarged(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Enlarge maps ``[n, M, h, w]`` bilinearly to ``size`` (height, width)."""
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
