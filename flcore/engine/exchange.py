"""One exchange between server and clients: the work handed out, replies and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flcore.io.records import Record, pack_records, unpack_records
from flcore.methods.api import Method
from flcore.methods.types import Exchange, FederationContext, RoundContext


@dataclass(frozen=True)
class ExchangeWork:
    """The work of one exchange as handed out: each client's message, and nothing else of the server.

    Attributes:
        round: 1-based. index: of the exchange in its round, from 0. name: of the exchange.
        number: of the exchange in the run, from 1.
        run: digest of the run's name.
        received: message by client; shared payloads are one object.
        client_states: by client the exchange that left its state.
    """

    round: int
    index: int
    name: str
    number: int
    run: str
    received: Mapping[int, Record]
    client_states: Mapping[int, int]


@dataclass(frozen=True)
class Reply:
    """One client's reply.

    Attributes:
        message: sent to the server.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        has_state: whether the client keeps a state.
        seconds: of training and replying; in a stack in proportion to steps. Excluded from equality.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    has_state: bool
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Failure:
    """A client without a reply.

    Attributes:
        cause: in one line. part: of the client's work in which it happened.
        details: a traceback; may be empty.
    """

    cause: str
    part: str = ""
    details: str = ""


ClientResult = Reply | Failure


def round_context(method: Method, setting: FederationContext, round_number: int, exchange: Exchange) -> RoundContext:
    """Return an exchange of a round as all parties know it."""
    first = method.round_exchanges(round_number, setting)[0]
    return RoundContext(setting, round_number, exchange.name, is_later_leg=exchange.name != first.name)


Results = Mapping[int, tuple[ClientResult, Record]]
"""Results of a stack by client, each with the client's state."""


def pack_results(results: Results) -> tuple[dict[str, Any], list[memoryview]]:
    """Return results as plain values, and the values of messages and states in pieces."""
    plain: dict[int, dict[str, Any]] = {}
    records: list[Record] = []
    for client, (result, client_state) in results.items():
        plain[client] = vars(result)
        if isinstance(result, Reply):
            plain[client] = {**vars(result), "message": None}
            records += result.message, client_state
    packed, values = pack_records(records)
    return {"results": plain, "records": packed}, values


def unpack_results(packed: Mapping[str, Any], values: Tensor) -> Results:
    """Return the results that :func:`pack_results` packed into ``values``, uint8 [n]."""
    records = iter(unpack_records(packed["records"], values))
    return {
        client: (Reply(**{**plain, "message": next(records)}), next(records))
        if "message" in plain
        else (Failure(**plain), Record())
        for client, plain in packed["results"].items()
    }
