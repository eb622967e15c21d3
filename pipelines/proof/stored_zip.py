"""Zip files with bytes that depend only on their contents, written and read with :mod:`zipfile`.

Entries are sorted by name and stored uncompressed with one fixed date: the same contents give the same file on every
machine, with any zlib. Reading accepts nothing else: no links, absolute paths, ``..``, duplicate names, compressed
entries, gaps or trailing bytes.
"""

from __future__ import annotations

import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from flcore.core.errors import ConfigError, DataError
from flcore.io.files import remove_stale_temp, replace_file

Content = bytes | Path
"""Content of an entry: bytes, or a file that contains them."""

_MAX_ENTRIES, _MAX_BYTES, _MAX_FILE = 2**16 - 1, 2**32 - 1, 2_000_000_000
"""Limits of a zip file without 64-bit headers, as :mod:`zipfile` has them."""

_CHUNK = 2**20
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+()-]*")
_MAX_NAME = 240
_LISTED, _END = struct.Struct("<4s4B4H3L5H2L"), struct.Struct("<4s4H2LH")
"""Formats of an entry in the central directory at the end of a file, and of the end record."""


_HEADER_BYTES = 30
"""Bytes of an entry's header without its name."""


@dataclass(frozen=True)
class StoredZip:
    """A checked zip file: its entries by name, in order."""

    path: Path
    entries: Mapping[str, zipfile.ZipInfo]

    def read(self, name: str, most: int) -> bytes:
        """Return the content of an entry of at most ``most`` bytes.

        Raises:
            DataError: the entry is missing or larger.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise DataError(f"{self.path}: has no {name}; it is no archive of protofl, or of another version")
        if entry.file_size > most:
            raise DataError(
                f"{self.path}: {name} has {entry.file_size} bytes, more than {most}; nothing of it was read"
            )
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of an entry in pieces; `zipfile` would read the central directory for each entry again.

        Raises:
            DataError: the file has changed since it was checked.
        """
        entry, crc = self.entries[name], 0
        with self.path.open("rb") as file:
            file.seek(entry.header_offset + _HEADER_BYTES + len(name.encode()))
            left = entry.file_size
            while left > 0 and (piece := file.read(min(left, _CHUNK))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
                yield piece
        if (crc, left) != (entry.CRC, 0):
            raise DataError(f"{self.path}: {name} has changed since it was checked; try again")


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
    sizes = [content.stat().st_size if isinstance(content, Path) else len(content) for content in contents.values()]
    overhead = sum(98 + 2 * len(name) for name in names)
    if len(names) > _MAX_ENTRIES or sum(sizes) + overhead > _MAX_BYTES or max(sizes, default=0) > _MAX_FILE:
        raise ConfigError(
            f"{path}: {len(names)} files with {sum(sizes) / 1e9:.1f} GB are more than an archive holds "
            "(65,535 files, 4.2 GB, 2 GB a file); archive fewer runs at a time"
        )

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", allowZip64=False) as target:
            for name in names:
                content = contents[name]
                with target.open(_entry(name), "w") as entry:
                    if isinstance(content, bytes):
                        entry.write(content)
                    else:
                        with content.open("rb") as source:
                            shutil.copyfileobj(source, entry, _CHUNK)

    remove_stale_temp(path.parent, path.name)
    replace_file(path, write)


def read_zip(path: Path) -> StoredZip:
    """Read a zip file and check that :func:`write_zip` could have written every byte of it.

    Raises:
        DataError: it is missing, damaged or from another program; the message names the entry.
    """
    try:
        with path.open("rb") as raw, closing(zipfile.ZipFile(raw)) as file:
            return StoredZip(path, _checked(path, raw, file))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise DataError(f"{path}: damaged or no zip file of protofl archive ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _checked(path: Path, raw: BinaryIO, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    offset, before, listing = 0, "", bytearray()
    for listed in file.infolist():
        name = listed.orig_filename
        if not _is_name(name):
            raise DataError(f"{path}: refused, {name[:_MAX_NAME]!r} is no relative path of plain names")
        if name <= before:
            raise DataError(f"{path}: refused, {name} follows {before}: duplicate or out of order")
        if listed.compress_type != zipfile.ZIP_STORED:
            raise DataError(f"{path}: {name} is compressed by another program; use the file that protofl archive wrote")
        expected = _entry(name)
        expected.CRC, expected.file_size, expected.compress_size = listed.CRC, listed.file_size, listed.file_size
        raw.seek(offset)
        header = expected.FileHeader(zip64=False)
        if (
            listed.header_offset != offset
            or listed.compress_size != listed.file_size
            or raw.read(len(header)) != header
        ):
            raise DataError(f"{path}: the header of {name} is damaged or of another program; get the archive again")
        if _crc(raw, listed.file_size) != listed.CRC:
            raise DataError(f"{path}: {name} is damaged, its checksum differs; get the archive again")
        sizes = (listed.CRC, listed.file_size, listed.file_size, len(name))
        entry = (20, 3, 20, 0, 0, 0, 0, 33, *sizes, 0, 0, 0, 0, expected.external_attr, offset)  # 33: 1 January 1980
        listing += _LISTED.pack(b"PK\x01\x02", *entry) + name.encode()
        entries[name], before, offset = listed, name, raw.tell()
    end = _END.pack(b"PK\x05\x06", 0, 0, len(entries), len(entries), len(listing), offset, 0)
    raw.seek(offset)
    if not entries or raw.read() != listing + end:
        raise DataError(f"{path}: damaged at its end, or no zip file of protofl archive; get the archive again")
    if clashes := _clashes(entries):
        raise DataError(
            f"{path}: refused, {clashes[0]} cannot be unpacked: it is a folder and a file, or differs from another "
            "name in capitals alone"
        )
    return entries


def _crc(file: BinaryIO, size: int) -> int:
    """Return the CRC-32 of the next ``size`` bytes of a file."""
    crc = 0
    while size > 0 and (piece := file.read(min(size, _CHUNK))):
        crc, size = zlib.crc32(piece, crc), size - len(piece)
    return crc


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # its defaults: 1 January 1980, stored
    entry.create_system, entry.external_attr = 3, 0o100644 << 16  # a plain file on Unix
    return entry


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
