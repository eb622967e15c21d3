"""Which failed tasks Prefect tries again."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.states import Failed

from flcore.core.errors import ConfigError, DataError, RunError
from pipelines.orchestration import prefect_steps


def of_the_disk(error: Exception) -> Exception:
    error.__cause__ = OSError(28, "No space left on device")
    return error


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (OSError(28, "No space left on device"), True),
        (of_the_disk(RunError("round 3, server step aggregate: the disk is full")), True),
        (RunError("round 1: training diverged"), False),
        (ConfigError("local.lr = -1"), False),
        (of_the_disk(DataError("data.root: no such folder")), False),
        (RuntimeError("KeyError: a fault while a page is drawn"), False),
    ],
)
def test_what_a_machine_did_is_tried_again_and_nothing_else(error: Exception, is_retried: bool) -> None:
    nothing: Any = None
    assert prefect_steps._worth_retrying(nothing, nothing, Failed(data=error)) == is_retried
