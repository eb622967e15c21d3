"""Limits of a flow: its duration, and the flows per GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency
from prefect.utilities.timeout import timeout

from flcore.core.errors import RunError
from pipelines.orchestration.gpus import limit_name, visible_gpus


class _TooLateError(TimeoutError):
    """The time of a flow is up; not its parent class, which waiting for a server may raise."""


@contextmanager
def time_limit(hours: float | None) -> Iterator[None]:
    """Interrupt the block, in a main thread, when its time is up; its runs can be resumed, as after Ctrl-C.

    ``hours`` None is no limit. Raises a RunError when the time is up.
    """
    try:
        with timeout(None if hours is None else 3600 * hours, timeout_exc_type=_TooLateError):
            yield
    except _TooLateError as late:
        raise RunError(
            f"limit_hours = {hours:g}: the time is up; what was done is kept, and the same parameters resume it"
        ) from late


@contextmanager
def gpus_held(device: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot of Prefect's concurrency limit of each visible GPU; wait while others hold all.

    ``protofl up`` and ``protofl deploy`` create the limits; a GPU without one is not limited. The slot of a killed
    process is free again when its lease expires. ``device`` is ``engine.device``: the CPU has no slots.
    """
    names = [limit_name(gpu) for gpu in visible_gpus()] if device == "cuda" else []
    with concurrency(names):
        if names:
            say(f"holds a slot of {', '.join(names)}")
        yield
