"""What a client's turn is known by and what comes of it: the words that workers, checkpoints and the round share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flcore.io.messages import Size, Weights
from flcore.io.records import Record
from flcore.methods.api import Method
from flcore.methods.types import Exchange, Leg, Setting


@dataclass(frozen=True)
class Place:
    """Where a run is: the round under way (1-based) and the leg of it (0-based)."""

    round: int
    leg: int


@dataclass(frozen=True)
class Reply:
    """What the server learns of one client's turn, and what it cost.

    Attributes:
        message: what goes up.
        losses: mean of every loss term over the steps that had it.
        steps: mini-batches trained on.
        remembers: whether the client keeps a memory for its next turn.
        down: cost of the received message by kind.
        up: of the reply.
        seconds: that training and answering took; of a stack each client has the share that it has of the steps. What a
            turn is does not depend on them, so that they are not compared.
        trained: the weights on the device that trained them, where the message holds copies of them
            (`flcore/io/twins.py`); they live as long as the reply.
    """

    message: Record
    losses: Mapping[str, float]
    steps: int
    remembers: bool
    down: Mapping[str, Size]
    up: Mapping[str, Size]
    seconds: float = field(default=0.0, compare=False)
    trained: Weights | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Failure:
    """A client that could not finish its turn. It received its message all the same.

    Attributes:
        cause: for people, in one line.
        down: cost of the received message by kind.
        part: of the turn in which it happened.
        details: a traceback, where there is one.
    """

    cause: str
    down: Mapping[str, Size]
    part: str = ""
    details: str = ""


def exchange_in(method: Method, setting: Setting, round_number: int, leg: Leg) -> Exchange:
    """Return a leg of a round as all parties know it."""
    first = method.legs(round_number, setting)[0]
    return Exchange(setting, round_number, leg.name, is_later_leg=leg.name != first.name)
