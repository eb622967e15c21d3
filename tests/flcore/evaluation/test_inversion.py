"""Prototype inversion: what is attacked, how it is scored, likeness of images (evaluation.md 5.3; Wang et al. 2004)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flcore.analyses import inversion as module
from flcore.analyses.base import FinishedRun
from flcore.analyses.inversion import (
    BASELINE,
    Decoder,
    group_means,
    psnr,
    search_images,
    squared_errors,
    ssim,
    train_decoder,
)
from flcore.io.messages import Weights
from flcore.io.records import Record

FEATURES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_a_prototype_of_one_sample_is_its_feature() -> None:
    for size, rows, mean in group_means(FEATURES, (1,), 3, np.random.default_rng(0)):
        assert size == 1 and torch.equal(mean, FEATURES[int(rows)])


def test_means_are_of_distinct_samples_and_sets() -> None:
    """Six features: sets of 2 exist in plenty; of 6 there is one; of 10 none."""
    found = group_means(FEATURES, (2, 6, 10), 4, np.random.default_rng(1))
    assert [size for size, _, _ in found] == [2, 2, 2, 2, 6]
    for size, rows, mean in found:
        assert len(set(rows.tolist())) == size
        torch.testing.assert_close(mean, FEATURES[rows].sum(0) / size)
    assert len({tuple(rows.tolist()) for _, rows, _ in found}) == 5


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 48), (1, 3, 5)])
def test_the_decoder_makes_images_of_every_size(shape: tuple[int, int, int]) -> None:
    with torch.no_grad():
        images = Decoder(7, shape).eval()(torch.randn(2, 7, generator=torch.Generator().manual_seed(0)))
    assert images.shape == (2, *shape)
    assert float(images.min()) >= 0 and float(images.max()) <= 1


@pytest.mark.slow
def test_the_decoder_learns_to_tell_images_apart() -> None:
    """Feature +1: a white image, -1: a black one; a constant answer has an error of at least 0.25.

    The second dimension never varies, and must not divide by zero.
    """
    images = torch.zeros(20, 1, 8, 8)
    images[::2] = 1
    features = torch.stack([2 * images.mean(dim=(1, 2, 3)) - 1, torch.full((20,), 3.0)], dim=1)
    rebuild = train_decoder(features, images, steps=30, batch_size=16, lr=0.01)
    rebuilt = rebuild(features)
    assert float((rebuilt - images).square().mean()) < 0.02
    again = train_decoder(features, images, steps=30, batch_size=16, lr=0.01)(features)
    assert torch.equal(rebuilt, again) and not rebuilt.requires_grad
    other = train_decoder(features, images, steps=30, batch_size=16, lr=0.01, seed=1)(features)
    assert not torch.equal(rebuilt, other)


def test_the_search_finds_the_image_behind_an_invertible_encoder() -> None:
    """The feature is the image itself times 4: nothing is lost, so the image is found, whichever others there are."""
    truths = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(2))

    def encode(images: Tensor) -> Tensor:
        return 4 * images.flatten(1)

    found = search_images(encode, encode(truths), (1, 4, 4), steps=200, lr=0.02, smoothness=0.0)
    assert float((found - truths).abs().max()) < 0.01
    alone = search_images(encode, encode(truths[1:2]), (1, 4, 4), steps=200, lr=0.02, smoothness=0.0)
    torch.testing.assert_close(found[1:2], alone)


def federation(lab: Any) -> tuple[Any, dict[str, Weights]]:
    """Two classes of 1×2 images; the model says which pixel is brighter.

    Training: class 0 (10, 0), (20, 0), (30, 0) at client 0 and (50, 0) at client 1; class 1 (0, 40) at client 1. Test:
    (40, 0) and (60, 0) of class 0, (0, 40) of class 1.
    """
    dataset = lab.toy_dataset(
        [[10, 0], [20, 0], [30, 0], [50, 0], [0, 40]], [0, 0, 0, 0, 1], [[40, 0], [60, 0], [0, 40]], [0, 0, 1]
    )
    partition = lab.by_hand(dataset, [[0, 1, 2], [3, 4]], [[0, 1], [2]])
    experiment = lab.experiment(dataset, partition, lab.ToySpec())
    return experiment, {"model": Weights({"head.weight": torch.eye(2), "head.bias": torch.zeros(2)})}


def test_scores_of_an_attack_that_hands_the_feature_back(lab: Any) -> None:
    """The toy's features are its pixels (0 to 255), so feature/255 is the mean image itself.

    m = 1 against the true image: error 0. The guess is the class's mean test image: (50, 0) and (0, 40).

    Class 0, all three images of client 0: their mean is (20, 0), which is one of them: closest 0, mean 0. The guess's
    closest is (30, 0), 20 off in one of two pixels: 200/255². Against the mean image it is 30 off: 450/255². Class 1's
    only image is the guess itself: 0. Means over both: 100/255², 225/255². ``fewest``: (50, 0) alone: guess exact.
    """
    experiment, server = federation(lab)

    def attack(run: FinishedRun, model: Weights, wanted: Tensor) -> Tensor:
        return (wanted / 255).reshape(-1, 1, 1, 2)

    result = module._attacked(FinishedRun(experiment, Record(server), lambda k: Record()), "oracle", attack)
    rows = {(row["attack"], row["m"], row["against"]): row for row in result.rows}
    assert {key[1] for key in rows} == {"1", "2", "3", "all", "fewest"}
    assert rows["oracle", "1", "closest"]["mse"] == pytest.approx(0.0, abs=1e-12)
    assert rows["oracle", "all", "closest"]["mse"] == pytest.approx(0.0, abs=1e-12)
    assert rows["oracle", "all", "class mean"]["mse"] == pytest.approx(0.0, abs=1e-12)
    assert rows["oracle", "all", "closest"]["n"] == 2
    unit = 1 / 255**2
    assert rows[BASELINE, "all", "closest"]["mse"] == pytest.approx(100 * unit)
    assert rows[BASELINE, "all", "class mean"]["mse"] == pytest.approx(225 * unit)
    assert rows[BASELINE, "fewest", "closest"]["mse"] == pytest.approx(0.0, abs=1e-12)
    assert all(row["accuracy"] == 1.0 for row in result.rows)
    # The sheet: classes that have a mean of every m, here class 0 alone (class 1 has one image).
    assert result.arrays["labels"].tolist() == [0]
    assert result.arrays["guesses"].reshape(-1).tolist() == [50, 0]
    assert result.arrays["rebuilt"].shape == (1, 5, 1, 1, 2)
    assert result.arrays["truths"].dtype == np.uint8


def test_a_run_is_attacked_both_ways(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few steps: the tables are complete and the auxiliary images are those of the test split."""
    experiment = lab.experiment(dataset=lab.dataset)
    server = experiment.method.start_server(experiment.setting)
    seen = []

    def short(features: Tensor, images: Tensor, *, seed: int) -> Any:
        seen.append(images)
        return train_decoder(features, images, steps=3, batch_size=8, seed=seed)

    monkeypatch.setattr(module, "train_decoder", short)
    monkeypatch.setattr(module, "search_images", lambda *arguments: search_images(*arguments, steps=3))
    for compute, name in ((module.inversion, "decoder"), (module.inversion_search, "search")):
        result = compute(FinishedRun(experiment, Record(server), lambda k: Record()))
        assert {row["attack"] for row in result.rows} == {name, BASELINE}
        assert {row["m"] for row in result.rows} >= {"1", "2", "all", "fewest"}
        assert all(0 <= float(row["mse"] or 0) <= 1 for row in result.rows)
    assert torch.equal(seen[0], lab.dataset.test.images.float() / 255)


# Likeness of images (evaluation.md section 5.3; Wang et al. 2004).

NOISE = torch.rand(3, 2, 16, 20, generator=torch.Generator().manual_seed(0))


def test_psnr_of_a_hundredth_is_twenty_decibels() -> None:
    assert psnr(0.01) == pytest.approx(20.0)
    assert psnr(1.0) == 0.0
    assert psnr(0.0) == math.inf


def test_squared_errors_are_means_over_an_image() -> None:
    """Two pixels off by 0.2 and 0.4, two right: (0.04 + 0.16)/4 = 0.05; the second image is right."""
    truth = torch.zeros(2, 1, 2, 2)
    shown = truth.clone()
    shown[0, 0, 0] = torch.tensor([0.2, -0.4])
    assert squared_errors(shown, truth).tolist() == pytest.approx([0.05, 0.0])


def test_ssim_of_an_image_and_itself_is_one() -> None:
    assert ssim(NOISE, NOISE).tolist() == pytest.approx([1.0] * 3, abs=1e-12)


def test_ssim_of_flat_images_compares_their_brightness() -> None:
    """No variance: (2ab + C1)/(a² + b² + C1), a = 0.5, b = 0.25, C1 = 1e-4: 0.2501/0.3126."""
    flat = torch.full((1, 1, 11, 11), 0.5)
    assert float(ssim(flat, flat / 2)) == pytest.approx(0.2501 / 0.3126)


def test_ssim_of_one_window_by_hand() -> None:
    """A 1×1 window (images of one pixel) has no variance; an 11×11 image is one window of Gaussian weights.

    Left half 1, right half (and middle column) 0 against its mirror image: with w the weight of five columns on one
    side, means w and w, variances w(1 - w), covariance 0 - w². SSIM = (2w² + C1)/(2w² + C1) ·
    (C2 - 2w²)/(2w(1 - w) + C2).
    """
    image = torch.zeros(1, 1, 11, 11)
    image[..., :5] = 1
    weights = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    w = sum(weights[:5]) / sum(weights)
    expected = (9e-4 - 2 * w * w) / (2 * w * (1 - w) + 9e-4)
    assert float(ssim(image, image.flip(-1))) == pytest.approx(expected)
    assert expected < -0.5


@pytest.mark.parametrize(("height", "width"), [(8, 8), (1, 5), (3, 12)])
def test_small_images_have_a_ssim(height: int, width: int) -> None:
    image = NOISE[:, :, :height, :width]
    assert ssim(image, image).tolist() == pytest.approx([1.0] * 3)
    assert (ssim(image, 1 - image) < 0.9).all()
