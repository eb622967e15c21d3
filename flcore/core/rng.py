"""Independent random streams from (seed, purpose, keys).

A stream depends on nothing else: round 400 resumes without a replay of 399 rounds, a client draws the same numbers on
any worker, and a new stream does not shift others. Keys, such as round, client and class, distinguish draws of one
purpose.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_GLOBAL_GENERATOR = threading.RLock()


def _sequence(seed: int, purpose: str, keys: tuple[int, ...]) -> np.random.SeedSequence:
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    # The count of keys is part of the entropy: SeedSequence pads with zeros, so that (1,) and (1, 0) would coincide.
    return np.random.SeedSequence([seed, word, len(keys), *keys])


def numpy_stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a numpy generator for one purpose; ``keys`` (round, client, ...) are non-negative integers."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, keys)))


def torch_stream(seed: int, purpose: str, *keys: int, device: str = "cpu") -> torch.Generator:
    """Return a torch generator for one purpose; ``keys`` (round, client, ...) are non-negative integers.

    Torch's CPU generator keeps 32 bits of its seed: among very many streams two may coincide. Generators of other
    devices draw other numbers.
    """
    state = _sequence(seed, purpose, keys).generate_state(1, np.uint64)[0]
    # Torch's seeds are signed 64-bit in some entry points; 63 bits are valid in all of them.
    return torch.Generator(device).manual_seed(int(state) & (2**63 - 1))


@contextmanager
def seeded_globally(seed: int) -> Iterator[None]:
    """Seed PyTorch's global generator, which initialises modules, within the block; restore it afterwards.

    The generator belongs to the process, so one thread at a time enters the block.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
