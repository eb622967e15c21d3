"""Whose folder it is: what each kind of command leaves in one, so that none works in, or empties, somebody else's.

A name that people give with ``--out`` may be of any folder, such as the one with their notes. :func:`claim_folder` is
asked before data are read. It goes by names alone: a kill leaves a folder in any state, half of its files damaged or
not there yet, and the same command has to go on in it.
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
    """A kind of folder.

    Attributes:
        words: what messages call it.
        leaves: what may lie in it, as a pattern of names.
        signs: names that lie in no other kind; where one is there, people may have put their own files beside it.
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
            "runs budget tuning comparison.csv comparison.json comparison.md comparison.tex runs.csv metrics.json "
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
    # Beside these, a comparison of each setting in a folder that is called by one of the table's columns.
    "paper table": _Kind(
        "a paper's table",
        _names("table.md table.csv table.json report.html"),
        frozenset({"table.json"}),
    ),
    # Of this the stages change what has a kind of its own; beside it, as in `artifacts`, anything may lie.
    "stages": _Kind("the stages of dvc.yaml", ".*", frozenset({"runs.json", "partitions"})),
    "prepared": _Kind("prepared data", _names("meta.json train.safetensors test.safetensors")),
    "partition": _Kind("a partition", _names("manifest.json indices.safetensors")),
    "partitions": _Kind("partitions", r"seed-\d+"),
    "stage runs": _Kind("runs of the stage train", r".+-s\d+"),
}
_REPRODUCTION = _Kind("what protofl reproduce made", "", frozenset({"proof.json"}))

_UNFINISHED = re.compile(r"\.(running|lock|claims)|\..+\.(tmp|unfinished|holder)")
"""Locks, and what a killed process has left half written."""
_OF_OTHERS = frozenset({".gitignore", ".gitkeep", ".DS_Store", ".directory", "lost+found"})
"""What version control, file managers and file systems put into folders that are empty to people."""

_NOT_HERE = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG}


def claim_folder(kind: Kind, folder: Path, besides: Collection[str] = ()) -> None:
    """Stop before anything is read or written where a folder is not a command's own, and cannot become so.

    It may be absent, empty, or of this kind, in whatever state. Whether it is of the very same run or study is for
    those to say who know what they look for.

    Args:
        kind: what the command leaves.
        folder: where it is to go.
        besides: names that the command leaves there beside those of its kind.

    Raises:
        ConfigError: it is a file, or holds something else, or nothing can be written there.
    """
    claim_names(kind, folder, besides)
    if not _KINDS[kind].signs & _names_in(folder):  # else it may lie, finished, where nothing can be written
        _try_to_write(folder)


def claim_names(kind: Kind, folder: Path, besides: Collection[str] = ()) -> None:
    """As :func:`claim_folder`, of one that a command makes for itself: whether it can be written to shows when it is.

    Raises:
        ConfigError: it is a file, holds something else, or lies in a folder that a run may remove.
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
    """The names in a folder, in order, of what no command of this kind has left; a folder need not be there."""
    return sorted(name for name in _names_in(folder) if not _is_left_by(kind, name))


def may_be_replaced(kind: Kind, folder: Path) -> bool:
    """Whether another folder can take the place of this one, and nothing is lost that is not of this kind.

    Not the folder that this process works in, nor the root of a file system: a name can be moved, these cannot.
    """
    place = folder.resolve()
    return not (strangers(kind, place) or Path.cwd().is_relative_to(place) or os.path.ismount(place))


def remove_own(kind: Kind, folder: Path) -> None:
    """Remove what commands of this kind leave, in order of names; the rest stays, and so does the folder.

    Hidden names come last: one of them is the lock of whoever does this.
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
    """Make the folder, and remove again what was made: rights do not tell of places such as /proc."""
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    above = missing[-1].parent if missing else folder
    try:
        reason = errno.EACCES if above.is_dir() else errno.ENOTDIR
        if not os.access(above, os.W_OK | os.X_OK):
            raise OSError(reason, os.strerror(reason))
        disk.make_folder(folder)
    except OSError as error:
        if error.errno not in _NOT_HERE:  # a full or failing disk: nothing that another name mends
            raise
        raise ConfigError(f"{folder}: cannot write there ({error.strerror}); choose another --out") from error
    for place in missing:
        if not disk.try_to_remove_empty(place):  # somebody else has begun in it
            break
