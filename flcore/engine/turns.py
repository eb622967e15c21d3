"""Types of clients' turns that workers, checkpoints and the round share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.api import Method
from flcore.methods.types import Exchange, FederationContext, RoundContext


@dataclass(frozen=True)
class ExchangeId:
    """An exchange: its round (1-based) and its place in it (0-based)."""

    round: int
    exchange: int


@dataclass(frozen=True)
class LegWork:
    """The work of one exchange as the server hands it out: to each client its message, and nothing else of the server.

    Attributes:
        place: the round and exchange. number: of the exchange, counted over the run from 1.
        run: digest of the run's name.
        received: message by client; what clients share is one object.
        client_states: client to the exchange that left its state, for clients with a state.
    """

    place: ExchangeId
    number: int
    run: str
    received: Mapping[int, Record]
    client_states: Mapping[int, int]

    def of(self, clients: Collection[int]) -> LegWork:
        """Return the work of some clients alone."""
        received = {client: self.received[client] for client in clients}
        client_states = {client: self.client_states[client] for client in clients if client in self.client_states}
        return replace(self, received=received, client_states=client_states)


@dataclass(frozen=True)
class Reply:
    """One client's answer.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        has_state: whether the client keeps a memory for its next turn.
        seconds: of training and answering; in a stack in proportion to steps. Timing is excluded from equality.
        trained: the weights on the device that trained them, if the message has copies (`flcore/io/twins.py`).
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
        cause: for people, in one line.
        part: of the turn in which it happened.
        details: a traceback, where there is one.
    """

    cause: str
    part: str = ""
    details: str = ""


ClientResult = Reply | Failure


def leg_of(experiment: Experiment, place: ExchangeId) -> Exchange:
    """Return the exchange at a place."""
    return experiment.method.round_exchanges(place.round, experiment.setting)[place.exchange]


def round_context(method: Method, setting: FederationContext, round_number: int, exchange: Exchange) -> RoundContext:
    """Return an exchange of a round as all parties know it."""
    first = method.round_exchanges(round_number, setting)[0]
    return RoundContext(setting, round_number, exchange.name, is_later_leg=exchange.name != first.name)
