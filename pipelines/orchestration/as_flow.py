"""Runs a command as a Prefect flow, in the command's process.

Results do not depend on the server. If it is lost, pages are incomplete; at worst the flow fails, and the same command
resumes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flcore.core.errors import RunError
from pipelines.execution.outcome import FailedRunsError
from pipelines.orchestration.address import choose, is_lost

if TYPE_CHECKING:
    from pipelines.execution.operation import Operation


def uses_prefect(wanted: bool | None, how: Operation) -> bool:
    """Return whether a command runs as a flow: as requested, or if a server responds."""
    if (address := choose(wanted, how.watcher.say)) is not None:
        address.set_variables()
    return address is not None


def as_flow(operation: Operation, body: Callable[..., object], *, hidden: str | None = None, **parameters: Any) -> Any:
    """Run a flow in this process and return the outcome of its body.

    Heartbeats are off: their thread sleeps for whole seconds, and every flow joins it. Requests are repeated once, but
    as often as Prefect repeats them by default while the body runs (`flow_runs.operation`). ``hidden`` is the storage
    of a study, which Prefect would store as a parameter.

    Raises:
        RunError: Prefect's server was lost before the body ended.
    """
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from pipelines.orchestration.flow_runs import CURRENT, Call, impatient

    _log_on_the_page()
    _say_once_that_it_is_lost()
    call = Call(operation, hidden, patience=int(PREFECT_CLIENT_MAX_RETRIES.value()))
    token = CURRENT.set(call)
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), impatient():
            body(**parameters)
    except FailedRunsError:  # the flow has failed; a command says so itself, below the table
        if call.outcome is None:
            raise
    except Exception as error:
        if not is_lost(error):
            raise
        lost = f"the Prefect server was lost on the way ({type(error).__name__})"
        if call.outcome is None:
            raise RunError(
                f"{lost}; what is done is on disk, and the same command resumes it, without the server while it is away"
            ) from error
        operation.watcher.say(f"{lost}; results are complete, its pages are not")
    finally:
        CURRENT.reset(token)
    assert call.outcome is not None
    return call.outcome


def _say_once_that_it_is_lost() -> None:
    """Silence Prefect's senders, which print a page per message to a lost server, unless debugging output is on."""
    if logging.getLogger("prefect").isEnabledFor(logging.DEBUG):
        return
    logging.raiseExceptions = False  # "--- Error logging to API ---"
    for sender in ("prefect._internal.concurrency", "EventsWorker", "APILogWorker"):
        # A filter, not a level: Prefect sets all levels again when a flow begins.
        logging.getLogger(sender).addFilter(lambda record: record.levelno < logging.WARNING)


def _log_on_the_page() -> None:
    """Send log lines of a flow to its page, and not to the terminal again: the command line sets one level for both."""
    logger = logging.getLogger("prefect.flow_runs")
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
        logger.propagate = False
