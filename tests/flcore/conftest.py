"""A device that is none: what runs on it must put every tensor there, as it must on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "lazy"  # a type that no build of PyTorch has kernels for, and whose gradients run on the calling thread

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._foreach_copy_.default}
_INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}


class _There(torch.Tensor):
    """A CPU tensor that says it lies on the device."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> _There:
        made: _There = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"there({self.here})"

    def tolist(self) -> Any:
        return self.here.tolist()


class _Elsewhere(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its results lie where PyTorch would leave them.

    Raises:
        RuntimeError: tensors of both devices, where CUDA does not take them: all but copies, numbers (tensors without
            dimensions), and places on the CPU that something on the device is read or written at.
    """
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, _There)]
    mixed = there and any(tensor.ndim for tensor in tensors if not isinstance(tensor, _There))
    if mixed and function not in _COPIES and not (function in _INDEXES and isinstance(args[0], _There)):
        raise RuntimeError(f"{function}: some tensors lie on the device, some on the CPU")
    goes = bool(there)
    if kwargs.get("device") is not None:
        goes = torch.device(kwargs["device"]).type == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    same = {id(_here(tensor)): tensor for tensor in tensors}
    found = function(*tree_map(_here, args), **tree_map(_here, kwargs))

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in same:  # it was changed in place
            return same[id(value)]
        return _There(value) if goes else value

    return tree_map(placed, found)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The name of the device, for ``engine.device`` and :attr:`Setting.device`; while the test runs, it is there."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=...) is a copy from the CPU, too
    with _Elsewhere():
        yield DEVICE
    torch._C._set_only_lift_cpu_tensors(before)
