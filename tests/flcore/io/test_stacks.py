"""Stacks of models: a row is the client's model, and whole stacks are copied, measured and averaged.

The other device is PyTorch's ``meta``, where tensors have a shape and no values, or a second stack of the CPU.
"""

from __future__ import annotations

import gc
import weakref

import torch

from flcore.aggregation.mean import average_weights
from flcore.io.messages import Size, Weights
from flcore.io.records import Record, on_device, serialise
from flcore.io.stacks import StackedWeights, WeightStack, where_trained


def stack_of(factor: float = 1.0) -> WeightStack:
    """Three clients: a large and a small layer, statistics and a counter, which is no floating value."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 70_000, generator=generator), "b": torch.randn(3, 2, 3, generator=generator)}
    buffers = {"mean": torch.randn(3, 3, generator=generator), "count": torch.tensor([0, 1, 2])}
    return WeightStack({name: factor * value for name, value in params.items()}, buffers)


def plain(weights: Weights) -> Weights:
    return Weights(dict(weights.params), dict(weights.buffers))


def test_a_row_is_the_clients_model() -> None:
    stack = stack_of()
    rows = stack.rows()
    assert list(rows[1].params) == ["w", "b"] and list(rows[1].buffers) == ["mean", "count"]
    assert torch.equal(rows[1].params["b"], stack.params["b"][1]) and int(rows[2].buffers["count"]) == 2
    assert rows[2].shapes == plain(rows[2]).shapes
    assert rows[2].shapes[0] == {"w": (torch.Size([70_000]), torch.float32), "b": (torch.Size([2, 3]), torch.float32)}
    # 70,000 + 6 parameters of 4 bytes; of the buffers bytes alone: 3 statistics of 4, and a counter of 8.
    assert rows[0].sizes() == plain(rows[0]).sizes() == {"": Size(70_006, 280_024), "_buffers": Size(0, 20)}
    assert serialise(Record({"model": rows[2]})) == serialise(Record({"model": plain(rows[2])}))
    without = WeightStack({"w": torch.ones(2, 3)}, {}).rows()[1]
    assert without.buffers == {} and without.sizes() == {"": Size(3, 12)}


def test_some_layers_of_a_row_are_a_row() -> None:
    rows = stack_of().rows()
    parts = [row.only(["b"]) for row in rows]
    assert [list(part.params) for part in parts] == [["b"]] * 3 and list(parts[0].buffers) == ["mean", "count"]
    assert isinstance(parts[0], StackedWeights) and isinstance(parts[1], StackedWeights)
    assert parts[0].stack is parts[1].stack
    assert torch.equal(parts[2].params["b"], rows[2].params["b"])
    bare = rows[2].without_buffers()
    assert isinstance(bare, StackedWeights) and bare.buffers == {} and bare.params.keys() == {"w", "b"}
    assert rows[0].part("b").params.keys() == {"b"}
    assert (rows[1] - rows[1]).params["w"].abs().max() == 0


def test_a_stack_is_copied_once_for_all_rows() -> None:
    stack = WeightStack({"w": torch.ones(2, 3)}, {})
    one, other = (on_device({"model": row}, "meta")["model"] for row in stack.rows())
    assert isinstance(one, StackedWeights) and isinstance(other, StackedWeights)
    assert one.stack is other.stack
    assert one.params["w"].device.type == "meta" and one.params["w"].shape == (3,)
    row = stack.rows()[0]
    assert row.to("cpu") is row


def test_the_stack_that_was_trained_lives_as_long_as_its_copy_if_it_may_stay() -> None:
    for stays in (True, False):
        there = WeightStack({"w": torch.ones(2, 3)}, {}, stays=stays)
        known = weakref.ref(there)
        copy = there.to("meta")
        assert (copy.trained is there) == stays
        gc.disable()  # without a cycle, counting references is enough
        del there
        assert (known() is not None) == stays
        del copy
        assert known() is None
        gc.enable()


def test_rows_are_averaged_as_other_models_are() -> None:
    """Shares 1/6, 2/6, 3/6 of counters 0, 1, 2 are 8/6, rounded 1; 70,000 values are added by blocks of 65,536."""
    stack = stack_of()
    rows, sizes = dict(enumerate(stack.rows())), {0: 1, 1: 2, 2: 3}
    found = average_weights(rows, sizes)
    expected = average_weights({client: plain(row) for client, row in rows.items()}, sizes)
    assert list(found.values) == list(expected.values)
    assert all(torch.equal(found.values[name], value) for name, value in expected.values.items())
    total = sum(share * stack.params["w"][client].double() for client, share in enumerate((1 / 6, 2 / 6, 3 / 6)))
    torch.testing.assert_close(found.params["w"], torch.as_tensor(total).float())
    assert int(found.buffers["count"]) == 1


def test_models_are_averaged_where_they_were_trained_if_all_are_there() -> None:
    """Of stacks twice as large on the device the mean is twice as large; if one is gone, it is that of the copies."""
    stack, sizes = stack_of(), dict.fromkeys(range(3), 1)
    rows = dict(enumerate(stack.rows()))
    here = average_weights(rows, sizes)
    stack.trained = stack_of(factor=2.0)
    there = average_weights(rows, sizes)
    assert all(torch.equal(there.params[name], 2 * here.params[name]) for name in ("w", "b"))
    one_from_the_disk = {**rows, 2: plain(rows[2])}
    assert torch.equal(average_weights(one_from_the_disk, sizes).params["w"], here.params["w"])
    others = [plain(row) for row in rows.values()]
    assert where_trained(others) is others
