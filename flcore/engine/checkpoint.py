"""What a running run keeps on disk, so that it can be killed at any moment and end with the same bytes.

::

    checkpoint/
      state.safetensors            server state after the last complete leg; replaced atomically: the one commit point
      history.jsonl                a record per evaluated round        timing.jsonl   seconds per leg
      clients/0003.0007.safetensors   what client 3 remembers since the run's 7th leg
      legs/0008/0003.safetensors      the reply of client 3 in the leg under way (0003.json: why it failed)

A round has one leg with nearly every method; then legs count rounds. The state names the leg and, per client, the leg
of its current memory. Whatever else lies around (a memory of the interrupted leg, history lines behind the state) is
either found again and used, or dropped; nothing is trusted before the state says so. No pickle: safetensors and JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flcore.engine.client import Failure, Place, Reply
from flcore.errors import DataError
from flcore.messages import Size
from flcore.records import Record, load_record, save_record

Traffic = Mapping[str, Size]


@dataclass(frozen=True)
class RunState:
    """A run between two legs.

    Attributes:
        round: the last complete round; 0 before the first.
        server: what the server holds.
        memories: client id to the leg (counted over the run, from 1) that left its current memory.
        up: cumulative cost of all replies by kind. down: of all broadcasts.
        steps: mini-batches trained on, by all clients together.
        leg: complete legs of the round after ``round``.
        legs: complete legs of the run.
        failures: (round, client, cause) of every client left out because it failed.
        simulated_seconds: since the start, where clients' speeds are simulated.
        run: names the run and the code.
        facts: what server stages measured in the legs of the round under way.
    """

    round: int
    server: Record
    memories: Mapping[int, int] = field(default_factory=dict)
    up: Traffic = field(default_factory=dict)
    down: Traffic = field(default_factory=dict)
    steps: int = 0
    leg: int = 0
    legs: int = 0
    failures: tuple[tuple[int, int, str], ...] = ()
    simulated_seconds: float = 0.0
    run: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The leg to do next."""
        return Place(self.round + 1, self.leg)


class Checkpoint:
    """The folder of one running run."""

    def __init__(self, directory: Path) -> None:
        """Point at a folder, which need not exist yet."""
        self.directory = directory

    @property
    def state_file(self) -> Path:
        """The committed state."""
        return self.directory / "state.safetensors"

    def reply_file(self, leg: int, client: int) -> Path:
        """Where a client's reply of a leg (counted over the run, from 1) lies."""
        return self.directory / "legs" / f"{leg:04d}" / f"{client:04d}.safetensors"

    def memory_file(self, client: int, leg: int) -> Path:
        """What a client remembers since its turn in a leg."""
        return self.directory / "clients" / f"{client:04d}.{leg:04d}.safetensors"

    def start(self, state: RunState) -> None:
        """Begin anew: whatever was here is dropped."""
        shutil.rmtree(self.directory, ignore_errors=True)
        (self.directory / "clients").mkdir(parents=True, exist_ok=True)
        self._write_state(state)

    def load(self, run: str) -> RunState | None:
        """The last complete round of the run named ``run``; None where there is none, or another run's.

        History lines behind it are dropped.
        """
        try:
            state = self._read_state(run)
        except DataError:
            return None
        for name in ("history.jsonl", "timing.jsonl"):
            self._truncate(name, state.round)
        return state

    def read_state(self) -> RunState:
        """The committed state, as a worker process reads it.

        Raises:
            DataError: there is none, or it is damaged.
        """
        return self._read_state(None)

    def _read_state(self, run: str | None) -> RunState:
        server, extra = load_record(self.state_file)
        if run is not None and extra.get("run") != run:
            raise DataError(f"{self.state_file}: belongs to another run, or to other code")
        return RunState(
            round=extra["round"],
            server=server,
            memories={int(client): number for client, number in extra["memories"].items()},
            up={kind: Size(**size) for kind, size in extra["up"].items()},
            down={kind: Size(**size) for kind, size in extra["down"].items()},
            steps=extra["steps"],
            leg=extra["leg"],
            legs=extra["legs"],
            failures=tuple((number, client, cause) for number, client, cause in extra["failures"]),
            simulated_seconds=extra["simulated_seconds"],
            run=extra["run"],
            facts=extra["facts"],
        )

    def commit(self, state: RunState, history: Mapping[str, Any] | None, timing: Mapping[str, Any]) -> None:
        """Close a leg: append its records, replace the state, and clear what is no longer needed."""
        if history is not None:
            self._append("history.jsonl", history)
        self._append("timing.jsonl", timing)
        self._write_state(state)
        shutil.rmtree(self.directory / "legs", ignore_errors=True)
        for path in (self.directory / "clients").iterdir():
            client, number = path.name.split(".")[:2]
            if client.isdigit() and state.memories.get(int(client)) != int(number):
                path.unlink()

    def _write_state(self, state: RunState) -> None:
        extra = {
            "run": state.run,
            "round": state.round,
            "steps": state.steps,
            "memories": {str(client): number for client, number in state.memories.items()},
            "up": {kind: vars(size) for kind, size in state.up.items()},
            "down": {kind: vars(size) for kind, size in state.down.items()},
            "leg": state.leg,
            "legs": state.legs,
            "failures": list(state.failures),
            "simulated_seconds": state.simulated_seconds,
            "facts": dict(state.facts),
        }
        save_record(self.state_file, state.server, extra, durable=True)

    def records(self, name: str) -> list[dict[str, Any]]:
        """The records of ``history.jsonl`` or ``timing.jsonl``, oldest first."""
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _truncate(self, name: str, last_round: int) -> None:
        """Drop records of rounds that were never committed, a line cut off by a kill included."""
        path = self.directory / name
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["round"] > last_round:
                break
            kept.append(line + "\n")
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)

    def memory(self, client: int, memories: Mapping[int, int]) -> Record:
        """What a client remembers; empty before its first participation, or where its method keeps nothing."""
        return load_record(self.memory_file(client, memories[client]))[0] if client in memories else Record()

    def save_reply(self, leg: int, client: int, reply: Reply, memory: Record, run: str = "") -> None:
        """Keep a client's reply and memory; the reply is written last, so that a reply on disk is complete."""
        if reply.remembers:
            # As durable as the state that will name it.
            save_record(self.memory_file(client, leg), memory, durable=True)
        path = self.reply_file(leg, client)
        path.parent.mkdir(parents=True, exist_ok=True)
        extra = {
            "run": run,
            "losses": dict(reply.losses),
            "steps": reply.steps,
            "remembers": reply.remembers,
            "down": {kind: vars(size) for kind, size in reply.down.items()},
            "up": {kind: vars(size) for kind, size in reply.up.items()},
        }
        save_record(path, reply.message, extra)

    def save_failure(self, leg: int, client: int, failure: Failure, run: str = "") -> None:
        """Keep why a client is left out of a leg."""
        path = self.reply_file(leg, client).with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        down = {kind: vars(size) for kind, size in failure.down.items()}
        temporary.write_text(json.dumps({"run": run, "cause": failure.cause, "down": down}, sort_keys=True))
        temporary.replace(path)

    def load_reply(self, leg: int, client: int, run: str | None = None) -> Reply | Failure | None:
        """A reply or failure that is already there; None where there is none, or it is damaged or another ``run``'s.

        A worker whose parent was killed finishes its task, perhaps in a folder where another run has begun since.
        """
        path = self.reply_file(leg, client)
        if path.with_suffix(".json").exists():
            kept = json.loads(path.with_suffix(".json").read_text())
            if run is not None and kept["run"] != run:
                return None
            return Failure(kept["cause"], {kind: Size(**size) for kind, size in kept["down"].items()})
        if not path.exists():
            return None
        try:
            message, extra = load_record(path)
        except DataError:
            return None
        if run is not None and extra["run"] != run:
            return None
        if extra["remembers"] and not self.memory_file(client, leg).exists():
            return None
        down, up = ({kind: Size(**size) for kind, size in extra[way].items()} for way in ("down", "up"))
        return Reply(message, extra["losses"], extra["steps"], extra["remembers"], down, up)
