"""The simplex equiangular tight frame (gfpl.md, section 8, fact 1)."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.core.rng import torch_stream
from flcore.math.prototypes.class_means import frame_of_basis, simplex_etf


def test_three_classes_on_unit_vectors() -> None:
    """Q = the first three unit vectors of R⁴: sqrt(3/2)·(1 - 1/3) = 0.816497, sqrt(3/2)·(-1/3) = -0.408248."""
    assert (math.sqrt(1.5) * 2 / 3, -math.sqrt(1.5) / 3) == pytest.approx((0.816497, -0.408248), abs=1e-6)
    a, b = 0.816497, -0.408248
    expected = torch.tensor([[a, b, b], [b, a, b], [b, b, a], [0, 0, 0]])
    assert torch.allclose(frame_of_basis(torch.eye(4)[:, :3]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "dim", "cosine"),
    [(2, 2, -1.0), (3, 4, -0.5), (4, 4, -0.333333), (10, 50, -0.111111), (62, 80, -0.016393), (100, 128, -0.010101)],
)
def test_gram_matrix(classes: int, dim: int, cosine: float) -> None:
    """Diagonal 1, off it -1/(K-1); columns sum to 0; rank K - 1."""
    frame = simplex_etf(dim, classes, torch_stream(0, "frame"))
    assert frame.dtype == torch.float32
    assert frame.shape == (dim, classes)
    expected = torch.full((classes, classes), cosine).fill_diagonal_(1.0)
    assert torch.allclose(frame.T @ frame, expected, atol=2e-6)
    assert torch.allclose(frame.sum(1), torch.zeros(dim), atol=1e-5)
    assert torch.linalg.matrix_rank(frame, atol=1e-4).item() == classes - 1


def test_the_frame_is_a_function_of_the_seed() -> None:
    frames = [simplex_etf(8, 4, torch_stream(seed, "frame")) for seed in (0, 0, 1)]
    assert torch.equal(frames[0], frames[1])
    assert not torch.allclose(frames[0], frames[2], atol=0.01)


def test_the_basis_spans_the_random_directions_in_order() -> None:
    """Q'A is upper triangular with a positive diagonal: the QR that does not depend on the library's signs.

    The frame spans Q without its mean direction; its first column has a positive product with the first direction,
    z_0·a_0 = sqrt(K/(K-1)) (1 - 1/K) |a_0| > 0.
    """
    for seed in range(20):
        first = torch.randn(6, 3, generator=torch_stream(seed, "frame"), dtype=torch.float64)[:, 0]
        frame = simplex_etf(6, 3, torch_stream(seed, "frame")).double()
        expected = math.sqrt(1.5) * (2 / 3) * first.norm()
        assert float(frame[:, 0] @ first) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("dim", "classes"), [(80, 100), (5, 1), (3, 0)])
def test_impossible_frames(dim: int, classes: int) -> None:
    """gfpl.md, section 2: 80 dimensions hold no 100 orthonormal columns."""
    with pytest.raises(ValueError, match=f"{classes} classes in {dim}"):
        simplex_etf(dim, classes, torch_stream(0, "frame"))
