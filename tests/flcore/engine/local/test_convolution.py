"""Convolutions by columns against PyTorch's: values, gradients, stacks; and when they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flcore.engine.local import convolution
from flcore.engine.local.convolution import col2im, im2col, output_size, use_im2col


def layers(**options: Any) -> tuple[nn.Conv2d, nn.Conv2d]:
    """The same layer twice, the second by columns."""
    plain = nn.Conv2d(2, 3, **options)
    other = nn.Conv2d(2, 3, **options)
    other.load_state_dict(plain.state_dict())
    use_im2col(nn.Sequential(other))
    return plain, other


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    size=st.tuples(st.integers(4, 8), st.integers(4, 8)),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_those_of_the_librarys(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], size: tuple[int, int], bias: bool
) -> None:
    plain, other = layers(kernel_size=kernel, stride=stride, padding=padding, bias=bias)
    images = torch.randn(3, 2, *size, requires_grad=True)
    expected, found = plain(images), other(images)
    assert torch.allclose(found, expected, atol=1e-5)
    wanted = torch.randn_like(expected)
    for one, two in zip(
        torch.autograd.grad((expected * wanted).sum(), [images, *plain.parameters()]),
        torch.autograd.grad((found * wanted).sum(), [images, *other.parameters()]),
        strict=True,
    ):
        assert torch.allclose(one, two, atol=1e-4)


def test_columns_by_hand() -> None:
    """A 3x3 image, a 2x2 kernel: four places, in rows what each of the four weights meets there."""
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    columns = im2col(image, (2, 2), (1, 1), (0, 0))
    assert columns.tolist() == [[0, 1, 3, 4], [1, 2, 4, 5], [3, 4, 6, 7], [4, 5, 7, 8]]
    # Ones folded back count how often a pixel was met: corners once, edges twice, the middle four times.
    counts = col2im(torch.ones(4, 4), (1, 1, 3, 3), (2, 2), (1, 1), (0, 0))
    assert counts.tolist() == [[[[1, 2, 1], [2, 4, 2], [1, 2, 1]]]]
    assert output_size((28, 28), (3, 3), (2, 2), (1, 1)) == (14, 14)


def test_a_stack_of_layers_is_each_of_them() -> None:
    """Under vmap, values and gradients of three layers at once."""
    shapes = layers(kernel_size=3, stride=2, padding=1)[1]
    weights = torch.randn(3, *shapes.weight.shape, requires_grad=True)
    biases = torch.randn(3, 3)
    images = torch.randn(3, 4, 2, 7, 7)

    def one(weight: torch.Tensor, bias: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(shapes, {"weight": weight, "bias": bias}, (own,))

    found = torch.vmap(one)(weights, biases, images)
    expected = torch.stack([F.conv2d(images[k], weights[k], biases[k], 2, 1) for k in range(3)])
    assert torch.allclose(found, expected, atol=1e-5)
    wanted = torch.randn_like(expected)
    own, theirs = (torch.autograd.grad((each * wanted).sum(), weights)[0] for each in (found, expected))
    assert torch.allclose(own, theirs, atol=1e-4)


def test_what_is_not_plain_or_too_large_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 images of 2x8x8, kernel 3, no padding: 36 places of 18 values each, 4 bytes: 5,184 bytes of columns."""
    module = nn.Sequential(
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv1d(2, 2, 3),
    )
    use_im2col(module)
    assert all(type(layer) in (nn.Conv1d, nn.Conv2d) for layer in module)
    _, other = layers(kernel_size=3)
    images = torch.randn(2, 2, 8, 8)
    used: list[tuple[int, ...]] = []
    real = convolution.im2col
    monkeypatch.setattr(convolution, "im2col", lambda *arguments: used.append(()) or real(*arguments))
    for most, times in ((5184, 1), (5183, 0)):
        used.clear()
        other.most_bytes = most
        other(images)
        assert len(used) == times
