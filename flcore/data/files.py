"""Reading and writing artefacts: JSON and safetensors, the same bytes for the same content, never half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flcore.errors import DataError


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` with sorted keys, two spaces of indent and a final newline, in one step."""
    text = json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` as safetensors in one step; the bytes depend on names and values only."""
    # No metadata: safetensors keeps it in a hash map, so that two keys would already come in random order.
    _atomically(path, lambda temporary: save_file(dict(tensors), temporary))


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


def content_bytes(name: str, array: np.ndarray) -> tuple[bytes, bytes]:
    """What a fingerprint hashes for one array: name, type and shape, then the values in C order."""
    values = np.ascontiguousarray(array)
    header = json.dumps([name, values.dtype.str, list(values.shape)])
    return header.encode() + b"\n", values.tobytes()


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    # In the same folder, because os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
