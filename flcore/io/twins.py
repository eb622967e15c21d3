"""Pair a device's tensors with their copies on the CPU.

A stack of clients is copied from a GPU at once, one copy per tensor; a thousand copies of rows, each a synchronisation,
take longer than the training. One client's tensor on the CPU is then a row of the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

_TWIN = "protofl_twin"  # the attribute

_MOST_PINNED = 2**30
"""Largest copy through pinned memory, in bytes."""


def on_the_cpu(stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return finished copies of a device's tensors; tensors of the CPU are not copied."""
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
    """Pair a device's tensor with its copy; the copy lives at least as long as the device's tensor."""
    setattr(there, _TWIN, here)
    setattr(here, _TWIN, weakref.ref(there))


def twin(tensor: Tensor) -> Tensor | None:
    """Return the other tensor of a pair; None if there is none."""
    known = getattr(tensor, _TWIN, None)
    found: Tensor | None = known() if isinstance(known, weakref.ref) else known
    return found


def moved(tensor: Tensor, device: str) -> Tensor:
    """Return the tensor on a device; take its twin if that is there."""
    if tensor.device.type == device:
        return tensor
    known = twin(tensor)
    return tensor.to(device) if known is None or known.device.type != device else known
