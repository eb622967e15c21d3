"""Some of a table's runs: the parts of machines, and what is kept already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import ConfigError
from pipelines.cli.app import main
from pipelines.orchestration import paper_flow
from pipelines.papers import catalogue
from pipelines.papers import shard as sharding
from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import RunKey, TablePlan, TableSelection, estimated_duration, plan_table, run_key
from pipelines.papers.publish import publish
from pipelines.papers.published import published_so_far
from pipelines.papers.results import assembled, notes
from pipelines.papers.runs import FailedRun
from pipelines.papers.shard import plan_shard, shard

from .conftest import tiny
from .test_publish import leave


def places(found: TablePlan) -> list[RunKey]:
    return [run_key(setting, run) for setting in found.settings for run in setting.plan.runs]


def test_every_run_is_in_one_part() -> None:
    """Eight runs dealt to three machines, by setting, row and seed; each seed divides its own data."""
    found = plan_table(tiny(), TableSelection(seeds=(3, 4)), with_data=False)
    first, second, third = (shard(found, (number, 3)) for number in (1, 2, 3))
    assert places(first) == [("even", "fedavg", 3, 3), ("even", "near", 4, 4), ("skewed", "near", 3, 3)]
    assert places(second) == [("even", "fedavg", 4, 4), ("skewed", "fedavg", 3, 3), ("skewed", "near", 4, 4)]
    assert places(third) == [("even", "near", 3, 3), ("skewed", "fedavg", 4, 4)]
    assert [[row.key for row in setting.rows] for setting in third.settings] == [["near"], ["fedavg"]]
    assert third.settings[0].parameters["compare"]["methods"] == ["near"]
    assert (found.num_runs, third.num_runs, len(third.left_out)) == (8, 2, 6)
    assert estimated_duration(third).startswith("2 runs in 2 settings (6 others left out); how long")
    assert any(note.startswith("6 runs left out: kept with") for note in notes(assembled(third, ())))
    assert shard(found) is found


def test_divisions_are_dealt_too() -> None:
    found = plan_table(tiny(), TableSelection(["near"], ["even"], (0,), (5, 6)), with_data=False)
    assert places(shard(found, (2, 2))) == [("even", "near", 6, 0)]


@pytest.mark.parametrize("part", ["3/2", "0/2", "1", "1/", "a/b", "1/2/3", "²/3"])
def test_what_is_no_part_is_told(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--part .*: expected K/N, the K-th of N parts, such as 1/2$"):
        plan_shard(tiny(), TableSelection(), part)
    assert main(["paper", "show", "fedpa.table2", "--part", part]) == 2
    assert "expected K/N" in capsys.readouterr().err


def asked_of_fedpa(*seeds: int, **asked: Any) -> TablePlan:
    return plan_table(
        table_named("fedpa.table2"), TableSelection(["fedavg", "fedpa"], ["mnist_0.1"], seeds, **asked), with_data=False
    )


def test_what_is_kept_is_left_out(tmp_path: Path) -> None:
    """FedAvg's and FedPA's of seed 0 are kept, on the table's division 42; both of seed 1 are left, in two parts."""
    publish(leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}), tmp_path)
    kept = published_so_far(table_named("fedpa.table2"), 1, tmp_path)
    found = asked_of_fedpa(0, 1)
    assert places(shard(found, published=kept)) == [("mnist_0.1", "fedavg", 42, 1), ("mnist_0.1", "fedpa", 42, 1)]
    # A part is of all runs, so that it is the same for a machine that has kept its own already.
    assert places(shard(asked_of_fedpa(0, 1, partition_seeds=(42, 43)), (1, 2), kept)) == [
        ("mnist_0.1", "fedavg", 43, 0),
        ("mnist_0.1", "fedpa", 43, 0),
    ]
    assert shard(asked_of_fedpa(0), published=kept).is_kept and not shard(found, published=kept).is_kept
    with pytest.raises(ConfigError, match=r"^--part 3/3: fedpa\.table2 has 2 runs here; take no more parts than that$"):
        shard(asked_of_fedpa(0), (3, 3), kept)
    assert not published_so_far(table_named("fedpa.table2"), 0.5, tmp_path).runs  # another budget, another file


def test_a_table_of_which_all_is_kept_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command ends well with a line; a scheduled flow has nothing to do, and has not failed."""
    monkeypatch.chdir(tmp_path)
    for module in (catalogue, paper_flow):
        monkeypatch.setattr(module, "table_named", lambda id: tiny())
    monkeypatch.setattr(sharding, "published_keys", lambda found, kept: set(places(found)))
    said = f"{tiny().id}: nothing to run: all that was asked for is kept, and is made again without --not-kept"
    assert main(["paper", "run", "any", "--not-kept", "--out", "table"]) == 0
    assert capsys.readouterr().out == said + "\n"
    state = paper_flow.paper_table.fn("any", not_kept=True, out="table")
    assert (state.type.value, state.name, state.message) == ("COMPLETED", "Unchanged", said)
    assert not Path("table").exists()


def test_what_is_kept_of_another_setting_is_made(tmp_path: Path) -> None:
    """An engine is another way to the same setting; a learning rate is not."""
    publish(leave(tmp_path / "table", {"fedavg": 90, "fedpa": 93}), tmp_path)
    kept = published_so_far(table_named("fedpa.table2"), 1, tmp_path)
    other = asked_of_fedpa(0, assignments=("local.lr=0.5",))
    assert shard(other, published=kept) is other
    assert shard(asked_of_fedpa(0, assignments=("engine.compile=default",)), published=kept).is_kept


def test_a_run_that_failed_where_others_are_kept_is_not_tried_again(tmp_path: Path) -> None:
    publish(leave(tmp_path / "table", {"fedavg": 90}), tmp_path)
    kept = published_so_far(table_named("fedpa.table2"), 1, tmp_path)
    kept = replace(kept, failed=(FailedRun("mnist_0.1", "fedpa", 42, 1, "round 3: training diverged"),))
    assert places(shard(asked_of_fedpa(0, 1), published=kept)) == [
        ("mnist_0.1", "fedavg", 42, 1),
        ("mnist_0.1", "fedpa", 42, 0),
    ]
    other = asked_of_fedpa(0, 1, assignments=("local.lr=0.5",))  # it may not fail there
    assert shard(other, published=kept) is other
