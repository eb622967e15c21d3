"""Generators: the specifications' parameter counts, seeds, no draws inside, BatchNorm by mode, and use under vmap."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from flcore.math.generators.networks import (
    EnlargingConvolution,
    FeatureGenerator,
    TrainedLinear,
    build_feature_generator,
    build_image_generator,
    constant_output,
    draw_labels,
    draw_noise,
)
from flcore.models import extract_weights

CLASSES = 4
SMALL: dict[str, Any] = {
    "feature": lambda seed=0: build_feature_generator(CLASSES, 5, noise_dim=3, hidden=7, seed=seed),
    "fc": lambda seed=0: build_image_generator("fc", CLASSES, (1, 8, 8), noise_dim=3, seed=seed),
    "cnn": lambda seed=0: build_image_generator("cnn", CLASSES, (1, 8, 8), noise_dim=3, seed=seed),
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def inputs(batch: int, noise_dim: int = 3, classes: int = CLASSES, seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return torch.rand(batch, noise_dim, generator=stream), torch.randint(classes, (batch,), generator=stream)


def state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    return params, {name: b.clone() for name, b in module.named_buffers()}


@pytest.mark.parametrize(
    ("classes", "hidden", "parameters"),
    [
        # (32 + K)·h + h, then 2·h of BatchNorm, then h·32 + 32
        (10, 256, 42 * 256 + 256 + 512 + 256 * 32 + 32),
        (26, 256, 58 * 256 + 256 + 512 + 256 * 32 + 32),
        (2, 128, 34 * 128 + 128 + 256 + 128 * 32 + 32),
    ],
)
def test_parameters_of_the_feature_generator(classes: int, hidden: int, parameters: int) -> None:
    """MNIST, EMNIST and CelebA of fedpa.md section 2; running statistics are 2·hidden more (section 3)."""
    assert parameters in {19_744, 23_840, 8_864}
    weights = extract_weights(build_feature_generator(classes, 32, hidden=hidden))
    assert weights.num_parameters == parameters
    assert sum(b.numel() for b in weights.buffers.values() if b.is_floating_point()) == 2 * hidden


def test_parameters_of_the_fc_image_generator() -> None:
    """fedpg.md fact 8: linear 3,905,664 and BatchNorm 2·(128 + 256 + 512 + 1024) = 3,840 for K = 10 and 3×32×32."""
    generator = build_image_generator("fc", 10, (3, 32, 32))
    linear = sum(count(layer) for layer in generator.modules() if isinstance(layer, nn.Linear))
    assert (linear, count(generator) - linear, count(generator)) == (3_905_664, 3_840, 3_909_504)


@pytest.mark.parametrize("bias", [True, False])
def test_a_trained_linear_layer_is_a_linear_layer(bias: bool) -> None:
    """Small whole numbers, so that products and sums are exact: x·Wᵀ + b; gᵀ·x for W, the sum of g for b, g·W for x."""
    stream = torch.Generator().manual_seed(0)
    layer = TrainedLinear(96, 80, bias=bias).train()
    with torch.no_grad():
        for values in layer.parameters():
            values.copy_(torch.randint(-4, 5, values.shape, generator=stream))
    given = torch.randint(-4, 5, (64, 96), generator=stream).float().requires_grad_()
    above = torch.randint(-4, 5, (64, 80), generator=stream).float()
    offset = layer.bias if bias else torch.zeros(80)
    made = layer(given)
    made.backward(above)
    assert made.equal((given.double() @ layer.weight.double().t() + offset.double()).float())
    assert layer.weight.grad is not None and given.grad is not None
    assert layer.weight.grad.equal((above.double().t() @ given.double()).float())
    assert given.grad.equal((above.double() @ layer.weight.double()).float())
    assert not bias or layer.bias.grad.equal(above.sum(dim=0))


def test_parameters_of_the_cnn_image_generator() -> None:
    """8×8, one channel, z + K = 7: start 4×4 with 256 maps, one stage to 128.

    Linear 7·256·16 = 28,672; BatchNorm 512; convolution 9·256·128 = 294,912; BatchNorm 256; last 9·128 + 1 = 1,153.
    """
    assert count(SMALL["cnn"]()) == 28_672 + 512 + 294_912 + 256 + 1_153


@pytest.mark.parametrize("kind", ["fc", "cnn"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 9), (1, 28, 28), (3, 32, 32), (3, 20, 31), (1, 64, 64)])
def test_images_of_every_size(kind: Literal["fc", "cnn"], shape: tuple[int, int, int]) -> None:
    generator = build_image_generator(kind, CLASSES, shape, noise_dim=3).train()
    noise, labels = inputs(2)
    images = generator(noise, labels)
    assert images.shape == (2, *shape)
    assert -1 <= images.min() < 0 < images.max() <= 1
    images.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in generator.parameters() if p.ndim > 1)


@pytest.mark.parametrize("size", [(8, 14), (7, 13), (8, 13), (4, 7)])
def test_enlarging_and_convolving_in_one(size: tuple[int, int]) -> None:
    """In double precision the result and both gradients are those of the two steps one after the other."""
    stream = torch.Generator().manual_seed(3)
    layer = EnlargingConvolution(2, 3, size).double()
    images = torch.randn(5, 2, 4, 7, generator=stream, dtype=torch.float64, requires_grad=True)
    enlarged = torch.nn.functional.interpolate(images, size=size, mode="nearest")
    apart = torch.nn.functional.conv2d(enlarged, layer.weight, padding=1)
    weights = torch.randn(apart.shape, generator=stream, dtype=torch.float64)
    moving = [images, layer.weight]
    expected = [apart, *torch.autograd.grad((apart * weights).sum(), moving)]
    joint = layer(images)
    found = [joint, *torch.autograd.grad((joint * weights).sum(), moving)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_layers_are_those_of_the_specification() -> None:
    """fedpa.md 5.2: Linear, BN, ReLU, Linear without activation; fedpg.md 2: four Linear-BN-LeakyReLU(0.2), Linear."""
    feature = build_feature_generator(10, 32)
    assert [type(layer) for layer in feature.network] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    image = build_image_generator("fc", 10, (3, 32, 32))
    stage = [TrainedLinear, nn.BatchNorm1d, nn.LeakyReLU]
    assert [type(layer) for layer in image.network] == [*stage * 4, TrainedLinear, nn.Tanh]
    assert [layer.out_features for layer in image.network if isinstance(layer, nn.Linear)] == [
        *(128, 256, 512, 1024),
        3072,
    ]
    assert {layer.negative_slope for layer in image.network if isinstance(layer, nn.LeakyReLU)} == {0.2}


def test_feature_generator_by_hand() -> None:
    """z = 1, K = 2, one hidden unit with weights (2; 10, -3) and bias 1, statistics at mean 0 and variance 1.

    (0.5, class 0): 1 + 10 + 1 = 12 → ReLU 12 → 12·(1, -1) + (0, 5) = (12, -7).
    (0.5, class 1): 1 - 3 + 1 = -1 → 0 → (0, 5). BatchNorm divides by √(1 + 1e-5): 12 becomes 11.99994.
    """
    generator = FeatureGenerator(1, 2, 1, 2).eval()
    first, last = generator.network[0], generator.network[3]
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[2.0, 10.0, -3.0]]))
        first.bias.fill_(1.0)
        last.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        last.bias.copy_(torch.tensor([0.0, 5.0]))
    made = generator(torch.tensor([[0.5], [0.5]]), torch.tensor([0, 1]))
    assert torch.allclose(made, torch.tensor([[12.0, -7.0], [0.0, 5.0]]), atol=1e-3)


@pytest.mark.parametrize("kind", SMALL)
def test_initial_weights_are_a_function_of_the_seed(kind: str) -> None:
    first, again, other = (extract_weights(SMALL[kind](seed)).params for seed in (4, 4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim > 1)


@pytest.mark.parametrize("kind", SMALL)
def test_batchnorm_follows_the_mode(kind: str) -> None:
    """Train: a sample's output depends on its batch, statistics move. Eval: neither."""
    generator = SMALL[kind]()
    noise, labels = inputs(6)
    together = generator.eval()(noise, labels)
    assert torch.allclose(together[:2], generator(noise[:2], labels[:2]), atol=1e-6)
    running = {name: b.clone() for name, b in generator.named_buffers()}
    trained = generator.train()(noise, labels)
    assert not torch.allclose(trained[:2], generator(noise[:2], labels[:2]), atol=1e-4)
    assert all(not torch.equal(running[name], b) for name, b in generator.named_buffers())


def test_an_untrained_image_generator_makes_grey() -> None:
    """fedpg.md section 2: one constant grey image for every class, pixel std 0.005 in eval mode (asserted: < 0.01)."""
    generator = build_image_generator("fc", 10, (1, 8, 8)).eval()
    noise, labels = inputs(200, noise_dim=512, classes=10)
    with torch.no_grad():
        images = generator(noise, labels)
    assert images.std(dim=0).mean() < 0.01
    assert images.abs().max() < 0.2


@pytest.mark.parametrize("kind", SMALL)
def test_a_constant_is_what_the_generator_says_and_changes_nothing(kind: str) -> None:
    """With the weights given, not those of the architecture; no gradient to them."""
    architecture, trained = SMALL[kind](1).eval(), SMALL[kind](0).eval()
    kept = [(*extract_weights(module).values.values(),) for module in (architecture, trained)]
    params, buffers = state(trained)
    noise, labels = inputs(4)
    made = constant_output(architecture, params, buffers, noise, labels)
    assert torch.equal(made, trained(noise, labels))
    assert not made.requires_grad
    own = (*params.values(), *buffers.values())
    assert all(torch.equal(one, other) for one, other in zip(own, kept[1], strict=True))
    still = extract_weights(architecture).values.values()
    assert all(torch.equal(one, other) for one, other in zip(still, kept[0], strict=True))


@pytest.mark.parametrize("kind", SMALL)
def test_shared_weights_and_noise_of_every_client(kind: str) -> None:
    """vmap over three clients gives each what it gets alone."""
    generator = SMALL[kind]().eval()
    params, buffers = state(generator)
    pairs = [inputs(4, seed=seed) for seed in range(3)]
    noise, labels = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
    together = torch.vmap(lambda n, y: constant_output(generator, params, buffers, n, y))(noise, labels)
    for client, (own_noise, own_labels) in enumerate(pairs):
        alone = constant_output(generator, params, buffers, own_noise, own_labels)
        assert torch.allclose(together[client], alone, atol=1e-6)


# What generators are asked with: noise and labels, from a stream that is handed in.

T = torch.tensor


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_forms() -> None:
    """20,000 draws: uniform mean 0.5 ± 5·0.2887/√20000 = 0.0102; normal mean 0 ± 0.0354, variance 1 ± 5·√(2/20000)."""
    uniform = draw_noise(2_000, 10, stream())
    normal = draw_noise(2_000, 10, stream(), "normal")
    assert uniform.shape == normal.shape == (2_000, 10)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.0102
    assert abs(normal.mean().item()) < 0.0354
    assert abs(normal.var().item() - 1) < 0.05
    assert torch.equal(uniform, draw_noise(2_000, 10, stream()))
    assert not torch.equal(uniform, draw_noise(2_000, 10, stream(1)))


def test_labels_by_mask_and_by_frequency() -> None:
    """8,000 draws; frequencies within 5·√(p(1-p)/8000) < 0.028."""
    for weights, shares in (
        (T([True, False, True, False]), [0.5, 0, 0.5, 0]),
        (T([30, 0, 10, 0]), [0.75, 0, 0.25, 0]),
        (T([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
    ):
        labels = draw_labels(8_000, weights, stream())
        assert labels.dtype == torch.int64
        found = torch.bincount(labels, minlength=4) / 8_000
        for share, expected in zip(found.tolist(), shares, strict=True):
            assert abs(share - expected) < 0.028 * (expected > 0) + 1e-9
        assert torch.equal(labels, draw_labels(8_000, weights, stream()))


def test_labels_of_nobody() -> None:
    with pytest.raises(ValueError, match="no class"):
        draw_labels(3, torch.zeros(4), stream())
