"""Artefacts on disk: the bytes of safetensors, files that appear in one step, and what a power failure leaves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flcore.core.errors import DataError
from flcore.core.host import host_id
from flcore.io import disk
from flcore.io.files import (
    Blocks,
    append,
    finite,
    json_text,
    make_durable,
    read_json,
    read_tensors,
    remove_stale_temp,
    replace_file,
    sealed,
    unsealed,
    write_json,
    write_tensors,
)

TENSORS = {
    "images": torch.arange(2 * 3 * 5, dtype=torch.uint8).reshape(5, 3, 2),
    "labels": torch.arange(5),
    "groups": torch.arange(5) * 2**40,
    "weights": torch.tensor([0.1, -0.0, torch.inf]),
    "half": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),
    "exact": torch.tensor(1 / 3, dtype=torch.float64),
    "present": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
    "nobody": torch.from_numpy(np.zeros(0, dtype=np.int64)),
    "number": torch.tensor(7),
}


def test_the_bytes_are_those_of_safetensors_itself(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs")
    write_tensors(tmp_path / "ours", TENSORS)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    save_file(TENSORS, tmp_path / "theirs", metadata={"protofl": '{"cause": "\\u00fc \\"x\\"", "n": 1}'})
    write_tensors(tmp_path / "ours", TENSORS, {"n": 1, "cause": 'ü "x"'})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    arrays, header = read_tensors(tmp_path / "ours", "")
    assert header == {"n": 1, "cause": 'ü "x"'}
    assert arrays.keys() == TENSORS.keys()
    assert all(torch.equal(arrays[name], tensor) for name, tensor in TENSORS.items())


def test_an_array_may_be_written_a_piece_at_a_time(tmp_path: Path) -> None:
    save_file({"images": TENSORS["images"], "labels": TENSORS["labels"]}, tmp_path / "theirs")
    pieces = Blocks(torch.uint8, (5, 3, 2), iter(TENSORS["images"].split(2)))
    write_tensors(tmp_path / "ours", {"labels": TENSORS["labels"], "images": pieces})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(ValueError, match="do not add up"):
        write_tensors(tmp_path / "short", {"images": Blocks(torch.uint8, (5, 3, 2), [TENSORS["images"][:4]])})
    assert not (tmp_path / "short").exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"n": 1})

    def half(file: Any) -> None:
        file.write(b'{"n": ')
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "deep" / "a.json", half)
    assert read_json(tmp_path / "deep" / "a.json", "") == {"n": 1}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.json"]


def test_what_a_failed_write_left_behind_the_end_goes_before_the_next_one(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    assert append(lines, b"one\n", at=0) == 4
    lines.open("ab").write(b"tw")  # then the disk was full
    assert append(lines, b"two\n", at=4) == 8
    assert append(lines, b"three\n", at=8, durable=True) == 14
    assert lines.read_bytes() == b"one\ntwo\nthree\n"


def test_what_a_killed_process_left_half_written_is_swept_and_nothing_else(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".a.json.{host_id()}.{ended.pid}.140.tmp").write_text("{")
    ours = f"{host_id()}.{os.getpid()}.140.tmp"
    kept = {f".a.json.{ours}", f"b.{host_id()}.{ended.pid}.140.tmp", ".running", "a.json", ".c.tmp"}
    for name in kept:
        (tmp_path / name).write_text("")
    remove_stale_temp(tmp_path, "b.json")
    assert len(list(tmp_path.iterdir())) == len(kept) + 1
    remove_stale_temp(tmp_path, "a.json")
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_stale_temp(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_stale_temp(tmp_path / "none")


def test_what_another_machine_is_writing_is_swept_when_it_is_a_day_old(tmp_path: Path) -> None:
    """Two machines share the folder: that a process of this number has ended here says nothing of the other's."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def write(file: Any) -> None:
        (name,) = [path.name for path in tmp_path.iterdir()]
        theirs = tmp_path / name.replace(host_id(), "0123abcd").replace(str(os.getpid()), str(ended.pid))
        theirs.write_text("half")
        remove_stale_temp(tmp_path)
        assert theirs.exists()
        two_days_ago = time.time() - 2 * 24 * 60 * 60
        os.utime(theirs, (two_days_ago, two_days_ago))
        remove_stale_temp(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]

    replace_file(tmp_path / "a.json", write)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not say which one where an open file is written to or synced."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "a.json", {}, durable=True)
    assert caught.value.filename == str(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


class Disk:
    """What was made durable, in order: files by what they held, folders by name; and renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        sync, rename = os.fsync, Path.replace

        def fsync(handle: int) -> None:
            place = Path(f"/proc/self/fd/{handle}").readlink()
            self.events.append(f"folder {place.name}" if place.is_dir() else f"file of {place.stat().st_size}")
            sync(handle)

        def replace(path: Path, target: Path) -> Path:
            self.events.append(f"rename to {target.name}")
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", replace)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds names of open files in /proc")
def test_what_is_durable_is_synced_before_it_is_named_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content first, else a power failure may leave the name with nothing behind it; then the folder, else no name."""
    disk = Disk(monkeypatch)
    (tmp_path / "f").mkdir()
    replace_file(tmp_path / "f" / "plain", lambda file: file.write(b"abc"))
    assert disk.events == ["rename to plain"]
    disk.events.clear()
    replace_file(tmp_path / "f" / "safe", lambda file: file.write(b"abcd"), durable=True)
    assert disk.events == ["file of 4", "rename to safe", "folder f"]
    disk.events.clear()
    (tmp_path / "g").mkdir()
    replace_file(tmp_path / "g" / "third", lambda file: file.write(b"a"))
    disk.events.clear()
    make_durable([tmp_path / "f" / "plain", tmp_path / "g" / "third", tmp_path / "f" / "safe"])
    assert disk.events == ["file of 3", "file of 1", "file of 4", "folder f", "folder g"]


def test_a_folder_is_made_while_others_try_whether_theirs_can_be(tmp_path: Path) -> None:
    """Three commands that are to write into folders of one that is not there yet, as ``runs`` in a fresh checkout."""
    above = tmp_path / "runs" / "papers"

    def tries(name: str) -> None:
        for _ in range(20):
            disk.make_folder(above / name)
            for place in (above / name, above, above.parent):
                disk.try_to_remove_empty(place)

    with ThreadPoolExecutor(3) as pool:
        for command in [pool.submit(tries, name) for name in "abc"]:
            command.result()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "file")


def test_json_is_the_same_for_the_same_content(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": [1, None], "a": "ü"})
    assert (tmp_path / "a").read_bytes() == '{\n  "a": "ü",\n  "b": [\n    1,\n    null\n  ]\n}\n'.encode()
    assert read_json(tmp_path / "a", "") == {"b": [1, None], "a": "ü"}


def strictly(text: str) -> Any:
    """JSON as readers other than Python's take it."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_number_that_is_infinite_or_nan(tmp_path: Path) -> None:
    """Null stands there, and where and what it was; a check sum is of what is read."""
    values = {"loss": float("inf"), "by": {"a": [1.0, float("nan")], "b": -np.float64("inf")}, "top1": 0.5}
    told = {"loss": "inf", "by.a.1": "nan", "by.b": "-inf"}
    expected = {"loss": None, "by": {"a": [1.0, None], "b": None}, "top1": 0.5, "not_finite": told}
    write_json(tmp_path / "a", values)
    assert strictly((tmp_path / "a").read_text()) == strictly(json_text(values)) == finite(values) == expected
    assert strictly(json_text([float("nan")])) == [None]
    assert unsealed(strictly(json_text(sealed(values)))) == expected
    assert finite({"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("content", "what"),
    [(None, "not found"), (b"{", "damaged, not readable as JSON"), (b"[1]", "damaged, not a JSON object")],
)
def test_json_that_cannot_be_read_is_refused_with_the_cure(content: bytes | None, what: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=rf"a: {what}; mend it$"):
        read_json(tmp_path / "a", "mend it")


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_tensors_cut_off_are_refused_with_the_cure(length: int, tmp_path: Path) -> None:
    write_tensors(tmp_path / "r", TENSORS, {"n": 1})
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:length])
    with pytest.raises(DataError, match=r"r: damaged .*; mend it$"):
        read_tensors(tmp_path / "r", "mend it")
    with pytest.raises(DataError, match=r"none: not found; mend it$"):
        read_tensors(tmp_path / "none", "mend it")


@pytest.mark.parametrize("target", ["docs", "README.md/x.zip", "n" * 255])
def test_what_cannot_be_written_is_told_by_the_name_that_was_asked_for(target: str, tmp_path: Path) -> None:
    """Not by that of the file that was to be renamed: nobody has heard of it."""
    (tmp_path / "docs" / "a").mkdir(parents=True)
    (tmp_path / "README.md").write_text("")
    with pytest.raises(OSError) as refused:  # noqa: PT011  which one, the system says
        replace_file(tmp_path / target, lambda file: file.write(b""))
    assert refused.value.filename in (str(tmp_path / target), str(tmp_path / "README.md"))
    assert ".tmp" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "docs"]
