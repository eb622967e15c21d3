"""Seconds and joules beside a comparison."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipelines.reporting.comparison import compare
from pipelines.reporting.time_table import time_csv, time_table, times_of
from pipelines.runs.record import RunRecord
from tests.pipelines.reporting.records import write_run


def make_run(root: Path, method: str, seed: int, timing: dict[str, Any] | None) -> RunRecord:
    """A finished run of four rounds that says these times."""
    run = write_run(root / f"{method}-{seed}", method=method, seed=seed, rounds=4)
    if timing is not None:
        (run.folder.directory / "timing.json").write_text(json.dumps(timing), encoding="utf-8")
    return run


def times(train: float, evaluate: float, joules: dict[str, float] | None = None) -> dict[str, Any]:
    """A ``timing.json`` with a server step of two seconds and 50 steps a second."""
    seconds = {"train-clients": train, "aggregate": 2.0, "evaluate": evaluate}
    return {"seconds": seconds, "joules": joules, "steps_per_second": 50.0, "rounds": []}


def test_seconds_and_joules_are_means_over_seeds(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "fedavg", 0, times(10.0, 4.0, {"train-clients": 30.0, "evaluate": 5.0})),
        make_run(tmp_path, "fedavg", 1, times(18.0, 4.0)),
        make_run(tmp_path, "local", 0, None),  # came by DVC
        make_run(tmp_path, "local", 1, {"seconds": {}, "joules": None, "rounds": []}),
    ]
    found = times_of(compare(runs))
    assert found is not None
    table = time_table(found)
    assert table.title == "Time and energy, mean ± std over n seeds"
    # Totals 10 + 2 + 4 = 16 and 18 + 2 + 4 = 24: mean 20, spread 8 / sqrt(2) = 5.66. Without evaluation 12 and 20 in
    # four rounds: 3 and 5, mean 4, spread sqrt(2). One of two seeds has joules: 30 + 5.
    assert table.header == ("method", "seconds", "of them evaluation", "seconds / round", "steps / s", "joules")
    told = [[text for text, _ in row] for row in table.rows]
    assert told[0] == ["fedavg", "20 ± 5.66", "4 ± 0", "4 ± 1.41", "50 ± 0", "35 (n = 1)"]
    assert told[1] == ["local", "–", "–", "–", "–", "–"]

    row = next(csv.DictReader(io.StringIO(time_csv(found))))
    assert (row["seconds_mean"], row["seconds_per_round_mean"], row["joules_mean"], row["joules_n"]) == (
        "20.0",
        "4.0",
        "35.0",
        "1",
    )


def test_no_table_where_no_run_says_its_times(tmp_path: Path) -> None:
    assert times_of(compare([make_run(tmp_path, "fedavg", 0, None)])) is None


def test_damaged_times_cost_no_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, damaged = make_run(tmp_path, "fedavg", 0, times(10.0, 4.0)), make_run(tmp_path, "fedavg", 1, {"seconds": 3})
    with caplog.at_level(logging.WARNING):
        found = times_of(compare([whole, damaged]))
    assert found is not None and time_table(found).rows[0][1][0] == "16 (n = 1)"
    assert "the table of times leaves fedavg (seed 1) out" in caplog.text and "timing.json" in caplog.text
