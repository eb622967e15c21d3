"""Records: payloads by name. One piece of code stores, restores and measures server state, messages and memories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from flcore.errors import DataError
from flcore.files import load_arrays, save_arrays
from flcore.messages import Arrays, Count, Facts, Mixtures, Payload, Prototypes, Size, Weights

PAYLOADS: dict[str, type[Payload]] = {
    cls.type_name: cls for cls in (Weights, Prototypes, Count, Arrays, Mixtures, Facts)
}


Record = Mapping[str, Payload]


def on_device(record: Record, device: str) -> Record:
    """A record with its tensors on a device; the same object where they are there already."""
    if all(tensor.device.type == device for payload in record.values() for tensor in payload.arrays().values()):
        return record
    return {
        name: type(payload).from_arrays(
            {key: tensor.to(device) for key, tensor in payload.arrays().items()}, payload.header()
        )
        for name, payload in record.items()
    }


P = TypeVar("P", bound=Payload)


def payload_of(cls: type[P], record: Record, name: str) -> P:
    """The payload ``name`` of a record, which must be a ``cls``.

    Raises:
        KeyError: the record has no such payload. TypeError: it is of another type.
    """
    payload = record[name]
    if not isinstance(payload, cls):
        raise TypeError(f"{name!r} is {payload.type_name}, expected {cls.type_name}")
    return payload


def measure(record: Record) -> dict[str, Size]:
    """Cost of a message by kind (the record's names, and ``<name>_buffers`` for BatchNorm statistics)."""
    return {name + suffix: size for name, payload in record.items() for suffix, size in payload.sizes().items()}


def serialise(record: Record) -> bytes:
    """The message as it would travel; its length is what :func:`measure` counts."""
    flat = _flatten(record)
    return b"".join(flat[name].detach().cpu().contiguous().numpy().tobytes() for name in sorted(flat))


def _flatten(record: Record) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name, payload in record.items() for key, tensor in payload.arrays().items()}


def save_record(path: Path, record: Record, extra: Mapping[str, Any] | None = None, *, durable: bool = False) -> None:
    """Write a record, with JSON values beside it, to one safetensors file, all or nothing.

    Args:
        path: the file; its folder exists.
        record: what to store.
        extra: JSON values kept in the file's header.
        durable: also survive a power failure (flush to the disk before the file appears).
    """
    header = {
        "payloads": {name: {"type": payload.type_name, **payload.header()} for name, payload in record.items()},
        "extra": dict(extra or {}),
    }
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in _flatten(record).items()}
    save_arrays(path, arrays, header, durable=durable)


def load_record(path: Path, device: str = "cpu") -> tuple[dict[str, Payload], dict[str, Any]]:
    """Read a record and the JSON values stored with it.

    Raises:
        DataError: the file is missing, cut off or not a record.
    """
    arrays, header = load_arrays(path, device)
    try:
        record = {name: _restore(name, payload, arrays) for name, payload in header["payloads"].items()}
        return record, header["extra"]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise DataError(f"{path}: not a record of protofl ({error!r}); delete it and run again") from error


def _restore(name: str, header: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Payload:
    own = {key.removeprefix(f"{name}/"): tensor for key, tensor in arrays.items() if key.startswith(f"{name}/")}
    return PAYLOADS[header["type"]].from_arrays(own, header)
