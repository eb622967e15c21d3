"""Server-side generator training against the numbers of fedpa.md 8, fedpg.md 8 and baselines.md 6 and 8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from flcore.files import load_arrays, save_arrays
from flcore.generators import features as gen
from flcore.generators.networks import build_feature_generator, build_image_generator, pure_pass

T = torch.tensor
SIX = {"abs": 1e-6}


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, of, allow_unused=True)


# Schedules


@pytest.mark.parametrize(
    ("t", "ge", "po"),
    [(0, 25, 5), (1, 24.5, 4.9), (10, 20.426820, 4.085364), (100, 3.315489, 0.663098)],
)
def test_weights_of_fedpa(t: int, ge: float, po: float) -> None:
    """fedpa.md fact 2."""
    assert gen.decayed_weight(25, 0.98, t, 1e-4) == pytest.approx(ge, **SIX)
    assert gen.decayed_weight(5, 0.98, t, 0.15) == pytest.approx(po, **SIX)


def test_floor_of_the_pull_starts_at_round_174() -> None:
    """fedpa.md fact 2: 5·0.98^173 = 0.151733, then the floor 0.15; λ_ge at 199 is 0.448672."""
    assert gen.decayed_weight(5, 0.98, 173, 0.15) == pytest.approx(0.151733, **SIX)
    assert gen.decayed_weight(5, 0.98, 174, 0.15) == 0.15
    assert gen.decayed_weight(25, 0.98, 199, 1e-4) == pytest.approx(0.448672, **SIX)


def test_weights_of_fedgen() -> None:
    """baselines.md 6: 10·0.98^r, floor 1e-4, reached when 0.98^r < 1e-5: r > 569.9."""
    assert gen.decayed_weight(10, 0.98, 1, 1e-4) == pytest.approx(9.8)
    assert gen.decayed_weight(10, 0.98, 569, 1e-4) > 1e-4
    assert gen.decayed_weight(10, 0.98, 570, 1e-4) == 1e-4


def test_a_floor_does_not_revive_a_weight_of_zero() -> None:
    assert all(gen.decayed_weight(0, 0.98, t, 0.15) == 0 for t in (0, 1, 500))


@pytest.mark.parametrize(("t", "lr"), [(10, 0.009043821), (100, 0.003660323), (199, 0.001353330)])
def test_client_learning_rate(t: int, lr: float) -> None:
    """fedpa.md fact 2: 0.01·0.99^t."""
    assert gen.exponential_lr(0.01, 0.99, t) == pytest.approx(lr, abs=1e-9)


def test_generator_learning_rate_of_fedpa() -> None:
    """fedpa.md fact 2: 3e-4·0.98^10 = 2.451218e-4."""
    assert gen.exponential_lr(3e-4, 0.98, 10) == pytest.approx(2.451218e-4, abs=1e-10)
    assert gen.exponential_lr(3e-4, 0.98, 0) == 3e-4


def test_generator_learning_rate_of_fedpg() -> None:
    """fedpg.md fact 8: the 300th step uses 2e-5·0.95^14, afterwards 0.95^15; the sum of 300 steps is 0.00429367.

    Sum by hand: 20·2e-5·(1 - 0.95^15)/0.05 = 0.008·(1 - 0.463291) = 0.004293672.
    """
    rates = [gen.step_lr(2e-5, 0.95, 20, step) for step in range(300)]
    assert rates[0] == rates[19] == 2e-5
    assert rates[20] == pytest.approx(1.9e-5)
    assert rates[-1] == pytest.approx(2e-5 * 0.95**14)
    assert gen.step_lr(2e-5, 0.95, 20, 300) == pytest.approx(2e-5 * 0.95**15)
    assert sum(rates) == pytest.approx(0.00429367, abs=1e-8)


# Draws


def test_noise_forms() -> None:
    """20,000 draws: uniform mean 0.5 ± 5·0.2887/√20000 = 0.0102; normal mean 0 ± 0.0354, variance 1 ± 5·√(2/20000)."""
    uniform = gen.draw_noise(2_000, 10, stream())
    normal = gen.draw_noise(2_000, 10, stream(), "normal")
    assert uniform.shape == normal.shape == (2_000, 10)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.0102
    assert abs(normal.mean().item()) < 0.0354
    assert abs(normal.var().item() - 1) < 0.05
    assert torch.equal(uniform, gen.draw_noise(2_000, 10, stream()))
    assert not torch.equal(uniform, gen.draw_noise(2_000, 10, stream(1)))


def test_labels_by_mask_and_by_frequency() -> None:
    """8,000 draws; frequencies within 5·√(p(1-p)/8000) < 0.028."""
    for weights, shares in (
        (T([True, False, True, False]), [0.5, 0, 0.5, 0]),
        (T([30, 0, 10, 0]), [0.75, 0, 0.25, 0]),
        (T([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
    ):
        labels = gen.draw_labels(8_000, weights, stream())
        assert labels.dtype == torch.int64
        found = torch.bincount(labels, minlength=4) / 8_000
        for share, expected in zip(found.tolist(), shares, strict=True):
            assert abs(share - expected) < 0.028 * (expected > 0) + 1e-9
        assert torch.equal(labels, gen.draw_labels(8_000, weights, stream()))


def test_no_labels() -> None:
    """A client without a step to do asks for none."""
    assert gen.draw_labels(0, T([0.5, 0.5]), stream()).tolist() == []


def test_labels_of_nobody() -> None:
    with pytest.raises(ValueError, match="no class"):
        gen.draw_labels(3, torch.zeros(4), stream())


def test_draws_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    gen.draw_noise(3, 2, stream())
    gen.draw_labels(3, torch.ones(2), stream())
    gen.gaussian_virtual_images(2, 2, (1, 8, 8), stream())
    gen.guided_targets(torch.ones(2, 2), T([True, False]), None, stream())
    assert torch.equal(before, torch.random.get_rng_state())


# VHL's virtual images


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28)])
def test_virtual_images(shape: tuple[int, int, int]) -> None:
    """uint8, class-major, 0 and 255 reached once in the whole set; classes differ more than their samples do.

    Before scaling the mean maps have variance 1 and samples 0.25 around them.
    """
    images = gen.gaussian_virtual_images(5, 40, shape, stream())
    assert images.shape == (200, *shape) and images.dtype == torch.uint8
    assert (images.min(), images.max()) == (0, 255)
    by_class = images.view(5, 40, -1).double()
    within, between = by_class.var(dim=1).mean(), by_class.mean(dim=1).var(dim=0).mean()
    # At 8×8 nothing is interpolated: within/between is 0.25 by construction (5 classes: wide), elsewhere similar.
    assert 0.1 < within / between < 0.6


def test_virtual_images_are_scaled_per_set() -> None:
    """Per image or per class every block would reach 0 and 255; per set only two images do (or a few, by rounding)."""
    images = gen.gaussian_virtual_images(6, 30, (1, 8, 8), stream()).flatten(1)
    assert (images.amin(dim=1) == 0).sum() <= 3
    assert (images.amax(dim=1) == 255).sum() <= 3


def test_virtual_images_by_the_formula() -> None:
    """8×8 from 8×8 maps: bilinear enlargement is the identity, so that the set is its maps, scaled and rounded."""
    draws = stream(3)
    means = torch.randn(2, 1, 1, 8, 8, generator=draws)
    maps = (means + 0.5 * torch.randn(2, 3, 1, 8, 8, generator=draws)).reshape(6, 1, 8, 8)
    expected = (maps - maps.min()) / (maps.max() - maps.min()) * 255
    found = gen.gaussian_virtual_images(2, 3, (1, 8, 8), stream(3))
    assert (found.float() - expected).abs().max() <= 0.5 + 1e-4


def test_virtual_sets_are_byte_identical_for_a_seed() -> None:
    """baselines.md 8 (b)."""
    first, second, other = (gen.gaussian_virtual_images(3, 4, (3, 32, 32), stream(seed)) for seed in (7, 7, 8))
    assert first.numpy().tobytes() == second.numpy().tobytes()
    assert not torch.equal(first, other)


# Label statistics and prototypes


def test_label_weights() -> None:
    """fedpa.md fact 5: (9+1)/(10+1+1), (4+1)/(1+5+1) and so on."""
    counts = T([[9, 0], [0, 4], [0, 0]])
    weights = gen.label_weights(counts)
    assert weights[:, 0].tolist() == pytest.approx([0.833333, 0.083333, 0.083333], **SIX)
    assert weights[:, 1].tolist() == pytest.approx([0.142857, 0.714286, 0.142857], **SIX)
    assert gen.qualified_labels(counts).tolist() == [True, True]
    assert gen.qualified_labels(T([[9, 0], [1, 0]])).tolist() == [True, False]


def test_label_weights_without_smoothing() -> None:
    """(3, 1) of class 0, nobody of class 1."""
    assert gen.label_weights(T([[3, 0], [1, 0]]), 0.0).tolist() == [[0.75, 0.0], [0.25, 0.0]]


@given(st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_label_weights_sum_to_one(counts: list[list[int]]) -> None:
    """baselines.md 6 (b): Σ_k ω_kc = 1 for every class present."""
    weights = gen.label_weights(T(counts), 0.0)
    present = gen.qualified_labels(T(counts))
    assert weights.sum(dim=0).tolist() == pytest.approx(present.float().tolist(), abs=1e-5)
    assert gen.label_weights(T(counts)).sum(dim=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_prototypes_by_sample_counts() -> None:
    """fedpa.md fact 3: (30·(1,3) + 10·(4,0))/40 = (1.75, 2.25); unweighted (2.5, 1.5)."""
    means = T([[[1.0, 3.0]], [[4.0, 0.0]]])
    assert gen.weighted_class_means(means, T([[30], [10]]))[0].tolist() == [[1.75, 2.25]]
    assert gen.weighted_class_means(means, T([[True], [True]]))[0].tolist() == [[2.5, 1.5]]


def test_prototypes_over_those_who_have_the_class() -> None:
    """fedpg.md fact 1; what stands in rows of weight 0 is ignored, even NaN."""
    missing = [float("nan")] * 3
    means = T([[[1.0, 0, 2], missing, missing], [[3.0, 2, 0], [5.0, 6, 7], missing]])
    found, present = gen.weighted_class_means(means, T([[1, 0, 0], [1, 1, 0]]))
    assert found.tolist() == [[2, 1, 1], [5, 6, 7], [0, 0, 0]]
    assert present.tolist() == [True, True, False]


# Diversity

H, EPS, Y = T([[0.0, 0], [1, 1], [2, 0]]), T([[0.0, 1], [1, 1], [0, 0]]), T([0, 0, 1])


@pytest.mark.parametrize(
    ("mask", "metric", "expected"),
    [
        ("all", "code", 0.641180),  # exp(-2·(0.5 + 0.5 + 1)/9)
        ("inter", "code", 0.716531),  # exp(-2·(0.5 + 1)/9)
        ("intra", "code", 0.894839),  # exp(-2·0.5/9)
        ("intra", "norms", 0.730322),  # exp(-2·√2·1/9)
    ],
)
def test_diversity_of_fedpa(mask: Any, metric: Any, expected: float) -> None:
    """fedpa.md fact 6."""
    assert gen.diversity_loss(H, EPS, Y, mask, metric).item() == pytest.approx(expected, **SIX)


def test_diversity_of_fedgen() -> None:
    """baselines.md 6 (a): ε (0,0), (0,1), (1,1); code 0.641180; norms exp(-2·(√2·1 + 2·√2 + √2·1)/9) = 0.284484."""
    noise = T([[0.0, 0], [0, 1], [1, 1]])
    assert gen.diversity_loss(H, noise, Y, "all").item() == pytest.approx(0.641180, **SIX)
    assert gen.diversity_loss(H, noise, Y, "all", "norms").item() == pytest.approx(0.284484, **SIX)


@pytest.mark.parametrize("mask", ["intra", "inter", "all"])
@pytest.mark.parametrize("metric", ["code", "norms"])
def test_gradient_of_diversity(mask: Any, metric: Any) -> None:
    """Finite where outputs coincide (norms: root at 0), to the outputs only; a step against it spreads them."""
    outputs = T([[0.0, 0], [0, 0], [2, 0], [2, 1]], requires_grad=True)
    noise = torch.rand(4, 3, generator=stream()).requires_grad_()
    labels = T([0, 0, 1, 1])
    value = gen.diversity_loss(outputs, noise, labels, mask, metric)
    grad, to_noise = gradient(value, outputs, noise)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0
    assert to_noise is None
    moved = gen.diversity_loss(outputs - 0.1 * grad, noise, labels, mask, metric)
    assert moved < value


@given(st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_masks_of_diversity_multiply(seed: int) -> None:
    """Exponents add: all = intra·inter. In (0, 1]; no dependence on the order of the batch."""
    outputs, noise = torch.randn(6, 3, generator=stream(seed)), torch.rand(6, 2, generator=stream(seed + 1))
    labels = torch.randint(3, (6,), generator=stream(seed))
    intra, inter, everything = (gen.diversity_loss(outputs, noise, labels, m) for m in ("intra", "inter", "all"))
    assert 0 < everything <= 1
    assert (intra * inter).item() == pytest.approx(everything.item(), rel=1e-5)
    order = torch.randperm(6, generator=stream(seed))
    shuffled = gen.diversity_loss(outputs[order], noise[order], labels[order], "intra")
    assert shuffled.item() == pytest.approx(intra.item(), rel=1e-5)


# Fidelity

LOSSES, SHARES = T([[0.2, 1.0], [0.5, 0.3]]), T([[0.75, 0.25], [0.25, 0.75]])


def test_fidelity_toy() -> None:
    """fedpa.md fact 4: ½·(0.15 + 0.25 + 0.125 + 0.225) = 0.375 (a further 1/|S| would give 0.1875).

    Broadcast mistake: 0.5·0.6 + 0.5·0.4 = 0.5.
    """
    assert gen.weighted_client_mean(LOSSES, SHARES).item() == pytest.approx(0.375, **SIX)
    assert gen.weighted_client_mean(LOSSES, SHARES, "authors_broadcast").item() == pytest.approx(0.5, **SIX)
    assert gen.weighted_client_mean(LOSSES, SHARES).item() / len(LOSSES) == pytest.approx(0.1875, **SIX)


def test_fidelity_of_fedgen() -> None:
    """baselines.md 6 (b): (0.2·1 + 0.8·3)/2 = 1.3; broadcast 0.5·2 = 1.0."""
    losses, weights = T([[1.0, 3.0]]), T([[0.2, 0.8]])
    assert gen.weighted_client_mean(losses, weights).item() == pytest.approx(1.3)
    assert gen.weighted_client_mean(losses, weights, "authors_broadcast").item() == pytest.approx(1.0)


def test_broadcast_form_is_the_authors_product() -> None:
    """Their (B) loss times (B, 1) weight is a B×B table, of which they take the mean, client by client."""
    losses, weights = torch.rand(3, 5, generator=stream()), torch.rand(3, 5, generator=stream(1))
    table = sum((own * share.unsqueeze(1)).mean() for own, share in zip(losses, weights, strict=True))
    assert gen.weighted_client_mean(losses, weights, "authors_broadcast").item() == pytest.approx(table.item())


def test_fidelity_from_logits() -> None:
    """Two clients, labels (0, 1). Logits chosen so that cross-entropies are -log p with p below.

    Client 0: p = ½, ¼ of the label; client 1: ¾, ½. Weights by class: client 0 (0.9, 0.2), client 1 (0.1, 0.8).
    ½·(0.9·ln 2 + 0.1·ln(4/3) + 0.2·ln 4 + 0.8·ln 2).
    """
    chances = T([[[0.5, 0.5], [0.75, 0.25]], [[0.75, 0.25], [0.5, 0.5]]])
    weights = T([[0.9, 0.2], [0.1, 0.8]])
    expected = 0.5 * (0.9 * math.log(2) + 0.1 * math.log(4 / 3) + 0.2 * math.log(4) + 0.8 * math.log(2))
    assert gen.fidelity_loss(chances.log(), T([0, 1]), weights).item() == pytest.approx(expected, **SIX)


def test_fidelity_teaches_the_generator_alone() -> None:
    """fedpa.md fact 12: L_fid has zero gradient to all client models."""
    features = torch.randn(4, 3, generator=stream()).requires_grad_()
    weight, bias = torch.randn(2, 5, 3, generator=stream()).requires_grad_(), torch.zeros(2, 5, requires_grad=True)
    logits = gen.frozen_head_logits(features, weight, bias)
    assert torch.allclose(logits[1], F.linear(features, weight[1], bias[1]), atol=1e-6)
    loss = gen.fidelity_loss(logits, T([0, 1, 2, 4]), gen.label_weights(torch.ones(2, 5)))
    to_features, *to_heads = gradient(loss, features, weight, bias)
    assert to_features.abs().sum() > 0
    assert to_heads == [None, None]


def test_equal_heads_make_plain_cross_entropy() -> None:
    """Weights sum to 1 over clients: S copies of a head give the loss of one, in either form when weights are equal."""
    logits, labels = torch.randn(6, 4, generator=stream()), T([0, 1, 2, 3, 0, 1])
    stack = logits.expand(3, -1, -1)
    weights = gen.label_weights(torch.randint(9, (3, 4), generator=stream()))
    plain = F.cross_entropy(logits, labels).item()
    assert gen.fidelity_loss(stack, labels, weights).item() == pytest.approx(plain, rel=1e-5)
    even = torch.full((3, 4), 1 / 3)
    assert gen.fidelity_loss(stack, labels, even, "authors_broadcast").item() == pytest.approx(plain, rel=1e-5)


# Pull and push

FEATURES, PHI, ALL = T([[3.0, 4.0], [0.0, 0.0]]), T([[0.0, 0.0], [0.0, 2.0]]), T([True, True])


def test_pull_toy() -> None:
    """fedpa.md fact 7: norms 5 and 2, mean 3.5; squares 25 and 4: mean 14.5, over d = 2 as well 7.25."""
    labels = T([0, 1])
    assert gen.prototype_pull(FEATURES, labels, PHI, ALL).item() == pytest.approx(7.25)
    assert gen.prototype_pull(FEATURES, labels, PHI, ALL, "l2").item() == pytest.approx(3.5)
    assert gen.prototype_pull(FEATURES, labels, PHI, ALL).item() * 2 == pytest.approx(14.5)


@pytest.mark.parametrize("form", ["mse", "l2"])
def test_a_missing_prototype_pulls_nowhere(form: Any) -> None:
    """fedpa.md fact 8: (1 + 4)/2 = 2.5 against a zero row, 0 when masked; no gradient, even with NaN in the row."""
    feature = T([[1.0, 2.0]], requires_grad=True)
    assert gen.prototype_pull(feature, T([0]), torch.zeros(1, 2), T([True])).item() == pytest.approx(2.5)
    value = gen.prototype_pull(feature, T([0]), torch.full((1, 2), float("nan")), T([False]), form)
    assert value.item() == 0
    assert gradient(value, feature)[0].tolist() == [[0.0, 0.0]]


def test_masked_samples_stay_in_the_mean() -> None:
    """Distances 12.5 and (masked) 2 over B = 2: 6.25; norms 5 and masked: 2.5."""
    present = T([True, False])
    assert gen.prototype_pull(FEATURES, T([0, 1]), PHI, present).item() == pytest.approx(6.25)
    assert gen.prototype_pull(FEATURES, T([0, 1]), PHI, present, "l2").item() == pytest.approx(2.5)


def test_gradients_of_the_pull() -> None:
    """fedpa.md 7d: per sample of norm 1 (l2) against 2‖h - φ‖/d (MSE), over B = 2; nothing to φ; 0 at distance 0."""
    for form, norms in (("mse", [2 * 5 / 2 / 2, 0.0]), ("l2", [1 / 2, 0.0])):
        features, phi = FEATURES.clone().requires_grad_(), torch.zeros(2, 2, requires_grad=True)
        grad, to_phi = gradient(gen.prototype_pull(features, T([0, 1]), phi, ALL, form), features, phi)
        assert grad.norm(dim=1).tolist() == pytest.approx(norms)
        assert to_phi is None


def test_pull_teaches_the_extractor_alone() -> None:
    """fedpa.md fact 12: L_po has zero gradient to the classifier Φ."""
    extractor, head = nn.Linear(3, 2), nn.Linear(2, 2)
    features = extractor(torch.ones(2, 3))
    head(features)
    value = gen.prototype_pull(features, T([0, 1]), PHI, ALL)
    own, other = gradient(value, extractor.weight, head.weight)
    assert own.abs().sum() > 0 and other is None


def test_cap() -> None:
    """Per-sample MSE 12.5 and 2, cap 5: (5 + 2)/2 = 3.5; the first sample has no gradient, the second (0,-2)/2."""
    features = FEATURES.clone().requires_grad_()
    value = gen.prototype_pull(features, T([0, 1]), PHI, ALL, cap=5.0)
    assert value.item() == pytest.approx(3.5)
    assert gradient(value, features)[0].tolist() == [[0.0, 0.0], [0.0, -1.0]]
    assert gen.prototype_pull(FEATURES, T([0, 1]), PHI, ALL, cap=20.0).item() == pytest.approx(7.25)


def test_padding_is_not_pulled() -> None:
    """Weights (1, 0): 12.5 alone."""
    assert gen.prototype_pull(FEATURES, T([0, 1]), PHI, ALL, weight=T([1.0, 0.0])).item() == pytest.approx(12.5)


def test_client_and_generator_sums_of_fedpa() -> None:
    """fedpa.md fact 9 at t = 1: 0.4 + 24.5·0.2 + 4.9·0.1 = 5.79; 24.5·0.375 + 0.716531 - 0.15·7.25 = 8.816531."""
    ge, po, fid = (gen.decayed_weight(w, 0.98, 1, f) for w, f in ((25, 1e-4), (5, 0.15), (25, 1e-4)))
    assert 0.4 + ge * 0.2 + po * 0.1 == pytest.approx(5.79)
    fidelity = gen.weighted_client_mean(LOSSES, SHARES)
    diversity = gen.diversity_loss(H, EPS, Y, "inter")
    adversarial = gen.prototype_pull(FEATURES, T([0, 1]), PHI, ALL)
    assert (fid * fidelity + diversity - 0.15 * adversarial).item() == pytest.approx(8.816531, abs=2e-6)


# FedGen's teacher


def test_teacher_divergence() -> None:
    """Teacher (¾, ¼), model (½, ½): ¾·ln 1.5 + ¼·ln 0.5 = 0.130812; second sample equal: 0. Mean 0.065406."""
    teacher = T([[0.75, 0.25], [0.75, 0.25]]).log().requires_grad_()
    logits = T([[0.0, 0.0], [math.log(3), 0.0]], requires_grad=True)
    value = gen.teacher_divergence(logits, teacher)
    assert value.item() == pytest.approx(0.5 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), **SIX)
    to_model, to_teacher = gradient(value, logits, teacher)
    # softmax minus target over B = 2: (½ - ¾)/2 = -⅛
    assert to_model[0].tolist() == pytest.approx([-0.125, 0.125])
    assert to_model[1].tolist() == pytest.approx([0, 0], abs=1e-7)
    assert to_teacher is None
    assert gen.teacher_divergence(logits, teacher, T([1.0, 0.0])).item() == pytest.approx(2 * value.item())


def test_one_hot_teachers_give_finite_gradients() -> None:
    """A teacher's probability that underflows to 0 contributes 0·log 0 = 0; its divergence is the cross-entropy."""
    logits = torch.zeros(1, 3, requires_grad=True)
    value = gen.teacher_divergence(logits, T([[500.0, 0.0, -500.0]]))
    assert value.item() == pytest.approx(math.log(3), **SIX)
    assert torch.isfinite(gradient(value, logits)[0]).all()


# FedPG

Z, TARGETS = T([[1.0, 0.0]]), T([[0.0, 0.0], [2.0, 1.0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.126928),  # ln(1 + e^(-2·(2 - 1)))
        ({"scale": 0.5}, 0.474077),  # ln(1 + e^(-½))
        ({"scale": 0.5, "distance": "l2"}, 0.594946),  # ln(1 + e^(-(√2 - 1)/2))
        ({"scale": 0.5, "distance": "l2", "denominator": "negatives"}, -0.207107),  # (1 - √2)/2
        ({"denominator": "negatives"}, -2.0),  # 2·1 - 2·2
    ],
)
def test_dce_toy(options: Any, expected: float) -> None:
    """fedpg.md fact 2: squared distances 1 and 2."""
    assert gen.squared_distances(Z, TARGETS).tolist() == [[1.0, 2.0]]
    assert gen.dce_loss(Z, T([0]), TARGETS, **options).item() == pytest.approx(expected, **SIX)


def test_printed_equation_8_is_unbounded() -> None:
    """fedpg.md fact 2: z = P'_0 = (0,0), P'_1 = (10,0): literal -2·100 = -200, the softmax about 0."""
    z, targets = torch.zeros(1, 2), T([[0.0, 0.0], [10.0, 0.0]])
    assert gen.dce_loss(z, T([0]), targets, denominator="negatives").item() == pytest.approx(-200)
    assert gen.dce_loss(z, T([0]), targets).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("distance", ["squared", "l2"])
@pytest.mark.parametrize("denominator", ["all", "negatives"])
def test_dce_gradients_are_finite_on_a_target(distance: Any, denominator: Any) -> None:
    z, targets = T([[0.0, 0.0], [2.0, 0.9]], requires_grad=True), TARGETS.clone().requires_grad_()
    for grad in gradient(gen.dce_loss(z, T([0, 1]), targets, distance=distance, denominator=denominator), z, targets):
        assert torch.isfinite(grad).all() and grad.abs().sum() > 0


def test_prototype_loss_toy() -> None:
    """fedpg.md fact 3: ‖(1,0)‖² = 1, ‖(0,2)‖² = 4, mean 2.5, times 0.001."""
    loss = gen.prototype_loss(T([[1.0, 0], [2, 3]]), T([0, 1]), TARGETS)
    assert loss.item() == pytest.approx(2.5)
    assert 0.001 * loss.item() == pytest.approx(0.0025)


P_VIRTUAL, P_GLOBAL = T([[1.0, 0], [0, 1], [3, 3]]), T([[1.0, 1], [0, 2], [float("nan")] * 2])
PRESENT = T([True, True, False])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.346741),  # (ln(1 + e^-8) + ln 2)/2: squared distances (1, 5) and (1, 1)
        ({"reduction": "sum"}, 0.693483),
        ({"form": "zero_rows"}, 0.895964),  # (ln(2 + e^-8) + ln 3)/2: the zero row stands 1 from both
        ({"form": "l2"}, 1.0),  # (1 + 1)/2
        ({"form": "l2", "reduction": "sum"}, 2.0),
    ],
)
def test_match_toy(options: Any, expected: float) -> None:
    """fedpg.md fact 4."""
    assert gen.prototype_match(P_VIRTUAL, P_GLOBAL, PRESENT, **options).item() == pytest.approx(expected, **SIX)


@pytest.mark.parametrize("form", ["softmax", "zero_rows", "l2"])
def test_gradient_of_the_match(form: Any) -> None:
    """To the targets of present classes only; finite and zero with no class present."""
    targets, prototypes = P_VIRTUAL.clone().requires_grad_(), P_GLOBAL.clone().requires_grad_()
    grad, to_prototypes = gradient(gen.prototype_match(targets, prototypes, PRESENT, form=form), targets, prototypes)
    assert torch.isfinite(grad).all() and grad[:2].abs().sum() > 0
    assert grad[2].tolist() == [0, 0] and to_prototypes is None
    nobody = gen.prototype_match(targets, prototypes, torch.zeros(3, dtype=torch.bool), form=form)
    assert nobody.item() == 0
    assert gradient(nobody, targets)[0].abs().sum() == 0


def test_the_softmax_match_saturates_and_l2_does_not() -> None:
    """fedpg.md 7c: at squared distances of 100 between classes value and gradient of the softmax form are 0."""
    prototypes = T([[0.0, 0.0], [10.0, 0.0]])
    targets = (prototypes + T([0.0, 1.0])).requires_grad_()
    softmax = gen.prototype_match(targets, prototypes, ALL)
    assert softmax.item() == 0 and gradient(softmax, targets)[0].abs().sum() == 0
    assert gradient(gen.prototype_match(targets, prototypes, ALL, form="l2"), targets)[0].tolist() == [[0, 1], [0, 1]]


def test_generator_sum_of_fedpg() -> None:
    """fedpg.md fact 7: 0.126928 + 0.001·1 + 0.346741 = 0.474669."""
    total = (
        gen.dce_loss(Z, T([0]), TARGETS)
        + 0.001 * gen.prototype_loss(Z, T([0]), TARGETS)
        + gen.prototype_match(P_VIRTUAL, P_GLOBAL, PRESENT)
    )
    assert total.item() == pytest.approx(0.474669, abs=2e-6)


def test_random_targets_stand_far_apart() -> None:
    """fedpg.md fact 9: E‖P'_a - P'_b‖² = 2d = 1024 at d = 512.

    Each pair has variance 8d, pairs are dependent; over 100 rows the mean is 2d·(sample variance of the coordinates),
    with relative deviation about √(2/(512·99)) = 0.0063: within 5 of those, 32.
    """
    targets = gen.random_targets(100, 512, stream())
    pairs = gen.squared_distances(targets, targets).sum() / (100 * 99)
    assert abs(pairs.item() - 1024) < 33


def test_guided_targets() -> None:
    """Bit for bit P where present (fedpg.md fact 12); norms 3 and 5: other rows drawn at norm 4, or last round's."""
    prototypes = T([[0.1, 2.998332], [float("nan")] * 2, [3.0, 4.0]])
    prototypes[0] *= 3 / prototypes[0].norm()
    present = T([True, False, True])
    first = gen.guided_targets(prototypes, present, None, stream())
    assert torch.equal(first[present], prototypes[present])
    assert first[1].norm().item() == pytest.approx(4, abs=1e-5)
    later = gen.guided_targets(prototypes, present, torch.full((3, 2), 7.0), stream())
    assert torch.equal(later[present], prototypes[present])
    assert later[1].tolist() == [7.0, 7.0]


def test_guided_targets_with_nothing_to_guide() -> None:
    nobody = torch.zeros(4, dtype=torch.bool)
    found = gen.guided_targets(torch.zeros(4, 3), nobody, None, stream(5))
    assert torch.equal(found, gen.random_targets(4, 3, stream(5)))


def test_nearest_prototype_accuracy() -> None:
    """Classes 0, 2 present at 0 and 10; class 1 (at 5) is missing, so 5.5 goes to 10 and a sample of class 1 is out.

    Samples (1, y0) right, (5.5, y0) wrong, (9, y2) right, (5, y1) not counted: 2/3.
    """
    prototypes, present = T([[0.0], [5.0], [10.0]]), T([True, False, True])
    features, labels = T([[1.0], [5.5], [9.0], [5.0]]), T([0, 0, 2, 1])
    assert gen.nearest_prototype_accuracy(features, labels, prototypes, present).item() == pytest.approx(2 / 3)
    nobody = torch.zeros(3, dtype=torch.bool)
    assert gen.nearest_prototype_accuracy(features, labels, prototypes, nobody).item() == 0


# Losses of clients run for many clients at once


def test_client_losses_under_vmap() -> None:
    """Pull and teacher: values and gradients of three clients at once are those of one by one."""
    features, logits = torch.randn(3, 4, 2, generator=stream()), torch.randn(3, 4, 2, generator=stream(1))
    labels = torch.randint(2, (3, 4), generator=stream())
    weight = T([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    present = T([True, False])
    for loss in (
        lambda f, g, y, w: gen.prototype_pull(f, y, PHI, present, weight=w),
        lambda f, g, y, w: gen.prototype_pull(f, y, PHI, present, "l2", cap=1.0, weight=w),
        lambda f, g, y, w: gen.teacher_divergence(f, g, w),
    ):
        together = torch.vmap(torch.func.grad_and_value(loss))(features, logits, labels, weight)
        for client in range(3):
            alone = torch.func.grad_and_value(loss)(features[client], logits[client], labels[client], weight[client])
            for both, one in zip(together, alone, strict=True):
                assert torch.allclose(both[client], one, atol=1e-6)
                assert torch.isfinite(one).all()


# Adam


@pytest.mark.parametrize("options", [{}, {"weight_decay": 1e-2}, {"betas": (0.5, 0.999)}])
@pytest.mark.parametrize("stored", [False, True])
def test_adam_is_torch_adam(options: Any, stored: bool, tmp_path: Any) -> None:
    """20 steps on a generator with a changing learning rate, in two halves; between them the state goes to a file."""
    generator = build_feature_generator(4, 5, noise_dim=3, hidden=7)
    params = {name: p.detach().clone() for name, p in generator.named_parameters()}
    start = {name: p.clone() for name, p in params.items()}
    reference = torch.optim.Adam(generator.parameters(), **options)
    state, draws = gen.AdamState.fresh(params), stream()
    for step in range(20):
        lr = gen.exponential_lr(1e-2, 0.98, step)
        if step == 10 and stored:
            save_arrays(tmp_path / "state", state.arrays(), {})
            state = gen.AdamState.from_arrays(load_arrays(tmp_path / "state")[0])
        grads = {name: torch.randn(p.shape, generator=draws) for name, p in params.items()}
        for name, p in generator.named_parameters():
            p.grad = grads[name].clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        params, state = gen.adam_step(params, grads, state, lr, **options)
    for name, p in generator.named_parameters():
        assert (params[name] - p).abs().max() <= 1e-7
        assert (params[name] - start[name]).abs().max() > 1e-2
    assert state.steps == 20


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.999)])
def test_the_fused_adam_is_the_pure_one(betas: tuple[float, float]) -> None:
    """20 steps with a falling learning rate; what it is given moves, in place."""
    draws = stream()
    params = {name: torch.randn(shape, generator=draws) for name, shape in (("w", (5, 3)), ("b", (3,)))}
    own = [param.clone().requires_grad_() for param in params.values()]
    fused, state = gen.FusedAdam(own, betas), gen.AdamState.fresh(params)
    for step in range(20):
        lr = gen.exponential_lr(1e-2, 0.9, step)
        grads = {name: torch.randn(param.shape, generator=draws) for name, param in params.items()}
        fused.step(list(grads.values()), lr)
        params, state = gen.adam_step(params, grads, state, lr, betas=betas)
    for found, expected in zip(own, params.values(), strict=True):
        assert float((found.detach() - expected).abs().max()) <= 1e-6


def test_a_fresh_adam_can_be_stored(tmp_path: Any) -> None:
    fresh = gen.AdamState.fresh({"w": T([1.0, 2.0])})
    save_arrays(tmp_path / "state", fresh.arrays(), {})
    found = gen.AdamState.from_arrays(load_arrays(tmp_path / "state")[0])
    assert (found.steps, found.first["w"].tolist(), found.second["w"].tolist()) == (0, [0, 0], [0, 0])


def test_adam_by_hand() -> None:
    """First step: m̂ = g, v̂ = g², so w moves by lr·g/(|g| + 1e-8). Weight decay 0.5 at w = 4 turns -2 into 0."""
    params, grads = {"w": T([1.0, 4.0])}, {"w": T([3.0, -2.0])}
    moved, state = gen.adam_step(params, grads, gen.AdamState.fresh(params), 0.1)
    assert moved["w"].tolist() == pytest.approx([0.9, 4.1])
    assert state.first["w"].tolist() == pytest.approx([0.3, -0.2])
    assert state.second["w"].tolist() == pytest.approx([0.009, 0.004])
    decayed, _ = gen.adam_step(params, grads, gen.AdamState.fresh(params), 0.1, weight_decay=0.5)
    assert decayed["w"].tolist() == pytest.approx([0.9, 4.0])


def test_adam_leaves_its_arguments_alone() -> None:
    params, grads = {"w": T([1.0], requires_grad=True)}, {"w": T([3.0])}
    before = gen.AdamState.fresh(params)
    first, state = gen.adam_step(params, grads, before, 0.1, weight_decay=0.1)
    again, _ = gen.adam_step(params, grads, before, 0.1, weight_decay=0.1)
    assert torch.equal(first["w"], again["w"]) and not first["w"].requires_grad
    assert params["w"].item() == 1 and grads["w"].item() == 3
    assert before.steps == 0 and before.first["w"].item() == 0
    assert set(state.arrays()) == {"steps", "first/w", "second/w"}


# All of it together


def test_generated_images_reach_the_prototypes() -> None:
    """fedpg.md fact 14: 100 steps of batch 128 at 1e-3 give nearest-prototype accuracy ≥ 0.95, none leave chance.

    Extractor: digits, one hidden layer, trained centrally for 60 steps; prototypes of 8 of 10 classes. The frozen
    network and P' stay bit-identical (fact 12). Adam moves no weight further than the sum of its learning rates, times
    a ratio near 1 (section 7c); a wide bound of 3 is asserted.
    """
    images, labels = load_digits(return_X_y=True)
    real, digits = T(images, dtype=torch.float32) / 8 - 1, T(labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        extractor, head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    optimizer = torch.optim.SGD([*extractor.parameters(), *head.parameters()], lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(head(extractor(real)), digits).backward()
        optimizer.step()
    extractor.requires_grad_(False)
    frozen = [p.clone() for p in extractor.parameters()]
    present = torch.arange(10) < 8
    means = torch.stack([extractor(real[digits == c]).mean(dim=0) for c in range(10)])
    prototypes = torch.where(present.unsqueeze(1), means, 0.0)
    draws = stream(1)
    targets = gen.guided_targets(prototypes, present, None, draws)

    generator = build_image_generator("fc", 10, (1, 8, 8), noise_dim=64)
    params = {name: p.detach().clone() for name, p in generator.named_parameters()}
    buffers = {name: b.clone() for name, b in generator.named_buffers()}
    start = params

    def accuracy() -> float:
        asked = torch.arange(8).repeat_interleave(16)
        noise = gen.draw_noise(len(asked), 64, stream(2))
        made, _ = pure_pass(generator.eval(), params, buffers, noise, asked)
        features = extractor(made.detach().flatten(1))
        return gen.nearest_prototype_accuracy(features, asked, prototypes, present).item()

    # One grey image for all: one prototype wins for every label, 1/8 (a few samples may go to a second one).
    assert accuracy() < 0.3
    state, moved = gen.AdamState.fresh(params), 0.0
    generator.train()
    for step in range(100):
        lr = gen.step_lr(1e-3, 0.95, 20, step)
        asked = gen.draw_labels(128, torch.ones(10), draws)
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        made, buffers = pure_pass(generator, leaves, buffers, gen.draw_noise(128, 64, draws), asked)
        features = extractor(made.flatten(1))
        loss = gen.dce_loss(features, asked, targets) + 0.001 * gen.prototype_loss(features, asked, targets)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        params, state = gen.adam_step(leaves, grads, state, lr, betas=(0.5, 0.999))
        moved += lr
    assert accuracy() >= 0.95
    assert torch.equal(targets[:8], prototypes[:8])
    assert all(torch.equal(p, kept) for p, kept in zip(extractor.parameters(), frozen, strict=True))
    assert max((params[name] - start[name]).abs().max().item() for name in params) < 3 * moved
