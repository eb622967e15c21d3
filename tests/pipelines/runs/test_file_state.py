"""A change of a file that is read is seen at any depth, and nothing else; what cannot be looked at stops nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.runs.file_state import state_of

IMAGE = "one/train/cats/1.png"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images two folders down, as `imagefolder` takes them below one folder."""
    for name in (IMAGE, "one/test/cats/2.png"):
        (tmp_path / "root" / name).parent.mkdir(parents=True)
        (tmp_path / "root" / name).write_bytes(b"one")
        os.utime(tmp_path / "root" / name, ns=(0, 0))
    return tmp_path / "root"


def overwrite(root: Path) -> None:
    """In place, as long as before: no folder's time changes."""
    (root / IMAGE).write_bytes(b"two")
    os.utime(root / IMAGE, ns=(0, 1))


def replace_where_a_link_leads(root: Path) -> None:
    (root.parent / "away" / "3.png").write_bytes(b"longer")


def overwrite_and_set_the_time_back(root: Path) -> None:
    before = (root / IMAGE).stat()
    (root / IMAGE).write_bytes(b"two")
    os.utime(root / IMAGE, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap(root: Path) -> None:
    """Two files of one size and one time, as an unpacked archive has them."""
    one, two = root / IMAGE, root / "one/test/cats/2.png"
    one.rename(root / "between")
    two.rename(one)
    (root / "between").rename(two)


@pytest.mark.parametrize(
    "change",
    [
        overwrite,
        overwrite_and_set_the_time_back,
        swap,
        lambda root: (root / IMAGE).write_bytes(b"longer"),
        lambda root: (root / IMAGE).with_name("0.png").write_bytes(b"one"),
        lambda root: (root / IMAGE).rename(root / "one/test/cats/1.png"),
        lambda root: (root / IMAGE).unlink(),
        replace_where_a_link_leads,
    ],
)
def test_every_change_is_seen(change: Callable[[Path], object], root: Path) -> None:
    (root.parent / "away").mkdir()
    (root.parent / "away" / "3.png").write_bytes(b"one")
    (root / "one/train/dogs").symlink_to(root.parent / "away")
    before = state_of([root])
    assert state_of([root]) == before
    change(root)
    assert state_of([root]) != before


def test_what_is_hidden_changes_nothing(root: Path) -> None:
    before = state_of([root])
    (root / ".protofl").mkdir()
    (root / ".protofl" / "entry.json").write_text("{}")
    (root / "one" / ".DS_Store").write_bytes(b"")
    assert state_of([root]) == before


def test_a_file_is_told_from_another_and_places_from_one(root: Path) -> None:
    (root / IMAGE).write_bytes(b"longer")
    first, second = root / IMAGE, root / "one/test/cats/2.png"
    assert len({state_of(places) for places in ([], [first], [second], [first, second], [second, first])}) == 5


def test_links_that_lead_nowhere_or_back_are_no_error(root: Path) -> None:
    (root / "one/train/nowhere").symlink_to(root / "gone")
    (root / "one/train/back").symlink_to(root)
    before = state_of([root])
    (root / "gone").write_bytes(b"")
    assert state_of([root]) != before
    assert state_of([root / "nothing"]) == state_of([root / "nothing else"])


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anywhere")
def test_a_folder_that_may_not_be_read_is_left_out(root: Path) -> None:
    """As lost+found is at the top of a disk."""
    before = state_of([root])
    (root / "lost+found").mkdir(mode=0)
    assert state_of([root]) == before
