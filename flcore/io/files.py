"""Reading and writing artefacts: JSON and safetensors, the same bytes for the same content, never half written.

Every file appears in one step (:func:`replace_file`), by operations of :mod:`flcore.io.disk`; what must survive a power
failure as well is written ``durable``, or made so afterwards, many files at a time (:func:`make_durable`). No pickle is
ever read.

Whoever reads a run's JSON alone need not wait for torch: it is imported where arrays are read or written.
"""

from __future__ import annotations

import glob
import json
import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flcore.core.errors import DataError
from flcore.core.host import host_id, is_alive
from flcore.core.text import shorten
from flcore.io import disk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# In the order in which safetensors lays types out, smallest first: https://huggingface.co/docs/safetensors (format).
_TYPES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int32": "I32",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_TYPES)}
_SECONDS_OF_A_DAY = 24 * 60 * 60
_CHECK = "check"
_OURS = "protofl"
"""The one metadata key: safetensors readers keep no order among several."""


# ---- any file ----------------------------------------------------------------------------------------------------


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Put a file in its place in one step, its folder included; a reader sees the old content or the new.

    Args:
        path: the file.
        write: writes the content to an open file.
        durable: also survive a power failure, from the moment this returns.
    """
    disk.make_folder(path.parent)
    # In the same folder, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{host_id()}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with disk.named(path), disk.create(temporary) as file:
            write(file)
            if durable:
                file.flush()
                disk.sync(file.fileno())
        disk.rename(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # what went wrong first is what has to be said
            disk.remove(temporary, missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error  # by the name that people know
        raise
    if durable:
        disk.sync_folder(path.parent)


def append(path: Path, content: bytes, *, at: int, durable: bool = False) -> int:
    """Write behind the first ``at`` bytes of a file; what else lies there was left by a write that failed, and goes.

    Args:
        path: the file; made where there is none.
        content: to be written.
        at: bytes that stay.
        durable: also survive a power failure, from the moment this returns.

    Returns:
        The file's length.
    """
    if path.exists() and path.stat().st_size > at:
        disk.truncate(path, at)
    with disk.named(path), disk.open_end(path) as file:
        file.write(content)
        if durable:
            file.flush()
            disk.sync(file.fileno())
    return at + len(content)


def remove_stale_temp(folder: Path, name: str | None = None) -> None:
    """Remove what processes that were killed have left half written in a folder; in those below it nothing.

    Whether a process of another machine is alive is unknown: its file is removed after a day without a write.

    Args:
        folder: need not be there.
        name: of the file that was to be written; None: of any.
    """
    whose = "*" if name is None else glob.escape(name)
    for path in sorted(folder.glob(f".{whose}.*.*.tmp")):
        host, number = path.name.split(".")[-4:-2]
        if number.isdigit() and (not is_alive(int(number)) if host == host_id() else _is_old(path)):
            disk.remove(path, missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _SECONDS_OF_A_DAY
    except FileNotFoundError:
        return False


def make_durable(paths: Iterable[Path]) -> None:
    """Let files that are there survive a power failure: their content, then their names, each folder once."""
    folders = set()
    for path in paths:
        with disk.named(path), path.open("rb") as file:
            disk.sync(file.fileno())
        folders.add(path.parent)
    for folder in sorted(folders):
        disk.sync_folder(folder)


NOT_JSON = (ValueError, RecursionError)
"""What reading JSON raises where it is none, or none that anybody meant: wrong signs, thousands of levels or digits."""


# ---- JSON --------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write ``content`` with sorted keys, two spaces of indent and a final newline."""
    text = json_text(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)


def json_text(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return ``content`` as JSON with sorted keys, on one line or indented; every reader of JSON accepts it.

    JSON has no infinite numbers and no NaN: see :func:`finite`.
    """
    try:
        return json.dumps(content, sort_keys=True, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:  # looking at each number before would take longer than writing it
        content = finite(content)
        return json.dumps(content, sort_keys=True, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def finite(content: Any) -> Any:
    """Return JSON values with null in place of every number that is infinite or NaN.

    An object then also has the key ``not_finite``, which maps the dotted names of these numbers to ``inf``, ``-inf`` or
    ``nan``: a loss that has overflowed is not taken for one that a method does not have.
    """
    found: dict[str, str] = {}

    def cleaned(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [cleaned(item, f"{name}.{place}" if name else str(place)) for place, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = str(float(value))
            return None
        return value

    result = cleaned(content, "")
    return {**result, "not_finite": found} if found and isinstance(result, dict) else result


def read_json(path: Path, cure: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        DataError: the file is missing, is not JSON or is not an object; the message ends with ``cure``.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    except (*NOT_JSON, OSError) as error:
        raise DataError(f"{path}: damaged, not readable as JSON; {cure}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: damaged, not a JSON object; {cure}")
    return content


def read_lines(path: Path, cure: str, *, growing: bool = False) -> list[dict[str, Any]]:
    """The JSON objects in ``path``, one a line; of a ``growing`` file without a last line that is not whole yet.

    Raises:
        DataError: the file is missing, or a line is no JSON object; the message ends with ``cure``.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {cure}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except NOT_JSON as error:  # also an incomplete UTF-8 character
            if growing and number == len(lines):
                break
            raise DataError(f"{path}, line {number}: damaged, not readable as JSON; {cure}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: damaged, not a JSON object; {cure}")
        records.append(record)
    return records


# ---- arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Blocks:
    """An array that is made a piece at a time: ``shape`` of the whole and its pieces along the first axis, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]


def given_path(text: str | os.PathLike[str]) -> Path:
    """Return a path of a configuration with ``~`` replaced by the home folder, where there is one."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises


def check_path(path: Path) -> Path:
    """Return a path unchanged if safetensors can open it; call this before anything is computed for it.

    Raises:
        DataError: a name in it is no text in UTF-8.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: a folder's name is no text in UTF-8; rename it, or use another folder") from error
    return path


def write_tensors(path: Path, arrays: Mapping[str, Tensor | Blocks], header: Mapping[str, Any] | None = None) -> None:
    """Write named arrays, and JSON values beside them, as safetensors; bytes depend on names and values only.

    They are the bytes that safetensors itself writes: it has no way to write a piece at a time, and none to write
    tensors that share memory.

    Raises:
        DataError: a name in the path is no text in UTF-8.
        ValueError: the pieces of an array do not add up to its shape.
    """
    check_path(path)
    order = sorted(arrays, key=lambda name: (-_RANKS[str(arrays[name].dtype)], name))
    described: dict[str, Any] = {} if header is None else {"__metadata__": {_OURS: json_text(header)}}
    ends = [0]
    for name in order:
        array = arrays[name]
        ends.append(ends[-1] + math.prod(array.shape) * array.dtype.itemsize)
        described[name] = {
            "dtype": _TYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, end in zip(order, ends[1:], strict=True):
            array = arrays[name]
            for piece in array.pieces if isinstance(array, Blocks) else (array,):
                file.write(raw_values(piece))
            if file.tell() != 8 + len(text) + end:
                raise ValueError(f"{path}: pieces of {name} do not add up to {array.shape}")

    replace_file(path, write)


def raw_values(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, in C order; not copied where they lie so already."""
    import torch

    values = tensor.detach().cpu().contiguous()
    # NumPy knows no bfloat16.
    array = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return array.reshape(-1).view(np.uint8).data


def read_tensors(path: Path, cure: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor in the safetensors file ``path``, memory-mapped, and the JSON values beside them, if any.

    Raises:
        DataError: the file is missing, truncated or otherwise not one of ours; the message ends with ``cure``.
    """
    from safetensors import SafetensorError, safe_open

    check_path(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_OURS, "{}"))
            arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    # A type that torch does not have is an AttributeError or TypeError of safetensors, or a RuntimeError of torch.
    except (SafetensorError, OSError, AttributeError, TypeError, RuntimeError, *NOT_JSON) as error:
        raise DataError(f"{path}: damaged or not written by protofl ({shorten(str(error))}); {cure}") from error
    foreign = [name for name, tensor in arrays.items() if str(tensor.dtype) not in _TYPES]
    if foreign or not isinstance(header, dict):
        what = f"{shorten(foreign[0])} is {arrays[foreign[0]].dtype}" if foreign else "its header is no JSON object"
        raise DataError(f"{path}: damaged or not written by protofl ({what}); {cure}")
    return arrays, header


def content_bytes(name: str, array: np.ndarray) -> tuple[bytes, memoryview]:
    """What a fingerprint hashes for one array: name, type and shape, then the values in C order (not copied)."""
    values = np.ascontiguousarray(array)
    header = json.dumps([name, values.dtype.str, list(values.shape)])
    return header.encode() + b"\n", values.data


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values with a check sum of them, under the key ``check``."""
    plain = json.loads(json_text(content))  # as it will be read
    return {**plain, _CHECK: check_sum({}, plain)}


def unsealed(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """What :func:`sealed` was given; None where that has changed since."""
    rest = {key: value for key, value in content.items() if key != _CHECK}
    return rest if content.get(_CHECK) == check_sum({}, rest) else None


def check_sum(arrays: Mapping[str, Tensor], values: Any) -> int:
    """CRC-32 of named arrays (names, types, shapes, values) and JSON values: tells damage, not a forger."""
    found = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    for name, tensor in sorted(arrays.items()):
        described = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        found = zlib.crc32(raw_values(tensor), zlib.crc32(described.encode(), found))
    return found
