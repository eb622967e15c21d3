"""Figures: the data behind them by hand, ids and bytes of the SVG text; pixels are for eyes."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest

from flcore.errors import DataError
from pipelines.reporting.figures import charts as figures
from pipelines.reporting.figures import sets as figure_set
from pipelines.runs.record import RoundRecord, RunRecord


def make_round(number: int, accuracy: float | None, **changes: Any) -> RoundRecord:
    """A round with the same accuracy everywhere; 100 bytes up and 50 down per round, loss 1/round."""
    values: dict[str, Any] = {
        "round": number,
        "participants": (),
        "top1_global": accuracy,
        "loss_global": None,
        "mean_local": accuracy,
        "pooled_local": accuracy,
        "client_std": None,
        "local_accuracy": (accuracy, None, 1.0),
        "class_accuracy": (),
        "train_loss": {"cross_entropy": 1 / number} if number else {},
        "bytes_up": {"weights": 100 * number},
        "bytes_down": {"weights": 50 * number},
    }
    return RoundRecord(**(values | changes))


def make_run(method: str, seed: int, history: Sequence[RoundRecord], **changes: Any) -> RunRecord:
    """A run around a history; what figures do not read is empty."""
    values: dict[str, Any] = {
        "method": method,
        "dataset": "digits",
        "partition": "iid",
        "seed": seed,
        "rounds": len(history),
        "class_acc": (),
        "bytes_up_by_kind": {},
        "bytes_down_by_kind": {},
        "best_round": None,
        "history": tuple(history),
    }
    empty: dict[str, Any] = dict.fromkeys(set(RunRecord.__dataclass_fields__) - set(values) - {"directory"})
    return RunRecord(**(empty | values | changes))


def two_seeds() -> list[RunRecord]:
    """fedavg: seed 0 has 0.2, 0.4, 0.5 in rounds 0 to 2, seed 1 has 0.6 and 0.7 in rounds 1 and 2."""
    return [
        make_run(
            "fedavg", 0, [make_round(0, 0.2), make_round(1, 0.4), make_round(2, 0.5)], class_acc=(0.2, None, None)
        ),
        make_run("fedavg", 1, [make_round(1, 0.6), make_round(2, 0.7)], class_acc=(0.4, 0.9, None)),
        make_run("local", 0, [make_round(1, 0.3, top1_global=None, bytes_up={}, bytes_down={})]),
    ]


def write_manifest(directory: Path, counts: Sequence[Any], **changes: Any) -> Path:
    """A partition directory whose clients hold `counts`."""
    directory.mkdir(parents=True, exist_ok=True)
    clients = [{"id": f"{number:04d}", "class_counts": row} for number, row in enumerate(counts)]
    document = {"clients": clients, "num_classes": 3, "parameters": {"name": "iid"}} | changes
    (directory / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def test_curves_use_rounds_that_every_seed_has() -> None:
    """Rounds 1 and 2 are common: (0.4 + 0.6)/2 = 0.5, (0.5 + 0.7)/2 = 0.6; std of a pair 0.2 apart: 0.2/√2."""
    table = figures.curve_data(two_seeds(), "top1_global")
    assert table["method"].tolist() == ["fedavg", "fedavg"]
    assert table["round"].tolist() == [1, 2]
    assert table["mean"].tolist() == pytest.approx([0.5, 0.6])
    assert table["std"].tolist() == pytest.approx([0.2 / math.sqrt(2)] * 2)
    local = figures.curve_data(two_seeds(), "mean_local").query("method == 'local'")
    assert local["n"].tolist() == [1] and local["std"].isna().all()


def test_bytes_against_accuracy() -> None:
    """150 bytes per round: 150 and 300; the silent method stays at 0 bytes."""
    table = figures.bytes_accuracy_data(two_seeds(), "mean_local")
    assert table["bytes"].tolist() == [150, 300, 0]
    assert table["accuracy"].tolist() == pytest.approx([0.5, 0.6, 0.3])


def test_client_class_and_loss_tables() -> None:
    """Clients without test data have no row; class 0 is (0.2 + 0.4)/2, class 1 known to one seed, class 2 to none."""
    clients = figures.client_accuracy_data(two_seeds())
    assert clients.values.tolist()[:2] == [["fedavg", 0, 0, 0.5], ["fedavg", 0, 2, 1.0]]
    classes = figures.class_accuracy_data(two_seeds())
    assert classes.index.tolist() == ["fedavg"]
    assert classes.iloc[0].tolist()[:2] == pytest.approx([0.3, 0.9]) and math.isnan(classes.iloc[0].tolist()[2])
    losses = figures.training_loss_data(two_seeds())
    assert losses.query("method == 'fedavg'")["mean"].tolist() == [1.0, 0.5]


def test_loss_terms_that_most_methods_share_come_first() -> None:
    """`a` belongs to one method, `z` to both."""
    runs = [
        make_run("fedavg", 0, [make_round(1, 0.5, train_loss={"z": 1.0})]),
        make_run("moon", 0, [make_round(1, 0.5, train_loss={"a": 1.0, "z": None})]),
        make_run("moon", 1, [make_round(1, 0.5, train_loss={"a": 3.0, "z": 2.0})]),
    ]
    table = figures.training_loss_data(runs)
    assert table[["term", "method", "mean"]].values.tolist() == [["z", "fedavg", 1], ["z", "moon", 2], ["a", "moon", 2]]


def test_partition_table(tmp_path: Path) -> None:
    """Counts as list or by class; absent classes count 0; names and sizes where given."""
    directory = write_manifest(tmp_path, [[1, 2, 3], {"0": 4}], class_names=["cat", "dog"])
    partition = figures.load_partition(directory)
    assert partition.counts.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert partition.class_names == ("cat", "dog", "2")
    assert figures.partition_data(partition).loc["0001", "cat"] == 4
    sized = [{"id": "a", "class_counts": [1], "sizes": {"train": 1, "val": 2, "test": 3}}]
    partition = figures.load_partition(write_manifest(tmp_path / "sizes", [], clients=sized))
    assert partition.sizes.values.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("text", [None, "{broken", "[]", '{"clients": []}', '{"clients": [{"id": "0000"}]}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    """The message names the file."""
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        figures.load_partition(tmp_path)


def test_spread_apart() -> None:
    """0.5 and 0.5 with gap 0.2: 0.4 and 0.6. Far ones stay. At the ceiling both move down: 0.8 and 1.

    Three heights at 0 with gap 0.9 fit only with gap 1/2: 0, 0.5, 1.
    """
    assert figures.spread_apart([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert figures.spread_apart([0.1, 0.9], 0.2) == pytest.approx([0.1, 0.9])
    assert figures.spread_apart([1.0, 1.0], 0.2) == pytest.approx([0.8, 1.0])
    assert figures.spread_apart([0.0, 0.0, 0.0], 0.9) == pytest.approx([0, 0.5, 1])
    assert figures.spread_apart([], 0.2) == []


def test_styles_are_distinct_and_follow_the_order() -> None:
    """26 methods get 26 different pairs of colour and dashes; adding methods at the end changes none before."""
    methods = [f"method{number}" for number in range(26)]
    styles = figures.method_styles(methods)
    assert len({(style.colour, str(style.dashes)) for style in styles.values()}) == 26
    assert figures.method_styles(methods[:3]) == {method: styles[method] for method in methods[:3]}


def test_svg_is_deterministic_and_ids_are_prefixed() -> None:
    """Two drawings of the same runs are the same text; no id and no reference is without its prefix; no date."""
    first = figures.svg_text(figures.draw_accuracy_curves(two_seeds()), "plot-a")
    assert first == figures.svg_text(figures.draw_accuracy_curves(two_seeds()), "plot-a")
    second = figures.svg_text(figures.draw_accuracy_curves(two_seeds()), "plot-b")
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in (first, second)]
    assert not set(ids[0]) & set(ids[1]) and len(ids[0]) == len(set(ids[0]))
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', first)
    assert targets and {a or b for a, b in targets} <= set(ids[0])
    assert "<metadata" not in first and "date" not in first
    ElementTree.fromstring(first)


def test_drawing_leaves_global_settings_alone() -> None:
    """Neither pyplot nor a changed setting stays behind."""
    before = dict(matplotlib.rcParams)
    figures.svg_text(figures.draw_client_spread(two_seeds()))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(("methods", "clients", "classes"), [(1, 1, 2), (15, 200, 100)])
def test_small_and_large_comparisons_can_be_drawn(methods: int, clients: int, classes: int) -> None:
    """From one method, one client and one round to the largest sensible size; each SVG stays below 1 MB."""
    rng = np.random.default_rng(0)
    rounds = [make_round(number, 0.5, local_accuracy=tuple(rng.random(clients))) for number in range(1, methods + 1)]
    runs = [make_run(f"method{i}", 0, rounds, class_acc=tuple(rng.random(classes))) for i in range(methods)]
    counts = rng.integers(0, 50, size=(clients, classes))
    partition = figures.PartitionTable(
        tuple(f"{k:04d}" for k in range(clients)), tuple(map(str, range(classes))), counts, pd.DataFrame(), {}
    )
    drawn = figure_set.comparison_figures(runs, partition)
    assert list(drawn) == ["accuracy", "bytes", "partition", "clients", "classes", "loss"]
    for figure, table in drawn.values():
        assert not table.empty
        assert 1000 < len(figures.svg_text(figure)) < 1_000_000


def test_write_figures(tmp_path: Path) -> None:
    """Without a partition, traffic or losses only what has data is written, each with its CSV; bytes repeat."""
    quiet = make_round(1, 0.5, bytes_up={}, bytes_down={}, train_loss={})
    runs = [make_run("local", 0, [quiet])]
    names = ["accuracy.svg", "accuracy.png", "accuracy.csv", "clients.svg", "clients.png", "clients.csv"]
    first = figure_set.write_figures(runs, tmp_path / "a", formats=("svg", "png"))
    second = figure_set.write_figures(runs, tmp_path / "b", formats=("svg", "png"))
    assert [path.name for path in first] == names
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[1].read_bytes().startswith(b"\x89PNG")
    assert first[2].read_text().splitlines()[0] == "method,round,mean,std,n,metric"
    with pytest.raises(ValueError, match=r"figure\.pdf"):
        figures.save(figures.draw_client_spread(runs), tmp_path / "figure.pdf")


def test_nothing_to_draw_gives_no_figures() -> None:
    """A run without history has no figures, and that is no error."""
    assert figure_set.comparison_figures([make_run("fedavg", 0, [])]) == {}
