"""Records that name their run and their place in it: a moved file is refused; and snapshots.

A snapshot is a round of ``evaluation.snapshots`` for later analyses; resuming does not read it.

::

    checkpoint/
      rounds/0010.server.safetensors          the server after a round of `evaluation.snapshots` (0: before the first)
      rounds/0010.client.0003.safetensors     a client's state then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import Cure, DataError
from flcore.io.files import make_durable, remove_stale_temp
from flcore.io.records import Payloads, Record, load_record, save_record


def save_tagged(path: Path, record: Payloads, place: Any, run: str) -> None:
    """Write a record.

    Args:
        path: the file. record: its content.
        place: in the run, as a JSON value. run: digest of the run's name; empty if unknown.
    """
    save_record(path, record, {"place": place, "run": run})


def load_tagged(path: Path, place: Any, run: str) -> Record:
    """Read what :func:`save_tagged` wrote.

    Raises:
        DataError: it is missing, damaged, or of another place or run.
    """
    record, extra = load_record(path, cure=Cure.START_OVER)
    if extra.get("place") != place or (run and extra.get("run") not in ("", run)):
        raise DataError(f"{path}: belongs to another run or another place in it; {Cure.START_OVER}")
    return record


@dataclass(frozen=True)
class Snapshots:
    """The snapshots in a checkpoint's folder.

    Attributes:
        directory: of the checkpoint. run: digest of the run's name.
    """

    directory: Path
    run: str

    def keep_round(self, number: int, server: Record, client_states: Mapping[int, Record]) -> None:
        """Write the states of server and clients after a round, durably, before the round's commit."""
        remove_stale_temp(self.directory / "rounds")
        clients = {f"client.{client:04d}": record for client, record in client_states.items()}
        for name, record in {"server": server, **clients}.items():
            save_tagged(self._file(number, name), record, [number, name], self.run)
        make_durable([self._file(number, name) for name in ("server", *clients)])

    def round(self, number: int) -> dict[str, Record]:
        """Return the snapshot of a round: ``server``, and ``client.<id>`` of each client with a state.

        Raises:
            DataError: it is missing or damaged.
        """
        stems = sorted(path.stem for path in self.directory.glob(f"rounds/{number:04d}.*.safetensors"))
        names = {"server", *(stem.partition(".")[2] for stem in stems)}  # a missing server's file is an error
        return {name: load_tagged(self._file(number, name), [number, name], self.run) for name in sorted(names)}

    def _file(self, number: int, name: str) -> Path:
        return self.directory / "rounds" / f"{number:04d}.{name}.safetensors"
