"""Typed payloads of server state, messages and client state, and their size in bytes.

The wire format of a payload is its arrays: raw little-endian values in sorted order of names. Server and client know
shapes, names and types (both know the model), so headers count no bytes (evaluation.md section 3).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of values by name."""


@dataclass(frozen=True)
class Size:
    """Size of a message: ``scalars`` are floating-point values without BatchNorm statistics; ``bytes`` are all."""

    scalars: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.scalars + other.scalars, self.bytes + other.bytes)


class Payload(ABC):
    """A typed value that is stored, sent and measured. Its tensors are never changed in place."""

    type_name: ClassVar[str]

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """Return the wire format, name to array; the receiver gets nothing else."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Payload:
        """Restore a payload from :meth:`arrays` and :meth:`header`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Payload:
        """Return the payload with every tensor changed, each to one of equal shape and type."""
        return type(self).from_arrays({name: change(tensor) for name, tensor in self.arrays().items()}, self.header())

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that the payload holds."""
        return self.arrays().values()

    def to(self, device: str) -> Payload:
        """Return the payload with its tensors on a device; itself if they are there."""
        if all(tensor.device.type == device for tensor in self.tensors()):
            return self
        return self.map(lambda tensor: tensor.to(device))

    def row_major(self) -> Payload:
        """Return the payload with its tensors in row-major order; itself if they are."""
        return self if all(map(Tensor.is_contiguous, self.tensors())) else self.map(Tensor.contiguous)

    def header(self) -> dict[str, Any]:
        """Return JSON values that the receiver knows in advance and needs to read the arrays; they are not counted."""
        return {}

    def sizes(self) -> dict[str, Size]:
        """Return sizes by kind; a kind is a suffix of the record's name, usually empty."""
        return {"": _size(self.arrays().values())}


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of tensors of one type as a vector; of a single tensor a view."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    joined: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return joined  # one call: a loop over small tensors takes twice as long


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are finite.

    A finite sum has finite summands, and takes a tenth of the time of a look at each; another sum may have overflowed.
    """
    return all(
        math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
        for tensor in tensors
        if tensor.is_floating_point()
    )


def rows_finite(stacks: Iterable[Tensor]) -> list[bool]:
    """Return for each client of a stack whether all its values are finite.

    Args:
        stacks: [A, ...] each; at least one has a floating-point type.
    """
    floating = [tensor.flatten(1) for tensor in stacks if tensor.is_floating_point()]
    found: list[bool] = torch.stack([torch.isfinite(tensor.sum(1)) for tensor in floating]).all(0).tolist()
    return [fine or all_finite(tensor[row] for tensor in floating) for row, fine in enumerate(found)]


def _size(tensors: Iterable[Tensor]) -> Size:
    return sum((Size(t.numel() if t.is_floating_point() else 0, t.nbytes) for t in tensors), Size())


@dataclass(frozen=True)
class Weights(Payload):
    """Parameters and buffers of a module by name, in its order; buffers (BatchNorm statistics) are counted separately.

    Arithmetic drops buffers, which are not trained.
    """

    type_name: ClassVar[str] = "weights"
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def arrays(self) -> dict[str, Tensor]:
        named = {f"params/{name}": tensor for name, tensor in self.params.items()}
        return named | {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Weights:
        return cls(
            {name: arrays[f"params/{name}"] for name in header["params"]},
            {name: arrays[f"buffers/{name}"] for name in header["buffers"]},
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        return Weights(
            *({name: change(tensor) for name, tensor in part.items()} for part in (self.params, self.buffers))
        )

    def tensors(self) -> Iterable[Tensor]:
        return (*self.params.values(), *self.buffers.values())

    def header(self) -> dict[str, Any]:
        return {"params": list(self.params), "buffers": list(self.buffers)}

    def sizes(self) -> dict[str, Size]:
        """Return the size of parameters, and of buffers (bytes alone) under ``<name>_buffers``."""
        return self._sizes

    @cached_property
    def _sizes(self) -> dict[str, Size]:  # cached: read for every client of a broadcast
        sizes = {"": _size(self.params.values())} if self.params or not self.buffers else {}
        if self.buffers:
            sizes["_buffers"] = Size(0, _size(self.buffers.values()).bytes)
        return sizes

    @cached_property
    def shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes and types of parameters and of buffers."""
        params, buffers = (
            {name: (tensor.shape, tensor.dtype) for name, tensor in part.items()}
            for part in (self.params, self.buffers)
        )
        return params, buffers

    @property
    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers together, for a frozen model in a loss."""
        return {**self.params, **self.buffers}

    def __add__(self, other: Weights) -> Weights:
        return Weights({name: value + other.params[name] for name, value in self.params.items()})

    def __sub__(self, other: Weights) -> Weights:
        return Weights({name: value - other.params[name] for name, value in self.params.items()})

    def __mul__(self, factor: float) -> Weights:
        return Weights({name: factor * value for name, value in self.params.items()})

    __rmul__ = __mul__

    def zeros(self) -> Weights:
        """Return zeros in the shapes of the parameters and on their device."""
        return Weights({name: torch.zeros_like(value) for name, value in self.params.items()})

    def part(self, *prefixes: str) -> Weights:
        """Return parameters and buffers with these prefixes, such as ``head.``."""
        groups = (self.params, self.buffers)
        return Weights(*({name: value for name, value in each.items() if name.startswith(prefixes)} for each in groups))

    def only(self, names: Sequence[str]) -> Weights:
        """Return the parameters with these names, and all buffers."""
        return Weights({name: self.params[name] for name in names}, self.buffers)

    def with_params(self, part: Weights | None) -> Weights:
        """Return the weights with the parameters of a part, if any, in place of their own."""
        return self if part is None else Weights({**self.params, **part.params}, self.buffers)

    def without_buffers(self) -> Weights:
        return Weights(self.params)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.params.values())


@dataclass(frozen=True)
class Prototypes(Payload):
    """One vector per class, for the classes that have one.

    ``means`` is float32 ``[K, d]`` with zero rows for missing classes, ``present`` bool ``[K]``. Only present rows
    travel, each with its class id (8 bytes, no scalar).
    """

    type_name: ClassVar[str] = "prototypes"
    means: Tensor
    present: Tensor

    def __post_init__(self) -> None:
        types = (self.means.dtype, self.means.ndim, self.present.dtype)
        if types != (torch.float32, 2, torch.bool) or self.present.shape != self.means.shape[:1]:
            shapes = f"means {tuple(self.means.shape)}, present {tuple(self.present.shape)} {self.present.dtype}"
            raise ValueError(f"prototypes need means float32 [K, d] and present bool [K], got {shapes}")

    def arrays(self) -> dict[str, Tensor]:
        """Return ids ``[k]`` int64 and rows ``[k, d]`` of the present classes."""
        classes = self.present.nonzero().flatten()
        return {"classes": classes, "means": self.means.index_select(0, classes)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Prototypes:
        rows, classes = arrays["means"], arrays["classes"]
        means = rows.new_zeros(header["num_classes"], rows.shape[1])
        means[classes] = rows
        present = torch.zeros(header["num_classes"], dtype=torch.bool, device=rows.device)
        present[classes] = True
        return cls(means, present)

    def map(self, change: Callable[[Tensor], Tensor]) -> Prototypes:
        return Prototypes(change(self.means), change(self.present))

    def tensors(self) -> Iterable[Tensor]:
        return self.means, self.present

    def header(self) -> dict[str, Any]:
        return {"num_classes": self.means.shape[0]}

    @classmethod
    def empty(cls, num_classes: int, feature_dim: int) -> Prototypes:
        return cls(torch.zeros(num_classes, feature_dim), torch.zeros(num_classes, dtype=torch.bool))


@dataclass(frozen=True)
class Count(Payload):
    """One non-negative integer, such as a client's number of samples: 8 bytes, no scalar."""

    type_name: ClassVar[str] = "count"
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError(f"a count cannot be negative, got {self.value}")

    def arrays(self) -> dict[str, Tensor]:
        return {"value": torch.tensor([self.value], dtype=torch.int64)}

    def tensors(self) -> Iterable[Tensor]:
        return ()

    def sizes(self) -> dict[str, Size]:
        return {"": Size(0, 8)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Count:
        return cls(int(arrays["value"][0]))


@dataclass(frozen=True)
class TensorDict(Payload):
    """Named arrays: label counts, virtual images, statistics, an optimiser's state; integers count as bytes only."""

    type_name: ClassVar[str] = "arrays"
    named: Mapping[str, Tensor]

    def arrays(self) -> dict[str, Tensor]:
        return dict(self.named)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> TensorDict:
        return cls(dict(sorted(arrays.items())))

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name]


@dataclass(frozen=True)
class Mixtures(Payload):
    """Mixtures of diagonal Gaussians for some classes, with different numbers of components (GFPL).

    The components of all classes are concatenated: n·(2d + 1) scalars. Class ids and counts are integers of 8 bytes.

    Attributes:
        classes: int64 ``[k]``, ascending ids.
        components: int64 ``[k]``, components of each class, at least one; n in all.
        weights: float32 ``[n]``.
        means: float32 ``[n, d]``.
        deviations: float32 ``[n, d]``, standard deviations, not variances.
        counts: int64 ``[k]``, samples of each class; None if they are not sent.
    """

    type_name: ClassVar[str] = "mixtures"
    classes: Tensor
    components: Tensor
    weights: Tensor
    means: Tensor
    deviations: Tensor
    counts: Tensor | None = None

    def __post_init__(self) -> None:
        integers = [value for value in (self.classes, self.components, self.counts) if value is not None]
        floats = (self.weights, self.means, self.deviations)
        is_consistent = (
            all(value.dtype == torch.int64 and value.shape == self.classes.shape for value in integers)
            and all(value.dtype == torch.float32 and len(value) == len(self.weights) for value in floats)
            and (self.classes.ndim, self.weights.ndim, self.means.ndim) == (1, 1, 2)
            and self.means.shape == self.deviations.shape
            and bool((self.components >= 1).all())
            and int(self.components.sum()) == len(self.weights)
            and bool((self.classes.diff() > 0).all())
        )
        if not is_consistent:
            shapes = ", ".join(f"{value.dtype} {tuple(value.shape)}" for value in (*integers, *floats))
            raise ValueError(
                "mixtures need ascending classes, components (and counts) int64 [k], and weights [n], means and "
                f"deviations [n, d] float32 with n components in all, got {shapes}"
            )

    def arrays(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("classes", "components", "weights", "means", "deviations")}
        return named if self.counts is None else {**named, "counts": self.counts}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Mixtures:
        return cls(**arrays)
