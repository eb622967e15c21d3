"""Replies of the current exchange and clients' states: held in memory, then written to files.

Replies and states survive as files. The process that commits holds them in memory before, until the commit
(``engine.durability: leg``) or for ``durable_every`` seconds; after a kill these are trained again. Workers write
states, which they alone read, and send replies.

A reply is a safetensors file, a failure a JSON file. Each names its run, exchange and client; a damaged or foreign one
counts as missing: the reply is made again, with the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.engine.energy import Clock
from flcore.engine.tagged_records import load_tagged, save_tagged
from flcore.engine.turns import ClientResult, Failure, Reply
from flcore.io import disk
from flcore.io.files import read_json, sealed, unsealed, write_json
from flcore.io.records import Record, load_record, save_record

ExchangeKey = tuple[int, int]
"""Leg, counted over the run from 1, and client."""


class TurnResults:
    """Replies, failures and memories below a run's folder, by exchange (counted over the run, from 1) and client."""

    def __init__(self, directory: Path, cure: str, durable_every: float, clock: Clock) -> None:
        """Nothing is held yet.

        Args:
            directory: the run's checkpoint folder.
            cure: what a person can do about a damaged memory.
            durable_every: seconds for which :meth:`hold` holds at most what it may spill.
            clock: of these seconds.
        """
        self._directory, self._cure = directory, cure
        self._durable_every, self._clock = durable_every, clock
        self._written_at = clock()
        self._held: dict[tuple[int, int], tuple[ClientResult, Record | None]] = {}
        self._holding = threading.Lock()  # a pool's results come on several threads

    def reply_file(self, exchange: int, client: int) -> Path:
        """Return the file of a client's reply in an exchange."""
        return self._directory / "legs" / f"{exchange:04d}" / f"{client:04d}.safetensors"

    def state_file(self, exchange: int, client: int) -> Path:
        """Return the file of a client's state since an exchange."""
        return self._directory / "clients" / f"{client:04d}.{exchange:04d}.safetensors"

    def hold(
        self,
        exchange: int,
        client: int,
        result: ClientResult,
        client_state: Record | None,
        run: str,
        *,
        spill: bool = False,
    ) -> None:
        """Keep what came of a client's turn in memory; its own memory is written when the exchange is committed.

        Safe to call from several threads.

        Args:
            exchange, client: of the turn. result: its result.
            client_state: what the client keeps; None: that has been written (:meth:`save_client_state`).
            run: digest of the run's name.
            spill: write all that is held where nothing has been written for ``durable_every`` seconds.
        """
        with self._holding:
            self._held[exchange, client] = result, client_state
            if spill and self._clock() - self._written_at >= self._durable_every:
                for place, kept in self._held.items():
                    self.save(*place, *kept, run)
                self.committed()

    def save(
        self, exchange: int, client: int, result: ClientResult, client_state: Record | None, run: str = ""
    ) -> None:
        """Keep a client's reply and memory, or why there is none; written last, so that a reply on disk is complete."""
        if isinstance(result, Reply) and result.has_state and client_state is not None:
            self.save_client_state(exchange, client, client_state, run)
        save_result(self.reply_file(exchange, client), result, (exchange, client), run)

    def save_client_state(self, exchange: int, client: int, client_state: Record, run: str) -> None:
        """Write what a client keeps after its turn in an exchange; it counts with the commit that names it."""
        save_tagged(self.state_file(exchange, client), client_state, [exchange, client], run)

    def save_client_states(self, exchanges: Mapping[int, int], run: str) -> None:
        """Write the held memories that a state names: by client the exchange of its memory."""
        for (exchange, client), (_, client_state) in self._held.items():
            if client_state is not None and exchanges.get(client) == exchange:
                self.save_client_state(exchange, client, client_state, run)

    def load(self, exchange: int, client: int, run: str | None = None) -> ClientResult | None:
        """Return an existing reply or failure; None if it is missing, damaged or of another ``run``.

        A worker whose parent was killed finishes its stack, perhaps in a folder of another run by now.
        """
        held = self._held.get((exchange, client))
        if held is not None:
            return held[0]
        result = load_result(self.reply_file(exchange, client), (exchange, client), run)
        if isinstance(result, Reply) and result.has_state:
            try:  # a power failure may damage the state and not the reply
                load_tagged(self.state_file(exchange, client), [exchange, client], run or "", self._cure)
            except DataError:
                return None
        return result

    def load_all(self, exchange: int, clients: Sequence[int], run: str) -> dict[int, ClientResult | None]:
        """Load results by client, with one look at the disk if it has none of the exchange."""
        held = {client: self._held.get((exchange, client), (None, None))[0] for client in clients}
        # Asked second: what another group's thread spills in between is on the disk before it is held no more.
        there = self.reply_file(exchange, 0).parent.exists()
        return {
            client: self.load(exchange, client, run) if there and found is None else found
            for client, found in held.items()
        }

    def client_state(self, exchange: int, client: int, run: str) -> Record:
        """Return a client's state since an exchange.

        Raises:
            DataError: it is gone, or damaged.
        """
        _, client_state = self._held.get((exchange, client), (None, None))
        if client_state is not None:
            return client_state
        return load_tagged(self.state_file(exchange, client), [exchange, client], run, self._cure)

    def committed(self) -> None:
        """All that is held is on the disk, or counts no more."""
        self._held, self._written_at = {}, self._clock()

    def forget(self, exchange: int) -> None:
        """Drop the replies and failures of an exchange that is not committed; it is repeated."""
        disk.remove_tree(self.reply_file(exchange, 0).parent)
        self._held = {}


def save_result(path: Path, result: ClientResult, place: ExchangeKey, run: str) -> None:
    """Write a reply to ``path``; a failure, to the same name with ``.json``.

    Args:
        path: of the reply.
        result: to be written.
        place: its exchange and client.
        run: digest of the run's name.
    """
    owner = {"place": list(place), "run": run}
    if isinstance(result, Failure):
        write_json(path.with_suffix(".json"), sealed({**vars(result), **owner}))
        return
    names = ("losses", "steps", "has_state", "seconds")
    values = {name: getattr(result, name) for name in names}
    save_record(path, result.message, {**values, **owner, "losses": dict(result.losses)})


def load_result(path: Path, place: ExchangeKey, run: str | None) -> ClientResult | None:
    """Return the result that :func:`save_result` wrote; None if it is missing, damaged, or of another place or run.

    Args:
        path: of the reply. place: expected exchange and client.
        run: digest of the run's name; None: any.
    """
    try:
        if path.with_suffix(".json").exists():
            content = unsealed(read_json(path.with_suffix(".json"), ""))
            if content is None or not _is_of(content, place, run):
                return None
            return Failure(**content)
        if not path.exists():
            return None
        message, extra = load_record(path)
        if not _is_of(extra, place, run):
            return None
        return Reply(message, **extra)
    except (DataError, KeyError, TypeError, AttributeError):
        return None


def _is_of(content: dict[str, Any], place: ExchangeKey, run: str | None) -> bool:
    """Return whether a file is of this place and run; remove both from its content."""
    same_place, owner = content.pop("place") == list(place), content.pop("run")
    return same_place and run in (None, owner)
