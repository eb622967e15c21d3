"""The maximum of 2×2 pixels: PyTorch's values whether or not a gradient is asked for, its gradient where one is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flcore.models.base import MaxPool, max_pool


@pytest.mark.parametrize("size", [(2, 2), (6, 4), (7, 5), (28, 29)])
def test_values_of_pytorch(size: tuple[int, int]) -> None:
    """A last odd row or column is left out; whole numbers make many ties."""
    maps = torch.randint(-3, 3, (2, 3, *size), generator=torch.Generator().manual_seed(0)).float()
    maps[0, 0, 1, 1] = torch.nan
    expected = F.max_pool2d(maps, 2)
    with torch.no_grad():
        found = max_pool(maps)
    assert torch.equal(torch.nan_to_num(found, 9), torch.nan_to_num(expected, 9))
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 1
    assert torch.equal(MaxPool()(maps).nan_to_num(9), expected.nan_to_num(9))


def test_by_hand() -> None:
    with torch.no_grad():
        assert max_pool(torch.tensor([[[1.0, 5, 0, 0], [2, 3, 0, -1]]])).tolist() == [[[5, 0]]]


def test_a_tie_gives_its_gradient_to_the_first() -> None:
    """Row by row; two elementwise maxima would give both one half."""
    maps = torch.tensor([[[1.0, 4, 4, 4]], [[4, 1, 1, 1]]]).reshape(1, 2, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(max_pool(maps).sum(), [maps])
    assert gradient.flatten().tolist() == [0, 1, 0, 0, 1, 0, 0, 0]


def test_one_row_is_refused_with_and_without_gradients() -> None:
    """So that a model that is too deep for its images says so when it is built."""
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError, match="too small"):
            max_pool(torch.zeros(1, 1, 1, 8))
