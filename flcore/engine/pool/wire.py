"""Serialisation of clients' results between workers and this process.

Descriptions are plain values; the bytes of tensors are sent separately.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from flcore.engine.turns import ClientResult, Failure, Reply
from flcore.evaluation.scoring import EvalTask
from flcore.io.records import Record, pack_record, unpack_record
from flcore.methods.types import MODEL

_AT_ONCE = 512
"""Pieces in one call; systems take 1,024."""


def packed_result(result: ClientResult) -> tuple[dict[str, Any], list[memoryview]]:
    """Return a description and the values of the message, in pieces; none for a failure."""
    if isinstance(result, Failure):
        return {"failure": vars(result)}, []
    message, values = pack_record(result.message)
    # The weights on the worker's device stay there.
    return {"reply": {**vars(result), "message": message, "trained": None}}, values


def unpacked_result(described: dict[str, Any], values: Tensor) -> ClientResult:
    """Return the result that :func:`packed_result` packed; tensors are views of ``values``, uint8 [n]."""
    if "failure" in described:
        return Failure(**described["failure"])
    reply = described["reply"]
    return Reply(**{**reply, "message": unpack_record(reply["message"], values)})


def split_parts(parts: Sequence[EvalTask]) -> tuple[list[Record], list[EvalTask]]:
    """The records of parts of a scoring, two each, and the parts without; :func:`whole_parts` puts them together."""
    nothing = Record()
    records = [record for part in parts for record in (part.known, Record({MODEL: part.model} if part.model else {}))]
    return records, [replace(part, known=nothing, model=None) for part in parts]


def whole_parts(parts: Sequence[EvalTask], records: Sequence[Record]) -> list[EvalTask]:
    """Return what :func:`split_parts` was given."""
    pairs = zip(parts, records[::2], records[1::2], strict=True)
    return [replace(part, known=known, model=model.get(MODEL)) for part, known, model in pairs]


def send_values(pipe: Connection, pieces: list[memoryview]) -> None:
    """Send pieces directly: the pipe's own messages would be joined and copied twice.

    The 45 MB of a ResNet-18 take a third of the time.
    """
    left = [piece for piece in pieces if len(piece)]
    while left:
        sent = os.writev(pipe.fileno(), left[:_AT_ONCE])
        whole = 0
        while whole < len(left) and sent >= len(left[whole]):
            sent -= len(left[whole])
            whole += 1
        left = left[whole:]
        if sent:
            left[0] = left[0][sent:]


def receive_values(pipe: Connection, size: int) -> Tensor:
    """Receive the values of :func:`send_values`, uint8 [size].

    Raises:
        EOFError: the other end was closed in the middle of it. OSError: likewise.
    """
    values = torch.empty(size, dtype=torch.uint8)
    left = values.numpy().data
    while len(left):
        read = os.readv(pipe.fileno(), [left])
        if read == 0:
            raise EOFError
        left = left[read:]
    return values
