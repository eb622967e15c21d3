"""Averages of weights by hand (baselines.md section 2) and their independence of order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.aggregation.mean import average_weights
from flcore.io.messages import Weights


def vector(*values: float) -> Weights:
    return Weights({"w": torch.tensor(values)})


def test_weighted_by_samples() -> None:
    """n = (100, 300): w = (1, 5) gives 1/4 + 15/4 = 4 (unweighted: 3); ((1, 2), (5, -2)) gives (4, -1)."""
    sizes = {0: 100, 1: 300}
    assert average_weights({0: vector(1.0), 1: vector(5.0)}, sizes).params["w"].tolist() == [4.0]
    assert average_weights({0: vector(1.0), 1: vector(5.0)}, {0: 1, 1: 1}).params["w"].tolist() == [3.0]
    assert average_weights({0: vector(1.0, 2.0), 1: vector(5.0, -2.0)}, sizes).params["w"].tolist() == [4.0, -1.0]


def test_sizes_of_absent_clients_do_not_count() -> None:
    """N runs over the clients that are there: client 2 with 10,000 samples did not answer."""
    sizes = {0: 100, 1: 300, 2: 10_000}
    assert average_weights({0: vector(1.0), 1: vector(5.0)}, sizes).params["w"].tolist() == [4.0]


def test_a_client_without_samples_does_not_count() -> None:
    assert average_weights({0: vector(1.0), 1: vector(5.0)}, {0: 0, 1: 3}).params["w"].tolist() == [5.0]
    with pytest.raises(ValueError, match="no client has a sample"):
        average_weights({0: vector(1.0)}, {0: 0})


def test_one_client_is_itself_to_the_bit() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert torch.equal(average_weights({5: Weights({"w": values})}, {5: 17}).params["w"], values)


def test_integer_buffers_are_averaged_and_rounded() -> None:
    """Counters 10 and 13 with n = (1, 2): 12; 1 and 2 with n = (1, 2): 5/3, rounded 2; statistics (0, 3): 2.0."""
    models = {
        client: Weights(
            {"w": torch.zeros(1)}, {"mean": torch.tensor([mean]), "a": torch.tensor(a), "b": torch.tensor(b)}
        )
        for client, (mean, a, b) in enumerate([(0.0, 10, 1), (3.0, 13, 2)])
    }
    buffers = average_weights(models, {0: 1, 1: 2}).buffers
    assert (buffers["mean"].item(), buffers["a"].item(), buffers["b"].item()) == (2.0, 12, 2)
    assert [buffers[name].dtype for name in ("mean", "a")] == [torch.float32, torch.int64]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_order_of_arrival_does_not_matter(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    models = {client: Weights({"w": torch.randn(50, generator=generator)}) for client in range(count)}
    sizes = {client: 3 * client + 1 for client in range(count)}
    expected = average_weights(models, sizes).params["w"]
    for order in itertools.permutations(models):
        assert torch.equal(average_weights({client: models[client] for client in order}, sizes).params["w"], expected)


def test_a_tensors_mean_does_not_depend_on_the_others() -> None:
    """Small tensors are folded together, a large one by blocks: the same bytes as each alone, and as a plain sum."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (300, 301), "small": (3, 7), "one": (), "none": (0, 4), "many": (8192,)}
    models = {
        client: Weights(
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
            {"count": torch.tensor(client + 5), **{f"b{i}": torch.randn(8000, generator=generator) for i in range(9)}},
        )
        for client in range(4)
    }
    sizes = {client: 3 * client + 1 for client in models}
    found = average_weights(models, sizes)
    assert list(found.params) == list(shapes) and list(found.buffers) == list(models[0].buffers)
    for name, mean in found.values.items():
        alone = average_weights(
            {client: Weights({name: model.values[name]}) for client, model in models.items()}, sizes
        )
        assert torch.equal(alone.params[name], mean) and mean.shape == models[0].values[name].shape
        total = sum(sizes[client] * model.values[name].double() for client, model in models.items()) / 22
        torch.testing.assert_close(mean, (total if mean.is_floating_point() else total.round()).to(mean.dtype))


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 10_000)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_an_average_lies_between_and_is_the_exact_one(clients: list[tuple[float, int]]) -> None:
    from fractions import Fraction

    models = {k: vector(value) for k, (value, _) in enumerate(clients)}
    sizes = {k: size for k, (_, size) in enumerate(clients)}
    values = {k: Fraction(model.params["w"].item()) for k, model in models.items()}
    exact = sum(values[k] * sizes[k] for k in values) / sum(sizes.values())
    found = average_weights(models, sizes).params["w"].item()
    assert found == pytest.approx(float(exact), rel=1.2e-7, abs=1e-10)  # float32 rounds once, at the end


def test_inputs_are_not_changed() -> None:
    first = vector(1.0, 2.0)
    average_weights({0: first, 1: vector(3.0, 4.0)}, {0: 1, 1: 1})
    assert first.params["w"].tolist() == [1.0, 2.0]


def test_sums_do_not_lose_small_clients() -> None:
    """1,000 clients of one sample with w = 1 and one with 10⁸: (1000 + 10⁸)/1001 = 99901.0979...

    A float32 sum of n·w would stop counting ones at 10⁸ (spacing 8).
    """
    models = {0: vector(1e8), **{k: vector(1.0) for k in range(1, 1001)}}
    found = average_weights(models, dict.fromkeys(models, 1)).params["w"].item()
    assert found == pytest.approx(100_001_000 / 1001, rel=6e-8)
