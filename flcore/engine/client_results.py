"""Replies of the current exchange and clients' states: buffered in memory, then written to files.

The committing process buffers them until the commit (``engine.durability: leg``) or for ``durable_every`` seconds.
After a kill, buffered ones are trained again. Workers write client states, which they alone read, and send replies.

A reply is a safetensors file, a failure a JSON file. Each names its run, exchange and client. A damaged or foreign file
counts as missing: the client trains again, with the same bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flcore.core.errors import DataError
from flcore.engine.exchange import ClientResult, Failure, Reply
from flcore.engine.tagged_records import load_tagged, save_tagged
from flcore.io import disk
from flcore.io.files import read_json, sealed, unsealed, write_json
from flcore.io.records import Record, load_record, save_record

Clock = Callable[[], float]


class ClientResults:
    """Replies, failures and client states in a checkpoint's folder, by exchange (of the run, from 1) and client."""

    def __init__(self, directory: Path, durable_every: float = 0.0, clock: Clock = time.monotonic) -> None:
        """Start with an empty buffer.

        Args:
            directory: of the checkpoint.
            durable_every: seconds after which :meth:`buffer` may write the buffer to files. clock: of these seconds.
        """
        self._directory, self._durable_every, self._clock = directory, durable_every, clock
        self._written_at = clock()
        self._buffer: dict[tuple[int, int], tuple[ClientResult, Record | None]] = {}
        self._lock = threading.Lock()  # a pool's results come on several threads

    def reply_file(self, exchange: int, client: int) -> Path:
        return self._directory / "legs" / f"{exchange:04d}" / f"{client:04d}.safetensors"

    def state_file(self, exchange: int, client: int) -> Path:
        return self._directory / "clients" / f"{client:04d}.{exchange:04d}.safetensors"

    def buffer(
        self,
        exchange: int,
        client: int,
        result: ClientResult,
        client_state: Record | None,
        run: str,
        *,
        spill: bool = False,
    ) -> None:
        """Keep a result in memory until the commit. Thread-safe.

        Args:
            exchange, client: of the result. result: to keep.
            client_state: to keep; None if it is on the disk (:meth:`save_client_state`).
            run: digest of the run's name.
            spill: write the buffer to files if that was not done for ``durable_every`` seconds.
        """
        with self._lock:
            self._buffer[exchange, client] = result, client_state
            if spill and self._clock() - self._written_at >= self._durable_every:
                for key, buffered in self._buffer.items():
                    self.save(*key, *buffered, run)
                self.clear()

    def save(
        self, exchange: int, client: int, result: ClientResult, client_state: Record | None, run: str = ""
    ) -> None:
        """Write a client's state, then its reply or failure: a reply on disk is complete."""
        if isinstance(result, Reply) and result.has_state and client_state is not None:
            self.save_client_state(exchange, client, client_state, run)
        path, tag = self.reply_file(exchange, client), {"place": [exchange, client], "run": run}
        if isinstance(result, Failure):
            write_json(path.with_suffix(".json"), sealed({**vars(result), **tag}))
            return
        values = {name: getattr(result, name) for name in ("losses", "steps", "has_state", "seconds")}
        save_record(path, result.message, {**values, **tag, "losses": dict(result.losses)})

    def save_client_state(self, exchange: int, client: int, client_state: Record, run: str) -> None:
        """Write a client's state after an exchange; the commit that names it makes it valid."""
        save_tagged(self.state_file(exchange, client), client_state, [exchange, client], run)

    def flush(self, exchanges: Mapping[int, int], run: str) -> None:
        """Write the buffered client states that a run state names: by client the exchange that left it."""
        for (exchange, client), (_, client_state) in self._buffer.items():
            if client_state is not None and exchanges.get(client) == exchange:
                self.save_client_state(exchange, client, client_state, run)

    def load(self, exchange: int, client: int, run: str | None = None) -> ClientResult | None:
        """Return a result; None if it is missing, damaged or of another ``run`` (None: any).

        After its parent was killed, a worker finishes its stack, perhaps in the folder of a later run.
        """
        buffered = self._buffer.get((exchange, client))
        if buffered is not None:
            return buffered[0]
        result = self._read(exchange, client, run)
        if isinstance(result, Reply) and result.has_state:
            try:  # a power failure may damage the state and not the reply
                load_tagged(self.state_file(exchange, client), [exchange, client], run or "")
            except DataError:
                return None
        return result

    def _read(self, exchange: int, client: int, run: str | None) -> ClientResult | None:
        path = self.reply_file(exchange, client)
        try:
            message: Record | None = None
            if path.with_suffix(".json").exists():
                content = unsealed(read_json(path.with_suffix(".json"), ""))
            elif path.exists():
                message, content = load_record(path)
            else:
                return None
            if content is None or content.pop("place") != [exchange, client]:
                return None
            if content.pop("run") != run and run is not None:
                return None
            return Failure(**content) if message is None else Reply(message, **content)
        except (DataError, KeyError, TypeError, AttributeError):
            return None

    def load_all(self, exchange: int, clients: Iterable[int], run: str) -> dict[int, ClientResult | None]:
        """Return results by client; look at the disk once if it has none of the exchange."""
        buffered = {client: self._buffer.get((exchange, client), (None, None))[0] for client in clients}
        # Look at the disk second: another thread spills to the disk before it clears the buffer.
        on_disk = self.reply_file(exchange, 0).parent.exists()
        return {
            client: self.load(exchange, client, run) if on_disk and result is None else result
            for client, result in buffered.items()
        }

    def missing(self, exchange: int, stacks: Sequence[Sequence[int]], run: str) -> list[list[int]]:
        """Return the stacks with a missing result. They train whole; existing results get the same bytes."""
        results = self.load_all(exchange, [client for stack in stacks for client in stack], run)
        return [list(stack) for stack in stacks if any(results[client] is None for client in stack)]

    def client_state(self, exchange: int, client: int, run: str) -> Record:
        """Return a client's state after an exchange.

        Raises:
            DataError: it is missing or damaged.
        """
        _, client_state = self._buffer.get((exchange, client), (None, None))
        if client_state is not None:
            return client_state
        return load_tagged(self.state_file(exchange, client), [exchange, client], run)

    def clear(self) -> None:
        """Empty the buffer: its content is on the disk or no longer valid."""
        self._buffer, self._written_at = {}, self._clock()

    def discard(self, exchange: int) -> None:
        """Delete the results of an exchange that will be repeated."""
        disk.remove_tree(self.reply_file(exchange, 0).parent)
        self._buffer = {}
