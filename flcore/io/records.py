"""Records: payloads by name, for server state, broadcasts, replies and client state.

Keys know the type of their payload: ``server[MODEL]`` is a :class:`~flcore.io.messages.Weights`, for mypy and at run
time. A key is a string, so a plain name finds the same payload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from torch import Tensor

from flcore.core.errors import DataError
from flcore.core.text import shorten
from flcore.io.files import check_sum, raw_values, read_tensors, write_tensors
from flcore.io.messages import Count, Mixtures, Payload, Prototypes, Size, TensorDict, Weights

PAYLOADS: dict[str, type[Payload]] = {cls.type_name: cls for cls in (Weights, Prototypes, Count, TensorDict, Mixtures)}

_CHECK = "check"
"""Header key of a file's check sum."""

P = TypeVar("P", bound=Payload)

Payloads = Mapping[str, Payload]
"""Payloads by name, such as ``{MODEL: weights, NUM_SAMPLES: Count(7)}``."""


class Key(str, Generic[P]):
    """The name of a payload together with its type."""

    kind: type[P]

    def __new__(cls, name: str, kind: type[P]) -> Self:
        """Make a key for payloads of type ``kind``."""
        key = super().__new__(cls, name)
        key.kind = kind
        return key


class Record(Mapping[str, Payload]):
    """Payloads by name; immutable, like everything in it."""

    __slots__ = ("_payloads",)

    def __init__(self, payloads: Payloads | None = None) -> None:
        """Keep the payloads.

        Raises:
            TypeError: a payload has another type than its key.
        """
        self._payloads: dict[str, Payload] = {}
        for name, payload in (payloads or {}).items():
            if isinstance(name, Key) and not isinstance(payload, name.kind):
                raise TypeError(f"{name!r} takes {name.kind.type_name}, got {type(payload).__name__}")
            self._payloads[str(name)] = payload

    @overload
    def __getitem__(self, key: Key[P]) -> P: ...

    @overload
    def __getitem__(self, key: str) -> Payload: ...

    def __getitem__(self, key: str) -> Any:
        """Return the payload of a name or key.

        Raises:
            KeyError: unknown name. TypeError: the payload has another type than the key.
        """
        payload = self._payloads[key]
        if isinstance(key, Key) and not isinstance(payload, key.kind):
            raise TypeError(f"{str(key)!r} is {payload.type_name}, expected {key.kind.type_name}")
        return payload

    @overload  # type: ignore[override]  # narrower for keys, the same for names
    def get(self, key: Key[P], /) -> P | None: ...

    @overload
    def get(self, key: Key[P], default: P, /) -> P: ...

    @overload
    def get(self, key: str, default: Any = None, /) -> Any: ...

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return the payload of a name or key, or ``default``."""
        return self[key] if key in self._payloads else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._payloads)

    def __len__(self) -> int:
        return len(self._payloads)

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}: {payload.type_name}' for name, payload in self.items())})"

    def __or__(self, more: Payloads) -> Record:
        return Record({**self._payloads, **Record(more)._payloads})

    def only(self, *names: str) -> Record:
        """Return the payloads with these names, in this order; ignore missing names."""
        return Record({name: self._payloads[name] for name in names if name in self._payloads})

    def without(self, *names: str) -> Record:
        return Record({name: payload for name, payload in self._payloads.items() if name not in names})


def on_device(record: Payloads, device: str) -> Record:
    """Return a record with its tensors on a device; tensors already there are not copied."""
    return Record({name: payload.to(device) for name, payload in record.items()})


def row_major(record: Payloads) -> Record:
    """Return a record with its tensors in row-major order, as messages and files hold them.

    Last bits of a product depend on the order, and a resumed run reads its tensors from files.
    """
    return Record({name: payload.row_major() for name, payload in record.items()})


class SharedOnDevice:
    """Copy records to a device; copy a payload that several records share once."""

    def __init__(self, device: str) -> None:
        """Keep the device; records come from the CPU, so nothing is copied to it."""
        self._device = device
        self._copies: dict[int, tuple[Payload, Payload]] = {}

    def of(self, records: Iterable[Payloads]) -> list[Record]:
        """Return the records on the device; copies are kept until the next call."""
        listed = [record if isinstance(record, Record) else Record(record) for record in records]
        if self._device == "cpu":
            return listed
        before, self._copies = self._copies, {}
        for payload in (payload for record in listed for payload in record.values()):
            if (key := id(payload)) not in self._copies:
                self._copies[key] = before.get(key) or (payload, payload.to(self._device))
        return [Record({name: self._copies[id(payload)][1] for name, payload in one.items()}) for one in listed]


def payload_sizes(record: Payloads) -> dict[str, Size]:
    """Return a message's size by kind: the record's names, and ``<name>_buffers`` for BatchNorm statistics."""
    return {str(name) + suffix: size for name, payload in record.items() for suffix, size in payload.sizes().items()}


def serialise(record: Payloads) -> bytes:
    """Return the bytes of a message; their number equals the sizes of :func:`payload_sizes`."""
    flat = flattened(record)
    return b"".join(flat[name].detach().cpu().contiguous().numpy().tobytes() for name in sorted(flat))


def flattened(record: Payloads) -> dict[str, Tensor]:
    """Return a record's arrays as ``<payload's name>/<array's name>``."""
    return {f"{name}/{key}": tensor for name, payload in record.items() for key, tensor in payload.arrays().items()}


def pack_record(record: Payloads) -> tuple[dict[str, Any], list[memoryview]]:
    """Return a description of a record and its values, to be sent to another process in this order."""
    arrays = flattened(record)
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # aligned
    described = {
        "payloads": kinds(record),
        "arrays": [[name, arrays[name].dtype, list(arrays[name].shape)] for name in order],
    }
    return described, [raw_values(arrays[name]) for name in order]


def unpack_record(described: Mapping[str, Any], values: Tensor) -> Record:
    """Restore a record from :func:`pack_record`; its tensors are views of the joined ``values``, uint8 [n]."""
    arrays, begin = {}, 0
    for name, dtype, shape in described["arrays"]:
        end = begin + dtype.itemsize * math.prod(shape)
        arrays[name] = values[begin:end].view(dtype).reshape(shape)
        begin = end
    return from_flattened(arrays, described["payloads"])


def pack_records(records: Sequence[Payloads]) -> tuple[dict[str, Any], list[memoryview]]:
    """Pack several records as :func:`pack_record` does; a shared payload is packed once."""
    shared = {id(payload): payload for record in records for payload in record.values()}
    number = {key: str(place) for place, key in enumerate(shared)}
    described, values = pack_record({number[key]: payload for key, payload in shared.items()})
    places = [{str(name): number[id(payload)] for name, payload in record.items()} for record in records]
    return {"records": places, **described}, values


def aligned(record: Payloads) -> Record:
    """Return a record with its tensors copied to aligned memory, because last bits of sums depend on alignment."""
    return Record({name: payload.map(Tensor.clone) for name, payload in record.items()})


def unpack_records(described: Mapping[str, Any], values: Tensor) -> list[Record]:
    """Restore the records of :func:`pack_records`, with shared payloads.

    Tensors are :func:`aligned`.
    """
    shared = aligned(unpack_record(described, values))
    return [Record({name: shared[number] for name, number in places.items()}) for places in described["records"]]


def kinds(record: Payloads) -> dict[str, Any]:
    """Return, by payload's name, the JSON values for restoring it with its arrays."""
    return {str(name): {"type": payload.type_name, **payload.header()} for name, payload in record.items()}


def from_flattened(arrays: Mapping[str, Tensor], described: Mapping[str, Any]) -> Record:
    """Return the record of :func:`flattened` arrays and their :func:`kinds`."""
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in described}
    for key, tensor in arrays.items():
        name, _, inner = key.partition("/")
        by_name[name][inner] = tensor
    return Record({name: PAYLOADS[kind["type"]].from_arrays(by_name[name], kind) for name, kind in described.items()})


def save_record(path: Path, record: Payloads, extra: Mapping[str, Any] | None = None) -> None:
    """Write a record and JSON values to one safetensors file, in one step, with a check sum in its header.

    Tensors that payloads share are written repeatedly. ``extra`` holds further JSON values for the header.
    """
    header = json.loads(json.dumps({"payloads": kinds(record), "extra": dict(extra or {})}))  # as it will be read
    arrays = flattened(record)
    write_tensors(path, arrays, {**header, _CHECK: check_sum(arrays, header)})


def load_record(path: Path, cure: str = "make it again") -> tuple[Record, dict[str, Any]]:
    """Read a record and the JSON values stored with it.

    Raises:
        DataError: the file is missing, cut off, changed or not a record; the message ends with ``cure``.
    """
    arrays, header = read_tensors(path, cure)
    written = header.pop(_CHECK, None)
    if header.keys() != {"payloads", "extra"}:
        raise DataError(f"{path}: not a record of protofl; {cure}")
    if written != check_sum(arrays, header):
        raise DataError(f"{path}: damaged, its content is not what was written; {cure}")
    try:
        return from_flattened(arrays, header["payloads"]), header["extra"]
    # Errors of payloads with inconsistent arrays.
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        raise DataError(f"{path}: not a record of protofl ({shorten(repr(error))}); {cure}") from error
