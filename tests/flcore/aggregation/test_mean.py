"""Averages (baselines.md section 2), medians and trimmed means by hand; order; what a few bad clients can do."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.aggregation.mean import average_weights, coordinate_median, robust, trimmed_count, trimmed_mean
from flcore.aggregation.settings import Aggregation
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


# Median and trimmed mean: by hand, and the law that a few bad clients cannot leave the range of the honest ones.

T = torch.tensor


def test_the_median_by_hand() -> None:
    """Column 0 of five: 1 2 3 9 100, the third. Column 1: -7 0 0 4 5, the third. Of four the mean of the middle two."""
    five = T([[9.0, 0.0], [1.0, 5.0], [100.0, -7.0], [2.0, 4.0], [3.0, 0.0]])
    assert coordinate_median(five).tolist() == [3, 0]
    assert coordinate_median(five[:4]).tolist() == [(2 + 9) / 2, (0 + 4) / 2]
    assert coordinate_median(five[:1]).tolist() == [9, 0]


def test_the_trimmed_mean_by_hand() -> None:
    """1 2 3 9 100 without the ends: (2 + 3 + 9)/3; of four with one left out at either end: (2 + 9)/2."""
    five = T([[9.0], [1.0], [100.0], [2.0], [3.0]])
    assert trimmed_mean(five, 0.2).tolist() == [14 / 3]
    assert trimmed_mean(five, 0.4).tolist() == [3]
    assert trimmed_mean(five[:4], 0.1).tolist() == [(2 + 9) / 2]
    assert trimmed_mean(five[:2], 0.4).tolist() == [5]


@pytest.mark.parametrize(
    ("clients", "share", "cut"),
    [(10, 0.1, 1), (10, 0.2, 2), (10, 0.25, 3), (5, 0.1, 1), (100, 0.07, 7), (4, 0.49, 1), (3, 0.1, 1), (2, 0.4, 0),
     (1, 0.4, 0)],
)  # fmt: skip
def test_a_share_is_rounded_up_as_long_as_something_remains(clients: int, share: float, cut: int) -> None:
    assert trimmed_count(clients, share) == cut


@pytest.mark.parametrize(
    "how", [Aggregation("median"), Aggregation("trimmed_mean", 0.3), Aggregation("trimmed_mean", 0.1)], ids=str
)
def test_bad_clients_cannot_leave_the_range_of_the_honest_ones(how: Aggregation) -> None:
    """Whatever up to ⌈m/2⌉ - 1, or ⌈βm⌉, of m clients send; one more, if they agree, carry it away."""
    generator = torch.Generator().manual_seed(20261123)

    def folded(bad: torch.Tensor, honest: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(bad) + len(honest), generator=generator)
        return robust(torch.cat([bad, honest])[order], how).float()

    for clients in range(3, 25):
        most = (clients - 1) // 2 if how.rule == "median" else trimmed_count(clients, how.trim)
        for count in range(most + 1):
            honest = 10 * torch.randn(clients - count, 50, generator=generator)
            sizes = 10.0 ** torch.randint(-3, 30, (count, 50), generator=generator)
            found = folded(sizes * torch.randn(count, 50, generator=generator), honest)
            assert bool(((found >= honest.amin(dim=0)) & (found <= honest.amax(dim=0))).all()), (clients, count)
        honest = 10 * torch.randn(clients - most - 1, 50, generator=generator)
        assert bool((folded(torch.full((most + 1, 50), 1e6), honest) > honest.amax(dim=0)).all()), clients


def test_whoever_has_which_id_plays_no_part() -> None:
    """To the bit: ten clients in three orders."""
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(10, 1000, generator=generator)
    for how in (Aggregation("median"), Aggregation("trimmed_mean", 0.2)):
        orders = [sent, sent.flip(0), sent[torch.randperm(10, generator=generator)]]
        first, *others = [robust(order, how) for order in orders]
        assert all(torch.equal(first, other) for other in others)
