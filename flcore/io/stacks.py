"""The models of a stack of clients; one client's model is a row.

A stack is copied from a GPU, measured and averaged as a whole: a thousand copies of rows, each a synchronisation, take
longer than the training. A row's tensors are views, made when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flcore.io.messages import Shapes, Size, Weights, flat

_MOST_PINNED = 2**30
"""Largest copy through pinned memory, in bytes."""


class WeightStack:
    """Models of A clients in contiguous tensors [A, ...] on one device.

    Attributes:
        params, buffers: by name.
        device: its type.
        trained: of a copy, the stack on the device that trained it, if it may stay there until the aggregation.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        stays: bool = False,
        trained: WeightStack | None = None,
    ) -> None:
        """Keep the tensors; ``stays``: copies of this stack know it as ``trained``."""
        self.params = {name: tensor.contiguous() for name, tensor in params.items()}
        self.buffers = {name: tensor.contiguous() for name, tensor in buffers.items()}
        one = next(iter({**params, **buffers}.values()))
        self.device, self.trained = one.device.type, trained
        self._clients, self._stays = len(one), stays
        self._copies: WeakValueDictionary[str, WeightStack] = WeakValueDictionary()  # a copy may know this stack
        self._parts: dict[tuple[tuple[str, ...], bool], WeightStack] = {}

    def rows(self) -> list[StackedWeights]:
        """Return the clients' models."""
        return [StackedWeights(self, index) for index in range(self._clients)]

    @cached_property
    def by_client(self) -> tuple[Sequence[dict[str, Tensor]], Sequence[dict[str, Tensor]]]:
        """Each client's parameters and buffers, as views."""
        params, buffers = (
            [
                dict(zip(part, row, strict=True))
                for row in zip(*(tensor.unbind(0) for tensor in part.values()), strict=True)
            ]
            for part in (self.params, self.buffers)
        )
        return params, buffers or [{} for _ in range(self._clients)]

    @cached_property
    def shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes and types of one client's parameters and buffers."""
        params, buffers = (
            {name: (tensor.shape[1:], tensor.dtype) for name, tensor in part.items()}
            for part in (self.params, self.buffers)
        )
        return params, buffers

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """The size of one client's model, as :meth:`Weights.sizes`."""
        whole = Weights(self.params, self.buffers).sizes().items()
        return {kind: Size(size.scalars // self._clients, size.bytes // self._clients) for kind, size in whole}

    def part(self, names: Sequence[str], *, buffers: bool = True) -> WeightStack:
        """Return the parameters with these names, with or without buffers; the same object for the same names."""
        key = tuple(names), buffers
        if key not in self._parts:
            params = {name: self.params[name] for name in names}
            self._parts[key] = WeightStack(params, self.buffers if buffers else {}, stays=self._stays)
        return self._parts[key]

    def to(self, device: str) -> WeightStack:
        """Return a finished copy on a device, the same for every row; itself if it is there."""
        if device == self.device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            pinned = (self.device, device) == ("cuda", "cpu") and self._bytes <= _MOST_PINNED
            params, buffers = (
                {name: _copied(tensor, device, pinned=pinned) for name, tensor in part.items()}
                for part in (self.params, self.buffers)
            )
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            copy = WeightStack(params, buffers, trained=self if self._stays else None)
            self._copies[device] = copy
        return copy

    @property
    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.params.values(), *self.buffers.values()))


class StackedWeights(Weights):
    """One client's model in a stack.

    Attributes:
        stack: of the client. index: of the client in it.
    """

    stack: WeightStack
    index: int

    def __init__(self, stack: WeightStack, index: int) -> None:
        """Take a row of the stack."""
        self.__dict__.update(stack=stack, index=index)

    @cached_property
    def params(self) -> Mapping[str, Tensor]:
        return self.stack.by_client[0][self.index]

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        return self.stack.by_client[1][self.index]

    @property
    def shapes(self) -> tuple[Shapes, Shapes]:
        return self.stack.shapes

    def sizes(self) -> dict[str, Size]:
        return self.stack.sizes

    def to(self, device: str) -> Self:
        stack = self.stack.to(device)
        return self if stack is self.stack else type(self)(stack, self.index)

    def row_major(self) -> Self:
        return self

    def only(self, names: Sequence[str]) -> Weights:
        return StackedWeights(self.stack.part(names), self.index)

    def without_buffers(self) -> Weights:
        return StackedWeights(self.stack.part(list(self.stack.params), buffers=False), self.index)


def where_trained(models: Sequence[Weights]) -> Sequence[Weights]:
    """Return the models on the device that trained them if all are still there; otherwise as they are."""
    there = [
        StackedWeights(model.stack.trained, model.index)
        for model in models
        if isinstance(model, StackedWeights) and model.stack.trained is not None
    ]
    return there if len(there) == len(models) else models


def vectors(models: Iterable[Weights], part: str, names: Sequence[str]) -> Iterator[Tensor]:
    """Yield the values of each model as a vector [n].

    Args:
        models: of the clients. part: ``params`` or ``buffers``. names: of tensors of one type in it.
    """
    matrices: dict[int, Tensor] = {}
    for model in models:
        if isinstance(model, StackedWeights):
            key = id(model.stack)
            if key not in matrices:
                tensors = [getattr(model.stack, part)[name] for name in names]
                flattened = [tensor.reshape(len(tensor), -1) for tensor in tensors]
                matrices[key] = flattened[0] if len(flattened) == 1 else torch.cat(flattened, 1)
            yield matrices[key][model.index]
        else:
            yield flat([getattr(model, part)[name] for name in names])


def _copied(tensor: Tensor, device: str, *, pinned: bool) -> Tensor:
    if not pinned:
        return tensor.to(device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
