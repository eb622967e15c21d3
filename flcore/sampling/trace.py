"""Clients that a trace says are available, for measured or made-up patterns of availability.

A trace is a CSV file with a header and a line for each round in which a client is available, or a JSON object::

    round,client                {"1": [0, 2], "2": [1]}
    1,0
    1,2
    2,1
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcore.core.errors import ConfigError
from flcore.core.params import param
from flcore.core.rng import numpy_stream
from flcore.core.text import shorten
from flcore.io.files import NOT_JSON, given_path
from flcore.sampling.base import Sampler


@dataclass(frozen=True)
class Trace(Sampler, name="trace"):
    """Available clients of the round, which a file lists, every one alike.

    The draw is uniform and without replacement; all are taken if they are too few. After its last round the trace
    starts again. In a round that it does not name no client is available.
    """

    file: str | None = param(None, "CSV with columns round and client, or JSON {round: [client, ...]}")
    rounds: Mapping[str, Any] = param({}, "in place of a file, its content: {round: [client, ...]}, rounds from 1")

    def __post_init__(self) -> None:
        """Refuse invalid rounds and clients."""
        if self.file is not None and self.rounds:
            raise ValueError("file and rounds are two traces; set one of them")
        for number, clients in self.rounds.items():
            if not number.isdecimal() or int(number) < 1:
                raise ValueError(f"rounds: {shorten(number)}: expected the number of a round, from 1")
            whole = isinstance(clients, list | tuple) and all(type(client) is int and client >= 0 for client in clients)
            if not whole or len(set(clients)) < len(clients):
                raise ValueError(f"rounds.{number} = {shorten(clients)}: expected different ids of clients, from 0")

    def sample(self, count: int, sizes: Mapping[int, int], round_number: int, seed: int) -> Sequence[int]:
        """Draw up to ``count`` of the clients available in the round."""
        available = sorted(self.rounds.get(str((round_number - 1) % self._length + 1), ()))
        draw = numpy_stream(seed, "cohort", round_number)
        return draw.choice(available, min(count, len(available)), replace=False).tolist() if available else []

    @property
    def _length(self) -> int:
        return max(map(int, self.rounds))

    def loaded(self) -> Trace:
        """Return the trace with its file's content in place of the file."""
        if self.file is None and not self.rounds:
            raise ConfigError("federation.sampler = trace: set sampler_options to {file: PATH}, or to {rounds: ...}")
        return self if self.file is None else Trace(rounds=_read(self.file))

    def identity(self) -> dict[str, Any]:
        """Return a digest of the trace, which may be long."""
        content = json.dumps({number: sorted(clients) for number, clients in self.rounds.items()}, sort_keys=True)
        return {"trace": hashlib.sha256(content.encode()).hexdigest()}

    def refusal(self, num_clients: int) -> str | None:
        """Refuse ids that no client has."""
        for number, clients in self.rounds.items():
            beyond = [client for client in clients if client >= num_clients]
            if beyond:
                return f"the trace has client {beyond[0]} in round {number}, and ids go from 0 to {num_clients - 1}"
        return None


def _read(path: str) -> dict[str, list[int]]:
    """Return the clients of each round of a file."""
    where = f"federation.sampler_options.file = {shorten(path)}"
    try:
        text = given_path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        rounds = json.loads(text) if text.lstrip().startswith("{") else _columns(text)
        if not rounds:
            raise ValueError("it names no round")
        return dict(Trace(rounds=rounds).rounds)
    except (*NOT_JSON, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {error}; expected CSV with a header round,client, or JSON {{round: [client, ...]}}"
        ) from error


def _columns(text: str) -> dict[str, list[int]]:
    rounds: dict[str, list[int]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        rounds.setdefault(str(int(row["round"])), []).append(int(row["client"]))
    return rounds
