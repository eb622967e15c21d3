"""What a client's turn is known by and what comes of it: the words that workers, checkpoints and the round share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.api import Method
from flcore.methods.types import Exchange, Leg, Setting


@dataclass(frozen=True)
class Place:
    """Where a run is: the round under way (1-based) and the leg of it (0-based)."""

    round: int
    leg: int


@dataclass(frozen=True)
class LegWork:
    """The turns of one leg as the server hands them out: to each client its message, and nothing else of the server's.

    Attributes:
        place: the round and leg. number: of the leg, counted over the run from 1.
        run: digest of the run's name.
        received: by client the message that it is sent; what clients share is one object.
        memories: client to the number of the leg that left what it remembers, of those that remember anything.
    """

    place: Place
    number: int
    run: str
    received: Mapping[int, Record]
    memories: Mapping[int, int]

    def of(self, clients: Collection[int]) -> LegWork:
        """Return the work of some clients alone."""
        received = {client: self.received[client] for client in clients}
        memories = {client: self.memories[client] for client in clients if client in self.memories}
        return replace(self, received=received, memories=memories)


@dataclass(frozen=True)
class Reply:
    """What the server learns of one client's turn.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        remembers: whether the client keeps a memory for its next turn.
        seconds: that training and answering took; of a stack each client has the share that it has of the steps. What a
            turn is does not depend on them, so that they are not compared.
        trained: the weights on the device that trained them, where the message holds copies of them
            (`flcore/io/twins.py`); they live as long as the reply.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    remembers: bool
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


def leg_of(experiment: Experiment, place: Place) -> Leg:
    """Return the leg at a place."""
    return experiment.method.legs(place.round, experiment.setting)[place.leg]


def exchange_in(method: Method, setting: Setting, round_number: int, leg: Leg) -> Exchange:
    """Return a leg of a round as all parties know it."""
    first = method.legs(round_number, setting)[0]
    return Exchange(setting, round_number, leg.name, is_later_leg=leg.name != first.name)
