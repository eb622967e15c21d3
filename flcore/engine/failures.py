"""Errors of a run with their place, the same in this process, in a worker and on a cluster.

:func:`client_step` wraps each part of a client's turn, :func:`error_context` a server step. An exception becomes a
:class:`~flcore.core.errors.RunError` that names the place; :class:`~flcore.core.errors.ConfigError` and
:class:`~flcore.core.errors.DataError`, which the user can mend, pass unchanged.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError, listed
from flcore.engine.turns import ExchangeId, Failure
from flcore.io.messages import Payload, Prototypes, Weights


class LocatedError(RunError):
    """An error that names its place."""


class ClientError(LocatedError):
    """An error in a client's turn.

    Attributes:
        round: 1-based. leg: its name.
        clients: in the stack that was trained.
        part: of the turn, such as ``local training, phase 2``; may be empty.
        cause: type and message of what was raised, in one line.
        details: its traceback.
    """

    def __init__(
        self, round_number: int, exchange: str, clients: Sequence[int], part: str, cause: str, details: str = ""
    ) -> None:
        self.round, self.exchange, self.clients, self.part, self.cause = (
            round_number,
            exchange,
            tuple(clients),
            part,
            cause,
        )
        super().__init__(
            f"round {round_number}, {_named(self.clients)} ({part_label(exchange, part)}): {cause}", details
        )


def part_label(exchange: str, part: str) -> str:
    """Return the label of a part of a turn."""
    return f"{exchange}, {part}" if part else exchange


def _named(clients: Sequence[int]) -> str:
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {listed(sorted(clients))}"


@contextmanager
def client_step(place: ExchangeId, leg_name: str, clients: Sequence[int], part: str) -> Iterator[None]:
    """Add the place to errors of one part of a client's or a stack's turn.

    Raises:
        ClientError: instead of any exception except ConfigError, DataError and LocatedError.
    """
    try:
        yield
    except (LocatedError, ConfigError, DataError):
        raise
    except Exception as error:
        raise ClientError(place.round, leg_name, clients, part, _cause(error), _details(error)) from error


@contextmanager
def error_context(where: str) -> Iterator[None]:
    """Add the place to errors outside of clients' turns, such as ``round 3, server step calibrate``.

    A plain ValueError or ArithmeticError is a method's own message and is shown without its type.

    Raises:
        LocatedError: instead of any exception except ConfigError, DataError and LocatedError.
    """
    try:
        yield
    except (LocatedError, ConfigError, DataError):
        raise
    except Exception as error:
        cause = str(error) if type(error) in (ValueError, ArithmeticError) else _cause(error)
        raise LocatedError(f"{where}: {cause}", _details(error)) from error


def _cause(error: Exception) -> str:
    if isinstance(error, ProtoflError):
        return str(error)
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _details(error: Exception) -> str:
    inner = error.details if isinstance(error, RunError) else ""
    return inner or "".join(traceback.format_exception(error))


def is_the_machines(error: ClientError) -> bool:
    """Return whether the machine, not a client, caused an error: full disk, no memory, broken GPU."""
    cause = error.__cause__
    # PyTorch has no type of its own for memory of the CPU.
    return isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)) or (
        isinstance(cause, RuntimeError) and "can't allocate memory" in str(cause)
    )


def misfit(answer: Payload, sent: Payload | None) -> str | None:
    """Return why an answer does not fit what was sent; None if it does, or nothing of its kind was sent.

    Without this check an array of one value would be broadcast over a mean, and an extra array ignored.
    """
    groups: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]
    if isinstance(answer, Weights) and isinstance(sent, Weights):
        groups = ((answer.params, sent.params), (answer.buffers, sent.buffers if answer.buffers else {}))
    elif isinstance(answer, Prototypes) and isinstance(sent, Prototypes):
        groups = (({"means": answer.means}, {"means": sent.means}),)
    else:
        return None
    for found, wanted in groups:
        if found.keys() != wanted.keys():
            return f"has other arrays than it was sent: {listed(sorted(found.keys() ^ wanted.keys()))}"
        for name, tensor in found.items():
            if (tensor.shape, tensor.dtype) != (wanted[name].shape, wanted[name].dtype):
                told, expected = ((list(one.shape), str(one.dtype)) for one in (tensor, wanted[name]))
                return f"has {name} of shape {told[0]} and {told[1]}, and was sent {expected[0]} and {expected[1]}"
    return None


def failure_of(error: ClientError) -> Failure:
    """Return one client's failure for an error in its turn."""
    return Failure(error.cause, error.part, error.details)


def failed(place: ExchangeId, leg_name: str, client: int, failure: Failure) -> ClientError:
    """Return the error that stops a run for one client's failure."""
    return ClientError(place.round, leg_name, [client], failure.part, failure.cause, failure.details)


# ---- through a pipe ----------------------------------------------------------------------------------------------

_PLAIN: dict[str, type[ProtoflError]] = {cls.__name__: cls for cls in (ConfigError, DataError)}


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error as plain values, which the parent reads without the code that raised it."""
    if isinstance(error, ClientError):
        ctx = [error.round, error.exchange, list(error.clients), error.part, error.cause]
        return {"type": "TurnError", "values": ctx, "details": error.details}
    if isinstance(error, OSError):
        return {"type": "OSError", "values": [error.errno, error.strerror, str(error.filename)], "details": ""}
    for name, cls in _PLAIN.items():
        if isinstance(error, cls):
            return {"type": name, "values": [str(error)], "details": ""}
    return {"type": "LocatedError", "values": [_cause(error)], "details": _details(error)}


def unpack_error(message: Mapping[str, Any]) -> Exception:
    """Return the error that :func:`pack_error` packed."""
    name, values, details = message["type"], message["values"], message["details"]
    if name == "TurnError":
        number, exchange, clients, part, cause = values
        return ClientError(number, exchange, clients, part, cause, details)
    if name == "OSError":
        return OSError(*values)
    return _PLAIN[name](*values) if name in _PLAIN else LocatedError(values[0], details)
