"""The tables behind figures, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipelines.reporting import frame
from tests.pipelines.reporting.records import make_round, make_run, two_seeds

ROUNDS = frame.rounds_frame(two_seeds())


def test_curves_use_rounds_that_every_seed_has() -> None:
    """Rounds 1 and 2 are common: (0.4 + 0.6)/2 = 0.5, (0.5 + 0.7)/2 = 0.6; std of a pair 0.2 apart: 0.2/√2."""
    table = frame.over_seeds(ROUNDS, ["top1_global"])
    assert table[["method", "round"]].values.tolist() == [["fedavg", 1], ["fedavg", 2]]
    assert table["mean"].tolist() == pytest.approx([0.5, 0.6])
    assert table["std"].tolist() == pytest.approx([0.2 / math.sqrt(2)] * 2)
    local = frame.over_seeds(ROUNDS, ["mean_local"]).query("method == 'local'")
    assert local["n"].tolist() == [1] and local["std"].isna().all()


def test_smoothed_curves_stand_beside_what_was_measured() -> None:
    """Two rounds each: 0.2, (0.2 + 0.4) / 2 and (0.4 + 0.9) / 2; of another method from its own first round on."""
    values = {"fedavg": (0.2, 0.4, 0.9), "fedprox": (0.8, 0.6, 0.6)}
    runs = [make_run(name, 0, [make_round(n, v) for n, v in enumerate(each, 1)]) for name, each in values.items()]
    table = frame.smoothed(frame.over_seeds(frame.rounds_frame(runs), ["top1_global"]), 2)
    assert table["mean"].tolist() == [0.2, 0.4, 0.9, 0.8, 0.6, 0.6]
    assert table["smoothed"].tolist() == pytest.approx([0.2, 0.3, 0.65, 0.8, 0.7, 0.6])


def test_clients_pooled_have_a_curve_where_they_are_not_the_mean_over_clients() -> None:
    """Equal test sets give one and the same curve."""
    alike, apart = (
        make_run("fedavg", seed, [replace(make_round(1, 0.4), pooled_local=pooled)])
        for seed, pooled in enumerate((0.4, 0.5))
    )
    assert frame.curve_metrics(frame.rounds_frame([alike])) == ["top1_global", "mean_local"]
    assert frame.curve_metrics(frame.rounds_frame([apart])) == ["top1_global", "mean_local", "pooled_local"]
    assert frame.curves_table([apart])["pooled_local"].tolist() == [0.5]


def test_bytes_against_accuracy() -> None:
    """150 bytes per round: 150 and 300; the silent method stays at 0 bytes."""
    table = frame.bytes_accuracy(ROUNDS, ["mean_local"])
    assert table["bytes"].tolist() == [150, 300, 0]
    assert table["accuracy"].tolist() == pytest.approx([0.5, 0.6, 0.3])


def test_clients_and_classes() -> None:
    """Clients without test data have no row; class 0 is (0.2 + 0.4)/2, class 1 known to one seed, class 2 to none."""
    clients = frame.client_accuracy(two_seeds())
    assert clients.values.tolist()[:2] == [["fedavg", 0, 0, 0.5], ["fedavg", 0, 2, 1.0]]
    classes = frame.class_accuracy(two_seeds())
    assert classes.index.tolist() == ["fedavg"] and classes.columns.tolist() == [0, 1, 2]
    assert classes.iloc[0].tolist() == [pytest.approx(0.3), 0.9, pytest.approx(math.nan, nan_ok=True)]
    named = make_run("fedavg", 0, [make_round(1, 0.5)], class_acc=(0.2, 0.4, None), class_names=("cat", "dog", "2"))
    assert frame.class_accuracy([named]).columns.tolist() == ["cat", "dog", "2"]


def test_loss_terms_that_most_methods_share_come_first() -> None:
    """`a` belongs to one method, `z` to both."""
    runs = [
        make_run("fedavg", 0, [make_round(1, 0.5, train_loss={"z": 1.0})]),
        make_run("moon", 0, [make_round(1, 0.5, train_loss={"a": 1.0, "z": None})]),
        make_run("moon", 1, [make_round(1, 0.5, train_loss={"a": 3.0, "z": 2.0})]),
    ]
    table = frame.training_losses(frame.rounds_frame(runs))
    assert table[["term", "method", "mean"]].values.tolist() == [["z", "fedavg", 1], ["z", "moon", 2], ["a", "moon", 2]]


def test_a_row_per_run_and_round_for_plotting_tools() -> None:
    """All rounds of all seeds, also those that one seed alone has; what a method lacks is empty."""
    table = frame.curves_table(two_seeds())
    assert list(table.columns) == [
        *("method", "seed", "round", "top1_global", "top1_vote", "mean_local", "pooled_local", "bytes")
    ]
    assert table[["seed", "round", "bytes"]].values.tolist()[:4] == [[0, 0, 0], [0, 1, 150], [0, 2, 300], [1, 1, 150]]
    local = table[table["method"] == "local"]
    assert local["top1_global"].isna().all() and local["mean_local"].tolist() == [0.3]


def test_final_accuracy_against_all_bytes() -> None:
    """0.5 and 0.7: mean 0.6, std 0.2/√2; bytes (300 + 500)/2 = 400. A method without a global model has one row."""
    runs = [
        make_run("fedavg", seed, [], top1_global=final, mean_local=final, bytes_up=100, bytes_down=200 * (seed + 1))
        for seed, final in enumerate((0.5, 0.7))
    ]
    runs.append(make_run("local", 0, [], mean_local=0.4, bytes_up=0, bytes_down=0))
    table = frame.tradeoff(runs, ["top1_global", "mean_local"])
    assert table[["metric", "method", "n"]].values.tolist() == [
        *(["top1_global", "fedavg", 2], ["mean_local", "fedavg", 2], ["mean_local", "local", 1])
    ]
    assert table[["bytes", "accuracy", "std"]].values.tolist()[0] == pytest.approx([400, 0.6, 0.2 / math.sqrt(2)])
    assert table[["bytes", "accuracy"]].values.tolist()[2] == [0, 0.4]


def test_a_stream_is_averaged_over_seeds_and_a_task_has_a_line_from_the_round_it_begins() -> None:
    """A_sel 0.4 and 0.6: mean 0.5, spread 0.2/√2. Task 2 begins in round 2."""
    runs = [
        make_run("fedavg", seed, [
            make_round(1, 0.5, tasks={"a_sel": level, "by_task": [level, None]}),
            make_round(2, 0.5, tasks={"a_sel": level, "by_task": [level, level / 4]}),
        ]) for seed, level in enumerate((0.4, 0.6))
    ]  # fmt: skip
    rounds = frame.rounds_frame(runs)
    stream = frame.over_seeds(rounds, ["a_glo", "a_sel"])
    assert stream[["metric", "round", "mean"]].values.tolist() == [["a_sel", 1, 0.5], ["a_sel", 2, 0.5]]
    assert stream["std"].tolist() == pytest.approx([0.2 / math.sqrt(2)] * 2)
    tasks = frame.task_accuracy(rounds)
    assert tasks[["task", "round", "mean"]].values.tolist() == [[1, 1, 0.5], [1, 2, 0.5], [2, 2, 0.125]]
