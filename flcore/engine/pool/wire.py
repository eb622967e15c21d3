"""What became of a client's turn, on its way from a worker to whoever keeps it.

Descriptions are plain values; the values of tensors go beside them as one string of bytes, as they lie in memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flcore.engine.replies import Result
from flcore.engine.turns import Failure, Reply
from flcore.records import packed, unpacked


def packed_result(result: Result) -> tuple[dict[str, Any], bytes]:
    """A description and the values of its message; of a failure there are none."""
    if isinstance(result, Failure):
        return {"failure": vars(result)}, b""
    message, values = packed(result.message)
    return {"reply": {**vars(result), "message": message}}, values


def unpacked_result(described: dict[str, Any], values: Tensor) -> Result:
    """What :func:`packed_result` was given; the tensors of its message are parts of ``values``, uint8 [n]."""
    if "failure" in described:
        return Failure(**described["failure"])
    reply = described["reply"]
    return Reply(**{**reply, "message": unpacked(reply["message"], values)})
