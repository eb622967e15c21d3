"""Zip files with bytes that depend only on their contents: :mod:`zipfile`, sorted by name, uncompressed, with one date.

Reading refuses what another program may have made to do harm: links, absolute paths, ``..``, duplicate names,
compressed or overlapping entries.
"""

from __future__ import annotations

import re
import shutil
import stat
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from flcore.core.errors import ConfigError, DataError
from flcore.io.files import remove_stale_temp, replace_file

Content = bytes | Path
"""Content of an entry: bytes, or a file that contains them."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+()-]*")
_MAX_NAME = 240


def refused_names(names: Sequence[str]) -> list[str]:
    """Return the names that :func:`write_zip` refuses: they cannot be unpacked on every system."""
    return [name for name in names if not _is_name(name)] or _clashes(names)


def write_zip(path: Path, contents: Mapping[str, Content]) -> None:
    """Write a zip file atomically; the same contents give the same bytes.

    Raises:
        ConfigError: too many or too large files for a plain zip file.
        ValueError: a name is refused by :func:`read_zip`.
    """
    names = sorted(contents)
    if refused := refused_names(names):
        raise ValueError(f"{refused[0]!r}: cannot be unpacked everywhere")

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", allowZip64=False) as target:
            for name in names:
                content, entry = contents[name], zipfile.ZipInfo(name)  # of 1 January 1980, stored
                entry.create_system, entry.external_attr = 3, 0o100644 << 16  # a plain file on Unix
                if isinstance(content, bytes):
                    target.writestr(entry, content)
                    continue
                entry.file_size = content.stat().st_size
                with content.open("rb") as source, target.open(entry, "w") as out:
                    shutil.copyfileobj(source, out)

    remove_stale_temp(path.parent, path.name)
    try:
        replace_file(path, write)
    except zipfile.LargeZipFile as error:
        raise ConfigError(
            f"{path}: {len(names)} files are more than an archive holds (65,535 files, 2 GB); archive fewer runs at a "
            f"time ({error})"
        ) from error


def read_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip file of which every entry is whole and can be unpacked on every system.

    Raises:
        DataError: it is missing, damaged or from another program; the message names the entry.
    """
    try:
        file = zipfile.ZipFile(path)
        _check_entries(path, file.infolist())
        damaged = file.testzip()
    except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise DataError(f"{path}: damaged or no zip file of protofl archive ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if damaged is not None:
        raise DataError(f"{path}: {damaged} is damaged; get the archive again")
    return file


def _check_entries(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    names = [entry.orig_filename for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        if not _is_name(name):
            raise DataError(f"{path}: refused, {name[:_MAX_NAME]!r} is no relative path of plain names")
        if entry.compress_type != zipfile.ZIP_STORED or not stat.S_ISREG(entry.external_attr >> 16):
            raise DataError(f"{path}: {name} is compressed or no plain file; use the file that protofl archive wrote")
    if not entries or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise DataError(f"{path}: damaged, or no zip file of protofl archive; get the archive again")
    if clashes := _clashes(names):
        raise DataError(
            f"{path}: refused, {clashes[0]} cannot be unpacked: it appears twice, is a folder and a file, or differs "
            "from another name in capitals alone"
        )


def _is_name(name: str) -> bool:
    """Return whether a name is a relative path that is safe to unpack on any system."""
    return len(name) <= _MAX_NAME and all(_PART.fullmatch(part) for part in name.split("/"))


def _clashes(names: Iterable[str]) -> list[str]:
    """Return names that would overwrite another file, or need a file as a folder, ignoring case."""
    folders = {parent.as_posix().casefold() for name in names for parent in PurePosixPath(name).parents}
    seen: set[str] = set()
    clashes = []
    for name in names:
        folded = name.casefold()
        if folded in folders or folded in seen:
            clashes.append(name)
        seen.add(folded)
    return clashes
