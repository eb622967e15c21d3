"""Random words by counter: Philox4x64-10 (Salmon, Moraes, Dror, Shaw, SC 2011).

A block of four words is a function of a key and a counter, so no draw depends on another one. The key is a hash of
(seed, purpose, ...); the counter is (block, and up to three integers such as pass, client and round). numpy's C code
draws on a CPU; :func:`device_words` is the same arithmetic in PyTorch, for many clients at once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_LOW = 0xFFFFFFFF

Key = tuple[int, int]

_EMPTY = {"bit_generator": "Philox", "buffer": (0,) * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
"""The rest of a generator's state, without words left over."""

_local = threading.local()


@cache
def philox_key(seed: int, *purpose: str | int) -> Key:
    """Return the key of a seed and a purpose: 128 bits of a hash."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def words(key: Key, counter: tuple[int, int, int], count: int) -> np.ndarray:
    """Return ``count`` words, uint64 [count]: blocks 1, 2, ... of the counters (block, *counter)."""
    generator: np.random.Philox | None = getattr(_local, "generator", None)
    if generator is None:
        generator = _local.generator = np.random.Philox(key=0)
    # The generator counts before it draws. Tuples: reading numbers from arrays takes four times as long.
    state: Any = {**_EMPTY, "state": {"counter": (0, *counter), "key": key}}
    generator.state = state
    drawn: np.ndarray = generator.random_raw(count)
    return drawn


def device_words(key: Key, counters: Sequence[tuple[int, int, int]], count: int, device: str) -> Tensor:
    """Return the :func:`words` of several counters as int64 [len(counters), count], computed on a device."""
    blocks = torch.arange(1, -(-count // 4) + 1, device=device)
    others = torch.tensor([[_signed(word) for word in counter] for counter in counters], device=device)
    return philox((blocks, *others.t().unsqueeze(2)), key).flatten(1)[:, :count]


def philox(counter: Sequence[Tensor], key: Key) -> Tensor:
    """Return the blocks of counters: four int64 tensors of 64-bit patterns in, [..., 4] out."""
    low0, high1, low2, high3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    keys = list(key)
    for _ in range(_ROUNDS):
        high_a, low_a = _product(low0, _MULTIPLIERS[0])
        high_b, low_b = _product(low2, _MULTIPLIERS[1])
        low0, high1 = high_b ^ high1 ^ _signed(keys[0]), low_b
        low2, high3 = high_a ^ high3 ^ _signed(keys[1]), low_a
        keys = [(word + step) % 2**64 for word, step in zip(keys, _WEYL, strict=True)]
    return torch.stack((low0, high1, low2, high3), dim=-1)


def _product(values: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of unsigned products, by halves of 32 bits."""
    low, high = values & _LOW, _upper(values)
    low_factor, high_factor = multiplier & _LOW, multiplier >> 32
    corner, first, second = low * low_factor, low * high_factor, high * low_factor
    middle = _upper(corner) + (first & _LOW) + (second & _LOW)
    return high * high_factor + _upper(first) + _upper(second) + (middle >> 32), values * _signed(multiplier)


def _upper(values: Tensor) -> Tensor:
    return (values >> 32) & _LOW


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def permutations(key: Key, counters: Sequence[tuple[int, int, int]], size: int) -> np.ndarray:
    """Return a random order of 0 ... ``size`` - 1 for each counter, int64 [len(counters), size].

    Position i is sorted by the i-th half word of the counter's words. Equal ones, a pair in 2^32, keep their order.
    """
    ranks = np.empty((len(counters), size), dtype=np.uint64)
    halves = ranks.view(np.uint32)
    halves[:, 0::2] = np.arange(size, dtype=np.uint32)
    for row, counter in enumerate(counters):
        halves[row, 1::2] = words(key, counter, -(-size // 2)).view(np.uint32)[:size]
    ranks.sort(axis=1)
    return halves[:, 0::2].astype(np.int64)


def uniforms(drawn: np.ndarray, count: int) -> Tensor:
    """Return ``count`` uniform numbers, multiples of 2^-16 below 1, of words uint64 [n]: float32 [count]."""
    return torch.from_numpy(np.multiply(drawn.view(np.uint16)[:count], np.float32(2**-16), dtype=np.float32))


def device_uniforms(drawn: Tensor, count: int) -> Tensor:
    """Return the :func:`uniforms` of words int64 [A, n]: float32 [A, count]."""
    shifts = torch.arange(0, 64, 16, device=drawn.device)
    quarters = (drawn.unsqueeze(-1) >> shifts) & 0xFFFF
    return quarters.flatten(1)[:, :count].to(torch.float32) * 2**-16
