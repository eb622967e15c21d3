"""Reading and writing artefacts: JSON and safetensors, the same bytes for the same content, never half written."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flcore.errors import DataError

# The names that safetensors has for the types of a dataset, https://huggingface.co/docs/safetensors (format).
_TYPES = {torch.int64: "I64", torch.uint8: "U8"}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` with sorted keys, two spaces of indent and a final newline, in one step."""
    text = json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


@dataclass(frozen=True, eq=False)
class Blocks:
    """An array that is made a piece at a time: ``shape`` of the whole and its pieces along the first axis, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blocks:
        """A tensor that is there already, as one piece."""
        return cls(tensor.dtype, tuple(tensor.shape), (tensor,))


def write_blocks(path: Path, arrays: Mapping[str, Blocks]) -> None:
    """Write safetensors in one step, without ever holding an array whole; bytes depend on names and values only.

    They are the bytes that safetensors itself writes: it has no way to write a piece at a time, and copies everything.

    Raises:
        ValueError: the pieces of an array do not add up to its shape.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header, ends = {}, [0]
    for name in order:
        kind = arrays[name]
        ends.append(ends[-1] + math.prod(kind.shape) * kind.dtype.itemsize)
        header[name] = {"dtype": _TYPES[kind.dtype], "shape": kind.shape, "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, end in zip(order, ends[1:], strict=True):
                for piece in arrays[name].pieces:
                    file.write(piece.contiguous().numpy().data)
                if file.tell() != 8 + len(text) + end:
                    raise ValueError(f"{path}: pieces of {name} do not add up to {arrays[name].shape}")

    _atomically(path, write)


def read_json(path: Path, cure: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        DataError: the file is missing, is not JSON or is not an object; the message ends with ``cure``.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: damaged, not readable as JSON; {cure}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: damaged, not a JSON object; {cure}")
    return content


def read_tensors(path: Path, cure: str) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors file ``path``, memory-mapped.

    Raises:
        DataError: the file is missing, truncated or otherwise not safetensors; the message ends with ``cure``.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in sorted(handle.keys())}
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: damaged, not readable as safetensors; {cure}") from error


def content_bytes(name: str, array: np.ndarray) -> tuple[bytes, memoryview]:
    """What a fingerprint hashes for one array: name, type and shape, then the values in C order (not copied)."""
    values = np.ascontiguousarray(array)
    header = json.dumps([name, values.dtype.str, list(values.shape)])
    return header.encode() + b"\n", values.data


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    # In the same folder, because os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: Mapping[str, Tensor], header: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write named arrays and a JSON header to a safetensors file, all or nothing; same content, same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # One metadata key only: safetensors writes several in random order.
    save_file(dict(arrays), temporary, metadata={"protofl": json.dumps(header, sort_keys=True)})
    if durable:
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    temporary.replace(path)


def load_arrays(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_arrays` wrote.

    Raises:
        DataError: the file is missing, cut off or not one of ours.
    """
    try:
        with safe_open(path, framework="pt", device=device) as file:
            header = json.loads((file.metadata() or {})["protofl"])
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 - not a mapping
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; run the stage that makes it first") from error
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: damaged or not written by protofl ({error}); delete it and run again") from error
