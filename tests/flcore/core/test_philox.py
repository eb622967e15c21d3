"""Random words by counter: published answers, two implementations, permutations and uniform numbers."""

from __future__ import annotations

import math
from itertools import permutations as all_orders

import numpy as np
import pytest
import torch

from flcore.core import philox

ONES = 2**64 - 1


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ([ONES] * 4, (ONES, ONES), "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_published_answers(counter: list[int], key: tuple[int, int], expected: str) -> None:
    """Known answers of Random123 for philox4x64 with 10 rounds."""
    found = philox.philox([torch.tensor([signed(word)]) for word in counter], key)
    assert " ".join(f"{word % 2**64:016x}" for word in found[0].tolist()) == expected


def test_both_implementations_draw_the_same_words() -> None:
    """Also of counters with the highest bit, and of counts that end within a block; a repeated call repeats them."""
    counters = [(0, 0, 0), (5, 2**40, 7), (ONES, ONES, ONES)]
    for count in (1, 4, 11, 0):
        key = philox.philox_key(count, "words")
        found = philox.device_words(key, counters, count, "cpu")
        expected = np.stack([philox.words(key, counter, count) for counter in counters])
        assert np.array_equal(found.numpy().view(np.uint64), expected)
        assert np.array_equal(philox.words(key, counters[1], count), expected[1])
        many = philox.device_uniforms(found, 4 * count)
        assert all(torch.equal(philox.uniforms(row, 4 * count), many[place]) for place, row in enumerate(expected))


def test_every_part_of_a_key_and_of_a_counter_counts() -> None:
    keys = [philox.philox_key(*parts) for parts in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", 11))]
    counters = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = {int(word) for key in keys for counter in counters for word in philox.words(key, counter, 8)}
    assert len(drawn) == 5 * 4 * 8


def test_uniform_numbers() -> None:
    """The quarters of a word, lowest first, over 2^16. Of 400,000 the share of each of 16 bins is 1/16 ± 5σ."""
    words = np.array([0xFFFF_8000_4000_0001], dtype=np.uint64)
    assert philox.uniforms(words, 4).tolist() == [2**-16, 0.25, 0.5, 1 - 2**-16]
    count = 400_000
    drawn = philox.uniforms(philox.words(philox.philox_key(0, "uniform"), (0, 0, 0), count // 4), count)
    shares = torch.histc(drawn, 16, 0, 1) / count
    assert (shares - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 * 15 / 16 / count)
    followed = (drawn[1:] - 0.5) * (drawn[:-1] - 0.5) * 12
    assert abs(float(followed.mean())) < 5 / math.sqrt(count)


def test_orders_are_uniform() -> None:
    """All 24 orders of 4, 24,000 times: 1,000 each on average, a deviation of 31; chi-squared of 23 below 60."""
    key = philox.philox_key(0, "orders")
    found = philox.permutations(key, [(place, 1, 2) for place in range(24_000)], 4)
    codes, counts = np.unique(found @ [64, 16, 4, 1], return_counts=True)
    assert len(codes) == len(list(all_orders(range(4)))) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 60


def test_orders_hold_every_position_once() -> None:
    for size in (0, 1, 2, 7, 1000):
        (order,) = philox.permutations(philox.philox_key(1, "orders"), [(0, 0, 0)], size)
        assert sorted(order.tolist()) == [*range(size)]
