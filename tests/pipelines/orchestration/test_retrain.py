"""The nightly flow that trains only what is new: of configuration, data and code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError, RunError
from flcore.methods import METHODS
from pipelines.execution.operation import Operation
from pipelines.execution.outcome import Outcome
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.orchestration import flows
from pipelines.orchestration.gate import check_gate, pass_comparison
from pipelines.runs.cache import ENVIRONMENT_VARIABLE
from pipelines.tuning.metrics import PER_ROUND


@pytest.fixture
def _without_prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow's body alone; a run is a folder with metrics, in which clients reach 0.8."""

    @contextmanager
    def operation(*arguments: Any, **keywords: Any) -> Iterator[Operation]:
        yield Operation(InlineSteps(), Watcher(), None)  # type: ignore[arg-type]

    def experiment(config: Any, out: Path, *arguments: Any, **keywords: Any) -> Outcome:
        out.mkdir(parents=True, exist_ok=True)
        reached = dict.fromkeys(PER_ROUND, None) | {"round": 1, "mean_local": 0.8}
        (out / "metrics.json").write_text(json.dumps(reached | {"bytes_up": 100}))
        (out / "history.jsonl").write_text(json.dumps(reached) + "\n")
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


@pytest.mark.usefixtures("_without_prefect")
def test_a_run_that_misses_the_gate_fails_every_night_and_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches 0.8 and sends 100 bytes: 0.9 is missed twice, then 0.8 is reached, and promoted once."""
    promoted = list[tuple[Any, ...]]()
    monkeypatch.setattr("pipelines.tracking.best.promote_run", lambda *what: promoted.append(what) or "models:/m/1")
    config = {"data": {"limit_per_class": 10}, "partition": {"num_clients": 3, "min_size": 1}}

    def night(**limits: float) -> str:
        return str(flows.retrain_on_new_data.fn(config=config, out="retrained", gate=limits, promote=True).name)

    for _ in range(2):
        with pytest.raises(RunError, match=r"mean_local = 0\.8, at least 0\.9"):
            night(mean_local=0.9, bytes_up=100)
    assert promoted == [] and not Path("retrained/last.json").exists()
    with pytest.raises(RunError, match=r"bytes_up = 100, at most 99"):
        night(mean_local=0.8, bytes_up=99)
    assert [night(mean_local=0.8, bytes_up=100) for _ in range(2)] == ["Completed", "Unchanged"]
    [(folder, store, reason)] = promoted
    assert folder.parent == Path("retrained") and store is None
    assert reason == "mean_local = 0.8, at least 0.8; bytes_up = 100, at most 100"
    with pytest.raises(ConfigError, match=r"gate\.mean_lokal"):
        night(mean_lokal=0.9)


def test_the_gate_of_a_comparison_is_for_means_of_its_rows(tmp_path: Path) -> None:
    """FedAvg reaches 0.8 and 0.9, so 0.85 in the mean; a row of which a run was not scored passes no limit."""
    runs = [
        {"method": method, "seed": seed, "mean_local": value, "bytes_up": 10}
        for method, values in (("fedavg", (0.8, 0.9)), ("slow.fedavg", (0.7, None)))
        for seed, value in enumerate(values)
    ]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": runs}))
    assert pass_comparison({"fedavg.mean_local": 0.85, "slow.fedavg.bytes_up": 10}, tmp_path)
    for missed in ({"fedavg.mean_local": 0.86}, {"fedavg.bytes_up": 9}, {"slow.fedavg.mean_local": 0.1}):
        with pytest.raises(RunError, match=f"gate missed: {next(iter(missed))}"):
            pass_comparison(missed, tmp_path)
    assert pass_comparison({}, tmp_path / "none") == ""
    methods = {"fedavg": METHODS["fedavg"](), "slow.fedavg": METHODS["fedavg"](), "fedproto": METHODS["fedproto"]()}
    check_gate({"slow.fedavg.mean_local": 0.9, "fedavg.top1_global": 0.9}, methods)
    for wrong in ("mean_local", "fedprox.mean_local", "fedavg.mean_lokal", "fedavg.steps", "fedproto.top1_global"):
        with pytest.raises(ConfigError, match=f"^gate.{wrong}|^gate.{wrong.partition('.')[2]}:"):
            check_gate({wrong: 0.9}, methods)
