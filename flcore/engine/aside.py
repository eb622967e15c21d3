"""Snapshots of a run for later analyses; a resumed run does not read them.

::

    checkpoint/
      rounds/0010.server.safetensors          the server after a round of `evaluation.snapshots` (0: before the first)
      rounds/0010.client.0003.safetensors     a client's state then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flcore.engine.owned import load_owned, save_owned
from flcore.io.files import make_durable, remove_stale_temp
from flcore.io.records import Record


@dataclass(frozen=True)
class Aside:
    """The snapshots in a checkpoint's folder.

    Attributes:
        directory: of the checkpoint. run: digest of the run's name. cure: advice for errors.
    """

    directory: Path
    run: str
    cure: str

    def keep_round(self, number: int, server: Record, client_states: Mapping[int, Record]) -> None:
        """Keep what server and clients hold after a round, before that is committed; it survives a power failure."""
        remove_stale_temp(self.directory / "rounds")
        clients = {f"client.{client:04d}": record for client, record in client_states.items()}
        for name, record in {"server": server, **clients}.items():
            save_owned(self._file(number, name), record, [number, name], self.run)
        make_durable([self._file(number, name) for name in ("server", *clients)])

    def round(self, number: int) -> dict[str, Record]:
        """Return the snapshot of a round: ``server``, and ``client.<id>`` of each client with a state.

        Raises:
            DataError: it is missing or damaged.
        """
        stems = sorted(path.stem for path in self.directory.glob(f"rounds/{number:04d}.*.safetensors"))
        names = {"server", *(stem.partition(".")[2] for stem in stems)}  # a missing server's file is an error
        return {
            name: load_owned(self._file(number, name), [number, name], self.run, self.cure) for name in sorted(names)
        }

    def _file(self, number: int, name: str) -> Path:
        return self.directory / "rounds" / f"{number:04d}.{name}.safetensors"
