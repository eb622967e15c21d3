"""What a client's turn is known by and what comes of it: the words that workers, checkpoints and the round share."""

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
    """Where a run is: the round under way (1-based) and the exchange of it (0-based)."""

    round: int
    exchange: int


@dataclass(frozen=True)
class LegWork:
    """The work of one exchange as the server hands it out: to each client its message, and nothing else of the server.

    Attributes:
        place: the round and exchange. number: of the exchange, counted over the run from 1.
        run: digest of the run's name.
        received: by client the message that it is sent; what clients share is one object.
        client_states: client to the number of the exchange that left what it remembers, of those that remember
        anything.
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
    """What the server learns of one client's turn.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        has_state: whether the client keeps a memory for its next turn.
        seconds: that training and answering took; of a stack each client has the share that it has of the steps. What a
            turn is does not depend on them, so that they are not compared.
        trained: the weights on the device that trained them, where the message holds copies of them
            (`flcore/io/twins.py`); they live as long as the reply.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    has_state: bool
    seconds: float = field(default=0.0, compare=False)
    trained: Weights | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Failure:
    """A client that could not finish its turn.

    Attributes:
        cause: for people, in one line.
        part: of the turn in which it happened.
        details: a traceback, where there is one.
    """

    cause: str
    part: str = ""
    details: str = ""


def leg_of(experiment: Experiment, place: ExchangeId) -> Exchange:
    """Return the exchange at a place."""
    return experiment.method.round_exchanges(place.round, experiment.setting)[place.exchange]


def round_context(method: Method, setting: FederationContext, round_number: int, exchange: Exchange) -> RoundContext:
    """Return an exchange of a round as all parties know it."""
    first = method.round_exchanges(round_number, setting)[0]
    return RoundContext(setting, round_number, exchange.name, is_later_leg=exchange.name != first.name)
