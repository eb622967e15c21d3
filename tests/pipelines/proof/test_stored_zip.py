"""Zip files of which every byte is known: what they are by the format, and that no other is read."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flcore.core.errors import ConfigError, DataError
from pipelines.proof.stored_zip import read_zip, write_zip

SMALL = {"b/c.txt": b"hello", "a.json": b"{}", "b/empty": b""}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_zip(tmp_path / "small.zip", SMALL)
    return tmp_path / "small.zip"


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    """One entry, field by field as APPNOTE 6.3 has them (4.3.7, 4.3.12, 4.3.16).

    30 + 1 bytes of header, 2 of content, 46 + 1 in the list, 22 at the end. The day is 1 January 1980: year 0 since
    1980 in the seven high bits, month 1 in the next four, day 1 in the low five, 0b0000000_0001_00001 = 33.
    """
    write_zip(tmp_path / "one.zip", {"a": b"hi"})
    crc = struct.pack("<I", zlib.crc32(b"hi"))
    sizes = b"\x02\0\0\0\x02\0\0\0"
    common = b"\x14\0" + b"\0\0" + b"\0\0" + b"\0\0" + b"\x21\0" + crc + sizes + b"\x01\0" + b"\0\0"
    entry = b"PK\x03\x04" + common + b"a" + b"hi"
    attributes = struct.pack("<I", (stat.S_IFREG | 0o644) << 16)
    listed = b"PK\x01\x02" + b"\x14\x03" + common + b"\0\0" + b"\0\0" + b"\0\0" + attributes + b"\0\0\0\0" + b"a"
    end = b"PK\x05\x06" + b"\0\0" * 2 + b"\x01\0" * 2 + struct.pack("<II", 47, 33) + b"\0\0"
    assert (len(entry), len(listed), len(end)) == (33, 47, 22)
    assert (tmp_path / "one.zip").read_bytes() == entry + listed + end


@given(
    contents=st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(/[0-9]{1,3})?\.x", fullmatch=True), st.binary(max_size=300), min_size=1, max_size=6
    )
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_by_everybody(contents: dict[str, bytes], tmp_path: Path) -> None:
    path, again = tmp_path / "one.zip", tmp_path / "again.zip"
    write_zip(path, contents)
    write_zip(again, dict(reversed(contents.items())))
    assert path.read_bytes() == again.read_bytes()
    with read_zip(path) as found:
        assert found.namelist() == sorted(contents)
        assert {name: found.read(name) for name in contents} == contents


def test_a_file_is_taken_as_it_lies_there(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(range(256)) * 10_000)  # more than is copied at a time
    write_zip(tmp_path / "x.zip", {"large": tmp_path / "large"})
    assert read_zip(tmp_path / "x.zip").read("large") == (tmp_path / "large").read_bytes()


def test_no_changed_byte_changes_content(small: Path) -> None:
    """It is found, or hides an entry, which the archive's list of files then lacks; dates and versions say nothing."""
    whole = small.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        small.write_bytes(changed)
        with suppress(DataError), read_zip(small) as found:
            assert {name: found.read(name) for name in found.namelist()}.items() <= SMALL.items()
        small.write_bytes(whole[:place])
        with pytest.raises(DataError):
            read_zip(small)


def test_the_changed_entry_is_named(small: Path) -> None:
    small.write_bytes(small.read_bytes().replace(b"hello", b"hellp"))
    with pytest.raises(DataError, match=r"small\.zip: b/c\.txt is damaged"):
        read_zip(small)


def foreign(
    *entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED, mode: int = stat.S_IFREG | 0o644
) -> bytes:
    """A file of another program, as like ours as it can be made."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in entries:
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.compress_type, about.external_attr = compression, mode << 16
            file.writestr(about, content)
    return out.getvalue()


def test_another_program_that_writes_the_same_bytes_is_read(small: Path) -> None:
    assert foreign(*sorted(SMALL.items())) == small.read_bytes()


HOSTILE = {
    "absolute": (foreign(("/etc/x", b"")), "'/etc/x'"),
    "upwards": (foreign(("../x", b"")), "'../x'"),
    "upwards inside": (foreign(("a/../../x", b"")), "no relative path of plain names"),
    "of Windows": (foreign(("a", b""), ("c:\\x", b"")), "no relative path of plain names"),
    "hidden": (foreign((".bashrc", b"")), "no relative path of plain names"),
    "a folder": (foreign(("a/", b"")), "no relative path of plain names"),
    "not ASCII": (foreign(("ä", b"")), "no relative path of plain names"),
    "a link": (foreign(("a", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777), "a is compressed or no plain file"),
    "a bomb": (foreign(("a", bytes(10**6)), compression=zipfile.ZIP_DEFLATED), "a is compressed"),
    "capitals": (foreign(("A", b""), ("a", b"")), "a cannot be unpacked"),
    "through a file": (foreign(("a", b""), ("a/b", b"")), "a cannot be unpacked"),
    "empty": (foreign(), "no zip file of protofl archive"),
    "no zip": (b"hello", "no zip file of protofl archive"),
    "nothing": (b"", "no zip file of protofl archive"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(foreign(("a", b"1"), ("a", b"2")))
    with pytest.raises(DataError, match="a cannot be unpacked: it appears twice"):
        read_zip(tmp_path / "x.zip")


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_ours_is_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    content, said = HOSTILE[kind]
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_zip(tmp_path / "x.zip")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'x.zip'}: ")


def test_an_entry_that_claims_more_than_there_is(small: Path) -> None:
    """Its size in the list, 24 bytes after the list's entry begins, says four gigabytes."""
    whole = small.read_bytes()
    place = whole.index(b"PK\x01\x02") + 20
    small.write_bytes(whole[:place] + b"\xff" * 3 + b"\x7f" + b"\xff" * 3 + b"\x7f" + whole[place + 8 :])
    with pytest.raises(DataError, match="damaged, or no zip file"):
        read_zip(small)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.zip: cannot be read \(No such file or directory\)"):
        read_zip(tmp_path / "none.zip")


@pytest.mark.parametrize("name", ["/a", "../a", "a//b", "a/./b", "", "ä", "a b", ".a", "x" * 241])
def test_no_name_is_written_that_would_not_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be unpacked everywhere"):
        write_zip(tmp_path / "x.zip", {name: b""})
    assert not (tmp_path / "x.zip").exists()


def test_what_a_plain_zip_cannot_hold_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    """65,536 entries are one too many; four of at most three are, too, where that is the limit."""
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
    with pytest.raises(ConfigError, match="4 files are more than an archive holds"):
        write_zip(tmp_path / "x.zip", dict.fromkeys("abcd", b""))
    assert not (tmp_path / "x.zip").exists()
