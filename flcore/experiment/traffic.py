"""Messages as they leave a party, without local BatchNorm statistics, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flcore.experiment.experiment import Experiment
from flcore.io.messages import Payload, Size, Weights
from flcore.io.records import Payloads, Record
from flcore.methods.types import MODEL

Traffic = Mapping[str, Size]
"""Cost of messages by kind."""


def outgoing(message: Payloads, experiment: Experiment) -> Record:
    """Return a message as it leaves: without BatchNorm statistics of the model, unless the policy aggregates them."""
    return leaving([message], experiment)[0]


def leaving(messages: Iterable[Payloads], experiment: Experiment) -> list[Record]:
    """Return messages as they leave; a payload that several share stays one object."""
    made: dict[int, tuple[Payload, Payload]] = {}

    def without_statistics(payload: Payload) -> Payload:
        if not isinstance(payload, Weights) or not payload.buffers:
            return payload
        return made.setdefault(id(payload), (payload, payload.without_buffers()))[1]

    if experiment.batchnorm == "aggregate":
        return [Record(message) for message in messages]
    return [
        Record({name: without_statistics(payload) if name == MODEL else payload for name, payload in message.items()})
        for message in messages
    ]


def cost(messages: Iterable[Payloads], experiment: Experiment) -> dict[str, Size]:
    """Return the cost of messages by kind; nothing where the only trainer is at the server."""
    total: dict[str, Size] = {}
    if experiment.method.data_scope == "union":
        return total
    known: dict[int, tuple[Payload, Mapping[str, Size]]] = {}  # a broadcast is one object for all clients of a round
    for message in messages:
        for name, payload in message.items():
            _, sizes = known.setdefault(id(payload), (payload, payload.sizes()))
            for suffix, size in sizes.items():
                total[name + suffix] = total.get(name + suffix, Size()) + size
    return total


def added(*parts: Traffic) -> dict[str, Size]:
    """Return the sum of costs by kind, in order of kinds."""
    sums: dict[str, Size] = {}
    for kind, size in (entry for part in parts for entry in part.items()):
        sums[kind] = sums.get(kind, Size()) + size
    return dict(sorted(sums.items()))
