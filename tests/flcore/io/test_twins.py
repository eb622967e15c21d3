"""Copies of a device's tensors: who knows whom, how long, and that folding the device's gives the same bits.

The device is PyTorch's ``meta``, where tensors have a shape and no values, or a second tensor of the CPU.
"""

from __future__ import annotations

import gc

import pytest
import torch

from flcore.aggregation.mean import average_weights
from flcore.engine.exchange import Reply, pack_result, unpack_result
from flcore.io.messages import Count, Weights
from flcore.io.records import Record, on_device
from flcore.io.twins import moved, on_the_cpu, pair, twin


def test_a_pair_is_handed_out_instead_of_another_copy() -> None:
    there, here = torch.empty(3, device="meta"), torch.arange(3.0)
    pair(there, here)
    assert twin(there) is here and twin(here) is there
    assert moved(there, "cpu") is here and moved(here, "meta") is there
    assert moved(here, "cpu") is here
    record = on_device({"model": Weights({"w": there})}, "cpu")
    assert record["model"].arrays()["params/w"] is here
    assert on_device(Record({"model": Weights({"w": here})}), "meta")["model"].arrays()["params/w"] is there


def test_the_copy_lives_as_long_as_the_devices_tensor_and_not_the_reverse() -> None:
    there, here = torch.empty(3, device="meta"), torch.arange(3.0)
    pair(there, here)
    del here
    gc.collect()
    kept = twin(there)
    assert kept is not None and kept.tolist() == [0.0, 1.0, 2.0]
    del there
    gc.collect()
    assert twin(kept) is None
    assert moved(kept, "meta").device.type == "meta"  # a new one


def test_tensors_of_the_cpu_stay_where_they_are() -> None:
    stack = torch.arange(6.0).reshape(2, 3)
    assert on_the_cpu({"w": stack})["w"] is stack


def models(clients: int) -> dict[int, Weights]:
    """One layer, one statistic and a counter, which is no floating value, by client."""
    generator = torch.Generator().manual_seed(0)
    return {
        client: Weights(
            {"w": torch.randn(70_000, generator=generator), "b": torch.randn(2, 3, generator=generator)},
            {"mean": torch.randn(3, generator=generator), "count": torch.tensor(client)},
        )
        for client in range(clients)
    }


def test_what_is_folded_there_is_what_would_be_folded_here() -> None:
    """Shares 1/6, 2/6, 3/6 of counters 0, 1, 2 are 8/6, rounded 1; 70,000 values are folded by blocks of 65,536."""
    here, sizes = models(3), {0: 1, 1: 2, 2: 3}
    expected = average_weights(here, sizes)
    total = sum(share * here[client].params["w"].double() for client, share in enumerate((1 / 6, 2 / 6, 3 / 6)))
    torch.testing.assert_close(expected.params["w"], torch.as_tensor(total).float())
    assert int(expected.buffers["count"]) == 1
    there = models(3)
    for client in here:
        for name, tensor in there[client].values.items():
            pair(tensor, here[client].values[name])
    found = average_weights(here, sizes)
    assert list(found.values) == list(expected.values)
    assert all(torch.equal(found.values[name], tensor) for name, tensor in expected.values.items())


@pytest.mark.parametrize("known", [2, 1])
def test_the_devices_tensors_are_folded_where_all_of_them_are_there(known: int) -> None:
    """Of twins that are twice as large the mean is twice as large; where one client's is gone, it is that of copies."""
    here, sizes = models(2), {0: 1, 1: 1}
    plain = average_weights(here, sizes)
    there = {client: {name: 2 * tensor for name, tensor in here[client].values.items()} for client in range(known)}
    for client, values in there.items():
        for name, tensor in values.items():
            pair(tensor, here[client].values[name])
    found = average_weights(here, sizes)
    factor = 2 if known == 2 else 1
    for name in ("w", "b", "mean"):
        assert torch.equal(found.values[name], factor * plain.values[name])
    assert torch.equal(found.values["count"], plain.values["count"])


def test_what_lies_on_a_workers_device_is_not_sent() -> None:
    """A reply says where its weights were trained, for who folds in the same process."""
    copies = Weights({"w": torch.arange(3.0)})
    reply = Reply(Record({"model": copies}), {}, 1, False, trained=Weights({"w": torch.empty(3, device="meta")}))
    described, values = pack_result(reply, Record({"n": Count(5)}))
    arrived, state = unpack_result(described, torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8))
    assert state == {"n": Count(5)}
    assert isinstance(arrived, Reply) and arrived.trained is None
    assert arrived.message["model"].arrays()["params/w"].tolist() == [0.0, 1.0, 2.0]
