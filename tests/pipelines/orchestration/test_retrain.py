"""The nightly flow that trains only what is new: of configuration, data and code."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Silence
from pipelines.execution.steps import InlineSteps
from pipelines.orchestration import flows
from pipelines.runs.cache import ENVIRONMENT_VARIABLE


@pytest.fixture
def _without_prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow's body alone; a run is a folder with metrics."""

    @contextmanager
    def operation(*arguments: Any, **keywords: Any) -> Iterator[Operation]:
        yield Operation(InlineSteps(), Silence(), None)  # type: ignore[arg-type]

    def experiment(config: Any, out: Path, *arguments: Any, **keywords: Any) -> Outcome:
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.json").write_text("{}")
        return Outcome(out)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(flows, "operation", operation)
    monkeypatch.setattr(flows, "experiment", experiment)
    monkeypatch.setattr(flows, "show_run", lambda outcome: None)
    monkeypatch.setattr(flows, "create_markdown_artifact", lambda *arguments, **keywords: None)


@pytest.mark.usefixtures("_without_prefect")
def test_a_changed_configuration_data_or_code_is_trained_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def night(size: int, method: str) -> tuple[str, str]:
        config = {
            "data": {"limit_per_class": size},
            "partition": {"num_clients": 3, "min_size": 1},
            "method": {"name": method},
        }
        state = flows.retrain_on_new_data.fn(config=config, out="retrained")
        return str(state.name), str(state.data)

    nights = [night(10, "fedavg"), night(10, "fedavg"), night(10, "local"), night(12, "local"), night(10, "fedavg")]
    assert [name for name, _ in nights] == ["Completed", "Unchanged", "Completed", "Completed", "Completed"]
    first, same, other_method, other_data, back = (folder for _, folder in nights)
    assert first == same == back
    assert len({first, other_method, other_data}) == 3
    monkeypatch.setattr(flows, "code_fingerprint", lambda config: "of tomorrow")
    assert night(10, "fedavg")[0] == "Completed"
    assert night(10, "fedavg")[0] == "Unchanged"
    shutil.rmtree("retrained", ignore_errors=False)
    assert night(10, "fedavg")[0] == "Completed"
