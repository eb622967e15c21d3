"""Zip files of which every byte follows from what they hold.

Entries stand in order of their names, stored and not compressed, with one fixed time stamp and nothing optional: the
same content is the same file on every machine, whatever its zlib. Every program that knows zip files opens them.

They are read back as strictly as they are written, entry by entry from the first byte to the last, and never by what a
table at the end says. So whatever byte of such a file is changed, it is found, and said in which entry; and there is
nothing to be careful about that cannot be said here: no links, no absolute paths, no ``..``, no name twice, no entry in
another one, and none that is larger unpacked than packed.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from flcore.core.errors import ConfigError, DataError
from flcore.io.files import remove_stale_temp, replace_file

Content = bytes | Path
"""Of an entry: bytes, or a file that holds them."""

_ENTRY, _LISTED, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_ENTRY_FORM = struct.Struct("<4s5H3I2H")
_LISTED_FORM = struct.Struct("<4s6H3I5H2I")
_END_FORM = struct.Struct("<4s4H2IH")
_VERSION = 20  # 2.0 of the format: stored files in folders
_MADE_BY = 3 << 8 | _VERSION  # attributes are those of Unix
_DATE = 1 << 5 | 1  # 1 January 1980, the first day that the format knows
_MODE = 0o100644 << 16  # a file that everybody may read
_MOST_ENTRIES, _MOST_BYTES = 2**16 - 1, 2**32 - 1  # beyond which the format has other headers
_CHUNK = 2**20
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+()-]*")
_LONGEST_NAME = 240


@dataclass(frozen=True)
class Entry:
    """Where an entry's content lies in the file, and its checksum."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class StoredZip:
    """A file that was read and found whole: its entries by name, in order."""

    path: Path
    entries: Mapping[str, Entry]

    def read(self, name: str, most: int) -> bytes:
        """The content of an entry.

        Args:
            name: of the entry.
            most: bytes that it may have.

        Raises:
            DataError: there is no such entry, or it is larger.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise DataError(f"{self.path}: has no {name}; it is no archive of protofl, or of another version")
        if entry.size > most:
            raise DataError(f"{self.path}: {name} has {entry.size} bytes, more than {most}; nothing of it was read")
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.size)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content of an entry that is there, a piece at a time."""
        entry = self.entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            yield from _chunks(file, entry.size)


def refused_names(names: Sequence[str]) -> list[str]:
    """Names with which :func:`write_zip` writes nothing: they cannot be unpacked on every system."""
    return [name for name in names if not _is_name(name)] or _clashes(names)


def write_zip(path: Path, contents: Mapping[str, Content]) -> None:
    """Write a zip file in one step; the same contents give the same bytes.

    Args:
        path: the file.
        contents: by name.

    Raises:
        ConfigError: they are more, or larger, than a plain zip file can hold.
        ValueError: a name that :func:`read_zip` would refuse.
    """
    names = sorted(contents)
    if refused := refused_names(names):
        raise ValueError(f"{refused[0]!r}: cannot be unpacked everywhere")
    sizes = {name: content.stat().st_size if isinstance(content, Path) else len(content)
             for name, content in contents.items()}  # fmt: skip
    overhead = sum(_ENTRY_FORM.size + _LISTED_FORM.size + 2 * len(name) for name in names) + _END_FORM.size
    if len(names) > _MOST_ENTRIES or sum(sizes.values()) + overhead > _MOST_BYTES:
        raise ConfigError(
            f"{path}: {len(names)} files with {sum(sizes.values()) / 1e9:.1f} GB are more than an archive holds "
            "(65,535 files, 4.2 GB); archive fewer runs at a time"
        )

    def write(file: BinaryIO) -> None:
        entries = {}
        for name in names:
            crc = 0
            for piece in _pieces(contents[name]):
                crc = zlib.crc32(piece, crc)
            header = _entry_header(name, crc, sizes[name])
            file.write(header)
            entries[name] = Entry(file.tell(), sizes[name], crc)
            for piece in _pieces(contents[name]):
                file.write(piece)
        file.write(b"".join(_table(entries)))

    remove_stale_temp(path.parent, path.name)
    replace_file(path, write)


def read_zip(path: Path) -> StoredZip:
    """Read a whole zip file and check every byte of it against what :func:`write_zip` writes.

    Raises:
        DataError: it is missing, or differs from that anywhere; says in which entry.
    """
    try:
        with path.open("rb") as file:
            return StoredZip(path, _read(path, file))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _read(path: Path, file: BinaryIO) -> dict[str, Entry]:
    length = path.stat().st_size
    entries: dict[str, Entry] = {}
    while (signature := file.read(4)) == _ENTRY:
        name, entry = _read_entry(path, file, length, next(reversed(entries), None))
        entries[name] = entry
        crc = 0
        for piece in _chunks(file, entry.size):
            crc = zlib.crc32(piece, crc)
        if crc != entry.crc:
            raise DataError(f"{path}: {name} is damaged, its checksum is another; get the archive again")
    if not entries:
        raise DataError(f"{path}: is no zip file as protofl archive writes it")
    file.seek(-len(signature), 1)
    for name, listed in zip([*entries, "its end"], _table(entries), strict=True):
        if file.read(len(listed)) != listed:
            raise DataError(f"{path}: damaged in its list of entries, at {name}; get the archive again")
    if file.read(1):
        raise DataError(f"{path}: has something behind its end; get the archive again")
    if clashes := _clashes(entries):
        raise DataError(
            f"{path}: refused, {clashes[0]} cannot be unpacked beside the others: one name is a folder and a file, or "
            "two differ in capitals alone"
        )
    return entries


def _read_entry(path: Path, file: BinaryIO, length: int, before: str | None) -> tuple[str, Entry]:
    """The header behind a signature, checked."""
    place = "its first entry" if before is None else f"the entry behind {before}"
    rest = file.read(_ENTRY_FORM.size - 4)
    if len(rest) < _ENTRY_FORM.size - 4:
        raise DataError(f"{path}: ends in {place}; get the archive again")
    _, _, _, method, _, _, crc, _, size, name_length, _ = _ENTRY_FORM.unpack(_ENTRY + rest)
    if method != 0:
        raise DataError(
            f"{path}: {place} is compressed, so another program has packed it; use the file that protofl archive wrote"
        )
    if not 0 < name_length <= _LONGEST_NAME:
        raise DataError(f"{path}: {place} has a name of {name_length} bytes; 1 to {_LONGEST_NAME} are read")
    raw = file.read(name_length)
    name = raw.decode("ascii", errors="replace")
    if not _is_name(name):
        raise DataError(f"{path}: refused, {place} is called {name!r}; only relative paths of plain names are read")
    if _ENTRY + rest + raw != _entry_header(name, crc, size):
        raise DataError(f"{path}: the header of {name} is damaged, or of another program; get the archive again")
    if before is not None and name <= before:
        raise DataError(f"{path}: refused, {name} stands behind {before}: twice, or out of order")
    if file.tell() + size > length:
        raise DataError(f"{path}: ends in the middle of {name}; get the archive again")
    return name, Entry(file.tell(), size, crc)


def _is_name(name: str) -> bool:
    """Whether a name is a relative path that stays where it is unpacked, on any system."""
    return len(name) <= _LONGEST_NAME and all(_PART.fullmatch(part) for part in name.split("/"))


def _clashes(names: Iterable[str]) -> list[str]:
    """Names that would be unpacked to the place of another file, or through one, where capitals make no difference."""
    folders = {parent.as_posix().casefold() for name in names for parent in PurePosixPath(name).parents}
    seen: set[str] = set()
    found = []
    for name in names:
        folded = name.casefold()
        if folded in folders or folded in seen:
            found.append(name)
        seen.add(folded)
    return found


def _entry_header(name: str, crc: int, size: int) -> bytes:
    raw = name.encode("ascii")
    return _ENTRY_FORM.pack(_ENTRY, _VERSION, 0, 0, 0, _DATE, crc, size, size, len(raw), 0) + raw


def _table(entries: Mapping[str, Entry]) -> Iterator[bytes]:
    """The list of entries at the end of the file: an item of it per entry, then its end."""
    start = length = 0
    for name, entry in entries.items():
        raw = name.encode("ascii")
        offset = entry.offset - _ENTRY_FORM.size - len(raw)
        described = (_VERSION, 0, 0, 0, _DATE, entry.crc, entry.size, entry.size, len(raw))
        yield _LISTED_FORM.pack(_LISTED, _MADE_BY, *described, 0, 0, 0, 0, _MODE, offset) + raw
        start, length = entry.offset + entry.size, length + _LISTED_FORM.size + len(raw)
    yield _END_FORM.pack(_END, 0, 0, len(entries), len(entries), length, start, 0)


def _pieces(content: Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, _CHUNK))):
        yield piece
        size -= len(piece)
