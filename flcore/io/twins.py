"""Tensors that have left a device: a copy on the CPU and what it was copied from know each other.

A stack of clients leaves a GPU at once, in one copy per tensor; a thousand copies of rows, each of which the host waits
for, take longer than the training. Whoever then asks for one client's tensor on the CPU is given its row of the copy,
and who folds rows of copies may fold those on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

_TWIN = "protofl_twin"  # the attribute

_MOST_PINNED = 2**30
"""Bytes that are copied through memory which the device writes to directly."""


def on_the_cpu(stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a device's tensors, whole when this returns; tensors of the CPU are not copied."""
    pinned = sum(tensor.nbytes for tensor in stacks.values()) <= _MOST_PINNED
    found: dict[str, Tensor] = {}
    for name, tensor in stacks.items():
        if tensor.device.type == "cuda" and pinned:
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found[name].copy_(tensor, non_blocking=True)
        else:
            found[name] = tensor.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found


def pair(there: Tensor, here: Tensor) -> None:
    """Have a device's tensor and its copy know each other; the copy lives as long as the device's, not the reverse."""
    setattr(there, _TWIN, here)
    setattr(here, _TWIN, weakref.ref(there))


def twin(tensor: Tensor) -> Tensor | None:
    """The other one of a pair; None where there is none any more."""
    known = getattr(tensor, _TWIN, None)
    found: Tensor | None = known() if isinstance(known, weakref.ref) else known
    return found


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device, as its twin where that is there."""
    if tensor.device.type == device:
        return tensor
    known = twin(tensor)
    return tensor.to(device) if known is None or known.device.type != device else known
