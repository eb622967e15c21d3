"""Tables and figures of runs on a stream of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.reporting.comparison import compare
from pipelines.reporting.comparison_files import markdown
from pipelines.reporting.comparison_tables import comparison_tables
from pipelines.reporting.figures.sets import comparison_drawings, run_drawings
from pipelines.runs.record import RunRecord
from tests.pipelines.reporting.records import write_run

NAMES = ("a_glo", "a_loc", "a_sel", "a_glo_minority", "a_loc_minority", "a_sel_minority")


def tasks(level: float, by_task: list[float | None]) -> dict[str, Any]:
    """A round whose accuracies are the level, the minority's half of it."""
    scores = {name: level / 2 if "minority" in name else level for name in NAMES}
    return {**scores, "by_task": by_task, "by_task_global": by_task}


def make_run(root: Path, method: str, seed: int, level: float, *, stream: bool = True) -> RunRecord:
    """Two tasks of two rounds each; in round r accuracy is level + r/100, forgetting of seed s is (level + s/10)/2."""
    history = []
    for number in (1, 2, 3, 4):
        now = level + number / 100
        record = {
            "round": number,
            "participants": [0],
            "top1_global": now,
            "mean_local": now,
            "train_loss": {"cross_entropy": 1.0},
            "bytes_up": {"model": number},
            "bytes_down": {"model": number},
            "local_accuracy": [now],
        }
        if stream:
            record["tasks"] = tasks(now, [now, now / 4 if number > 2 else None])
        history.append(record)
    metrics: dict[str, Any] = {"method": method, "dataset": "digits", "seed": seed, "rounds": 4, "top1_global": level}
    if stream:
        metrics["tasks"] = {
            "schedule": "blocked",
            "last_epochs": dict.fromkeys(NAMES, level),
            "stage_ends": [{"round": 2}, {"round": 4}],
            "forgetting": (level + seed / 10) / 2,
            "backward_transfer": -level,
            "roundwise_forgetting": None,
        }
    return write_run(root / f"{method}-{seed}", history, **metrics)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunRecord]:
    return [make_run(tmp_path, "fedavg", 0, 0.4), make_run(tmp_path, "fedavg", 1, 0.6), make_run(tmp_path, "b", 0, 0.7)]


@pytest.mark.slow
def test_both_figures_are_drawn_for_streams_alone(runs: list[RunRecord], tmp_path: Path) -> None:
    drawn, again = (comparison_drawings(compare(runs)) for _ in range(2))
    assert list(drawn["stream"].panels) == ["stream-a_glo", "stream-a_loc", "stream-a_sel"]
    assert list(drawn["tasks"].panels) == ["tasks-fedavg", "tasks-b"]
    assert all(drawn[name].svgs == again[name].svgs for name in ("stream", "tasks"))
    assert not {"stream", "tasks"} & set(run_drawings(make_run(tmp_path / "still", "fedavg", 0, 0.4, stream=False)))


def test_a_comparison_has_a_table_of_the_stream(runs: list[RunRecord]) -> None:
    """A_glo of fedavg: (40 + 60)/2 = 50, std 14.14; b has seed 0 alone, so nothing is ranked."""
    stream = comparison_tables(compare(runs))["stream"]
    rows = {row[0][0]: dict(zip(stream.header, row, strict=True)) for row in stream.rows}
    assert rows["fedavg"]["A_glo"] == ("50.00 ± 14.14", "")
    assert rows["b"]["A_glo"] == ("70.00", "")
    assert "round-wise forgetting" not in stream.header  # nobody has it
    assert "**A_loc (a_loc)**: mean over all clients" in markdown(compare(runs))


def test_less_forgetting_is_better(tmp_path: Path) -> None:
    """Forgetting 0.4/2 = 20 against 0.6/2 = 30 points, with one seed."""
    runs = [make_run(tmp_path, "fedavg", 0, 0.4), make_run(tmp_path, "b", 0, 0.6)]
    column = next(c for c in comparison_tables(compare(runs))["stream"].columns if c.metric == "forgetting")
    assert [column.text(0), column.text(1)] == ["20.00", "30.00"]
    assert [column.mark(0), column.mark(1)] == ["best", ""]


def test_differences_of_the_stream_are_paired(runs: list[RunRecord], tmp_path: Path) -> None:
    """b minus fedavg, seed 0: 70 - 40."""
    found = compare(runs).methods[1].differences["a_glo"]
    assert (found.mean, found.n) == (pytest.approx(0.3), 1)


def test_without_a_stream_nothing_of_it_is_printed(tmp_path: Path) -> None:
    comparison = compare([make_run(tmp_path, "fedavg", 0, 0.4, stream=False)])
    assert "stream" not in comparison_tables(comparison) and "A_loc" not in markdown(comparison)


def test_a_method_without_a_stream_beside_one_with_it(runs: list[RunRecord], tmp_path: Path) -> None:
    """The centralised reference sees all data at once."""
    central = make_run(tmp_path / "more", "central", 0, 0.9, stream=False)
    comparison = compare([*runs, central])
    assert next(row for row in comparison.methods if row.method == "central").scores["a_loc"].n == 0
    assert "central" in markdown(comparison)
