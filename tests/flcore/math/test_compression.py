"""Few bits per value: steps by hand, packing, rounding without bias (baselines.md section 24)."""

from __future__ import annotations

import math

import pytest
import torch

from flcore.math.compression import quantised, quantised_all, restored, restored_all


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_values_on_a_step_stay() -> None:
    """4 bits: 15 steps of 1/7 of the largest size, 7 on either side; codes count from the lowest, two in a byte."""
    values = torch.tensor([7.0, -7.0, 0.0, 3.0])
    codes, largest = quantised(values, 4, stream())
    assert largest.tolist() == [7]
    assert codes.tolist() == [14 | 0 << 4, 7 | 10 << 4]
    assert restored(codes, largest, 4, (4,)).tolist() == values.tolist()


@pytest.mark.parametrize(("bits", "count", "size"), [(8, 5, 5), (4, 5, 3), (2, 5, 2), (2, 8, 2), (4, 0, 0)])
def test_bytes_and_errors(bits: int, count: int, size: int) -> None:
    """n·bits/8 bytes, rounded up; nothing is off by more than a step of the largest size over 2^(bits - 1) - 1."""
    values = torch.randn(count, generator=stream(1))
    codes, largest = quantised(values, bits, stream(2))
    assert (codes.dtype, codes.numel()) == (torch.uint8, size)
    step = float(largest) / (2 ** (bits - 1) - 1)
    assert all(abs(float(error)) <= step * (1 + 1e-5) for error in restored(codes, largest, bits, (count,)) - values)


def test_the_mean_is_right() -> None:
    """0.3 of a step is rounded up in three of ten cases: the mean over 20,000 is off by less than four deviations."""
    values = torch.full((20_000,), 0.3)
    values[0] = 1.0  # the largest: with 2 bits the steps are -1, 0 and 1
    found = restored(*quantised(values, 2, stream(3)), 2, values.shape)
    assert set(found.tolist()) == {0.0, 1.0}
    assert abs(float(found[1:].mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)


def test_tensors_by_name_have_scales_of_their_own() -> None:
    values = {"small": torch.tensor([[1e-3, -1e-3]]), "large": torch.tensor([100.0]), "none": torch.zeros(3)}
    sent = quantised_all(values, 8, stream())
    assert sorted(sent) == sorted(f"{name}/{part}" for name in values for part in ("codes", "largest"))
    found = restored_all(sent, values, 8)
    for name, value in values.items():
        torch.testing.assert_close(found[name], value)
