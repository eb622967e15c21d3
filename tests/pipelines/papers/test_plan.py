"""From a table to comparisons: who is run with what, who is refused and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flcore.core.errors import ConfigError, DataError, ProtoflError, RunError
from pipelines.papers.catalogue import table_named, tables
from pipelines.papers.plan import (
    TablePlan,
    TableSelection,
    estimated_duration,
    plan_table,
    refused_by_reason,
    snapshots_beyond,
)
from pipelines.papers.results import assembled, notes
from tests.cases import quick

from .conftest import TINY, tiny


def planned(selection: TableSelection, **changes: Any) -> TablePlan:
    return plan_table(tiny(**changes), selection, with_data=False)


def test_settings_are_comparisons_of_what_can_be_run() -> None:
    """The row without a method is refused everywhere, and a cell of a run that is there for its own reason alone."""
    found = planned(TableSelection(seeds=(3, 4)))
    assert [(setting.name, [row.key for row in setting.rows]) for setting in found.settings] == [
        ("even", ["fedavg", "near"]),
        ("skewed", ["fedavg", "near"]),
    ]
    assert found.num_runs == 8
    assert found.refused == {
        ("near", "sent"): "its bytes are not told",
        **{("other", column): "Unheard-of is not built" for column in ("even", "sent", "skewed")},
    }
    assert refused_by_reason(found) == {
        "its bytes are not told": "FedProx (kilobytes)",
        "Unheard-of is not built": "Unheard-of (all)",
    }
    compare = found.settings[1].parameters["compare"]
    assert compare["methods"] == ["fedavg", "near"]
    assert compare["variants"] == {"near": {"method": "fedprox", "method.mu": 0.1}}
    assert compare["baseline"] == "fedavg"


def test_a_row_that_cannot_be_configured_is_refused_alone() -> None:
    """With the message that a run of it would end with."""
    rows = {
        "fedavg": {"method": "fedavg"},
        "near": {"title": "FedProx", "method": "fedprox", "values": {"method.mu": -1}},
    }
    found = planned(TableSelection(), rows=rows, printed={}, missing=[])
    assert [row.key for row in found.settings[0].rows] == ["fedavg"]
    assert "method.mu = -1" in found.refused["near", "even"]


@pytest.mark.parametrize("id", quick(tables(), [*tables()][::20]))
def test_what_a_row_sets_no_other_row_has(id: str) -> None:
    """A row is configured as where it is asked for alone; also beside one that is called as its method.

    GFPL's table 2: the projection is of the rows with both heads alone.
    """
    table = table_named(id)
    for setting in plan_table(table, TableSelection(), with_data=False).settings[:2]:
        for run in setting.plan.runs:
            alone = plan_table(
                table, TableSelection(rows=(run.name,), columns=(setting.name,)), with_data=False
            ).settings[0]
            assert run.config.identity() in [one.config.identity() for one in alone.plan.runs]


def test_a_setting_keeps_its_folder_whichever_columns_are_asked_for() -> None:
    """``sent`` is read from the runs of ``even``."""
    found = planned(TableSelection(columns=("sent",)))
    assert [setting.name for setting in found.settings] == ["even"]
    assert [column.key for column in found.settings[0].columns] == ["sent"]
    assert [row.key for row in found.settings[0].rows] == ["fedavg"]


def test_rounds_are_scaled_for_all_rows() -> None:
    """A fifth of 10 rounds are 2; of a cell's own 20 they are 4."""
    own = [{"rows": ["near"], "columns": ["skewed"], "values": {"federation.rounds": 20}}]
    found = planned(TableSelection(rounds_scale=0.2), cells=own)
    assert [
        (
            setting.parameters["federation"]["rounds"],
            setting.parameters["compare"]["variants"]["near"].get("federation.rounds"),
        )
        for setting in found.settings
    ] == [(2, None), (2, 4)]


def test_snapshots_beyond_a_reduced_budget_are_left_out_and_told() -> None:
    """Of 10 rounds a half are 5: of rounds 0, 5 and 8 the last is not reached, nor any row's own 9 of 12.

    A row that has 20 rounds by itself, which are 10 then, keeps the table's 8.
    """
    rows = {
        **TINY["rows"],
        "near": {**TINY["rows"]["near"], "values": {"federation.rounds": 20}},
        "far": {
            "title": "Far",
            "method": "fedavg",
            "values": {"federation.rounds": 12, "evaluation.snapshots": [6, 9]},
        },
    }
    common = {**TINY["common"], "evaluation.snapshots": [0, 5, 8]}
    found = planned(TableSelection(rounds_scale=0.5), rows=rows, common=common)
    variants = found.settings[0].parameters["compare"]["variants"]
    assert found.settings[0].parameters["evaluation"]["snapshots"] == [0, 5]
    assert [variants[row]["evaluation.snapshots"] for row in ("near", "far")] == [[0, 5, 8], [6]]
    assert (snapshots_beyond(found), snapshots_beyond(planned(TableSelection(), rows=rows, common=common))) == ([9], [])
    alone = planned(TableSelection(rows=("fedavg",), rounds_scale=0.5), common=common)
    assert notes(assembled(alone, ()))[-1] == "No pictures of round 8: the reduced budget ends before."
    given = planned(
        TableSelection(rows=("fedavg",), rounds_scale=0.5, assignments=("evaluation.snapshots=[8]",)), common=common
    )
    assert "evaluation.snapshots = [8]: the run has 5 rounds" in given.refused["fedavg", "even"]


UNKNOWN = "how long they take is not known before one of each kind has finished here (paper show --measure)"


@pytest.mark.parametrize(
    ("seconds", "finished", "told"),
    [
        ((480.0, 480.0), {}, ", about 16 minutes on one core"),
        ((480.0, 480.0), {"even": 3}, ", 3 of them finished before, about 10 minutes on one core"),
        (
            (480.0, None),
            {"even": 2},
            ", 2 of them finished before, about 4 minutes on one core and 1 setting of which no run has finished here",
        ),
        ((480.0, None), {"even": 4}, f", 4 of them finished before; {UNKNOWN}"),
        ((480.0, 480.0), {"even": 4, "skewed": 4}, ", 8 of them finished before"),
    ],
)
def test_what_has_finished_takes_no_time(
    seconds: tuple[float | None, ...], finished: dict[str, int], told: str
) -> None:
    """Two settings of four runs each, which take two minutes each where that is known."""
    found = planned(TableSelection(seeds=(0, 1)))
    settings = tuple(replace(one, seconds=each) for one, each in zip(found.settings, seconds, strict=True))
    assert estimated_duration(replace(found, settings=settings), finished) == f"8 runs in 2 settings{told}"


def test_rounds_are_not_set_behind_the_back_of_their_mark() -> None:
    for assignment in ("federation.rounds=3", " federation.rounds =3", "federation={rounds: 3}"):
        with pytest.raises(ConfigError, match=r"^--set .*federation.*: the rounds are the table's; --rounds-scale F"):
            planned(TableSelection(assignments=(assignment,)))


def test_one_data_set_stands_in_for_columns_of_one_alone() -> None:
    """An archive of one data set's images would be measured in the columns of all of them."""
    table = table_named("fedpa.table2")
    given = ("data.name=imagefolder", "data.root=images.zip")
    with pytest.raises(
        ConfigError,
        match=r"^--set data.name=imagefolder: these columns are of mnist, emnist, fashionmnist, celeba; with --columns "
        r"name those of one data set, such as --columns mnist_0.1,mnist_1$",
    ):
        plan_table(table, TableSelection(assignments=given), with_data=False)
    for columns in (("mnist_0.1", "mnist_1"), ("celeba",)):
        found = plan_table(table, TableSelection(columns=columns, assignments=given), with_data=False)
        assert {setting.parameters["data"]["name"] for setting in found.settings} == {"imagefolder"}
        assert {setting.overrides for setting in found.settings} == {("data.name=imagefolder",)}


def test_what_is_set_counts_where_it_can_change_a_result() -> None:
    """Not where data lie, nor what a setting, or its only row, has anyway."""
    settings = planned(
        TableSelection(
            assignments=(
                *("data.root=images", "engine.workers=3", "tracking.uri=http://me:hidden@host", "seed=9"),
                *("local.batch_size=32", "partition.min_size=1", "local.lr=0.02"),
            )
        ),
        columns={"even": {"values": {"partition.name": "dirichlet"}}, "skewed": {"values": {"local.lr": 0.02}}},
        common={**TINY["common"], "partition.name": "dirichlet", "partition.min_size": 1},
        printed={},
        missing=[],
    ).settings
    assert [(setting.name, setting.overrides) for setting in settings] == [("even", ("local.lr=0.02",)), ("skewed", ())]
    rows = {**TINY["rows"], "near": {**TINY["rows"]["near"], "values": {"local.lr": 0.02}}}
    for of, besides in ((("near",), ()), (("fedavg", "near"), ("local.lr=0.02",))):
        found = planned(TableSelection(rows=of, columns=("even",), assignments=("local.lr=0.02",)), rows=rows)
        assert found.settings[0].overrides == besides


def test_what_is_not_in_the_table_is_told() -> None:
    with pytest.raises(ConfigError, match=r"fedpa.tiny: no row moon; one of fedavg, near, other"):
        planned(TableSelection(rows=("moon",)))
    with pytest.raises(ConfigError, match=r"fedpa.tiny: no column odd; one of even, sent, skewed"):
        planned(TableSelection(columns=("odd",)))


@pytest.mark.parametrize(
    ("table", "selection", "kind", "about"),
    quick(
        [
            # MNIST has no data here, and a run of FedPA cannot be configured: no one kind.
            ("fedpa.tiny", TableSelection(columns=("mnist", "wrong")), RunError, "none of these cells can be run here"),
            ("fedpa.tiny", TableSelection(rows=("other",)), RunError, "Unheard-of is not built"),
            ("fedpa.table2", TableSelection(columns=("mnist_1",)), DataError, "data.root is not set"),
            ("fedpa.table2", TableSelection(assignments=("nonsense=3",)), ConfigError, "nonsense: unknown key"),
            (
                "fedpa.table2",
                TableSelection(columns=("mnist_1",), assignments=("data.root=nowhere",)),
                DataError,
                "data.root = nowhere",
            ),
        ],
        3,
    ),
)
def test_where_nothing_can_be_run_the_error_is_of_the_kind_of_all_refusals(
    table: str, selection: TableSelection, kind: type[ProtoflError], about: str
) -> None:
    """What the table's file refuses counts for none: nobody can do anything about it."""
    columns = {**TINY["columns"], "mnist": {"values": {"data.name": "mnist"}}, "wrong": {"values": {"local.lr": -1}}}
    found = plan_table(tiny(columns=columns) if table == "fedpa.tiny" else table_named(table), selection)
    assert not found.settings
    error = found.nothing_to_run()
    assert type(error) is kind
    assert about in str(error)
