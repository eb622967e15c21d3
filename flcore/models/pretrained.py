"""Initial weights from a file that the user names, checked before use."""

from __future__ import annotations

import errno
import hashlib
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from flcore.core.errors import DataError, listed
from flcore.io.files import read_tensors


@dataclass(frozen=True)
class PretrainedFile:
    """A safetensors file, and the SHA-256 in hexadecimal that it must have (None: any)."""

    path: Path
    sha256: str | None = None

    def digest(self) -> str:
        """Return the file's SHA-256.

        Raises:
            DataError: the file is missing, or has another SHA-256 than required.
        """
        try:
            facts = self.path.stat()
            if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for, a device read without end
                raise OSError(errno.EINVAL, "not a file")
            found = _digest(self.path, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))
        except OSError as error:
            raise DataError(
                f"model.pretrained = {self.path}: cannot be read ({error.strerror}); name a safetensors file, or null"
            ) from error
        if self.sha256 is not None and found != self.sha256.lower():
            raise DataError(
                f"model.pretrained = {self.path}: its SHA-256 is {found}, not pretrained_sha256 = {self.sha256}; it is "
                "another file, or damaged"
            )
        return found


@cache
def _digest(path: Path, state: tuple[int, ...]) -> str:
    # Asked for whenever a run is named; size, times and inode say whether it is the file of before.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def load_pretrained(network: nn.Module, file: PretrainedFile, left_out: tuple[str, ...]) -> None:
    """Copy a file's values into a network's parameters and buffers: all of them, or none and an error.

    Args:
        network: changed in place.
        file: has a tensor for each of the network's names; BatchNorm's counters of batches may be missing.
        left_out: prefixes of names that are not loaded; the file may contain them in any shape.

    Raises:
        DataError: the file is missing or damaged, has another SHA-256, or is of another network.
    """
    file.digest()
    given, _ = read_tensors(file.path, "name another file in model.pretrained, or null")
    given = {name: tensor for name, tensor in given.items() if not name.startswith(left_out)}
    own = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(left_out)}
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        faults = [f"{what} {listed(names, 3)}" for what, names in (("lacks", missing), ("has", unknown)) if names]
        raise DataError(f"model.pretrained = {file.path}: is of another network: it {' and '.join(faults)}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise DataError(
                f"model.pretrained = {file.path}: {name} has shape {tuple(tensor.shape)}, the model's "
                f"{tuple(own[name].shape)}: it is of another network"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"model.pretrained = {file.path}: {name} holds values that are not finite")
    for name, tensor in given.items():
        own[name].copy_(tensor)
