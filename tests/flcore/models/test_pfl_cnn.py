"""pfl-research's small network: its size, what dropout covers, how its weights are drawn."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from flcore.models import build_model
from flcore.models.cnn import PflCnn

SHAPE = (3, 32, 32)


def test_parameters_and_feature() -> None:
    """(27+1)·32 = 896; (288+1)·64 = 18,496; (12,544+1)·128 = 1,605,760; (128+1)·10 = 1,290: in all 1,626,442."""
    model = build_model(PflCnn(), SHAPE, 10)
    parts = [sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.projection, model.head)]
    assert parts == [896 + 18_496, 1_605_760, 1_290]
    assert sum(parts) == 1_626_442
    assert model.feature_dim == 128
    assert not dict(model.named_buffers())


def test_dropout_behind_the_pooling_and_in_front_of_the_head() -> None:
    """Noise of 0 drops everything: the maps leave the hidden layer's bias, the features leave the head's."""
    model = build_model(PflCnn(), SHAPE, 10)
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    kept = {site: torch.ones(2, *shape) for site, shape in model.dropout_shapes.items()}
    gone = {site: torch.zeros(2, *shape) for site, shape in model.dropout_shapes.items()}
    assert torch.equal(model.classify(model.features(images), gone), model.head.bias.expand(2, 10))
    without_maps = model.features(images, {"maps": gone["maps"], "features": kept["features"]})
    assert torch.allclose(without_maps, model.projection[0].bias.relu().expand(2, 128))
    # What stays is scaled by 1 / (1 - rate): 4/3 behind the pooling, 2 in front of the head.
    assert torch.allclose(model.encode(images, kept), model.encode(images) * 4 / 3)
    features = model.features(images)
    doubled = (model.classify(features, kept) - model.head.bias) / (model.classify(features) - model.head.bias)
    assert torch.allclose(doubled, torch.full((2, 10), 2.0), atol=1e-3)


def test_glorot_weights() -> None:
    """Uniform within sqrt(6 / (in + out)): for the hidden layer sqrt(6 / 12,672), which 1.6 million draws fill."""
    weight = build_model(PflCnn(), SHAPE, 10).projection[0].weight.detach()
    bound = sqrt(6 / (12_544 + 128))
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.999 * bound
    assert float(weight.std()) == pytest.approx(bound / sqrt(3), rel=0.01)


def test_other_sizes_are_refused_with_a_cure() -> None:
    with pytest.raises(ValueError, match=r"images of 28x28 do not fit this model; set data\.size to 32"):
        build_model(PflCnn(), (1, 28, 28), 10)
