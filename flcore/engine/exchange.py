"""One exchange between server and clients: the work handed out, replies and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flcore.io.messages import Weights
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
        trained: the weights on the training device, if the message has copies (:mod:`flcore.io.twins`).
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    has_state: bool
    seconds: float = field(default=0.0, compare=False)
    trained: Weights | None = field(default=None, compare=False, repr=False)


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


def pack_result(result: ClientResult, client_state: Record) -> tuple[dict[str, Any], list[memoryview]]:
    """Return a result as plain values, and the values of its message and of the client's state in pieces."""
    if isinstance(result, Failure):
        return {"failure": vars(result)}, []
    records, values = pack_records([result.message, client_state])
    # The weights on the worker's device stay there.
    return {"reply": {**vars(result), "message": None, "trained": None}, "records": records}, values


def unpack_result(packed: dict[str, Any], values: Tensor) -> tuple[ClientResult, Record]:
    """Return the result and the state that :func:`pack_result` packed into ``values``, uint8 [n]."""
    if "failure" in packed:
        return Failure(**packed["failure"]), Record()
    message, client_state = unpack_records(packed["records"], values)
    return Reply(**{**packed["reply"], "message": message}), client_state
