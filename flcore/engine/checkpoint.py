"""What a running run keeps on disk, so that it can be killed at any moment and end with the same bytes.

::

    checkpoint/
      state.json                   what holds after the last complete leg; replaced atomically: the one commit point
      server.0007.safetensors      those payloads of the server that the run's 7th leg changed
      history.jsonl                a record per evaluated round        timing.jsonl   seconds per leg
      clients/0003.0007.safetensors   what client 3 remembers since the run's 7th leg
      legs/0008/0003.safetensors      the reply of client 3 in the leg under way (0003.json: why it failed)

A round has one leg with nearly every method; then legs count rounds. The state names the leg of every payload and of
every client's memory, and how many lines of the records count. Whatever else lies around (a memory of the interrupted
leg, lines behind those that count) is either found again and used, or dropped. No pickle: safetensors and JSON.

Every file has a check sum, and says whose it is and of which leg: what was changed, or has changed places, is refused,
or where it is a reply, made again. A flipped bit would otherwise train on to other results.

Everything that a commit names survives a power failure. Replies and memories of the leg under way survive a kill of the
process, or, where they are held in memory until the commit (``engine.durability: leg``), are trained again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flcore import disk
from flcore.engine.aside import Aside
from flcore.engine.owned import load_owned, save_owned
from flcore.engine.run_state import RunName, RunState
from flcore.engine.turns import Failure, Reply
from flcore.errors import DataError, RunError
from flcore.files import append, make_durable, read_json, read_lines, replace_file, sealed, unsealed, write_json
from flcore.messages import Payload, Size
from flcore.records import Record, load_record, save_record

Result = Reply | Failure

_RECORDS = ("history.jsonl", "timing.jsonl")

CURE = "what is there cannot be gone on with: --restart throws it away and begins with the first round"


class Checkpoint:
    """The folder of one running run."""

    def __init__(self, directory: Path) -> None:
        """Point at a folder, which need not exist yet."""
        self.directory = directory
        self._server: dict[str, tuple[int, Payload]] = {}
        self._held: dict[tuple[int, int], tuple[Result, Record]] = {}
        self._run = ""
        """Digest of the run's name; empty as long as nobody has said it."""
        self._history_check = 0
        """Of the lines of the history that count."""
        self._ends: dict[str, int] = {}  # of records: bytes that count

    @property
    def state_file(self) -> Path:
        """The committed state."""
        return self.directory / "state.json"

    def server_file(self, leg: int) -> Path:
        """Payloads of the server that a leg changed; 0: those that it started with."""
        return self.directory / f"server.{leg:04d}.safetensors"

    def state_files(self) -> list[Path]:
        """The files that the state is made of, clients' memories aside."""
        legs = set(read_json(self.state_file, CURE)["server"].values())
        return [self.state_file, *map(self.server_file, sorted(legs))]

    def reply_file(self, leg: int, client: int) -> Path:
        """Where a client's reply of a leg (counted over the run, from 1) lies."""
        return self.directory / "legs" / f"{leg:04d}" / f"{client:04d}.safetensors"

    def memory_file(self, client: int, leg: int) -> Path:
        """What a client remembers since its turn in a leg."""
        return self.directory / "clients" / f"{client:04d}.{leg:04d}.safetensors"

    # ---- the state -----------------------------------------------------------------------------------------------

    def start(self, state: RunState, *, replace: bool = False) -> None:
        """Begin anew.

        Args:
            state: before the first round.
            replace: throw away what is here.

        Raises:
            RunError: something is here, and ``replace`` is False.
        """
        if replace:
            disk.remove(self.state_file, missing_ok=True)  # first: what is left of it is nobody's state
            disk.remove_tree(self.directory)
        elif self._holds_a_run():
            raise RunError(f"{self.directory}: holds the checkpoint of a run; {CURE}")
        self._server, self._held, self._ends = {}, {}, dict.fromkeys(_RECORDS, 0)
        self._run, self._history_check = state.run.digest, 0
        disk.make_folder(self.directory / "clients")
        self._write_state(state)

    def load(self, name: RunName) -> RunState | None:
        """The last complete leg of a run; None where nothing is there. Records behind it are dropped.

        Raises:
            DataError: what is there is damaged. RunError: it is of another run, or of other code; says what differs.
        """
        if not self._holds_a_run():
            return None
        content = self._content()
        difference = name.difference(RunName(content["run"], content["code"]))
        if difference is not None:
            raise RunError(f"{self.directory}: holds {difference}; {CURE}")
        state = self._state(content)
        for client in state.memories:
            self.memory(client, state.memories)  # better now than hours later
        history, _ = (
            self._keep_lines(file, count) for file, count in zip(_RECORDS, (state.evaluated, state.legs), strict=True)
        )
        self._history_check = zlib.crc32(history)
        timing = self.directory / "timing.jsonl"
        times = read_lines(timing, CURE) if timing.exists() else []
        if self._history_check != content["history"] or any(unsealed(record) is None for record in times):
            raise DataError(f"{self.directory}: damaged, history or timing are not what was written; {CURE}")
        return state

    def _content(self) -> dict[str, Any]:
        """The content of the state's file, as it was written."""
        content = read_json(self.state_file, CURE)
        if "check" not in content:
            raise RunError(f"{self.state_file}: of another version of protofl; {CURE}")
        written = unsealed(content)
        if written is None:
            raise DataError(f"{self.state_file}: damaged, its content is not what was written; {CURE}")
        return written

    def _holds_a_run(self) -> bool:
        """Whether anything is here that a start which was interrupted would not have left."""
        begun = {"clients", self.server_file(0).name}
        found = {path.name for path in self.directory.glob("*") if not path.name.startswith(".")}
        return bool(found - begun)

    def read_state(self) -> RunState:
        """The committed state, as a worker process reads it; payloads that it knows already are not read again.

        Raises:
            DataError: there is none, or it is damaged.
        """
        return self._state(self._content())

    def _state(self, content: Mapping[str, Any]) -> RunState:
        try:
            fields = {name: content[name] for name in _AS_THEY_ARE}
            name = RunName(content["run"], content["code"])
            self._run = name.digest
            return RunState(
                server=self._read_server(content["server"]),
                memories={int(client): leg for client, leg in content["memories"].items()},
                up={kind: Size(**size) for kind, size in content["up"].items()},
                down={kind: Size(**size) for kind, size in content["down"].items()},
                failures=tuple((number, client, cause) for number, client, cause in content["failures"]),
                run=name,
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.state_file}: damaged ({error!r}); {CURE}") from error

    def _read_server(self, legs: Mapping[str, int]) -> Record:
        missing = {leg for name, leg in legs.items() if self._server.get(name, (None,))[0] != leg}
        files = {leg: load_owned(self.server_file(leg), leg, self._run, CURE) for leg in sorted(missing)}
        self._server = {
            name: (leg, files[leg][name] if leg in files else self._server[name][1]) for name, leg in legs.items()
        }
        return Record({name: payload for name, (_, payload) in self._server.items()})

    def commit(self, state: RunState, history: Mapping[str, Any] | None, timing: Mapping[str, Any]) -> None:
        """Close a leg: append its records, replace the state, and clear what is no longer needed."""
        for (leg, client), (_, memory) in self._held.items():
            if state.memories.get(client) == leg == state.legs:
                save_owned(self.memory_file(client, leg), memory, [leg, client], self._run)
        records = {"history.jsonl": history, "timing.jsonl": sealed(timing)}
        lines = {name: _line(record) for name, record in records.items() if record is not None}
        ends = {name: append(self.directory / name, line, at=self._ends[name]) for name, line in lines.items()}
        check = zlib.crc32(lines.get("history.jsonl", b""), self._history_check)
        self._write_state(state, check)
        self._ends, self._history_check = self._ends | ends, check  # not before: who failed until here may try again
        self._held = {}
        self._clear(state)

    def _write_state(self, state: RunState, history_check: int = 0) -> None:
        """Make durable all that the state names, then the state."""
        # Records are immutable: a payload that is still the same object is on the disk already.
        known = {name: leg for name, (leg, payload) in self._server.items() if state.server.get(name) is payload}
        changed = state.server.without(*known)
        if changed:
            save_owned(self.server_file(state.legs), changed, state.legs, self._run)
        written = [self.server_file(state.legs)] if changed else []
        written += [self.memory_file(client, leg) for client, leg in state.memories.items() if leg == state.legs]
        written += [path for name in _RECORDS if (path := self.directory / name).exists()]
        written += self.aside.points()
        make_durable(written)
        legs = {name: known.get(name, state.legs) for name in state.server}
        content = {
            **{name: getattr(state, name) for name in _AS_THEY_ARE},
            "run": state.run.run,
            "code": dict(state.run.code),
            "server": legs,
            "memories": {str(client): leg for client, leg in state.memories.items()},
            "up": {kind: vars(size) for kind, size in state.up.items()},
            "down": {kind: vars(size) for kind, size in state.down.items()},
            "failures": list(state.failures),
            "history": history_check,
        }
        text = json.dumps(sealed(content), sort_keys=True)
        replace_file(self.state_file, lambda file: file.write(text.encode()), durable=True)
        self._server = {name: (leg, state.server[name]) for name, leg in legs.items()}

    def _clear(self, state: RunState) -> None:
        """Remove what no longer counts. What cannot be removed now is no reason to do a committed leg again."""
        disk.try_to_remove(self.directory / "legs")
        named = {self.memory_file(client, leg) for client, leg in state.memories.items()}
        named |= {self.server_file(leg) for leg, _ in self._server.values()}
        unfinished = self.directory.glob(".*.tmp")  # by a process that was killed
        for path in (*(self.directory / "clients").iterdir(), *self.directory.glob("server.*"), *unfinished):
            if path not in named:
                disk.try_to_remove(path)

    @property
    def aside(self) -> Aside:
        """States that are kept for analyses of the finished run."""
        return Aside(self.directory, self._run, CURE)

    def keep_round(self, state: RunState) -> None:
        """Put aside what server and clients hold after a round that is about to be committed."""
        memories = {client: self.memory(client, state.memories) for client in sorted(state.memories)}
        self.aside.keep_round(state.round, state.server, memories)

    def show(self, server: Record, legs: Mapping[int, int]) -> Path:
        """Let workers see a state that is not committed: what the server holds, and whose memory is of which leg."""
        path = self.directory / "shown.safetensors"
        save_record(path, server, {"legs": {str(client): leg for client, leg in legs.items()}})
        for (leg, client), (_, memory) in self._held.items():
            if legs.get(client) == leg and not self.memory_file(client, leg).exists():
                save_owned(self.memory_file(client, leg), memory, [leg, client], self._run)
        return path

    def shown(self, path: Path) -> tuple[Record, dict[int, int]]:
        """What :meth:`show` wrote."""
        server, extra = load_record(path, cure=CURE)
        return server, {int(client): leg for client, leg in extra["legs"].items()}

    # ---- records -------------------------------------------------------------------------------------------------

    def records(self, name: str) -> list[dict[str, Any]]:
        """The records of ``history.jsonl`` or ``timing.jsonl``, oldest first."""
        path = self.directory / name
        return [unsealed(record) or record for record in read_lines(path, CURE)] if path.exists() else []

    def _keep_lines(self, name: str, count: int) -> bytes:
        """Drop lines that were never committed, one cut off by a kill included; returns those that were."""
        path = self.directory / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = b"".join(lines[:count])
        if len(lines) < count or (whole and not whole.endswith(b"\n")):
            raise DataError(f"{path}: damaged, {count} lines were written; {CURE}")
        self._ends[name] = sum(map(len, lines[:count]))
        if len(lines) > count:
            disk.cut(path, self._ends[name])
        return whole

    # ---- clients -------------------------------------------------------------------------------------------------

    def memory(self, client: int, memories: Mapping[int, int]) -> Record:
        """What a client remembers; empty before its first participation, or where its method keeps nothing.

        Raises:
            DataError: it is gone, or damaged.
        """
        if client not in memories:
            return Record()
        held = self._held.get((memories[client], client))
        leg = memories[client]
        return load_owned(self.memory_file(client, leg), [leg, client], self._run, CURE) if held is None else held[1]

    def hold(self, leg: int, client: int, result: Result, memory: Record) -> None:
        """Keep what came of a client's turn in memory; its own memory is written when the leg is committed."""
        self._held[leg, client] = result, memory

    def save_reply(self, leg: int, client: int, reply: Reply, memory: Record, run: str = "") -> None:
        """Keep a client's reply and memory; the reply is written last, so that a reply on disk is complete."""
        if reply.remembers:
            save_owned(self.memory_file(client, leg), memory, [leg, client], run)
        extra = {
            "place": [leg, client],
            "run": run,
            "losses": dict(reply.losses),
            "steps": reply.steps,
            "remembers": reply.remembers,
            "seconds": reply.seconds,
            "down": {kind: vars(size) for kind, size in reply.down.items()},
            "up": {kind: vars(size) for kind, size in reply.up.items()},
        }
        save_record(self.reply_file(leg, client), reply.message, extra)

    def save_failure(self, leg: int, client: int, failure: Failure, run: str = "") -> None:
        """Keep why a client is left out of a leg."""
        down = {kind: vars(size) for kind, size in failure.down.items()}
        content = {**vars(failure), "place": [leg, client], "run": run, "down": down}
        write_json(self.reply_file(leg, client).with_suffix(".json"), sealed(content))

    def load_reply(self, leg: int, client: int, run: str | None = None) -> Result | None:
        """A reply or failure that is already there; None where there is none, or it is damaged or another ``run``'s.

        A worker whose parent was killed finishes its stack, perhaps in a folder where another run has begun since.
        """
        if (leg, client) in self._held:
            return self._held[leg, client][0]
        path = self.reply_file(leg, client)
        try:
            if path.with_suffix(".json").exists():
                return _failure(read_json(path.with_suffix(".json"), ""), [leg, client], run)
            if not path.exists():
                return None
            message, extra = load_record(path)
            if extra["place"] != [leg, client] or run not in (None, extra["run"]):
                return None
            if extra["remembers"] and not self.memory_file(client, leg).exists():
                return None
            down, up = ({kind: Size(**size) for kind, size in extra[way].items()} for way in ("down", "up"))
            return Reply(message, extra["losses"], extra["steps"], extra["remembers"], down, up, extra["seconds"])
        except (DataError, KeyError, TypeError, AttributeError):
            return None

    def forget(self, leg: int) -> None:
        """Drop the replies and failures of a leg that is not committed, so that it is done anew."""
        disk.remove_tree(self.reply_file(leg, 0).parent)
        self._held = {}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode() + b"\n"


_AS_THEY_ARE = ("round", "steps", "leg", "legs", "evaluated", "simulated_seconds", "facts", "scored")


def _failure(written: dict[str, Any], place: list[int], run: str | None) -> Failure | None:
    content = unsealed(written)
    if content is None or content.pop("place") != place or content.pop("run") != run is not None:
        return None
    down = {kind: Size(**size) for kind, size in content.pop("down").items()}
    return Failure(down=down, **content)
