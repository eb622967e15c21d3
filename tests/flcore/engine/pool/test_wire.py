"""Values on their way through a pipe: all of them, in order, however little it takes at a time."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest
import torch

from flcore.engine.pool.process import receive_values, send_values
from flcore.io.files import raw_values


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0, 3, 0],
        [1] * 1300,  # more pieces than a system takes in one call
        [1, 3_000_000, 5, 2_000_000],  # more than a pipe holds
    ],
    ids=["nothing", "empty", "many", "large"],
)
def test_what_is_sent_is_received(sizes: list[int]) -> None:
    """Between two messages of the pipe's own, which are not touched."""
    here, there = Pipe()
    tensors = [torch.arange(size, dtype=torch.int32) + number for number, size in enumerate(sizes)]

    def send() -> None:
        there.send("before")
        send_values(there, [raw_values(tensor) for tensor in tensors])
        there.send("after")

    sender = threading.Thread(target=send)
    sender.start()
    with here, there:
        assert here.recv() == "before"
        values = receive_values(here, 4 * sum(sizes))
        assert here.recv() == "after"
        sender.join()
    expected = torch.cat([torch.empty(0, dtype=torch.int32), *tensors])
    assert torch.equal(values.view(torch.int32), expected)


def test_a_sender_that_ends_in_the_middle() -> None:
    here, there = Pipe()
    send_values(there, [memoryview(b"half")])
    there.close()
    with here, pytest.raises(EOFError):
        receive_values(here, 8)
