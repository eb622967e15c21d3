"""GradCAM by hand (evaluation.md section 5.2)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flcore.analyses.gradcam import CASES, case_lists, clearest, gradcam
from flcore.models import Backbone, build_model
from flcore.models.cnn import FedGenCnn
from flcore.models.resnet import ResNet18
from tests.cases import quick

IMAGE = torch.tensor([[[[1.0, 2], [3, 4]]]])


def by_hand(kernels: list[float], head: list[list[float]], inplace: bool = False) -> Backbone:
    """1×1 convolutions (one per kernel) of a 2×2 image, perhaps ReLU, then a linear head without bias."""
    convolution = nn.Conv2d(1, len(kernels), 1, bias=False)
    convolution.weight.data = torch.tensor(kernels, dtype=torch.float32).reshape(-1, 1, 1, 1)
    layers: list[nn.Module] = [convolution, *([nn.ReLU(inplace=True)] if inplace else []), nn.Flatten()]
    linear = nn.Linear(4 * len(kernels), len(head))
    linear.weight.data, linear.bias.data = torch.tensor(head, dtype=torch.float32), torch.zeros(len(head))
    return Backbone(nn.Sequential(*layers), nn.Identity(), linear)


def test_a_map_by_hand() -> None:
    """A = image and minus the image; class 0 weighs them 0.5 and -1 on average: 0.5·x + 1·x = 1.5·x, /6 = x/4."""
    model = by_hand([1, -1], [[0.2, 0.8, 0.4, 0.6, -4, 0, 0, 0]])
    assert gradcam(model, IMAGE, torch.tensor([0])).tolist() == [[[0.25, 0.5], [0.75, 1.0]]]


def test_what_speaks_against_the_class_is_not_shown() -> None:
    """Class 1 weighs the image negatively: ReLU leaves nothing, and zero is not divided by zero."""
    model = by_hand([1], [[1, 1, 1, 1], [-1, -1, -1, -1]])
    assert gradcam(model, IMAGE, torch.tensor([1])).tolist() == [[[0, 0], [0, 0]]]


def test_activations_are_those_before_an_activation_in_place() -> None:
    """A = (-1, 2, 3, 4), w = (-4, 1, 1, 1). The gradient at -1 is 0, the mean 3/4: map ∝ (0, 2, 3, 4).

    Behind the ReLU, which overwrites A, the gradients would be w itself, their mean -1/4, and the map zero.
    """
    image = IMAGE.clone()
    image[..., 0, 0] = -1
    model = by_hand([1], [[-4, 1, 1, 1]], inplace=True)
    assert gradcam(model, image, torch.tensor([0])).tolist() == [[[0, 0.5], [0.75, 1.0]]]


@pytest.mark.parametrize("spec", quick([FedGenCnn(), ResNet18()], 1))
def test_maps_are_between_zero_and_one_and_as_large_as_the_image(spec: FedGenCnn | ResNet18) -> None:
    """Also one by one as together; parameters are left without gradient, and no hook stays."""
    model = build_model(spec, (3, 20, 24), 5, seed=4)
    images = torch.randn(3, 3, 20, 24, generator=torch.Generator().manual_seed(1))
    classes = torch.tensor([0, 4, 2])
    maps = gradcam(model, images, classes)
    assert maps.shape == (3, 20, 24)
    assert float(maps.min()) >= 0
    assert all(float(one.max()) in (0.0, 1.0) for one in maps) and maps.any()
    alone = torch.cat([gradcam(model, images[i : i + 1], classes[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(maps, alone, rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_model_without_convolution_is_refused() -> None:
    model = Backbone(nn.Flatten(), nn.Identity(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="convolution"):
        gradcam(model, IMAGE, torch.tensor([0]))


def test_four_lists_partition_the_samples() -> None:
    """Labels 0; before 0, 0, 1, 1, 0; after 0, 1, 0, 1, 0."""
    labels = torch.zeros(5, dtype=torch.int64)
    found = case_lists(torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 1, 0, 1, 0]), labels)
    assert {case: rows.tolist() for case, rows in found.items()} == {
        "kept right": [0, 4],
        "mended": [2],
        "broken": [1],
        "still wrong": [3],
    }
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(3, (50,), generator=generator) for _ in range(3)]
    together = torch.cat(list(case_lists(*draws).values()))
    assert sorted(together.tolist()) == list(range(50))
    assert tuple(case_lists(*draws)) == CASES


def test_examples_are_those_of_the_highest_margin() -> None:
    """Two classes, logits (ln p, ln (1 - p)): margins |2p - 1|.

    Before: 0.2, 0.8, 0, 1; after 0.6, 0.1, 0.6, 0: sums 0.8, 0.9, 0.6, about 1. Of samples 0, 1, 2 the best two are 1
    and 0.
    """

    def logits(margins: list[float]) -> torch.Tensor:
        chances = torch.tensor([[(1 + m) / 2, (1 - m) / 2] for m in margins])
        return chances.clamp_min(1e-9).log()

    before, after = logits([0.2, 0.8, 0.0, 1.0]), logits([0.6, 0.1, 0.6, 0.0])
    assert clearest(torch.tensor([0, 1, 2]), before, after, 2).tolist() == [1, 0]
    assert clearest(torch.tensor([0, 1, 2, 3]), before, after, 9).tolist() == [3, 1, 0, 2]
    assert clearest(torch.zeros(0, dtype=torch.int64), before, after, 2).tolist() == []
