"""Optuna's dashboard over the studies of ``protofl tune``, each of which has a file in its own folder.

The dashboard knows one storage; :class:`Studies` makes one of all files that there are. A study that begins later
appears when the page is loaded again. Notes and plots of the dashboard are kept in the study's file; studies are begun
by ``protofl tune`` and deleted with their folder.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from flcore.core.errors import DataError
from pipelines.addresses import sqlite_address
from pipelines.same_origin import LOOPBACK, checked_wsgi
from pipelines.tuning.journal import open_journal

_FILES = 100_000
"""An id here is the id in a file times this, plus the number of the file: both can be told from it."""


def study_files() -> list[Path]:
    """The studies of this folder: where ``protofl tune`` and ``compare --tuned`` put them, and one level below.

    One level below is where deployments put theirs: ``runs/nightly/{date}``.
    """
    names = ("study.journal", "study.db")  # the second by earlier versions
    folders = ("runs/*", "runs/*/*", "runs/*/tuning/*", "runs/*/*/tuning/*")
    return [path for folder in folders for name in names for path in sorted(Path().glob(f"{folder}/{name}"))]


class Studies(BaseStorage):
    """The studies of several files as one storage, each named after its folder."""

    def __init__(self) -> None:
        """Look for files at every question."""
        self._known: list[Path] = []
        self._opened: dict[Path, RDBStorage | JournalStorage] = {}

    # ---- studies -------------------------------------------------------------------------------------------------

    def get_all_studies(self) -> list[FrozenStudy]:
        """Those of all files; one that is just being made, or damaged, is left out."""
        found = []
        for number, storage, path in self._storages():
            try:
                studies = storage.get_all_studies()
            except (SQLAlchemyError, StorageInternalError):
                continue
            for study in studies:
                shown = copy.copy(study)
                shown._study_id = study._study_id * _FILES + number
                shown.study_name = self._shown(path, study.study_name, len(studies))
                found.append(shown)
        return found

    def get_study_id_from_name(self, study_name: str) -> int:
        """The id of a study by the name under which it is shown."""
        return next(study._study_id for study in self.get_all_studies() if study.study_name == study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """The name under which a study is shown."""
        return next(study.study_name for study in self.get_all_studies() if study._study_id == study_id)

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        raise NotImplementedError("begin a study with `protofl tune`")

    def delete_study(self, study_id: int) -> None:
        raise NotImplementedError("delete a study with its folder")

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial, for example one that the dashboard is asked to enqueue."""
        storage, number = self._of(study_id)
        return storage.create_new_trial(study_id // _FILES, template_trial) * _FILES + number

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._of(study_id)[0].get_study_directions(study_id // _FILES)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """What ``protofl tune`` notes of a study."""
        return self._of(study_id)[0].get_study_user_attrs(study_id // _FILES)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """What Optuna and its dashboard note of a study."""
        return self._of(study_id)[0].get_study_system_attrs(study_id // _FILES)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._of(study_id)[0].set_study_user_attr(study_id // _FILES, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._of(study_id)[0].set_study_system_attr(study_id // _FILES, key, value)

    # ---- trials --------------------------------------------------------------------------------------------------

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """A study's trials."""
        storage, number = self._of(study_id)
        trials = storage.get_all_trials(study_id // _FILES, deepcopy=deepcopy, states=states)
        return [_renumbered(trial, number) for trial in trials]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        storage, number = self._of(trial_id)
        return _renumbered(storage.get_trial(trial_id // _FILES), number)

    def set_trial_param(self, trial_id: int, param_name: str, param_value_internal: float, distribution: Any) -> None:
        storage = self._of(trial_id)[0]
        storage.set_trial_param(trial_id // _FILES, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set how a trial has ended."""
        return self._of(trial_id)[0].set_trial_state_values(trial_id // _FILES, state, values)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Set the value of a round."""
        self._of(trial_id)[0].set_trial_intermediate_value(trial_id // _FILES, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._of(trial_id)[0].set_trial_user_attr(trial_id // _FILES, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._of(trial_id)[0].set_trial_system_attr(trial_id // _FILES, key, value)

    # ---- files ---------------------------------------------------------------------------------------------------

    def _storages(self) -> Iterator[tuple[int, BaseStorage, Path]]:
        for path in study_files():
            if path not in self._known:
                self._known.append(path)
            if path not in self._opened:
                try:
                    self._opened[path] = _opened(path)
                except (
                    SQLAlchemyError,
                    StorageInternalError,
                    RuntimeError,
                    DataError,
                ):  # no tables yet, or another version's
                    continue
            if path.exists():
                yield self._known.index(path), self._opened[path], path

    def _of(self, number: int) -> tuple[BaseStorage, int]:
        """The storage that an id is from, and the number of its file.

        Raises:
            KeyError: the file is not known (any more).
        """
        file = number % _FILES
        if file >= len(self._known) or self._known[file] not in self._opened:
            list(self._storages())  # a page that was opened before the server was started again
        return self._opened[self._known[file]], file

    @staticmethod
    def _shown(path: Path, name: str, studies: int) -> str:
        return str(path.parent) if studies == 1 else f"{path.parent}: {name}"


def _opened(path: Path) -> RDBStorage | JournalStorage:
    if path.suffix == ".journal":
        return open_journal(path)
    return RDBStorage(sqlite_address(path.resolve()), skip_table_creation=True)


def _renumbered(trial: FrozenTrial, file: int) -> FrozenTrial:
    shown = copy.copy(trial)
    shown._trial_id = trial._trial_id * _FILES + file
    return shown


def main() -> None:
    """Serve the pages until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.tuning.dashboard", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (default: this machine only)")
    parser.add_argument("--port", type=int, default=8080)
    about = "a database with the studies to show, such as PROTOFL_STORAGE of workers (default: those of this folder)"
    parser.add_argument("--storage", metavar="URL", help=about)
    given = parser.parse_args()
    import bottle  # type: ignore[import-untyped]
    from optuna_dashboard import wsgi  # type: ignore[import-untyped]

    # Optuna's own command ends where a database has no tables, that is until the first study.
    pages = wsgi(RDBStorage(given.storage) if given.storage else Studies())
    bottle.run(checked_wsgi(pages, any_host=given.host not in LOOPBACK), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
