"""Typed payloads: what a server holds, what crosses the line, what a client remembers, and how many bytes that is.

A *record* maps a name (``model``, ``prototypes``, ...) to a payload. Server state, broadcasts, replies and client
memories are all records, so one piece of code stores, restores and measures them. A payload's arrays are its wire
format: raw little-endian values in sorted order of their names; shapes, names and types are agreed beforehand (both
ends know the model), so headers carry no bytes, as in evaluation.md section 3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """A cost: ``scalars`` are floating-point values without BatchNorm statistics, ``bytes`` everything sent."""

    scalars: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.scalars + other.scalars, self.bytes + other.bytes)


class Payload(ABC):
    """One typed thing that can be held, sent, measured and stored. Tensors inside are never changed in place."""

    type_name: ClassVar[str]

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """The wire format: name to array. What is not in here does not reach the receiver."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Payload:
        """The inverse of :meth:`arrays` with :meth:`header`."""

    def header(self) -> dict[str, Any]:
        """What the receiver knows beforehand and needs to read the arrays (JSON values, not counted)."""
        return {}

    def sizes(self) -> dict[str, Size]:
        """Cost by kind; the kind is a suffix to the record's name, usually empty."""
        return {"": _size(self.arrays().values())}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is infinite or not a number.

    A sum that is finite has finite summands, and takes a tenth of the time of looking at each; one that is not may
    have overflowed.
    """
    return all(
        math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
        for tensor in tensors
        if tensor.is_floating_point()
    )


def rows_finite(stacks: Iterable[Tensor]) -> list[bool]:
    """Of each client of a stack whether no value is infinite or not a number; as :func:`all_finite`, all at once.

    Args:
        stacks: [A, ...] each, at least one of them of floating point.
    """
    floating = [tensor.flatten(1) for tensor in stacks if tensor.is_floating_point()]
    found: list[bool] = torch.stack([torch.isfinite(tensor.sum(1)) for tensor in floating]).all(0).tolist()
    return [fine or all_finite(tensor[row] for tensor in floating) for row, fine in enumerate(found)]


def _size(tensors: Iterable[Tensor]) -> Size:
    scalars = nbytes = 0
    for tensor in tensors:
        values = tensor.numel()
        scalars += values if tensor.is_floating_point() else 0
        nbytes += values * tensor.element_size()
    return Size(scalars, nbytes)


@dataclass(frozen=True)
class Weights(Payload):
    """Parameters and buffers of a module by name; buffers (BatchNorm statistics) are counted as a kind of their own."""

    type_name: ClassVar[str] = "weights"
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def arrays(self) -> dict[str, Tensor]:
        """``params/<name>`` and ``buffers/<name>``."""
        named = {f"params/{name}": tensor for name, tensor in self.params.items()}
        return named | {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Weights:
        """Restore both groups in the order of the module, which the header keeps."""
        return cls(
            {name: arrays[f"params/{name}"] for name in header["params"]},
            {name: arrays[f"buffers/{name}"] for name in header["buffers"]},
        )

    def header(self) -> dict[str, Any]:
        """Names in the module's own order."""
        return {"params": list(self.params), "buffers": list(self.buffers)}

    def sizes(self) -> dict[str, Size]:
        """Parameters under the record's name; buffers, which nobody trains, under ``<name>_buffers`` in bytes."""
        return self._sizes

    @cached_property
    def _sizes(self) -> dict[str, Size]:  # of a broadcast every client of a round asks
        sizes = {"": _size(self.params.values())} if self.params or not self.buffers else {}
        if self.buffers:
            sizes["_buffers"] = Size(0, _size(self.buffers.values()).bytes)
        return sizes

    @property
    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers together, as a frozen model in a loss takes them."""
        return {**self.params, **self.buffers}

    def __add__(self, other: Weights) -> Weights:
        """Add parameters; arithmetic leaves buffers out, which nobody trains."""
        return Weights({name: value + other.params[name] for name, value in self.params.items()})

    def __sub__(self, other: Weights) -> Weights:
        """Subtract parameters; buffers are left out."""
        return Weights({name: value - other.params[name] for name, value in self.params.items()})

    def __mul__(self, factor: float) -> Weights:
        """Multiply parameters by a number; buffers are left out."""
        return Weights({name: factor * value for name, value in self.params.items()})

    __rmul__ = __mul__

    def zeros(self) -> Weights:
        """Return zeros in the shapes of the parameters and on their device."""
        return Weights({name: torch.zeros_like(value) for name, value in self.params.items()})

    def without_buffers(self) -> Weights:
        return Weights(self.params)

    @property
    def num_parameters(self) -> int:
        """Trainable scalars."""
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
        """Refuse shapes that do not belong together."""
        if (
            self.means.dtype != torch.float32
            or self.means.ndim != 2
            or self.present.shape != self.means.shape[:1]
            or self.present.dtype != torch.bool
        ):
            shapes = f"means {tuple(self.means.shape)}, present {tuple(self.present.shape)} {self.present.dtype}"
            raise ValueError(f"prototypes need means float32 [K, d] and present bool [K], got {shapes}")

    def arrays(self) -> dict[str, Tensor]:
        """Ids ``[k]`` int64 and rows ``[k, d]`` of the present classes."""
        classes = self.present.nonzero().flatten()
        return {"classes": classes, "means": self.means.index_select(0, classes)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Prototypes:
        """Put the rows back at their classes."""
        rows, classes = arrays["means"], arrays["classes"]
        means = rows.new_zeros(header["num_classes"], rows.shape[1])
        means[classes] = rows
        present = torch.zeros(header["num_classes"], dtype=torch.bool, device=rows.device)
        present[classes] = True
        return cls(means, present)

    def header(self) -> dict[str, Any]:
        """The number of classes K."""
        return {"num_classes": self.means.shape[0]}

    @classmethod
    def empty(cls, num_classes: int, feature_dim: int) -> Prototypes:
        """No class has a prototype yet."""
        return cls(torch.zeros(num_classes, feature_dim), torch.zeros(num_classes, dtype=torch.bool))


@dataclass(frozen=True)
class Count(Payload):
    """One non-negative integer, such as a client's number of samples: 8 bytes, no scalar."""

    type_name: ClassVar[str] = "count"
    value: int

    def __post_init__(self) -> None:
        """Refuse what no count can be."""
        if self.value < 0:
            raise ValueError(f"a count cannot be negative, got {self.value}")

    def arrays(self) -> dict[str, Tensor]:
        """The integer as int64 ``[1]``."""
        return {"value": torch.tensor([self.value], dtype=torch.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Count:
        return cls(int(arrays["value"][0]))


@dataclass(frozen=True)
class TensorDict(Payload):
    """Named arrays without a type of their own: label counts, virtual images, statistics, an optimiser's state.

    All of them travel and are counted; integers cost bytes and no scalars.
    """

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
    """Mixtures of diagonal Gaussians of some classes, each with components of its own number (GFPL).

    Components of all classes stand behind one another: n·(2d + 1) scalars; class ids, numbers of components and, where
    given, of samples are integers, 8 bytes each.

    Attributes:
        classes: int64 ``[k]``, ascending ids.
        components: int64 ``[k]``, components of each class, at least one; n in all.
        weights: float32 ``[n]``.
        means: float32 ``[n, d]``.
        deviations: float32 ``[n, d]``, standard deviations, not variances.
        counts: int64 ``[k]``, samples of each class; None where they are not told.
    """

    type_name: ClassVar[str] = "mixtures"
    classes: Tensor
    components: Tensor
    weights: Tensor
    means: Tensor
    deviations: Tensor
    counts: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what does not belong together."""
        integers = [value for value in (self.classes, self.components, self.counts) if value is not None]
        floats = (self.weights, self.means, self.deviations)
        right = (
            all(value.dtype == torch.int64 and value.shape == self.classes.shape for value in integers)
            and all(value.dtype == torch.float32 and len(value) == len(self.weights) for value in floats)
            and (self.classes.ndim, self.weights.ndim, self.means.ndim) == (1, 1, 2)
            and self.means.shape == self.deviations.shape
            and bool((self.components >= 1).all())
            and int(self.components.sum()) == len(self.weights)
            and bool((self.classes.diff() > 0).all())
        )
        if not right:
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
