"""Every table of the papers: its numbers are the printed ones, and what it says can be configured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from flcore.config.analyses import SUMMARIES, with_snapshots, without_round
from flcore.methods import METHODS
from pipelines.papers.catalogue import DIVISION, PAPERS, Column, PaperTable, Printed, table_named, table_of, tables
from pipelines.papers.metrics import TO_TARGET
from pipelines.papers.plan import TableSelection, cells, plan_table

from .conftest import TINY, tiny

DATASETS = {
    "FEMNIST": "femnist",
    "CIFAR-10": "cifar10",
    "CIFAR10": "cifar10",
    "CIFAR-100": "cifar100",
    "CIFAR100": "cifar100",
    "TinyImagenet": "tinyimagenet",
    "VireoFood172": "vireofood172",
    "MNIST": "mnist",
    "EMNIST": "emnist",
    "FashionMNIST": "fashionmnist",
    "CelebA": "celeba",
}
PARTITIONERS = {
    **dict.fromkeys(("lda", "dirichlet", "dda"), "dirichlet"),
    "by-writer": "by_group",
    "2-class": "classes_per_client",
    "subset-95": "dominant",
    "sharding": "shards",
    "w-way-s-shot": "ways_shots",
    "iid": "by_group",  # CelebA: persons, ten to a client
}
KEYS = {
    "alpha": "partition.alpha",
    "beta": "partition.alpha",
    "gamma": "partition.imbalance_gamma",
    "s": "partition.shards",
    "w_bar": "partition.ways",
    "w_hat": "partition.ways_spread",
    "s_hat": "partition.shots_spread",
    "sample_fraction": "federation.participation",
    "virtual_per_class": "method.n_virtual",
}
METRICS = {
    "A_loc": "tasks.last_epochs.a_loc",
    "A_glo": "tasks.last_epochs.a_glo",
    "A_loc_t": "tasks.last_epochs.a_loc_minority",
    "A_glo_t": "tasks.last_epochs.a_glo_minority",
    "energy_gt_wh": "timing.joules.train-generator",
    "energy_lt_wh": "timing.joules.train-clients",
    "duration_s_per_round": "timing.ideal_seconds_per_round",
    "intra_class": "analyses.generator_distances.generated.tsne.intra",
    "inter_class": "analyses.generator_distances.generated.tsne.inter",
}
NO_RESULTS = {"fedcspc.table1", "gfpl.table3"}
"""Statistics of data sets, and hyper-parameters."""


def row_of(table: PaperTable, record: Mapping[str, Any]) -> str:
    """The key of the row that a transcribed record stands in, by its title."""
    title = record["method"].removeprefix("FedPG/").removeprefix("FedCSPC/").replace("[", " (").replace("]", ")")
    if "round" in record:
        title = f"Round {record['round']}"
    if "L_ad" in record:
        title = ", ".join(part for part in ("L_ad", "L_ge", "L_po") if record[part]) or "none"
    return next(row.key for row in table.rows if row.title == title)


def columns_of(table: PaperTable, record: Mapping[str, Any], **more: Any) -> list[Column]:
    """Columns with the setting and the metric of a transcribed record."""
    asked = {KEYS[key]: value for key, value in record.items() if key in KEYS} | more
    if "dataset" in record:
        asked["data.name"] = DATASETS[record["dataset"]]
    if "partition" in record:
        asked["partition.name"] = PARTITIONERS[record["partition"]]
    metric = METRICS.get(record.get("metric", ""))

    def fits(column: Column) -> bool:
        given = {**table.common, **column.values}
        same = all(given.get(key) == value for key, value in asked.items())
        return same and column.printed_as is None and metric in (None, column.metric)

    return [column for column in table.columns if fits(column)]


def test_printed_numbers_are_those_of_the_papers(printed_tables: Path) -> None:
    """Each transcribed number stands in the cell whose configuration is its setting, and no cell has another."""
    documents = yaml.safe_load(printed_tables.read_text(encoding="utf-8"))["tables"]
    compared = 0
    for document in documents:
        if document["id"] in NO_RESULTS:
            continue
        table = table_named(document["id"])
        expected: dict[tuple[str, str], Printed] = {}
        for record in document["results"]:
            row, found = row_of(table, record), columns_of(table, record)
            accuracies = [c for c in found if c.metric != "scalars_up_per_round" and not c.metric.startswith(TO_TARGET)]
            assert len(accuracies) == 1, (table.id, record)
            if record["value"] is not None:
                expected[row, accuracies[0].key] = Printed(record["value"], record.get("std"))
                compared += 1
            if "comm_params_k" in record:  # once per method, of four ways
                sent = [
                    c for c in columns_of(table, {**record, "w_bar": 4}) if c not in accuracies and c.scale == 0.001
                ]
                assert len(sent) == 1
                expected[row, sent[0].key] = Printed(record["comm_params_k"])
        assert dict(table.printed) == expected, table.id
    assert compared == 637


def test_printed_rounds_are_those_of_the_paper(printed_tables: Path) -> None:
    """GFPL's table 1 prints them once per method and data set; here they stand in a table of their own."""
    documents = yaml.safe_load(printed_tables.read_text(encoding="utf-8"))["tables"]
    records = next(document["results"] for document in documents if document["id"] == "gfpl.table1")
    table, source = table_named("gfpl.rounds"), table_named("gfpl.table1")
    expected = {(row_of(source, one), DATASETS[one["dataset"]]): Printed(one["rounds"]) for one in records}
    assert dict(table.printed) == expected
    assert len(expected) == 40


def test_every_file_is_a_table_of_a_paper() -> None:
    """Its name is its id, and each paper has its tables before nobody's."""
    names = {path.name for path in (files("pipelines.papers") / "tables").iterdir() if path.name.endswith(".yaml")}
    assert names == {f"{id}.yaml" for id in tables()}
    assert [table.paper for table in tables().values()] == sorted(
        (table.paper for table in tables().values()), key=PAPERS.index
    )


def test_every_cell_has_a_configuration_or_a_reason() -> None:
    """What is refused is refused by its file, never by the configuration; of 721 printed numbers 600 can be run.

    At a fiftieth of the rounds too, where most snapshots are out of reach.
    """
    runnable = 0
    for table in tables().values():
        planned = plan_table(table, TableSelection(seeds=(0,)), with_data=False)
        assert (
            plan_table(table, TableSelection(seeds=(0,), rounds_scale=0.02), with_data=False).refused == planned.refused
        )
        told = {one.why for one in table.missing}
        assert set(planned.refused.values()) <= told, table.id
        assert {row.key for row in table.rows if row.method is None} <= {one.row for one in table.missing}
        runnable += sum((row.key, column.key) not in planned.refused for row, column in cells(table))
    assert runnable >= 600


def test_pictures_are_analyses_that_their_runs_make() -> None:
    """Of every cell: what the page is to show stands among its analyses, with the rounds of its snapshots."""
    shown = 0
    for table in tables().values():
        for setting in (
            plan_table(table, TableSelection(seeds=(0,)), with_data=False).settings if table.pictures else ()
        ):
            evaluation = setting.parameters.get("evaluation", {})
            made = with_snapshots(evaluation.get("analyses", ()), evaluation.get("snapshots", ()))
            assert set(table.pictures) <= {*made, "partition"}, table.id
            shown += 1
    assert shown >= 13  # with the four divisions of fedpa.fig3 and the two settings of gfpl.fig2


def test_columns_with_the_same_runs_are_one_setting() -> None:
    """``even`` and ``sent`` have the same keys; with a key of its own for one row, ``sent`` is another setting."""
    assert [[column.key for column in group] for group in tiny().settings()] == [["even", "sent"], ["skewed"]]
    apart = tiny(cells=[{"rows": ["near"], "columns": ["sent"], "values": {"method.mu": 1.0}}])
    assert [[column.key for column in group] for group in apart.settings()] == [["even"], ["sent"], ["skewed"]]
    assert apart.values_of(apart.row("near"), apart.column("sent")) == {"method.mu": 1.0}
    assert apart.values_of(apart.row("near"), apart.column("even")) == {"method.mu": 0.1}


def problems(table: PaperTable) -> Iterator[str]:
    """What does not fit together in a file: keys of rows and columns, methods, pictures, and data of a row."""
    rows, columns = {row.key for row in table.rows}, {column.key for column in table.columns}
    if table.paper not in PAPERS:
        yield f"id = {table.id}: must begin with one of {', '.join(PAPERS)}"
    if table.baseline not in rows:
        yield f"baseline = {table.baseline}: is no row"
    named = [("printed", {row}, {column}) for row, column in table.printed]
    named += [("cells", {*one.rows}, {*one.columns}) for one in table.cells]
    reasons = (("missing", table.missing), ("unlike", table.unlike))
    named += [
        (n, {one.row or table.baseline}, {one.column or table.columns[0].key}) for n, each in reasons for one in each
    ]
    named += [("printed_as", {row.printed_as or row.key}, set()) for row in table.rows]
    named += [("printed_as", set(), {column.printed_as or column.key}) for column in table.columns]
    for name, row_keys, column_keys in named:
        for key in (row_keys - rows) | (column_keys - columns):
            yield f"{name}: {key}: no such row or column"
    locations = [(f"rows.{row.key}", row.values) for row in table.rows]
    for name, values in (*locations, *(("cells", one.values) for one in table.cells if one.rows)):
        for key in values:
            if key.startswith(("data.", "partition.")):
                yield f"{name}: {key}: all rows of a column have the same; set it there"
    for row in table.rows:
        if row.method is not None and row.method not in METHODS:
            yield f"rows.{row.key}: method = {row.method}: is not known"
        if row.key in METHODS and row.method not in (None, row.key):
            yield f"rows.{row.key}: is the name of another method than {row.method}; choose another key"
    for name in table.pictures:
        if name != DIVISION and without_round(name)[0] not in SUMMARIES:
            yield f"pictures: {name}: expected {DIVISION}, {', '.join(SUMMARIES)}, or NAME_round_N"


def test_every_file_fits_together() -> None:
    """Its keys are those of its rows and columns, its methods and pictures are known."""
    assert [f"{table.id}: {problem}" for table in tables().values() for problem in problems(table)] == []


def changed(changes: dict[str, Any]) -> PaperTable:
    rows = changes.get("rows", TINY["rows"])
    return table_of({**TINY, "printed": {}, "missing": [], "baseline": next(iter(rows)), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "nobody.table1"}, "id = nobody.table1: must begin with one of"),
        ({"baseline": "moon"}, "baseline = moon: is no row"),
        ({"printed": {"fedavg": {"odd": 1.0}}}, "printed: odd: no such row or column"),
        ({"cells": [{"rows": ["moon"], "values": {}}]}, "cells: moon: no such row or column"),
        (
            {"rows": {"fedavg": {"method": "fedavg", "values": {"partition.num_clients": 5}}}},
            "rows.fedavg: partition.num_clients: all rows of a column have the same",
        ),
        ({"cells": [{"rows": ["fedavg"], "values": {"data.name": "mnist"}}]}, "cells: data.name: all rows of a column"),
        ({"missing": [{"row": "moon", "why": "?"}]}, "missing: moon: no such row or column"),
        ({"columns": TINY["columns"] | {"again": {"printed_as": "odd"}}}, "printed_as: odd: no such row or column"),
        ({"pictures": ["tsne_round_2", "tnse"]}, "pictures: tnse: expected partition, class_heatmap"),
        ({"rows": {"fedavg": {"method": "fedprox"}}}, "is the name of another method than fedprox"),
        ({"rows": {"new": {"method": "fednothing"}}}, "method = fednothing: is not known"),
    ],
)
def test_a_file_that_does_not_fit_together_is_found(changes: dict[str, Any], message: str) -> None:
    assert message in next(problems(changed(changes)))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"colour": "red"}, "colour"),
        ({"scale": "much"}, r"columns\.0\.scale"),
        ({"printed": {"fedavg": {"even": [1, 2, 3]}}}, "expected a number, or a number and its spread"),
    ],
)
def test_a_file_with_another_key_or_type_is_refused(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        changed(changes)
