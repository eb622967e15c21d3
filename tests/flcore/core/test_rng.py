"""Streams depend on (seed, purpose, keys) and on nothing else."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.core.rng import numpy_stream, seeded_globally, torch_stream


def numpy_draw(*arguments: object) -> tuple[int, ...]:
    return tuple(numpy_stream(*arguments).integers(2**62, size=3).tolist())  # type: ignore[arg-type]


def torch_draw(*arguments: object) -> tuple[int, ...]:
    return tuple(torch.randint(2**62, (3,), generator=torch_stream(*arguments)).tolist())  # type: ignore[arg-type]


DRAWS = pytest.mark.parametrize("draw", [numpy_draw, torch_draw])


@DRAWS
def test_same_arguments_same_numbers(draw) -> None:
    assert draw(3, "batches", 7, 2) == draw(3, "batches", 7, 2)


@DRAWS
def test_different_arguments_different_numbers(draw) -> None:
    seeds, purposes = (0, 1, 2**32, 2**40), ("batches", "dropout", "batches ", "")
    keys = ((), (0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0), (2**32,), (2**32, 1))
    drawn = [draw(seed, purpose, *key) for seed, purpose, key in itertools.product(seeds, purposes, keys)]
    assert len(set(drawn)) == len(drawn) == 4 * 4 * 9


@settings(max_examples=20)
@given(st.integers(0, 2**70), st.text(max_size=5), st.lists(st.integers(0, 2**40), max_size=4))
def test_any_seed_purpose_and_keys(seed: int, purpose: str, keys: list[int]) -> None:
    assert numpy_draw(seed, purpose, *keys) == numpy_draw(seed, purpose, *keys)
    assert numpy_draw(seed, purpose, *keys) != numpy_draw(seed + 1, purpose, *keys)
    assert torch_draw(seed, purpose, *keys) == torch_draw(seed, purpose, *keys)


def test_keys_are_not_negative() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        numpy_stream(0, "x", -1)


def test_the_global_generator_is_lent_to_one_thread_at_a_time_and_put_back() -> None:
    """Four numbers of seed 0 drawn in two halves, while another thread asks for those of seed 1: it waits."""
    alone = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    before, others = torch.get_rng_state(), []

    def draw() -> None:
        with seeded_globally(1):
            others.append(torch.rand(4))

    other = threading.Thread(target=draw)
    with seeded_globally(0):
        first = torch.rand(2)
        other.start()
        other.join(0.2)
        assert other.is_alive() and not others
        second = torch.rand(2)
    other.join()
    assert torch.equal(torch.cat([first, second]), alone[0]) and torch.equal(others[0], alone[1])
    assert torch.equal(torch.get_rng_state(), before)
