"""``protofl paper run`` as a flow: what Prefect is told of it, and what it may not be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError
from pipelines.cli.paper import Selection, paper_run
from pipelines.execution.outcome import Outcome
from pipelines.orchestration.paper_flow import paper_table

SECRET = "http://me:hidden@127.0.0.1:1"


@pytest.mark.slow
def test_the_address_of_a_store_is_no_parameter_of_the_flow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prefect keeps parameters, and shows them to whoever opens the flow's page."""
    told: dict[str, Any] = {}

    def as_flow(how: object, body: object, **parameters: Any) -> Outcome:
        told.update(parameters)
        return Outcome(tmp_path)

    monkeypatch.setattr("pipelines.orchestration.as_flow.as_flow", as_flow)
    monkeypatch.setattr("pipelines.orchestration.as_flow.uses_prefect", lambda *_: True)
    monkeypatch.chdir(tmp_path)
    assignments = ("data.root=images", f"tracking.uri={SECRET}", "tracking.enabled=false")
    selection = Selection(columns=("mnist_1",), assignments=assignments, part="1/2")
    paper_run("fedpa.table2", selection=selection, out=tmp_path)
    assert told["assignments"] == ("data.root=images",)
    assert "hidden" not in str(told)
    assert (told["part"], told["not_kept"]) == ("1/2", False)


@pytest.mark.parametrize("assignment", [f"tracking.uri={SECRET}", f"tracking={{uri: '{SECRET}'}}", " tracking.uri =x"])
def test_a_deployment_is_refused_that_names_a_store(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"^assignments: tracking.uri would be kept by Prefect.*MLFLOW_TRACKING_URI"):
        paper_table.fn("fedpa.table2", assignments=[assignment])
