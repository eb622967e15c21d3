"""Tasks of Prefect: which failed ones are tried again, their inputs, and when data are cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Failed
from prefect.utilities.annotations import quote

from flcore.core.errors import ConfigError, DataError, RunError
from pipelines.orchestration import prefect_steps, tasks
from pipelines.orchestration.tasks import TaskCall
from pipelines.runs.cache import ENVIRONMENT_VARIABLE


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
    assert tasks.worth_retrying(nothing, nothing, Failed(data=error)) == is_retried


def test_inputs_are_shown_with_their_values_and_without_the_call() -> None:
    """Text as it is, anything else as JSON."""
    inputs = {
        "step": "aggregate",
        "round": 2,
        "folder": Path("runs"),
        "data": {"size": 8},
        "call": quote(TaskCall(int)),
    }
    shown = {name: [each.type for each in found] for name, found in tasks._constants(inputs).items()}
    assert shown == {"step": ["aggregate"], "round": ["2"], "folder": ["runs"], "data": ['{"size": 8}']}


@pytest.mark.parametrize(
    ("clients", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 3, 7, 8, 9], "0-1, 3, 7-9")]
)
def test_clients_are_shown_as_spans(clients: list[int], text: str) -> None:
    assert prefect_steps._spans(clients) == text


def test_data_that_exist_are_cached_and_data_that_are_made_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made, found, and made again under the same name, as damaged data are."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    folder, new = tmp_path / "prepared" / "ab", tmp_path / "new"

    def make() -> Path:
        new.mkdir()
        folder.parent.mkdir(exist_ok=True)
        return new.rename(folder)  # over an empty one

    assert tasks._cached(TaskCall(make)) == folder
    found = tasks._cached(TaskCall(lambda: folder))
    assert isinstance(found, State) and (found.name, found.data) == ("Cached", folder)
    assert tasks._cached(TaskCall(make)) == folder
