"""Ownership of folders: the files that each kind of command leaves, so that none uses or empties another's folder.

``--out`` may name any folder, such as one with a user's notes. Names alone are checked: a killed command leaves damaged
or missing files, and must be able to resume.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flcore.io import disk
from flcore.core.errors import ConfigError, listed
from flcore.experiment.run_folder import refuse_inside_a_run

Kind = Literal[
    "run", "comparison", "sweep", "study", "paper table", "stages", "prepared", "partition", "partitions", "stage runs"
]


@dataclass(frozen=True)
class _Kind:
    """A kind of folder: its name in messages, and the names that it may have, as a pattern.

    ``signs`` are names that no other kind has; next to one of them, files of the user are accepted.
    """

    words: str
    leaves: str
    signs: frozenset[str] = frozenset()


def _names(words: str, patterns: str = "") -> str:
    return "|".join([*map(re.escape, words.split()), *patterns.split()])


_KINDS = {
    "run": _Kind(
        "a run",
        _names(
            "config.json checkpoint history.jsonl model.safetensors server.safetensors clients before snapshots "
            "timing.json metrics.json seal.json curves.csv analyses figures report.html prepared partition plugins "
            "inputs.json trial.json .mlflow.json"
        ),
        frozenset({"config.json", "history.jsonl", "checkpoint", "seal.json"}),
    ),
    "comparison": _Kind(
        "a comparison",
        _names(
            "runs tuning comparison.csv comparison.json comparison.md comparison.tex runs.csv metrics.json "
            "curves.csv times.csv figures report.html"
        ),
        frozenset({"comparison.json", "comparison.csv"}),
    ),
    "sweep": _Kind(
        "a sweep",
        _names("runs sweep.csv sweep.json sweep.md sweep.png figures report.html"),
        frozenset({"sweep.json", "sweep.csv"}),
    ),
    "study": _Kind(
        "a study",
        _names("params.yaml best.yaml study study.json study.md trials.csv trials figures", r"\.?study\.(journal|db).*"),
        frozenset({"study", "study.json", "study.journal", "study.db", "trials"}),
    ),
    # Also a comparison of each setting, in a folder named after one of the table's columns.
    "paper table": _Kind(
        "a paper's table",
        _names("table.md table.csv table.json report.html"),
        frozenset({"table.json"}),
    ),
    # Each part that a stage changes has a kind; other files are allowed, as in `artifacts`.
    "stages": _Kind("the stages of dvc.yaml", ".*", frozenset({"runs.json", "partitions"})),
    "prepared": _Kind("prepared data", _names("meta.json train.safetensors test.safetensors")),
    "partition": _Kind("a partition", _names("manifest.json indices.safetensors")),
    "partitions": _Kind("partitions", r"seed-\d+"),
    "stage runs": _Kind("runs of the stage train", r".+-s\d+"),
}
_REPRODUCTION = _Kind("what protofl reproduce made", "", frozenset({"proof.json"}))

_UNFINISHED = re.compile(r"\.(running|lock|claims)|\..+\.(tmp|unfinished|holder)")
"""Locks, and partial files of a killed process."""
_OF_OTHERS = frozenset({".gitignore", ".gitkeep", ".DS_Store", ".directory", "lost+found"})
"""Files of version control, file managers and file systems in folders that look empty."""

_NOT_HERE = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG}


def claim_folder(kind: Kind, folder: Path, besides: Collection[str] = ()) -> None:
    """Stop, before anything is read or written, if a command must not use a folder.

    It may be missing, empty, or of this kind in any state. Callers check whether it is of the same run or study.

    ``besides`` are more names that the command leaves there.

    Raises:
        ConfigError: it is a file, has other content, or cannot be written to.
    """
    claim_names(kind, folder, besides)
    if not _KINDS[kind].signs & _names_in(folder):  # else it may be finished and read-only
        _try_to_write(folder)


def claim_names(kind: Kind, folder: Path, besides: Collection[str] = ()) -> None:
    """Check the names as :func:`claim_folder` does, but not write access, for a folder that the command creates itself.

    Raises:
        ConfigError: it is a file, has other content, or is inside a folder that a run may remove.
    """
    refuse_inside_a_run(folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; choose another --out")
    own = _KINDS[kind]
    names = _names_in(folder)
    for other in (*_KINDS.values(), _REPRODUCTION):
        if other is not own and other.signs & names:
            raise ConfigError(f"{folder}: holds {other.words}, not {own.words}; choose another --out")
    if own.signs & names:
        return
    found = [name for name in strangers(kind, folder) if name not in _OF_OTHERS and name not in besides]
    if found:
        raise ConfigError(
            f"{folder}: holds {listed(found, 3)}, which {own.words} would not; choose another --out, of a new folder"
        )


def strangers(kind: Kind, folder: Path) -> list[str]:
    """Return the names in a folder, in order, that no command of this kind leaves; none without a folder."""
    return sorted(name for name in _names_in(folder) if not _is_left_by(kind, name))


def may_be_replaced(kind: Kind, folder: Path) -> bool:
    """Return whether another folder can replace this one without loss of other files.

    Not the working folder of this process, nor the root of a file system: they cannot be moved.
    """
    place = folder.resolve()
    return not (strangers(kind, place) or Path.cwd().is_relative_to(place) or os.path.ismount(place))


def remove_own(kind: Kind, folder: Path) -> None:
    """Remove the files of this kind, in order of names; other files and the folder itself remain.

    Hidden names come last, as one of them is the caller's lock.
    """
    own = [name for name in _names_in(folder) if _is_left_by(kind, name)]
    own.sort(key=lambda name: (name.startswith("."), name))
    for path in (folder / name for name in own):
        if path.is_dir() and not path.is_symlink():
            disk.remove_tree(path)
        else:
            disk.remove(path, missing_ok=True)


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return set()
        if not isinstance(error, PermissionError):
            raise
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}); choose another --out") from error


def _is_left_by(kind: Kind, name: str) -> bool:
    return bool(re.fullmatch(_KINDS[kind].leaves, name) or _UNFINISHED.fullmatch(name))


def _try_to_write(folder: Path) -> None:
    """Create the folder and remove it again: file modes do not show that places such as /proc refuse it."""
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    above = missing[-1].parent if missing else folder
    try:
        reason = errno.EACCES if above.is_dir() else errno.ENOTDIR
        if not os.access(above, os.W_OK | os.X_OK):
            raise OSError(reason, os.strerror(reason))
        disk.make_folder(folder)
    except OSError as error:
        if error.errno not in _NOT_HERE:  # a full or failing disk: another name does not help
            raise
        raise ConfigError(f"{folder}: cannot write there ({error.strerror}); choose another --out") from error
    for place in missing:
        if not disk.try_to_remove_empty(place):  # another process uses it
            break
