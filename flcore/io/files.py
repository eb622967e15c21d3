"""Read and write JSON and safetensors: the same bytes for the same content, never half written.

Every file is replaced in one step (:func:`replace_file`). ``durable`` files also survive a power failure;
:func:`make_durable` does that for many files at once. No pickle is read. torch is imported only for arrays.
"""

from __future__ import annotations

import glob
import hashlib
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
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.int32": "I32", "torch.float32": "F32", "torch.float64": "F64",
    "torch.int64": "I64",
}  # fmt: skip
_RANKS = {dtype: rank for rank, dtype in enumerate(_TYPES)}
_SECONDS_OF_A_DAY = 24 * 60 * 60
_CHECK = "check"
_OURS = "protofl"
"""The one metadata key: safetensors readers keep no order among several."""


# ---- any file ----------------------------------------------------------------------------------------------------


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Replace a file in one step by what ``write`` writes, and make its folder; readers see the old content or the new.

    A ``durable`` file survives a power failure after this returns.
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
        with suppress(OSError):  # report the first error
            disk.remove(temporary, missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        disk.sync_folder(path.parent)


def append(path: Path, content: bytes, *, at: int, durable: bool = False) -> int:
    """Append to the first ``at`` bytes of a file, which may be missing; return the new length.

    The rest, which a failed write left, is discarded. A ``durable`` file survives a power failure after this returns.
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
    """Remove temporary files of killed processes from a folder, which may be missing, not from its subfolders.

    Files of another machine's processes are removed after a day without a write. With ``name``, only the temporary
    files of that file are removed.
    """
    target = "*" if name is None else glob.escape(name)
    for path in sorted(folder.glob(f".{target}.*.*.tmp")):
        host, number = path.name.split(".")[-4:-2]
        if number.isdigit() and (not is_alive(int(number)) if host == host_id() else _is_old(path)):
            disk.remove(path, missing_ok=True)


def _is_old(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _SECONDS_OF_A_DAY
    return False


def make_durable(paths: Iterable[Path]) -> None:
    """Sync the content of existing files, then their names, each folder once."""
    folders = set()
    for path in paths:
        with disk.named(path), path.open("rb") as file:
            disk.sync(file.fileno())
        folders.add(path.parent)
    for folder in sorted(folders):
        disk.sync_folder(folder)


# ---- JSON --------------------------------------------------------------------------------------------------------

NOT_JSON = (ValueError, RecursionError)
"""Errors of reading invalid JSON, or JSON with thousands of levels or digits."""


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write ``content`` with sorted keys, two spaces of indent and a final newline."""
    text = json_text(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)


def json_text(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return ``content`` as standard JSON with sorted keys; :func:`finite` replaces infinite numbers and NaN."""
    try:
        return json.dumps(content, sort_keys=True, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:  # looking at each number before would take longer than writing it
        content = finite(content)
        return json.dumps(content, sort_keys=True, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def finite(content: Any) -> Any:
    """Replace every infinite number and NaN by null.

    An object then gets the key ``not_finite``, which maps the dotted names of these numbers to ``inf``, ``-inf`` or
    ``nan``, so that an overflowed loss differs from a missing one.
    """
    replaced: dict[str, str] = {}

    def clean(value: Any, *keys: object) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item, *keys, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, *keys, index) for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            replaced[".".join(map(str, keys))] = str(float(value))
            return None
        return value

    result = clean(content)
    return {**result, "not_finite": replaced} if replaced and isinstance(result, dict) else result


def read_json(path: Path, cure: str) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Raises:
        DataError: the file is missing, is not JSON or is not an object; the message ends with ``cure``.
    """
    return _json_object(_content(path, cure), str(path), cure)


def read_lines(path: Path, cure: str, *, growing: bool = False) -> list[dict[str, Any]]:
    """Read JSON objects, one a line; ignore an incomplete last line of a ``growing`` file.

    Raises:
        DataError: the file is missing, or a line is no JSON object; the message ends with ``cure``.
    """
    lines = _content(path, cure).splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_json_object(line, f"{path}, line {number}", cure))
        except DataError as error:
            if not (growing and number == len(lines) and isinstance(error.__cause__, NOT_JSON)):
                raise
    return records


def _content(path: Path, cure: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; {cure}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {cure}") from error


def _json_object(text: bytes, place: str, cure: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except NOT_JSON as error:  # also an incomplete UTF-8 character
        raise DataError(f"{place}: damaged, not readable as JSON; {cure}") from error
    if not isinstance(content, dict):
        raise DataError(f"{place}: damaged, not a JSON object; {cure}")
    return content


# ---- arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Blocks:
    """An array written in pieces along the first axis; ``shape`` covers the whole array."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]


def given_path(text: str | os.PathLike[str]) -> Path:
    """Return a path of a configuration with ``~`` replaced by the home folder, if there is one."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises


def check_path(path: Path) -> Path:
    """Return a path unchanged if safetensors can open it.

    Raises:
        DataError: a name in it is not UTF-8.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: a folder's name is no text in UTF-8; rename it, or use another folder") from error
    return path


def write_tensors(path: Path, arrays: Mapping[str, Tensor | Blocks], header: Mapping[str, Any] | None = None) -> None:
    """Write named arrays and JSON values as safetensors; the bytes depend on names and values only.

    The safetensors package would write the same bytes, but can write neither pieces nor tensors that share memory.

    Raises:
        DataError: a name in the path is not UTF-8.
        ValueError: the pieces of an array do not add up to its shape.
    """
    check_path(path)
    order = sorted(arrays, key=lambda name: (-_RANKS[str(arrays[name].dtype)], name))
    described: dict[str, Any] = {} if header is None else {"__metadata__": {_OURS: json_text(header)}}
    ends = [0]
    for name in order:
        array = arrays[name]
        ends.append(ends[-1] + math.prod(array.shape) * array.dtype.itemsize)
        dtype = _TYPES[str(array.dtype)]
        described[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": ends[-2:]}
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
    """Return the bytes of a tensor's values in C order, without a copy if possible."""
    import torch

    values = tensor.detach().cpu().contiguous()
    # NumPy knows no bfloat16.
    array = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return array.reshape(-1).view(np.uint8).data


def read_tensors(path: Path, cure: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors in a safetensors file, memory-mapped, and its JSON values.

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
    # Types unknown to torch raise AttributeError, TypeError or RuntimeError.
    except (SafetensorError, OSError, AttributeError, TypeError, RuntimeError, *NOT_JSON) as error:
        raise DataError(f"{path}: damaged or not written by protofl ({shorten(str(error))}); {cure}") from error
    foreign = [name for name, tensor in arrays.items() if str(tensor.dtype) not in _TYPES]
    if foreign or not isinstance(header, dict):
        what = f"{shorten(foreign[0])} is {arrays[foreign[0]].dtype}" if foreign else "its header is no JSON object"
        raise DataError(f"{path}: damaged or not written by protofl ({what}); {cure}")
    return arrays, header


def content_digest(facts: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the SHA-256 of JSON values and of named arrays: name, type and shape, then the values in C order."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in arrays:
        values = np.ascontiguousarray(array)
        digest.update(json.dumps([name, values.dtype.str, list(values.shape)]).encode() + b"\n")
        digest.update(values.data)
    return digest.hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with their check sum under the key ``check``."""
    plain = json.loads(json_text(content))  # as it will be read
    return {**plain, _CHECK: check_sum({}, plain)}


def unsealed(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values given to :func:`sealed`; None if they have changed."""
    rest = {key: value for key, value in content.items() if key != _CHECK}
    return rest if content.get(_CHECK) == check_sum({}, rest) else None


def check_sum(arrays: Mapping[str, Tensor], values: Any) -> int:
    """Return the CRC-32 of named arrays (names, types, shapes, values) and JSON values, against damage, not forgery."""
    check = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    for name, tensor in sorted(arrays.items()):
        described = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        check = zlib.crc32(raw_values(tensor), zlib.crc32(described.encode(), check))
    return check
