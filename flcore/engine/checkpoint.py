"""The files of an unfinished run: killed at any moment and resumed, it ends with the same bytes.

::

    checkpoint/
      state.json                        the state after the last complete exchange; replaced atomically
      durable.json                      the last state that survives a power failure, if that is an older one
      server.0007.safetensors           payloads of the server that the run's 7th exchange changed
      history.jsonl                     a record per evaluated round
      timing.jsonl                      seconds per exchange
      clients/0007.safetensors          states of clients since the run's 7th exchange
      legs/0008/0000.safetensors        replies in an exchange that lasts more than ``engine.durable_every`` seconds

A round has one exchange with nearly every method; then exchanges count rounds. The state names the exchange of every
payload and client state, and the number of committed lines. Anything else in the folder, such as a client state of the
interrupted exchange or later lines, is reused or dropped. No pickle: safetensors and JSON.

Every file has check sums and names its run and exchange: a flipped bit would otherwise change later results. A changed
or moved file is refused; a changed reply is made again.

A commit survives a kill. It survives a power failure if ``engine.durable_every`` seconds have passed since the last
durable commit (0: always): syncing at every exchange would take a quarter of the time of small models. If a power
failure damages the newest state, the durable one replaces it; its files stay until the next durable commit.

:mod:`flcore.engine.client_results` writes clients' replies and states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flcore.core.errors import Cure, DataError, RunError
from flcore.engine.client_results import ClientResults, Clock, StateFiles
from flcore.engine.committed_log import CommittedLog
from flcore.engine.exchange import Reply
from flcore.engine.run_state import RunName, RunState
from flcore.engine.tagged_records import Snapshots, load_tagged, save_tagged
from flcore.io import disk
from flcore.io.files import json_text, make_durable, read_json, replace_file, sealed, unsealed
from flcore.io.messages import Payload, Size
from flcore.io.records import Payloads, Record

CURE = Cure.START_OVER


class Checkpoint:
    """The folder of one running run."""

    def __init__(self, directory: Path, *, durable_every: float = 0.0, clock: Clock = time.monotonic) -> None:
        """Use a folder, which need not exist yet.

        Args:
            directory: the folder.
            durable_every: seconds between two commits that survive a power failure; 0: all do. clock: of these seconds.
        """
        self.directory = directory
        self.durable_every, self._clock = durable_every, clock
        self._synced_at = clock()
        self._synced: set[Path] = set()  # files of the last durable state
        self._server: dict[str, tuple[int, Payload]] = {}
        self.client_results = ClientResults(directory, durable_every, clock)
        self.states = StateFiles(directory)
        self.run = ""
        """Digest of the run's name; empty until it is known."""
        self._log = CommittedLog(directory)

    @property
    def state_file(self) -> Path:
        return self.directory / "state.json"

    @property
    def durable_file(self) -> Path:
        """The last state that survives a power failure, if the committed one may not."""
        return self.directory / "durable.json"

    def server_file(self, exchange: int) -> Path:
        """Return the file of the server's payloads that an exchange changed; 0: the initial ones."""
        return self.directory / f"server.{exchange:04d}.safetensors"

    def state_files(self) -> list[Path]:
        """Return the files of the state, without clients' states."""
        exchanges = set(read_json(self.state_file, CURE)["server"].values())
        return [self.state_file, *map(self.server_file, sorted(exchanges))]

    def start(self, state: RunState, *, replace: bool = False) -> None:
        """Start with an empty folder.

        Args:
            state: before the first round.
            replace: delete the content of the folder.

        Raises:
            RunError: something is here, and ``replace`` is False.
        """
        if replace:
            for path in (self.durable_file, self.state_file):  # first: a partial removal leaves no state
                disk.remove(path, missing_ok=True)
            disk.remove_tree(self.directory)
        elif self._holds_a_run():
            raise RunError(f"{self.directory}: holds the checkpoint of a run; {CURE}")
        self.client_results.clear()
        self.states.close()
        self._server, self._synced = {}, set()
        self.run = state.run.digest
        self._log.start()
        disk.make_folder(self.directory / "clients")
        self._write_state(state, durable=True)

    def load(self, name: RunName) -> RunState | None:
        """Return the state after the last complete exchange, None without any; drop later records.

        If a power failure has damaged the newest state, the last durable one replaces it.

        Raises:
            DataError: a file is damaged. RunError: the state is of another run or other code; names the differences.
        """
        if not self._holds_a_run():
            return None
        durable = self._durable()
        try:
            content = self._content(self.state_file)
            if durable is not None and durable["exchanges"] > content["exchanges"]:  # the newest has lost its name
                raise DataError(f"{self.state_file}: damaged, {self.durable_file.name} is newer; {CURE}")
            state = self._checked(content, name)
        except DataError:
            if durable is None:
                raise
            content, state = durable, self._checked(durable, name)
            self._replace(self.state_file, content)  # workers read it
        if durable is not None or not self.durable_file.exists():  # alone, the state is durable itself
            self._synced = self._files_of(durable or content)
        return state

    def _durable(self) -> dict[str, Any] | None:
        """Return the content of the durable state's file; None if it is missing or damaged."""
        with suppress(DataError):
            return self._content(self.durable_file) if self.durable_file.exists() else None
        return None

    def _checked(self, content: Mapping[str, Any], name: RunName) -> RunState:
        """Return the state after checking all files that it names; drop later records."""
        self._refuse(content, name)
        state = self._state(content)
        for client in state.client_states:
            self.client_state(client, state.client_states)  # better now than hours later
        self._log.restore(state.evaluated, state.exchanges, content["history"])
        return state

    def refuse_other(self, name: RunName) -> None:
        """Raise RunError if the folder has the state of another run or other code; name the difference."""
        with suppress(DataError):  # nothing, or damaged: load knows what to do
            self._refuse(self._content(self.state_file), name)

    def _refuse(self, content: Mapping[str, Any], name: RunName) -> None:
        difference = name.difference(RunName(content["run"], content["code"]))
        if difference is not None:
            raise RunError(f"{self.directory}: holds {difference}; {CURE}")

    def _content(self, path: Path) -> dict[str, Any]:
        content = read_json(path, CURE)
        if "check" not in content:
            raise RunError(f"{path}: of another version of protofl; {CURE}")
        written = unsealed(content)
        if written is not None and {"run", "server"} <= written.keys() and not written.keys() >= _STATE:
            raise RunError(f"{path}: of another version of protofl; {CURE}")
        if written is None or not written.keys() >= _STATE:  # a line of timing.jsonl is whole, too, and no state
            raise DataError(f"{path}: damaged, its content is not what was written; {CURE}")
        return written

    def _holds_a_run(self) -> bool:
        """Return whether the folder has more than an interrupted start leaves."""
        begun = {"clients", self.server_file(0).name}
        found = {path.name for path in self.directory.glob("*") if not path.name.startswith(".")}
        return bool(found - begun)

    def read_state(self) -> RunState:
        """Return the committed state; payloads already in memory are not read again.

        Raises:
            DataError: it is missing or damaged.
        """
        return self._state(self._content(self.state_file))

    def _state(self, content: Mapping[str, Any]) -> RunState:
        try:
            fields: dict[str, Any] = {name: content[name] for name in _AS_THEY_ARE}
            fields |= {name: {kind: Size(**size) for kind, size in content[name].items()} for name in _TRAFFIC}
            name = RunName(content["run"], content["code"])
            self.run = name.digest
            return RunState(
                server=self._read_server(content["server"]),
                client_states={
                    client: int(exchange) for exchange, clients in content["states"].items() for client in clients
                },
                metrics=[
                    {**exchange, "server": {name: float(value) for name, value in exchange["server"].items()}}
                    for exchange in content["told"]
                ],
                failures=tuple((number, client, cause) for number, client, cause in content["failures"]),
                run=name,
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.state_file}: damaged ({error!r}); {CURE}") from error

    def _read_server(self, exchanges: Mapping[str, int]) -> Record:
        missing = {exchange for name, exchange in exchanges.items() if self._server.get(name, (None,))[0] != exchange}
        files = {exchange: load_tagged(self.server_file(exchange), exchange, self.run) for exchange in sorted(missing)}
        self._server = {
            name: (exchange, files[exchange][name] if exchange in files else self._server[name][1])
            for name, exchange in exchanges.items()
        }
        return Record({name: payload for name, (_, payload) in self._server.items()})

    def commit(self, state: RunState, history: Mapping[str, Any] | None, timing: Mapping[str, Any]) -> None:
        """Commit an exchange: append its records, replace the state, and remove files no longer needed."""
        lengths = self._log.append(history, timing)
        self._write_state(state, lengths.check, durable=self._clock() - self._synced_at >= self.durable_every)
        self._log.committed = lengths  # last: a failed commit is repeated
        self.client_results.clear()
        self._clear(state)

    def _write_state(self, state: RunState, history_check: int = 0, *, durable: bool) -> None:
        """Write changed payloads, then the state; if ``durable``, sync all files that it names first."""
        # Records are immutable: the same object is on the disk already.
        known = {
            name: exchange for name, (exchange, payload) in self._server.items() if state.server.get(name) is payload
        }
        changed = state.server.without(*known)
        if changed:
            save_tagged(self.server_file(state.exchanges), changed, state.exchanges, self.run)
        exchanges = {name: known.get(name, state.exchanges) for name in state.server}
        content = {
            **{name: getattr(state, name) for name in _AS_THEY_ARE},
            "run": state.run.run,
            "code": dict(state.run.code),
            "server": exchanges,
            "states": _by_exchange(state.client_states),
            **{name: {kind: vars(size) for kind, size in getattr(state, name).items()} for name in _TRAFFIC},
            "failures": list(state.failures),
            # NaN and infinity as text: a resumed round has the record of an uninterrupted one.
            "told": [
                {**exchange, "server": {name: _jsonable(value) for name, value in exchange["server"].items()}}
                for exchange in state.metrics
            ],
            "history": history_check,
        }
        if durable:
            named = self._files_of(content)
            make_durable([*sorted(named - self._synced), *self._log.files()])
            self._replace(self.durable_file if self.durable_every else self.state_file, content, durable=True)
            self._synced, self._synced_at = named, self._clock()
        if self.durable_every or not durable:
            self._replace(self.state_file, content)
        self._server = {name: (exchange, state.server[name]) for name, exchange in exchanges.items()}

    def _replace(self, path: Path, content: Mapping[str, Any], *, durable: bool = False) -> None:
        text = json_text(sealed(content))
        replace_file(path, lambda file: file.write(text.encode()), durable=durable)

    def _files_of(self, content: Mapping[str, Any]) -> set[Path]:
        states = {self.states.path(int(exchange)) for exchange in content["states"]}
        return states | {self.server_file(exchange) for exchange in content["server"].values()}

    def _clear(self, state: RunState) -> None:
        """Remove files that the state does not name; ignore errors, since the exchange is committed."""
        disk.try_to_remove(self.directory / "legs")
        exchanges = set(state.client_states.values())
        self.states.close(but=exchanges)
        named = set(map(self.states.path, exchanges))
        named |= {self.server_file(exchange) for exchange, _ in self._server.values()} | self._synced
        with suppress(OSError):  # an unavailable file system
            unfinished = self.directory.glob(".*.tmp")  # by a process that was killed
            for path in (*(self.directory / "clients").iterdir(), *self.directory.glob("server.*"), *unfinished):
                if path not in named:
                    disk.try_to_remove(path)
        if not self.durable_every:  # from a process with durable_every > 0
            disk.try_to_remove(self.durable_file)

    @property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.directory, self.run)

    def keep_round(self, state: RunState) -> None:
        """Write a snapshot of a round that is about to be committed."""
        client_states = {
            client: self.client_state(client, state.client_states) for client in sorted(state.client_states)
        }
        self.snapshots.keep_round(state.round, state.server, client_states)

    def keep_states(self, before: Mapping[int, int], replies: Mapping[int, Reply], exchange: int) -> dict[int, int]:
        """Write the states after an exchange's replies; return by client the exchange with its state's file.

        A file is never changed. If less than half of all written states are valid, the new file takes over the rest.

        Args:
            before: what the last call returned. replies: by client; each replaces or drops a state.
            exchange: of the run, from 1.
        """
        states = self.client_results.states(exchange, [k for k, reply in replies.items() if reply.has_state], self.run)
        left = {client: number for client, number in before.items() if client not in replies}
        written = len(states) + sum(len(self.states.rows(number, self.run)) for number in set(left.values()))
        if written > 2 * (len(states) + len(left)):
            states |= {client: self.states.rows(number, self.run)[client].record for client, number in left.items()}
            left = {}
        if states:
            self.states.save(exchange, states, self.run)
        return left | dict.fromkeys(states, exchange)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of ``history.jsonl`` or ``timing.jsonl``, oldest first."""
        return self._log.read(name)

    def client_state(self, client: int, client_states: Mapping[int, int]) -> Record:
        """Return a client's state; empty before its first participation or if its method keeps none.

        Raises:
            DataError: it is missing or damaged.
        """
        if client not in client_states:
            return Record()
        return self.states.load(client_states[client], client, self.run)

    def stored_state(self, client: int, client_states: Mapping[int, int]) -> Payloads:
        """Return a state that a client has, as views of its file, for sending.

        Raises:
            DataError: it is missing or damaged.
        """
        return self.states.view(client_states[client], client, self.run)


def _by_exchange(client_states: Mapping[int, int]) -> dict[str, list[int]]:
    """Return clients, ascending, by the exchange with their states' file."""
    found: dict[str, list[int]] = {}
    for client, exchange in sorted(client_states.items()):
        found.setdefault(str(exchange), []).append(client)
    return found


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


_AS_THEY_ARE = ("round", "steps", "exchange", "exchanges", "evaluated", "simulated_seconds")
_TRAFFIC = ("up", "down", "eval_up", "eval_down")
_STATE = {*_AS_THEY_ARE, *_TRAFFIC, "told", "run", "code", "server", "states", "failures", "history"}
