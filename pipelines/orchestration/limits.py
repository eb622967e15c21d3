"""How long a flow may take, and how many flows a GPU may hold at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency
from prefect.utilities.timeout import timeout

from flcore.core.errors import RunError
from pipelines.orchestration.gpus import limit_name, visible_gpus


class _TooLateError(TimeoutError):
    """The time of a flow is up; a class of its own, because waiting for a server may raise its parent."""


@contextmanager
def time_limit(hours: float | None) -> Iterator[None]:
    """Interrupt what is carried out in this block when its time is up, as Ctrl-C would; in a main thread.

    What has finished stays, and what has not goes on from its checkpoint when the same is started again.

    Args:
        hours: None: no limit.

    Raises:
        RunError: the time was up.
    """
    try:
        with timeout(None if hours is None else 3600 * hours, timeout_exc_type=_TooLateError):
            yield
    except _TooLateError as late:
        raise RunError(
            f"limit_hours = {hours:g}: the time is up; what was done is kept, and the same parameters go on from there"
        ) from late


@contextmanager
def gpus_held(device: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot on each GPU that this process sees, and wait for it where others hold them all.

    The limits are Prefect's global ones, made by ``protofl up`` and ``protofl deploy``; a GPU without one has no limit.
    A slot is a lease: that of a process which was killed comes back by itself.

    Args:
        device: ``engine.device`` of what trains here; the CPU has no slots.
        say: told which GPUs are held.
    """
    names = [limit_name(gpu) for gpu in visible_gpus()] if device == "cuda" else []
    with concurrency(names):
        if names:
            say(f"holds a slot of {', '.join(names)}")
        yield
