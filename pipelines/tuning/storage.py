"""Optuna's storage: one journal for all studies of a project, or the one given by ``--storage``.

The journal is a copy of the studies' folders: if deleted, the same commands write it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import get_lock_file
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.core.text import shorten
from flcore.io import disk
from pipelines.addresses import redact, remember, without_password

JOURNAL = Path(".protofl") / "studies.journal"
"""Its studies are shown by ``optuna-dashboard .protofl/studies.journal``."""

_GRACE_SECONDS = 10  # then the lock of a killed process is removed


class _Journal(JournalFileBackend):
    """Optuna's journal; a line cut short by a full disk or a power failure is dropped before the next one."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with get_lock_file(self._lock):
            _drop_cut_line(Path(self._file_path))
        super().append_logs(logs)


def open_storage(url: str | None) -> BaseStorage:
    """Open a database or a journal, by default :data:`JOURNAL`; create it if missing.

    Raises:
        ConfigError: it cannot be opened. DataError: the journal is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None or url.endswith(".journal"):
        return _open_journal(JOURNAL if url is None else Path(url))
    remember(url)
    try:
        try:
            return RDBStorage(url)
        except IntegrityError:  # another process makes its tables at the same moment
            return RDBStorage(url)
    # SQLAlchemyError for addresses and connections, ImportError for a missing driver, RuntimeError for the tables of
    # another version of Optuna.
    except (SQLAlchemyError, StorageInternalError, ImportError, RuntimeError) as error:
        reason = redact(str(error)).partition("\n")[0]
        raise ConfigError(
            f"--storage {without_password(url)}: cannot be opened ({reason}); expected such as sqlite:///study.db"
        ) from error


def _open_journal(path: Path) -> JournalStorage:
    try:
        disk.make_folder(path.parent)
        absolute = str(path.absolute())  # the lock is a symbolic link with a target relative to its folder
        backend = _Journal(absolute, JournalFileSymlinkLock(absolute, grace_period=_GRACE_SECONDS))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another --storage") from error
    try:
        return JournalStorage(backend)
    except Exception as error:  # a damaged line may raise anything in Optuna
        reason = shorten(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: damaged ({reason}); delete it, and run the same command") from error


def _drop_cut_line(path: Path) -> None:
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        length = file.read().rfind(b"\n") + 1
    disk.truncate(path, length)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn the loss of a storage into a one-line error."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = redact(str(error.__cause__ or error)).partition("\n")[0]
        raise RunError(f"--storage: lost during the study ({reason}); run the same command to resume") from error
