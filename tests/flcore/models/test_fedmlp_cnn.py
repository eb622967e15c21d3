"""FedMLP's five-layer CNN: sizes, the feature tap, and channel dropout whose noise is an argument."""

from __future__ import annotations

import pytest
import torch

from flcore.models import MODELS, Backbone, build_model

GREY = (1, 28, 28)


def make(shape: tuple[int, int, int] = GREY, classes: int = 10) -> Backbone:
    return build_model(MODELS["fedmlp_cnn"](), shape, classes)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def images(shape: tuple[int, int, int] = GREY) -> torch.Tensor:
    return torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))


def test_parameters() -> None:
    """fedmlp.md, fact 14: 260 + 5,020 + 5,792 + 6,450 + 510 = 18,032; the extractor without the last: 17,522."""
    module = make()
    assert [count(part) for part in [*module.encoder.children(), module.head]] == [260, 5_020, 5_792, 6_450, 510]
    assert count(module) == 18_032
    assert count(module.encoder) == 17_522


@pytest.mark.parametrize(
    ("shape", "flat"),
    [
        ((1, 28, 28), 128),  # 28 - 4 = 24, 12, 12 - 4 = 8, 4, 4 - 2 = 2: 32·2·2
        ((3, 32, 32), 288),  # 28, 14, 10, 5, 3: 32·3·3
        ((1, 24, 24), 32),  # 20, 10, 6, 3, 1: 32
    ],
)
def test_image_sizes(shape: tuple[int, int, int], flat: int) -> None:
    module = make(shape, 5).eval()
    assert list(module.encoder.children())[-1].in_features == flat
    features, logits = module(images(shape))
    assert (module.feature_dim, features.shape, logits.shape) == (50, (4, 50), (4, 5))
    assert torch.allclose(logits, features @ module.head.weight.T + module.head.bias, atol=1e-6)
    assert bool((features >= 0).all()) and bool((features > 0).any())  # behind a ReLU


def test_images_that_are_too_small() -> None:
    """16 - 4 = 12, 6, 2, 1: nothing is left for the third convolution."""
    with pytest.raises(ValueError, match=r"images of 16x16 are too small .* set data\.size to 28 or 32"):
        make((1, 16, 16))


def test_layers_in_order() -> None:
    """Conv-pool-ReLU, conv-pool-ReLU, conv-ReLU, linear-ReLU, as a chain of PyTorch's own modules."""
    module = make().eval()
    first, second, third, linear = module.encoder.children()
    pool, relu, flat = torch.nn.MaxPool2d(2), torch.nn.ReLU(), torch.nn.Flatten()
    chain = torch.nn.Sequential(first, pool, relu, second, pool, relu, third, relu, flat, linear, relu)
    assert torch.equal(module.features(images()), chain(images()))


def test_dropout_is_of_channels_and_behind_the_second_convolution() -> None:
    """All channels dropped: the third convolution reads zeros, whatever the image. Kept: it reads twice the values."""
    module = make().train()
    assert dict(module.dropout_shapes) == {"channels": (20,)}
    given = images()
    gone = module.features(given, {"channels": torch.zeros(4, 20)})
    assert torch.equal(gone, gone[:1].expand(4, -1))
    kept = module.features(given, {"channels": torch.ones(4, 20)})
    double = make().eval()
    double.load_state_dict(module.state_dict())
    with torch.no_grad():  # twice the convolution is the convolution with twice the weights
        for parameter in list(double.encoder.children())[1].parameters():
            parameter.mul_(2)
    assert torch.allclose(kept, double.features(given), atol=1e-5)
    assert not torch.allclose(kept, module.features(given), atol=1e-3)
