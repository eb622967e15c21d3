"""What came of clients' turns: replies of the leg under way, and what clients remember; held in memory, then files.

Replies and memories survive as files. The process that commits holds them in memory before, until the commit
(``engine.durability: leg``) or for ``durable_every`` seconds; whoever is killed trains these again. Workers write
memories, which they alone read, and hand over replies.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from flcore.core.errors import DataError
from flcore.engine.energy import Clock
from flcore.engine.owned import load_owned, save_owned
from flcore.engine.replies import Result, load_result, save_result
from flcore.engine.turns import Reply
from flcore.io import disk
from flcore.io.records import Record


class TurnResults:
    """Replies, failures and memories below a run's folder, by leg (counted over the run, from 1) and client."""

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
        self._held: dict[tuple[int, int], tuple[Result, Record | None]] = {}
        self._holding = threading.Lock()  # a pool's results come on several threads

    def reply_file(self, leg: int, client: int) -> Path:
        """Where a client's reply of a leg lies."""
        return self._directory / "legs" / f"{leg:04d}" / f"{client:04d}.safetensors"

    def memory_file(self, leg: int, client: int) -> Path:
        """Where lies what a client remembers since its turn in a leg."""
        return self._directory / "clients" / f"{client:04d}.{leg:04d}.safetensors"

    def hold(
        self, leg: int, client: int, result: Result, memory: Record | None, run: str, *, spill: bool = False
    ) -> None:
        """Keep what came of a client's turn in memory; its own memory is written when the leg is committed.

        Safe to call from several threads.

        Args:
            leg, client: whose turn it was. result: what came of it.
            memory: what the client keeps; None: that has been written (:meth:`save_memory`).
            run: digest of the run's name.
            spill: write all that is held where nothing has been written for ``durable_every`` seconds.
        """
        with self._holding:
            self._held[leg, client] = result, memory
            if spill and self._clock() - self._written_at >= self._durable_every:
                for place, kept in self._held.items():
                    self.save(*place, *kept, run)
                self.committed()

    def save(self, leg: int, client: int, result: Result, memory: Record | None, run: str = "") -> None:
        """Keep a client's reply and memory, or why there is none; written last, so that a reply on disk is complete."""
        if isinstance(result, Reply) and result.remembers and memory is not None:
            self.save_memory(leg, client, memory, run)
        save_result(self.reply_file(leg, client), result, (leg, client), run)

    def save_memory(self, leg: int, client: int, memory: Record, run: str) -> None:
        """Write what a client keeps after its turn in a leg; it counts with the commit that names it."""
        save_owned(self.memory_file(leg, client), memory, [leg, client], run)

    def save_memories(self, legs: Mapping[int, int], run: str) -> None:
        """Write the held memories that a state names: by client the leg of its memory."""
        for (leg, client), (_, memory) in self._held.items():
            if memory is not None and legs.get(client) == leg:
                self.save_memory(leg, client, memory, run)

    def load(self, leg: int, client: int, run: str | None = None) -> Result | None:
        """A reply or failure that is already there; None where there is none, or it is damaged or another ``run``'s.

        A worker whose parent was killed finishes its stack, perhaps in a folder where another run has begun since.
        """
        held = self._held.get((leg, client))
        if held is not None:
            return held[0]
        result = load_result(self.reply_file(leg, client), (leg, client), run)
        if isinstance(result, Reply) and result.remembers:
            try:  # what it keeps may be gone, or damaged by a power failure that the reply has survived
                load_owned(self.memory_file(leg, client), [leg, client], run or "", self._cure)
            except DataError:
                return None
        return result

    def load_all(self, leg: int, clients: Sequence[int], run: str) -> dict[int, Result | None]:
        """As :meth:`load`, by client; where nothing of a leg lies on the disk, it is asked once."""
        held = {client: self._held.get((leg, client), (None, None))[0] for client in clients}
        # Asked second: what another group's thread spills in between is on the disk before it is held no more.
        there = self.reply_file(leg, 0).parent.exists()
        return {
            client: self.load(leg, client, run) if there and found is None else found for client, found in held.items()
        }

    def memory(self, leg: int, client: int, run: str) -> Record:
        """What a client remembers since its turn in a leg.

        Raises:
            DataError: it is gone, or damaged.
        """
        _, memory = self._held.get((leg, client), (None, None))
        if memory is not None:
            return memory
        return load_owned(self.memory_file(leg, client), [leg, client], run, self._cure)

    def committed(self) -> None:
        """All that is held is on the disk, or counts no more."""
        self._held, self._written_at = {}, self._clock()

    def forget(self, leg: int) -> None:
        """Drop the replies and failures of a leg that is not committed, so that it is done anew."""
        disk.remove_tree(self.reply_file(leg, 0).parent)
        self._held = {}
