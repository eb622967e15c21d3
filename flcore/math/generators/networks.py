"""Label-conditioned generators: of features (FedGen, FedPA) and of images (FedPG).

All read noise ``[B, z]`` and a one-hot label ``[B, K]`` and draw nothing. They contain BatchNorm: servers train in
train mode, on two samples or more; clients use eval mode, in which ``torch.vmap`` runs one set of weights for many
clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from flcore.core.rng import seeded_globally

FC_WIDTHS = (128, 256, 512, 1024)
CNN_WIDTHS = (256, 128, 64, 32)


class ConditionalGenerator(nn.Module):
    """A network from the joint input (noise, one-hot label), ``[B, z + K]``, to the output."""

    def __init__(self, noise_dim: int, num_classes: int, network: nn.Module) -> None:
        super().__init__()
        self.noise_dim, self.num_classes, self.network = noise_dim, num_classes, network

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Map noise float ``[B, z]`` and labels int64 ``[B]`` to outputs ``[B, ...]``."""
        # A comparison instead of F.one_hot, which looks at the values of the labels and so cannot run under vmap.
        one_hot = labels.unsqueeze(1) == torch.arange(self.num_classes, device=labels.device)
        return self.network(torch.cat([noise, one_hot.to(noise.dtype)], dim=1))


class FeatureGenerator(ConditionalGenerator):
    """FedGen's and FedPA's generator of latent features: Linear, BatchNorm, ReLU, Linear without activation.

    19,744 parameters for z = 32, K = 10, 256 hidden units and d = 32 (fedpa.md section 2, baselines.md section 6).
    """

    def __init__(self, noise_dim: int, num_classes: int, hidden: int, feature_dim: int) -> None:
        network = nn.Sequential(
            nn.Linear(noise_dim + num_classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, feature_dim),
        )
        super().__init__(noise_dim, num_classes, network)


class ImageGenerator(ConditionalGenerator):
    """FedPG's generator of images ``[B, C, H, W]`` in [-1, 1] (Tanh); real images must be normalised to that range.

    ``fc``: Linear, BatchNorm, LeakyReLU(0.2) of widths 128, 256, 512, 1024, then Linear to all pixels. 3,909,504
    parameters for z = 512, K = 10 and 3×32×32 (fedpg.md section 2).

    ``cnn`` (the paper does not state its architecture) follows DCGAN (Radford et al. 2016), for 8 to 64 pixels. A
    linear layer makes 256 maps of 4×4 (or less: H and W halved, rounded up, until neither exceeds 4). Each stage
    enlarges to the next size by nearest neighbour, convolves 3×3 and halves the maps, not below 32: DCGAN's transposed
    convolution cannot reach sizes such as 28 and 7, and makes chequerboards. BatchNorm and LeakyReLU(0.2) follow all
    but the last.
    """

    def __init__(
        self, kind: Literal["fc", "cnn"], noise_dim: int, num_classes: int, shape: tuple[int, int, int]
    ) -> None:
        layers = _fc_layers if kind == "fc" else _cnn_layers
        super().__init__(noise_dim, num_classes, nn.Sequential(*layers(noise_dim + num_classes, shape), nn.Tanh()))
        self.shape = shape

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        return super().forward(noise, labels).reshape(-1, *self.shape)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b by oneDNN; so are its gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _by_onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        return (
            _by_onednn(grad, weight.t()) if ctx.needs_input_grad[0] else None,
            _by_onednn(grad.t(), inputs.t()),
            grad.sum(dim=0) if ctx.has_bias else None,
        )


def _by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


class TrainedLinear(nn.Linear):
    """A linear layer with wide inputs and outputs that a server trains in steps of a hundred rows or more.

    On a CPU its training steps take oneDNN's products: MKL's, held to the same bytes on all processors
    (:mod:`flcore.core.portable`), take 2.3 times as long. For thin layers and short steps these are no faster.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and inputs.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return _Product.apply(inputs, self.weight, self.bias)
        return super().forward(inputs)


class EnlargingConvolution(nn.Conv2d):
    """Enlarges maps ``[B, C, h, w]`` to ``size`` (H, W) by nearest neighbour and convolves them 3×3, without a bias.

    A doubling is computed as one transposed convolution of stride 2 with a 4×4 kernel of sums of the 3×3 one: 4
    products per pixel and map instead of 9, equal up to rounding.
    """

    def __init__(self, maps: int, outputs: int, size: tuple[int, int]) -> None:
        super().__init__(maps, outputs, 3, padding=1, bias=False)
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        if self.training:  # a step of the whole generator takes 0.8 of the time; torch.vmap knows no such layouts
            images = images.contiguous(memory_format=torch.channels_last)
        if (2 * images.shape[-2], 2 * images.shape[-1]) != self.size:
            return super().forward(F.interpolate(images, size=self.size, mode="nearest"))
        # Output y reads enlarged pixels y - 1, y, y + 1 with weights w0, w1, w2, and enlarged pixel j is pixel j // 2:
        # pixel i meets output y = 2i - 1 + t with k[t] = (w2, w1 + w2, w0 + w1, w0)[t], and the same across.
        kernel = F.pad(self.weight, (1, 1, 1, 1)).flip(2, 3).transpose(0, 1)
        for across in (2, 3):
            width = kernel.shape[across] - 1
            kernel = kernel.narrow(across, 0, width) + kernel.narrow(across, 1, width)
        return F.conv_transpose2d(images, kernel, stride=2, padding=1)


def _fc_layers(inputs: int, shape: tuple[int, int, int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in FC_WIDTHS:
        layers += [TrainedLinear(inputs, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)]
        inputs = width
    return [*layers, TrainedLinear(inputs, shape[0] * shape[1] * shape[2])]


def _cnn_layers(inputs: int, shape: tuple[int, int, int]) -> list[nn.Module]:
    sizes = [(shape[1], shape[2])]
    while max(sizes[-1]) > 4:
        height, width = sizes[-1]
        sizes.append(((height + 1) // 2, (width + 1) // 2))
    *stages, (height, width) = sizes
    maps = CNN_WIDTHS[0]
    # No biases in front of BatchNorm: it would subtract them.
    layers: list[nn.Module] = [
        TrainedLinear(inputs, maps * height * width, bias=False),
        nn.Unflatten(1, (maps, height, width)),
        nn.BatchNorm2d(maps),
        nn.LeakyReLU(0.2),
    ]
    for stage, size in enumerate(reversed(stages), start=1):
        fewer = CNN_WIDTHS[min(stage, len(CNN_WIDTHS) - 1)]
        layers += [EnlargingConvolution(maps, fewer, size), nn.BatchNorm2d(fewer), nn.LeakyReLU(0.2)]
        maps = fewer
    return [*layers, nn.Conv2d(maps, shape[0], 3, padding=1)]


def build_feature_generator(
    num_classes: int, feature_dim: int, *, noise_dim: int = 32, hidden: int = 256, seed: int = 0
) -> FeatureGenerator:
    """Build a feature generator as a function of ``seed``; CelebA has 128 hidden units."""
    with seeded_globally(seed):
        return FeatureGenerator(noise_dim, num_classes, hidden, feature_dim)


def build_image_generator(
    kind: Literal["fc", "cnn"], num_classes: int, shape: tuple[int, int, int], *, noise_dim: int = 512, seed: int = 0
) -> ImageGenerator:
    """Build an image generator (``fc`` is the paper's) for ``shape`` (C, H, W), as a function of ``seed``."""
    with seeded_globally(seed):
        return ImageGenerator(kind, noise_dim, num_classes, shape)


def constant_output(
    generator: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], noise: Tensor, labels: Tensor
) -> Tensor:
    """Return the outputs of a generator in eval mode, detached (fedpa.md section 4).

    Runs under ``torch.vmap`` with shared ``params`` and ``buffers`` and each client's noise [B, z] and labels [B].
    Raises ValueError in train mode, in which a pass would change the generator's statistics.
    """
    if generator.training:
        raise ValueError("a generator in train mode changes its BatchNorm statistics; call eval() on it first")
    return functional_call(generator, (dict(params), dict(buffers)), (noise, labels)).detach()


NoiseForm = Literal["uniform", "normal"]


def draw_noise(count: int, noise_dim: int, generator: torch.Generator, form: NoiseForm = "uniform") -> Tensor:
    """Return noise float32 ``[count, noise_dim]``: uniform on [0, 1) or standard normal."""
    if form == "uniform":
        return torch.rand(count, noise_dim, generator=generator)
    return torch.randn(count, noise_dim, generator=generator)


def draw_labels(count: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels int64 ``[count]``, drawn with replacement in proportion to ``weights`` [K] >= 0, not all 0."""
    classes = (weights.cpu() > 0).nonzero().flatten()
    if not len(classes):
        raise ValueError("no label can be drawn: no class has a positive weight")
    if not count:
        return classes[:0]  # PyTorch's sampler refuses to draw nothing
    return classes[torch.multinomial(weights.cpu()[classes].double(), count, replacement=True, generator=generator)]
