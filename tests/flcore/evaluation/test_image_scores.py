"""Likeness of images (evaluation.md section 5.3; Wang et al. 2004)."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.analyses.inversion import psnr, squared_errors, ssim

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
