"""Clients' states and replies on the disk, a row per client (:mod:`flcore.io.rows`).

A finished exchange leaves one file of states. Replies of the current exchange wait in memory for its commit;
after ``engine.durable_every`` seconds those that wait are written to a file, with their states, so that a kill costs no
more than these seconds. A damaged row counts as missing: the client trains again, with the same bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from flcore.core.errors import Cure, DataError
from flcore.engine.exchange import ClientResult, Failure, Reply, Results
from flcore.io import disk
from flcore.io.messages import Payload
from flcore.io.records import Payloads, Record, aligned
from flcore.io.rows import Row, Rows, save_rows

Clock = Callable[[], float]


class StateFiles:
    """Clients' states in a checkpoint's folder: per exchange a file of those that it left."""

    def __init__(self, directory: Path) -> None:
        """Read nothing yet; ``directory`` is the checkpoint's."""
        self._directory = directory
        self._open: dict[int, Rows] = {}

    def path(self, exchange: int) -> Path:
        return self._directory / "clients" / f"{exchange:04d}.safetensors"

    def save(self, exchange: int, states: Mapping[int, Payloads], run: str) -> None:
        """Write states by client; the commit that names them makes them valid. ``run``: digest of the run's name."""
        save_rows(self.path(exchange), {client: Row(state) for client, state in states.items()}, exchange, run)
        self._open.pop(exchange, None)

    def rows(self, exchange: int, run: str) -> Rows:
        """Return the states that an exchange left, as views of the mapped file.

        Raises:
            DataError: the file is missing, damaged or of another run.
        """
        rows = self._open.get(exchange)
        if rows is None:
            rows = self._open[exchange] = Rows(self.path(exchange), exchange, run)
        return rows

    def load(self, exchange: int, client: int, run: str) -> Record:
        """Return a client's state after an exchange, as :meth:`view` does, but copied."""
        return aligned(self.view(exchange, client, run))

    def view(self, exchange: int, client: int, run: str) -> Payloads:
        """Return a client's state after an exchange, as views of the mapped file.

        Raises:
            DataError: it is missing, damaged or of another run.
        """
        rows = self.rows(exchange, run)
        if client not in rows:
            raise DataError(f"{self.path(exchange)}: has no state of client {client}; {Cure.START_OVER}")
        return rows[client].record

    def close(self, but: Collection[int] = ()) -> None:
        """Close the files of all exchanges ``but`` these; a removed file keeps its space while it is mapped."""
        self._open = {exchange: rows for exchange, rows in self._open.items() if exchange in but}


class ClientResults:
    """Replies and failures of the current exchange, with the clients' states. Thread-safe."""

    def __init__(self, directory: Path, durable_every: float = 0.0, clock: Clock = time.monotonic) -> None:
        """Start without results.

        Args:
            directory: of the checkpoint.
            durable_every: seconds of results that may be lost. clock: of these seconds.
        """
        self._directory, self._durable_every, self._clock = directory, durable_every, clock
        self._written_at = clock()
        self._lock = threading.RLock()
        self._leg = (0, "")
        self._buffer: dict[int, tuple[ClientResult, Record]] = {}
        self._written: dict[int, Rows] = {}
        self._parts = 0

    def part_file(self, exchange: int, number: int) -> Path:
        """Return the file of results that were written together, from 0."""
        return self._directory / "legs" / f"{exchange:04d}" / f"{number:04d}.safetensors"

    def add(self, exchange: int, results: Results, run: str) -> None:
        """Take the results of a stack; write all that wait if the last time is ``durable_every`` seconds ago.

        Args:
            exchange: of the results. results: to keep. run: digest of the run's name.
        """
        with self._lock:
            self._begin(exchange, run)
            self._buffer |= results
            if self._clock() - self._written_at >= self._durable_every:
                path = self.part_file(exchange, self._parts)
                save_rows(path, {client: _row(*result) for client, result in self._buffer.items()}, exchange, run)
                self._written |= dict.fromkeys(self._buffer, Rows(path, exchange, run))
                self._buffer, self._parts, self._written_at = {}, self._parts + 1, self._clock()

    def load(self, exchange: int, client: int, run: str) -> ClientResult | None:
        """Return a result; None if it is missing, damaged or of another run."""
        found = self._find(exchange, client, run)
        return None if found is None else found[0]

    def states(self, exchange: int, clients: Iterable[int], run: str) -> dict[int, Payloads]:
        """Return the states of clients with replies; those on the disk are views of mapped files.

        Raises:
            DataError: a client's reply is missing or damaged.
        """
        states: dict[int, Payloads] = {}
        for client in clients:
            found = self._find(exchange, client, run)
            if found is None:
                folder = self.part_file(exchange, 0).parent
                raise DataError(f"{folder}: client {client}'s reply is missing or damaged; resume the run")
            states[client] = found[1]
        return states

    def _find(self, exchange: int, client: int, run: str) -> tuple[ClientResult, Payloads] | None:
        with self._lock:
            self._begin(exchange, run)
            if client in self._buffer:
                return self._buffer[client]
            try:
                return _result(self._written[client][client]) if client in self._written else None
            except (DataError, KeyError, TypeError):
                return None

    def load_all(self, exchange: int, clients: Iterable[int], run: str) -> dict[int, ClientResult | None]:
        """Return results by client; None without one."""
        return {client: self.load(exchange, client, run) for client in clients}

    def missing(self, exchange: int, stacks: Sequence[Sequence[int]], run: str) -> list[list[int]]:
        """Return the stacks with a missing result. They train whole; existing results get the same bytes."""
        return [list(stack) for stack in stacks if any(self.load(exchange, client, run) is None for client in stack)]

    def clear(self) -> None:
        """Forget all results: they are committed, or no longer valid."""
        with self._lock:
            self._leg, self._buffer, self._written, self._parts = (0, ""), {}, {}, 0
            self._written_at = self._clock()

    def discard(self, exchange: int) -> None:
        """Delete the results of an exchange that will be repeated."""
        disk.remove_tree(self.part_file(exchange, 0).parent)
        self.clear()

    def _begin(self, exchange: int, run: str) -> None:
        """Look for an exchange's results on the disk, once."""
        if self._leg == (exchange, run):
            return
        self.clear()
        self._leg = exchange, run
        for path in sorted(self.part_file(exchange, 0).parent.glob("*.safetensors")):
            self._parts = int(path.stem) + 1
            try:
                rows = Rows(path, exchange, run)
            except DataError:
                continue
            self._written |= dict.fromkeys(rows, rows)  # a later one replaces a damaged one


def _row(result: ClientResult, client_state: Record) -> Row:
    if isinstance(result, Failure):
        return Row({}, {"failure": vars(result)})
    values = {name: getattr(result, name) for name in ("losses", "steps", "has_state", "seconds")}
    payloads = {f"message:{name}": payload for name, payload in result.message.items()}
    return Row({**payloads, **{f"state:{name}": payload for name, payload in client_state.items()}}, values)


def _result(row: Row) -> tuple[ClientResult, Payloads]:
    """Return what :func:`_row` was given; the state's tensors are views."""
    if "failure" in row.values:
        return Failure(**row.values["failure"]), {}
    parts: dict[str, dict[str, Payload]] = {"message": {}, "state": {}}
    for key, payload in row.record.items():
        part, _, name = key.partition(":")
        parts[part][name] = payload
    return Reply(aligned(parts["message"]), **row.values), parts["state"]
