"""Errors of a run with their place, the same in this process, in a worker and on a cluster.

:func:`client_step` wraps each part of a client's work, :func:`error_context` a server step. An exception becomes a
:class:`~flcore.core.errors.RunError` that names the place. ConfigError and DataError pass unchanged.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError, listed
from flcore.engine.exchange import ExchangeWork, Failure
from flcore.io.messages import Payload, Prototypes, Shapes, Weights


class LocatedError(RunError):
    """An error that names its place."""


class ClientError(LocatedError):
    """An error in a client's work.

    Attributes:
        round: 1-based. exchange: its name.
        clients: in the stack that was trained.
        part: of the work, such as ``local training``; may be empty.
        cause: type and message of the exception, in one line.
        details: its traceback.
    """

    def __init__(
        self, round_number: int, exchange: str, clients: Sequence[int], part: str, cause: str, details: str = ""
    ) -> None:
        self.round, self.exchange, self.clients = round_number, exchange, tuple(clients)
        self.part, self.cause = part, cause
        names = f"client {clients[0]}" if len(clients) == 1 else f"clients {listed(sorted(clients))}"
        super().__init__(f"round {round_number}, {names} ({part_label(exchange, part)}): {cause}", details)

    @classmethod
    def of(cls, work: ExchangeWork, client: int, failure: Failure) -> ClientError:
        """Return the error that stops a run for one client's failure."""
        return cls(work.round, work.name, [client], failure.part, failure.cause, failure.details)

    @property
    def failure(self) -> Failure:
        return Failure(self.cause, self.part, self.details)

    @property
    def is_the_machines(self) -> bool:
        """True if the machine, not a client, caused it: full disk, no memory, broken GPU."""
        cause = self.__cause__
        # PyTorch has no exception type for memory of the CPU.
        return isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)) or (
            isinstance(cause, RuntimeError) and "can't allocate memory" in str(cause)
        )


def part_label(exchange: str, part: str) -> str:
    """Return ``exchange, part``."""
    return f"{exchange}, {part}" if part else exchange


@contextmanager
def client_step(work: ExchangeWork, clients: Sequence[int], part: str) -> Iterator[None]:
    """Add the place to errors of one part of a client's or a stack's work.

    Raises:
        ClientError: instead of any exception except ConfigError, DataError and LocatedError.
    """
    try:
        yield
    except (LocatedError, ConfigError, DataError):
        raise
    except Exception as error:
        raise ClientError(work.round, work.name, clients, part, _cause(error), _details(error)) from error


@contextmanager
def error_context(where: str) -> Iterator[None]:
    """Add the place to errors outside of clients' work, such as ``round 3, server step calibrate``.

    A plain ValueError or ArithmeticError is a method's message; its type is not shown.

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


def misfit(answer: Payload, sent: Payload | None) -> str | None:
    """Return how an answer differs in shape from what was sent; None if it fits, or nothing of its kind was sent.

    Without this check an array of one value would be broadcast over a mean, and an extra array ignored.
    """
    groups: Sequence[tuple[Shapes, Shapes]]
    if isinstance(answer, Weights) and isinstance(sent, Weights):
        (params, buffers), (sent_params, sent_buffers) = answer.shapes, sent.shapes
        groups = ((params, sent_params), (buffers, sent_buffers if buffers else {}))
    elif isinstance(answer, Prototypes) and isinstance(sent, Prototypes):
        means, sent_means = ({"means": (one.means.shape, one.means.dtype)} for one in (answer, sent))
        groups = ((means, sent_means),)
    else:
        return None
    for shapes, wanted in groups:
        if shapes.keys() != wanted.keys():
            return f"has other arrays than it was sent: {listed(sorted(shapes.keys() ^ wanted.keys()))}"
        for name in shapes if shapes != wanted else ():
            if shapes[name] != wanted[name]:
                has, sent_as = ((list(shape), str(dtype)) for shape, dtype in (shapes[name], wanted[name]))
                return f"has {name} of shape {has[0]} and {has[1]}, and was sent {sent_as[0]} and {sent_as[1]}"
    return None


# ---- through a pipe ----------------------------------------------------------------------------------------------

_PLAIN: dict[str, type[ProtoflError]] = {cls.__name__: cls for cls in (ConfigError, DataError)}


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error as plain values."""
    if isinstance(error, ClientError):
        ctx = [error.round, error.exchange, list(error.clients), error.part, error.cause]
        return {"type": "ClientError", "values": ctx, "details": error.details}
    if isinstance(error, OSError):
        return {"type": "OSError", "values": [error.errno, error.strerror, str(error.filename)], "details": ""}
    for name, cls in _PLAIN.items():
        if isinstance(error, cls):
            return {"type": name, "values": [str(error)], "details": ""}
    return {"type": "LocatedError", "values": [_cause(error)], "details": _details(error)}


def unpack_error(message: Mapping[str, Any]) -> Exception:
    """Return the error that :func:`pack_error` packed."""
    name, values, details = message["type"], message["values"], message["details"]
    if name == "ClientError":
        number, exchange, clients, part, cause = values
        return ClientError(number, exchange, clients, part, cause, details)
    if name == "OSError":
        return OSError(*values)
    return _PLAIN[name](*values) if name in _PLAIN else LocatedError(values[0], details)
