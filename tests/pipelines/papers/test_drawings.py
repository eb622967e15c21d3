"""A table's page before its numbers: where the marks of a column stand, and which pictures of runs it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore.experiment.run_folder import RunFiles
from pipelines.papers import drawings
from pipelines.papers.catalogue import Column
from pipelines.papers.caveats import is_changed, mark, overrides_by_setting
from pipelines.papers.drawings import beside_printed, sections
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.results import TableResults, results
from pipelines.reporting.figures.cells import draw_partition
from pipelines.reporting.figures.sets import drawing
from pipelines.reporting.partition_table import load_partition
from pipelines.runs.analyses import _analysed as analysed
from pipelines.runs.folder import RunFolder

from .conftest import RUNS, tiny

Compared = Callable[[str, Any], Path]


def test_marks_stand_at_our_means_and_at_the_printed_figures(compared: Compared) -> None:
    """Rows from above: FedAvg 71 ± √2 and printed 70 ± 1.5, FedProx 76 and 71.25, a method of nobody's 80 printed."""
    found = results(plan_table(tiny(), TableSelection(seeds=(0, 1)), with_data=False), compared("even", RUNS))
    figure = drawings._draw_column(found, found.plan.table.columns[0])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedAvg", "FedProx", "Unheard-of"]
    assert axes.yaxis_inverted()
    marks = [(bar.lines[0].get_xdata()[0], round(bar.lines[0].get_ydata()[0])) for bar in axes.containers]
    assert marks == [(pytest.approx(71), 0), (70, 0), (pytest.approx(76), 1), (71.25, 1), (80, 2)]
    ours, printed = (bar.lines[2][0].get_segments()[0][:, 0] for bar in axes.containers[:2])
    assert ours.tolist() == pytest.approx([71 - 2**0.5, 71 + 2**0.5])
    assert printed.tolist() == [68.5, 71.5]
    drawn = beside_printed(found)
    assert drawn is not None
    assert list(drawn.panels) == ["beside-printed-even", "beside-printed-sent"]  # nothing was run of the third


def test_a_panel_says_that_it_is_no_figure_of_the_table(compared: Compared) -> None:
    """It may be looked at without its page."""
    found = results(
        plan_table(tiny(), TableSelection(seeds=(0, 1), rounds_scale=0.5), with_data=False), compared("even", RUNS)
    )
    changed = replace(found, plan=replace(found.plan, overrides={"even": ("local.lr=0.02",)}))
    first, _, third = found.plan.table.columns

    def heading(of: TableResults, column: Column) -> str:
        return drawings._draw_column(of, column).axes[0].get_title()

    assert heading(found, first) == "even\n0.5 of the rounds"
    assert heading(changed, first) == "even\n0.5 of the rounds, changed setting"
    assert heading(changed, third) == "skewed\n0.5 of the rounds"


def test_what_can_only_round_otherwise_is_told_and_is_no_other_setting(compared: Compared) -> None:
    """How steps are compiled and stacked changes last digits; half as many bits change what is learned."""
    found = results(plan_table(tiny(), TableSelection(seeds=(0, 1)), with_data=False), compared("even", RUNS))
    first, marks, told = found.plan.table.columns[0], [], []
    for assignments in (("engine.compile=default", "engine.stack=true"), ("engine.precision=bfloat16",)):
        planned = replace(found.plan, overrides={"even": assignments})
        marks.append((is_changed(planned, first), mark(planned)))
        told.append(overrides_by_setting(planned))
    assert marks == [(False, ""), (True, " (CHANGED SETTING: engine.precision=bfloat16)")]
    assert told == [
        ["even, kilobytes: engine.compile=default, engine.stack=true"],
        ["even, kilobytes: engine.precision=bfloat16"],
    ]


def test_nothing_is_drawn_of_what_nobody_has_run(tmp_path: Path) -> None:
    assert list(sections(results(plan_table(tiny(), TableSelection(), with_data=False), tmp_path))) == []


def test_pictures_are_those_of_the_first_run_of_each_row(compared: Compared) -> None:
    """Two were made, one could not be, a third was not asked for; of FedProx none is there."""
    table = tiny(pictures=["tsne", "tsne_round_5"])
    place = compared("even", RUNS)
    for seed in (0, 1):
        files = RunFiles(place / "even" / "runs" / f"fedavg-s{seed}-fedavgNo")
        files.analyses.mkdir()
        reason = f"seed {seed} has no features"
        index = {name: {"skipped": reason, "notes": []} for name in ("tsne_round_5", "class_heatmap")}
        (files.analyses / "index.json").write_text(
            json.dumps({**analysed(RunFolder(files.directory)), "analyses": index})
        )
    found = results(plan_table(table, TableSelection(seeds=(0, 1)), with_data=False), place)
    shown = [one for one in sections(found) if one.name.startswith("picture")]
    assert [one.name for one in shown] == ["pictures", "picture-even-fedavg-tsne_round_5"]
    assert "FedAvg" in shown[1].heading
    assert [block.content for block in shown[1].blocks] == ["Left out: seed 0 has no features."]


def test_a_division_is_a_picture_of_every_run(compared: Compared) -> None:
    """Two clients with 3 and 0, 1 and 2 samples of two classes; of a run whose division is gone, why there is none."""
    table, place = tiny(pictures=["partition"]), compared("even", RUNS)
    files = RunFiles(place / "even" / "runs" / "fedavg-s0-fedavgNo")
    clients = [{"id": 0, "class_counts": [3, 0]}, {"class_counts": [1, 2]}]
    for folder, name, content in (
        (files.prepared, "meta.json", {}),
        (files.partition, "manifest.json", {"clients": clients, "fingerprint": "division of 0"}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
    shown = list(sections(results(plan_table(table, TableSelection(seeds=(0,)), with_data=False), place)))
    held, gone = (one.blocks[0] for one in shown if one.name.startswith("picture-"))
    assert held.content["caption"].startswith("Training samples")
    drawn = drawing("even-fedavg-partition", {"": draw_partition(load_partition(files.partition))})
    assert held.content["panels"] == drawn.svgs and "even-fedavg-partition" in held.content["panels"][0]
    assert "are not there any more" in gone.content
