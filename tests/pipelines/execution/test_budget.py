"""Equal bytes: how many rounds a run has, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError, RunError
from flcore.io.files import read_tensors
from pipelines.execution import admission
from pipelines.execution.budget import Budget, _sent, rounds_for_bytes, within_budget
from pipelines.execution.operation import Operation
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.plan.comparison import comparison_plan
from pipelines.reporting.formats import format_bytes
from tests.cases import quick
from tests.following import NoFollower

RAW: dict[str, Any] = {
    "data": {"name": "digits", "limit_per_class": 20},
    "partition": {"name": "iid", "num_clients": 2},
    "federation": {"rounds": 4},
    "local": {"batch_size": 16},
    "compare": {"methods": ["fedavg", "fedproto"], "seeds": [0, 1], "baseline": "fedavg"},
}


@pytest.mark.parametrize(
    ("budget", "sent", "rounds"),
    [
        (25, [10, 10, 10, 10], 2),  # two make 20, three 30
        (40, [10, 10, 10, 10], 4),
        (69, [10, 10, 10, 10], 6),  # the later half sent 10 each: 60, 70
        (10_000, [10, 10, 10, 10], 40),  # ten times four
        (90, [0, 0, 30, 30], 5),  # 0, 0, 30, 60, and 30 more
        (5, [10, 10], 1),  # a run has a round
        (100, [0, 0], 20),  # who sends nothing
        (100, [10, 11, 12], 8),  # 33, then (11 + 12) / 2 = 11.5 each: five more make 90.5, six 102
    ],
)
def test_bytes_are_enough_for_so_many_rounds(budget: int, sent: list[int], rounds: int) -> None:
    assert rounds_for_bytes(budget, sent) == rounds


def test_totals_since_the_start_are_bytes_by_round(tmp_path: Path) -> None:
    """7 after two rounds are 3 and 4, 10 after three are 3 more; of the fourth and fifth nothing was sent."""
    totals = ((2, {"model": 4}, {"model": 3}), (3, {"model": 5}, {"model": 5}), (5, {"model": 5}, {"model": 5}))
    records = [{"round": number, "bytes_up": up, "bytes_down": down} for number, up, down in totals]
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert _sent(tmp_path) == [3, 4, 3, 0, 0]


@pytest.mark.parametrize("every", quick([4, 1], 1))
def test_who_sends_twice_as_much_has_half_the_rounds(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of M bytes a model, a client is sent M a round and sends M + 8, the 8 being its count.

    Two of four clients in each of six rounds: 12 (2 M + 8). Of all four that is three rounds. A measured run that is
    damaged is an error, or is measured again.
    """
    monkeypatch.setattr(admission, "physical_cores", lambda: 1)
    raw = {**RAW, "evaluation": {"every": every}, "tracking": {"enabled": False}}
    raw |= {"partition": {"name": "iid", "num_clients": 4}, "federation": {"rounds": 6, "participation": 0.5}}
    all_four = {"all four": {"method": "fedavg", "federation.participation": 1.0}}
    raw["compare"] = {"methods": ["fedavg", "all four"], "seeds": [0], "baseline": "fedavg", "variants": all_four}
    operation = Operation(InlineSteps(), Watcher(), NoFollower())  # type: ignore[arg-type]
    budget, plan = within_budget("bytes", comparison_plan(raw), tmp_path, operation)
    folder = next((tmp_path / "budget").glob("fedavg-*"))
    model = sum(tensor.nbytes for tensor in read_tensors(folder / "model.safetensors", "")[0].values())
    assert budget.bytes == 12 * (2 * model + 8)
    assert budget.words is not None and f"may send {format_bytes(budget.bytes)}, as fedavg does" in budget.words
    assert {run.name: run.config.federation.rounds for run in plan.runs} == {"fedavg": 6, "all four": 3}
    (folder / "history.jsonl").write_text("")
    with pytest.raises(RunError, match=r"could not be measured: \S+history\.jsonl: damaged"):
        within_budget("bytes", comparison_plan(raw), tmp_path, operation)
    assert within_budget("bytes", comparison_plan(raw), tmp_path, replace(operation, restart=True)) == (budget, plan)


def test_equal_rounds_leave_runs_as_they_are(tmp_path: Path) -> None:
    plan = comparison_plan(RAW)
    assert within_budget("rounds", plan, tmp_path, None) == (Budget(), plan)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--budget joules: must be one of rounds, bytes"):
        within_budget("joules", plan, tmp_path, None)  # type: ignore[arg-type]


def test_a_stream_of_tasks_has_its_own_rounds(tmp_path: Path) -> None:
    raw = {**RAW, "partition": {"name": "dirichlet", "variant": "plain", "num_clients": 2, "tasks": 2}}
    raw["federation"] = {"rounds": 4, "task_schedule": "cyclic"}
    with pytest.raises(ConfigError, match="a stream of tasks is as long as its rounds"):
        within_budget("bytes", comparison_plan(raw), tmp_path, None)  # type: ignore[arg-type]
