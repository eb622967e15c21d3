"""A server that is lost on the way: what is on disk is told, and what is not the same command takes up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest

from flcore.core.errors import RunError
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Watcher
from pipelines.orchestration import artifacts
from pipelines.orchestration.as_flow import as_flow
from pipelines.orchestration.flow_runs import CURRENT, finish_all, publish_result, show_table


class Listening(Watcher):
    """Remembers what a person should know."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def refuse(*asked: object, **named: object) -> Any:
    raise httpx.ConnectError("connection refused")


def test_results_that_are_there_are_told_though_the_flow_could_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost while the table is shown, which is after the body has ended."""
    monkeypatch.setattr("pipelines.orchestration.flow_runs.create_markdown_artifact", refuse)
    watcher, outcome = Listening(), Outcome(Path("all"))
    how: Any = SimpleNamespace(watcher=watcher)
    assert as_flow(how, lambda: show_table(outcome)) is outcome  # type: ignore[arg-type, return-value]
    assert watcher.lines == [
        "the Prefect server was lost on the way (ConnectError); results are complete, its pages are not"
    ]


def test_a_flow_of_many_runs_fails_with_one_of_them_and_the_command_has_its_table() -> None:
    """Two of three failed: the flow says so, and which was the first; a command does below the table that it prints."""
    outcome = Outcome(Path("all"), failed={"fedavg seed 0": "round 1: diverged", "fedavg seed 1": "round 2: diverged"})
    with pytest.raises(
        RunError, match=r"^2 of 3 runs failed; the first of them, fedavg seed 0: round 1: diverged; the "
    ):
        finish_all(outcome, 3)
    how: Any = SimpleNamespace(watcher=Listening())
    assert as_flow(how, lambda: publish_result(outcome) and finish_all(outcome, 3)) is outcome
    assert finish_all(Outcome(Path("all"), failed={}), 3) == "all"
    with pytest.raises(RunError, match=r"^2 of 2"):  # none has finished: there is no table
        as_flow(how, lambda: finish_all(outcome, 2))


def greet() -> Any:
    """As Prefect's client does where a server is greeted that does not answer."""
    try:
        refuse()
    except httpx.ConnectError as error:
        raise RuntimeError("Failed to reach API at http://127.0.0.1:4200/api/") from error


@pytest.mark.parametrize(("body", "named"), [(refuse, "ConnectError"), (greet, "RuntimeError")])
def test_a_flow_that_is_broken_off_is_a_line_and_goes_on(body: Any, named: str) -> None:
    how: Any = SimpleNamespace(watcher=Listening())
    with pytest.raises(RunError, match=rf"^the Prefect server was lost on the way \({named}\); .*the same command"):
        as_flow(how, body)


def test_a_mistake_in_a_flow_is_no_lost_server() -> None:
    def mistaken() -> Any:
        raise RuntimeError("no such thing")

    how: Any = SimpleNamespace(watcher=Listening())
    with pytest.raises(RuntimeError, match=r"^no such thing$"):
        as_flow(how, mistaken)


def test_a_page_that_cannot_be_brought_up_to_date_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda *given, **named: uuid4())
    monkeypatch.setattr(artifacts, "_EVERY_SECONDS", 0.0)

    def update(artifact: object, progress: float) -> None:
        asked.append(progress)
        refuse()

    monkeypatch.setattr(artifacts, "update_progress_artifact", update)
    watcher = Listening()
    shown = artifacts.ProgressArtifact(watcher)
    shown.runs(1, 0)
    shown.run("fedavg seed 0", 4, 0)
    for number in (1, 2, 3):
        shown.round("fedavg seed 0", number, None)
    shown.update()
    assert asked == [25.0]  # the first of four rounds; nobody was asked again
    assert watcher.lines == ["the Prefect server does not answer (ConnectError); runs continue, its pages do not"]


def test_only_a_body_at_work_waits_for_a_server_that_has_gone() -> None:
    """Prefect repeats a question five times, for a minute in all; around a body it is asked once more."""
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    found: list[int] = []

    def body() -> Any:
        found.append(PREFECT_CLIENT_MAX_RETRIES.value())
        call = CURRENT.get()
        found.append(call.patience)
        call.outcome = Outcome(Path("all"))

    usual = PREFECT_CLIENT_MAX_RETRIES.value()
    how: Any = SimpleNamespace(watcher=Listening())
    as_flow(how, body)
    assert found == [1, usual] and usual > 1
    assert PREFECT_CLIENT_MAX_RETRIES.value() == usual
