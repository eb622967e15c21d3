"""What a flow of one method makes of its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flcore.core.errors import ConfigError
from pipelines.orchestration import flow_runs, flows
from pipelines.orchestration.flow_runs import configuration, named_by_folder, named_by_method, parameters


def test_a_deployment_has_the_settings_of_its_method_as_the_command_has(tmp_path: Path) -> None:
    """`compare.settings` of that method, and of no other; a configuration that a command has made stays what it is."""
    settings = {"fedpa": {"local.lr": 0.03}, "gfpl": {"local.lr": 0.5}}
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"local": {"lr": 0.1}, "compare": {"settings": settings}}))
    found = {name: configuration(str(params), [f"method.name={name}"], None) for name in ("fedavg", "fedpa")}
    assert {name: config.local.lr for name, config in found.items()} == {"fedavg": 0.1, "fedpa": 0.03}
    made = {"method": {"name": "fedpa"}, "local": {"lr": 0.2}, "compare": {"settings": settings}}
    assert configuration(None, None, made).local.lr == 0.2


def test_a_flow_run_is_named_by_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By method and seed, or by folder and day; one that the flow refuses has the flow's name."""
    due = datetime(2026, 1, 2, 3, tzinfo=UTC)

    def name(make: Callable[[], str], **parameters: Any) -> str:
        given = {"params_file": None, "overrides": None, "config": None} | parameters
        run = SimpleNamespace(parameters=given, flow_name="a-flow", scheduled_start_time=due)
        monkeypatch.setattr(flow_runs, "flow_run", run)
        return make()

    by_method = named_by_method("retrain ")
    assert name(by_method, config={"method": {"name": "fedpa"}, "seed": 7}) == "retrain fedpa-s7"
    assert name(by_method, overrides=["method.name=gfpl", "seed=1"]) == "retrain gfpl-s1"
    assert name(by_method, config={"seed": -1}) == "a-flow"
    assert name(named_by_folder("compare"), out="runs/nightly/{date}") == "compare 2026-01-02"


@pytest.mark.parametrize(
    "storage",
    ["postgresql+psycopg2://me:se/cret@host/runs", "postgresql://host/runs?password=secret", "mysql://me@host/x"],
)
def test_a_storage_with_a_password_is_no_parameter_of_a_flow(storage: str) -> None:
    """Prefect keeps what a flow is given."""
    with pytest.raises(ConfigError, match="storage") as refused:
        flows.tune.fn(storage=storage)
    assert "cret" not in str(refused.value)


def test_a_store_is_no_part_of_a_configuration_that_a_flow_is_given() -> None:
    for tracking in ({"uri": "http://me:secret@host"}, "http://me:secret@host"):
        with pytest.raises(ConfigError, match="tracking") as refused:
            parameters(None, None, {"seed": 1, "tracking": tracking})
        assert "secret" not in str(refused.value)
    assert parameters(None, None, {"tracking": {"enabled": False}}) == {"tracking": {"enabled": False}}


def test_a_flow_outlives_the_worker_that_reads_its_output() -> None:
    """Prefect's handler prints with rich, which exits when a pipe has no reader."""
    logger, written = logging.Logger("flow"), list[str]()

    class Unread(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())
            raise SystemExit(1)

    logger.addHandler(Unread())
    flow_runs.lines_to(logger)("round 1")
    assert written == ["round 1"]
