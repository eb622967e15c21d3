"""Independent random streams from (seed, purpose, keys): randomness is an argument, never a global.

A stream depends on what it is for and on nothing else, so that round 400 can be resumed without replaying 399 rounds, a
client draws the same numbers on any worker, and a new consumer of randomness does not shift the others. Purposes are
plain words; keys are the round, the client, the class, whatever tells two draws of the same purpose apart.
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
    """A numpy generator for one purpose; ``keys`` (round, client, ...) are non-negative integers."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, keys)))


def torch_stream(seed: int, purpose: str, *keys: int, device: str = "cpu") -> torch.Generator:
    """A torch generator for one purpose; ``keys`` (round, client, ...) are non-negative integers.

    Torch's CPU generator keeps 32 bits of its seed: among very many streams of a purpose two may coincide. That of
    another ``device`` draws other numbers, the same on all devices of a model.
    """
    state = _sequence(seed, purpose, keys).generate_state(1, np.uint64)[0]
    # Torch's seeds are signed 64-bit in some entry points; 63 bits are valid in all of them.
    return torch.Generator(device).manual_seed(int(state) & (2**63 - 1))


@contextmanager
def seeded_globally(seed: int) -> Iterator[None]:
    """PyTorch's global generator as a function of ``seed`` within the block; behind it, it is as it was.

    Modules are initialised from that one, and from no other. It belongs to the process, so that a second thread waits
    with its block until the first has left: otherwise each would take the other's numbers.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
