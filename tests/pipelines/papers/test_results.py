"""Our figures beside the printed ones, from comparisons as they lie in a table's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.papers.catalogue import Printed
from pipelines.papers.figures_of_a_run import figures
from pipelines.papers.plan import Asked, plan
from pipelines.papers.results import results, write

from .conftest import RUNS, tiny

Compared = Callable[[str, Any], Path]


def test_figures_stand_beside_the_printed_ones(compared: Compared) -> None:
    """FedAvg (70 + 72) / 2 = 71; FedProx 76, ahead by 4 and 6 points: 5 ± t(0.975, 1) * √2 / √2 = 5 ± 12.71."""
    found = results(plan(tiny(), Asked(seeds=(0, 1)), look_at_data=False), compared("even", RUNS))
    average, near = found.cells["fedavg", "even"], found.cells["near", "even"]
    assert (average.ours.mean, average.printed) == (pytest.approx(71.0), Printed(70.0, 1.5))
    assert average.difference.n == 0
    assert near.ours.mean == pytest.approx(76.0)
    assert (near.difference.mean, near.difference.low) == (pytest.approx(5.0), pytest.approx(5 - 12.7062, abs=1e-4))
    assert found.cells["fedavg", "sent"].ours.mean == pytest.approx(3.0)  # 3,000 bytes in thousands
    refused = found.cells["near", "sent"]
    assert (refused.refused, refused.ours.n) == ("its bytes are not told", 0)
    assert found.cells["fedavg", "skewed"].ours.n == 0
    assert found.num_measured == 2


def test_a_page_shows_what_earlier_commands_measured(compared: Compared) -> None:
    """Asked for one column, the results still have the other's."""
    out = compared("even", RUNS)
    compared("skewed", {"fedavg": {0: {"top1_global": 0.5}}})
    found = results(plan(tiny(), Asked(columns=("skewed",)), look_at_data=False), out)
    assert found.cells["fedavg", "even"].ours.n == 2
    assert found.cells["fedavg", "skewed"].ours.mean == pytest.approx(50.0)


def test_a_row_may_be_read_from_another_figure(compared: Compared) -> None:
    """A vote in place of a global model, which there is none of; a method that has neither leaves its cell empty."""
    rows = {
        "fedavg": {"title": "FedAvg", "method": "fedavg"},
        "near": {"title": "FedProx", "method": "fedprox", "metrics": {"top1_global": "top1_vote"}},
    }
    table = tiny(rows=rows, missing=[], printed={})
    found = results(
        plan(table, Asked(), look_at_data=False),
        compared(
            "even",
            {
                "fedavg": {0: {"bytes_up": 1}},
                "near": {0: {"top1_vote": 0.25, "top1_global": 0.9}},
            },
        ),
    )
    assert found.cells["near", "even"].ours.mean == pytest.approx(25.0)
    assert found.cells["fedavg", "even"].ours.mean is None


def test_what_is_written_says_budget_and_refusals(compared: Compared) -> None:
    """A smaller budget is marked in the title; refused cells stand with their reason."""
    out = compared("even", RUNS)
    found = results(plan(tiny(), Asked(seeds=(0, 1), rounds_scale=0.5), look_at_data=False), out)
    page = write(found, out)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text.startswith("# fedpa.tiny: Two methods on digits (REDUCED BUDGET: 0.5 of the rounds)\n")
    assert "- its bytes are not told: FedProx (kilobytes)" in text
    assert "- Unheard-of is not built: Unheard-of (all)" in text
    assert page.exists()
    document = json.loads((out / "table.json").read_text(encoding="utf-8"))
    cell = next(one for one in document["cells"] if (one["row"], one["column"]) == ("near", "even"))
    assert (cell["printed"], cell["ours"], cell["n"]) == (71.25, pytest.approx(76.0), 2)
    whole = write(replace(found, plan=plan(tiny(), Asked(seeds=(0, 1)), look_at_data=False)), out)
    assert "REDUCED" not in whole.read_text(encoding="utf-8")


def test_seconds_per_round_leave_out_evaluation_and_the_first_two_rounds(tmp_path: Path) -> None:
    """Rounds of 9, 5, 2 and 4 seconds beside evaluations of 1: (2 + 4) / 2 = 3."""
    (tmp_path / "metrics.json").write_text("{}")
    rounds = [{"seconds": {"train-clients": length, "evaluate": 1.0}} for length in (9.0, 5.0, 2.0, 4.0)]
    (tmp_path / "timing.json").write_text(json.dumps({"joules": None, "rounds": rounds}))
    assert figures(tmp_path, "timing.seconds_per_round")["timing"]["seconds_per_round"] == 3.0
    assert "timing" not in figures(tmp_path, "top1_global")
