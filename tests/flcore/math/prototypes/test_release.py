"""Privacy of class means: bounds that hold for any data, noise that has the stated size, and the account."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.math.prototypes.release import clip_to_norm, mean_sensitivity, noisy_means, noisy_vectors, privacy_spent

T = torch.tensor


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_clipping_by_hand() -> None:
    """(3, 4) has norm 5: to 2.5 it is halved; (0.6, 0.8) has norm 1 and stays bit for bit; 0 stays 0."""
    vectors = T([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]])
    clipped = clip_to_norm(vectors, 2.5)
    assert clipped[0].tolist() == pytest.approx([1.5, 2.0])
    assert torch.equal(clipped[1:], vectors[1:])


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_must_be_positive(norm: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        clip_to_norm(torch.ones(1, 2), norm)


@given(seed=st.integers(0, 500), norm=st.floats(0.01, 100), scale=st.floats(0.001, 1000))
@settings(max_examples=40, deadline=None)
def test_clipping_bounds_and_keeps_direction(seed: int, norm: float, scale: float) -> None:
    vectors = scale * torch.randn(2, 3, 4, generator=stream(seed))
    clipped = clip_to_norm(vectors, norm)
    lengths = vectors.norm(dim=-1)
    assert (clipped.norm(dim=-1) <= norm * (1 + 1e-6)).all()
    assert torch.allclose(clipped.norm(dim=-1), lengths.clamp_max(norm), rtol=1e-5)
    assert torch.allclose(torch.cosine_similarity(clipped, vectors, dim=-1), torch.ones(2, 3), atol=1e-5)


def test_clipping_has_finite_gradients_at_zero_and_runs_under_vmap() -> None:
    vectors = T([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(clip_to_norm(vectors, 1.0).sum(), vectors)
    assert torch.isfinite(grad).all()
    assert grad[0].tolist() == [1.0, 1.0]
    stack = torch.randn(3, 4, 2, generator=stream())
    assert torch.equal(torch.vmap(lambda v: clip_to_norm(v, 1.0))(stack), clip_to_norm(stack, 1.0))


def test_sensitivity_by_hand() -> None:
    """C = 3: one of 4 samples 2·3/4 = 1.5, one of 12 0.5; a whole client with 2 released classes 2·3·√2 = 8.485281."""
    counts, released = T([4, 12, 7]), T([True, True, False])
    assert mean_sensitivity(counts, released, 3.0, "sample").tolist() == pytest.approx([1.5, 0.5, 0.0])
    assert mean_sensitivity(counts, released, 3.0, "client").tolist() == pytest.approx([8.485281, 8.485281, 0.0])


@given(seed=st.integers(0, 500), count=st.integers(1, 9), norm=st.floats(0.1, 5), scale=st.floats(0.1, 20))
@settings(max_examples=60, deadline=None)
def test_replacing_one_sample_moves_the_mean_no_further(seed: int, count: int, norm: float, scale: float) -> None:
    features = scale * torch.randn(count, 3, generator=stream(seed))
    neighbour = features.clone()
    neighbour[0] = scale * torch.randn(3, generator=stream(seed + 1))
    moved = clip_to_norm(features, norm).mean(dim=0) - clip_to_norm(neighbour, norm).mean(dim=0)
    bound = mean_sensitivity(T([count]), T([True]), norm, "sample").item()
    assert moved.norm().item() <= bound * (1 + 1e-5)


def test_the_bounds_are_attained() -> None:
    """Opposite vectors of norm C: one of n = 4 moves the mean by 2C/4; k = 2 whole rows move by 2C·√2."""
    features = T([[9.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    neighbour = features.clone()
    neighbour[0] = T([-9.0, 0.0])
    moved = clip_to_norm(features, 1.0).mean(dim=0) - clip_to_norm(neighbour, 1.0).mean(dim=0)
    assert moved.norm().item() == pytest.approx(mean_sensitivity(T([4]), T([True]), 1.0, "sample").item())
    rows = T([[5.0, 0.0], [0.0, 5.0]])
    both = (clip_to_norm(rows, 1.0) - clip_to_norm(-rows, 1.0)).norm().item()
    assert both == pytest.approx(mean_sensitivity(T([1, 1]), T([True, True]), 1.0, "client")[0].item())


def test_noise_has_the_stated_size() -> None:
    """z = 2, C = 3, n = 4 and 12: deviations 2·1.5 = 3 and 2·0.5 = 1; over d = 20,000 within 5·1/√(2·20000) = 2.5 %.

    Client unit, two rows: 2·8.485281 = 16.970563. Means are 0, so that the result is the noise.
    """
    counts, released, zeros = T([4, 12, 7]), T([True, True, False]), torch.zeros(3, 20_000)
    for unit, deviations in (("sample", (3.0, 1.0)), ("client", (16.970563, 16.970563))):
        noisy = noisy_means(zeros, counts, released, stream(), max_norm=3.0, noise_multiplier=2.0, unit=unit)
        assert noisy[:2].std(dim=1).tolist() == pytest.approx(deviations, rel=0.025)
        assert (noisy[:2].mean(dim=1).abs() < 5 * T(deviations) / math.sqrt(20_000)).all()
        assert noisy[2].abs().sum() == 0


def test_no_noise_is_clipping_and_nothing_else() -> None:
    """Even what stands in rows that are not released (NaN here) does not come out."""
    means = T([[3.0, 4.0], [0.3, 0.4], [float("nan")] * 2])
    released = T([True, True, False])
    found = noisy_means(means, T([4, 4, 0]), released, stream(), max_norm=2.5, noise_multiplier=0.0, unit="sample")
    assert found[0].tolist() == pytest.approx([1.5, 2.0])
    assert found[1].tolist() == means[1].tolist()
    assert found[2].tolist() == [0.0, 0.0]


def test_noise_is_a_function_of_the_generator_alone() -> None:
    """The same stream for one class whether or not others are released; other streams, other noise."""
    means, counts = torch.zeros(2, 3), T([2, 2])

    def draw(released: list[bool], seed: int) -> torch.Tensor:
        return noisy_means(means, counts, T(released), stream(seed), max_norm=1.0, noise_multiplier=1.0, unit="sample")

    assert torch.equal(draw([True, True], 0)[1], draw([False, True], 0)[1])
    assert not torch.equal(draw([True, True], 0), draw([True, True], 1))
    both = draw([True, True], 0)
    assert not torch.equal(both[0], both[1])


def test_noise_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        noisy_means(torch.ones(1, 2), T([1]), T([True]), stream(), max_norm=1.0, noise_multiplier=-1.0, unit="sample")


def test_noise_on_any_number_of_vectors() -> None:
    """q = 3, C = 2, z = 0.5: Δ = 2·2·√3 = 6.928203, deviation 3.464102; 60,000 numbers, within 5/√120000."""
    noisy = noisy_vectors(torch.zeros(3, 20_000), stream(), max_norm=2.0, noise_multiplier=0.5)
    assert noisy.std().item() == pytest.approx(3.464102, rel=5 / math.sqrt(120_000))
    assert noisy.std(dim=1).tolist() == pytest.approx([3.464102] * 3, rel=0.025)
    assert noisy.mean().item() == pytest.approx(0, abs=5 * 3.4641 / math.sqrt(60_000))


@given(seed=st.integers(0, 500), count=st.integers(1, 6), norm=st.floats(0.1, 5), scale=st.floats(0.1, 20))
@settings(max_examples=60, deadline=None)
def test_all_vectors_together_move_no_further(seed: int, count: int, norm: float, scale: float) -> None:
    """Whatever stands instead of q vectors: 2·C·√q at most; opposite vectors of norm C and more attain it."""
    vectors = scale * torch.randn(count, 3, generator=stream(seed))
    others = scale * torch.randn(count, 3, generator=stream(seed + 1))

    def released(values: torch.Tensor) -> torch.Tensor:
        return noisy_vectors(values, stream(), max_norm=norm, noise_multiplier=0.0)

    bound = 2 * norm * math.sqrt(count)
    assert (released(vectors) - released(others)).norm().item() <= bound * (1 + 1e-5)
    far = vectors / vectors.norm(dim=1, keepdim=True) * 2 * norm
    assert (released(far) - released(-far)).norm().item() == pytest.approx(bound, rel=1e-5)


CASES = [(1.0, 1, 1e-5), (4.0, 100, 1e-5), (2.0, 10, 1e-3), (20.0, 50, 1e-6)]


@pytest.mark.parametrize(("multiplier", "releases", "delta"), CASES)
def test_account_by_the_formula(multiplier: float, releases: int, delta: float) -> None:
    """Order α: ρ = T·α/(2z²), ε = ρ + ln(1 - 1/α) - ln(δ·α)/(α - 1); the best over all α > 1.

    The account tries fewer orders than the fine grid here, so it may lie above the optimum, by little, never below.
    """
    orders = [1 + math.exp(step / 200) for step in range(-1000, 1400)]
    best = min(releases * a / (2 * multiplier**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)
    spent = privacy_spent(multiplier, releases, delta)
    assert best * (1 - 1e-4) <= spent <= best * 1.02


@pytest.mark.parametrize(("multiplier", "releases", "delta"), CASES)
def test_account_is_valid_and_not_far_from_exact(multiplier: float, releases: int, delta: float) -> None:
    """T Gaussian mechanisms are one with μ = √T/z; exactly δ(ε) = Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ) (Balle, Wang 2018).

    The account's ε must not exceed δ there, while ¾ of it would.
    """
    mu, normal = math.sqrt(releases) / multiplier, NormalDist()

    def exact(epsilon: float) -> float:
        return normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)

    spent = privacy_spent(multiplier, releases, delta)
    assert exact(spent) <= delta < exact(0.75 * spent)


def test_ends_of_the_account() -> None:
    assert privacy_spent(1.0, 0, 1e-5) == 0
    assert privacy_spent(0.0, 0, 1e-5) == 0
    assert privacy_spent(0.0, 1, 1e-5) == math.inf


@pytest.mark.parametrize("arguments", [(-1.0, 1, 1e-5), (1.0, -1, 1e-5), (1.0, 1, 0.0), (1.0, 1, 1.0)])
def test_accounts_that_make_no_sense(arguments: tuple[float, int, float]) -> None:
    with pytest.raises(ValueError, match="account"):
        privacy_spent(*arguments)
