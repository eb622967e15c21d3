"""Verdicts on a table's own page."""

from __future__ import annotations

from html import unescape
from pathlib import Path

from pipelines.papers.catalogue import table_named
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.results import TableResults, assembled, write
from pipelines.papers.runs import MeasuredRun
from pipelines.papers.verdicts.judge import verdict_table


def measured(points: dict[str, float], scale: float = 1.0) -> TableResults:
    """FedPA's table II: rows with the same points for two seeds, but for one more of the second seed."""
    found = plan_table(table_named("fedpa.table2"), TableSelection(seeds=(0, 1), rounds_scale=scale), with_data=False)
    runs = [
        MeasuredRun("mnist_1", row, 42, seed, {"mnist_1": value + seed}, "drawn by 42")
        for row, value in points.items()
        for seed in (0, 1)
    ]
    return assembled(found, runs)


def test_claims_of_the_table_stand_on_its_page_with_what_decided_them(tmp_path: Path) -> None:
    """FedPA 3 points above FedAvg with either seed: no spread, an interval of 3 to 3, p 0. No other rival was run."""
    found = measured({"fedavg": 90, "fedpa_authors": 93})
    table = verdict_table(found)
    assert table is not None
    page = write(found, tmp_path, verdicts=table)
    said = "FedPA (authors' values) is ahead of FedAvg, MNIST, α 1"
    line = next(line for line in (tmp_path / "table.md").read_text("utf-8").splitlines() if said in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][1:6] == [
        *("holds on one division", "0", "+3.00 [+3.00, +3.00]", "< 0.001", "1")
    ]
    assert "FedProx" not in "".join(str(one) for one in table.columns[0].values)
    text = unescape(page.read_text("utf-8")).replace("\u00a0", " ")
    assert said in text and "What is claimed, and what these runs say of it" in text


def test_a_part_of_the_rounds_decides_nothing() -> None:
    table = verdict_table(measured({"fedavg": 90, "fedpa_authors": 93}, scale=0.5))
    assert table is not None and table.title.endswith("(REDUCED BUDGET: 0.5 of the rounds)")
    verdicts, reasons = ({*column.values} for column in (table.columns[1], table.columns[-1]))
    assert (verdicts, reasons) == ({"withdrawn"}, {"0.5 of the rounds"})


def test_a_table_of_which_nothing_was_run_has_none() -> None:
    assert verdict_table(measured({})) is None
