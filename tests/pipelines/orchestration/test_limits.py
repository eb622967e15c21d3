"""A flow's time is up: it is interrupted as Ctrl-C would, and says so; nothing else is taken for that."""

from __future__ import annotations

import time

import pytest

from flcore.core.errors import RunError
from pipelines.orchestration.flow_runs import gpus_held, time_limit


def test_what_takes_longer_is_interrupted_in_the_middle() -> None:
    """The limit is 0.36 s; whoever catches exceptions, as a retried task does, does not catch this."""
    began, caught = time.monotonic(), []

    def retried() -> None:
        try:
            time.sleep(60)
        except Exception as error:
            caught.append(error)

    said = r"limit_hours = 0\.0001: the time is up; what was done is kept"
    with pytest.raises(RunError, match=said), time_limit(1e-4):
        retried()
    assert caught == []
    assert 0.3 < time.monotonic() - began < 50


def test_what_is_done_in_time_and_what_fails_by_itself_pass() -> None:
    with time_limit(None), time_limit(1.0):
        pass
    with pytest.raises(TimeoutError, match="of a server"), time_limit(1.0):
        raise TimeoutError("of a server")


def test_the_cpu_has_no_slots() -> None:
    """No server is asked for one: none is configured here."""
    with gpus_held("cpu", pytest.fail):
        pass
