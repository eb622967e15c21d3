"""A command carried out as a flow of Prefect, in the command's own process.

Prefect's server shows what happens; nothing that counts is kept by it. One that is lost on the way costs pages, and at
worst the flow, which the same command takes up where it stopped: never a result.
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
    """Return whether a command runs as a flow: what it asks for, and whether a server answers."""
    choice = choose(wanted)
    if choice.warning:
        how.watcher.say(choice.warning)
    if choice.uses_prefect:
        choice.apply()
    return choice.uses_prefect


def as_flow(operation: Operation, body: Callable[..., object], *, hidden: str | None = None, **parameters: Any) -> Any:
    """Run a flow in this process, with this operation; returns the outcome of its body.

    Its heartbeat is off: a thread that sleeps in whole seconds and is waited for at the end of every flow. A server
    that has gone is asked once more, not for a minute per question: only while the body is at work, whose steps are
    worth it, it may be away for as long as Prefect's own patience lasts (`flow_runs.operation`).

    Args:
        operation: how the body is carried out.
        body: the flow.
        hidden: a study's storage, which is no parameter because Prefect would keep it.
        parameters: of the flow.

    Raises:
        RunError: Prefect's server was lost before the body had ended.
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
                f"{lost}; what is done is on disk, and the same command goes on, without the server while it is away"
            ) from error
        operation.watcher.say(f"{lost}; results are complete, its pages are not")
    finally:
        CURRENT.reset(token)
    assert call.outcome is not None
    return call.outcome


def _say_once_that_it_is_lost() -> None:
    """Leave it to the lines above that the server has gone: Prefect's senders write a page for each of their messages.

    Whoever asks Prefect for its debugging output gets that.
    """
    if logging.getLogger("prefect").isEnabledFor(logging.DEBUG):
        return
    logging.raiseExceptions = False  # "--- Error logging to API ---"
    for sender in ("prefect._internal.concurrency", "EventsWorker", "APILogWorker"):
        # A filter, not a level: Prefect sets all levels again when a flow begins.
        logging.getLogger(sender).addFilter(_is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


def _log_on_the_page() -> None:
    """Let what a flow logs reach its page, and not the terminal a second time, unless somebody wants to see it there.

    Prefect's level is one for both, and the command line has set it so that the terminal stays quiet.
    """
    logger = logging.getLogger("prefect.flow_runs")
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
        logger.propagate = False
