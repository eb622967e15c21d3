"""Our figures beside the printed ones, from comparisons as they lie in a table's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from flcore.config.schema import Config
from pipelines.papers.catalogue import Printed, table_named
from pipelines.papers.drawings import formula_of
from pipelines.papers.metrics import figure, figures, mixtures_up
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.papers.results import lead, results, write
from pipelines.papers.runs import describe_pairs
from pipelines.runs.folder import RunFolder

from .conftest import RUNS, tiny

Compared = Callable[..., Path]


def test_figures_stand_beside_the_printed_ones(compared: Compared) -> None:
    """FedAvg (70 + 72) / 2 = 71; FedProx 76, ahead by 4 and 6 points: 5 ± t(0.975, 1) * √2 / √2 = 5 ± 12.71."""
    found = results(plan_table(tiny(), TableSelection(seeds=(0, 1)), with_data=False), compared("even", RUNS))
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
    """TableSelection for one column, the results still have the other's."""
    out = compared("even", RUNS)
    compared("skewed", {"fedavg": {0: {"top1_global": 0.5}}})
    found = results(plan_table(tiny(), TableSelection(columns=("skewed",)), with_data=False), out)
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
        plan_table(table, TableSelection(), with_data=False),
        compared("even", {"fedavg": {0: {"bytes_up": 1}}, "near": {0: {"top1_vote": 0.25, "top1_global": 0.9}}}),
    )
    assert found.cells["near", "even"].ours.mean == pytest.approx(25.0)
    assert found.cells["fedavg", "even"].ours.mean is None


def test_the_lead_tells_of_every_column_the_runs_that_it_is_over(compared: Compared) -> None:
    """One column on divisions 42 and 43, the other on 42, where FedProx has seed 1 only; asked for are others."""
    same = {(draw, seed): {"top1_global": 0.5} for draw in (42, 43) for seed in (0, 1)}
    out = compared("even", {"fedavg": same, "near": same})
    one = {seed: {"top1_global": 0.5} for seed in (0, 1, 2)}
    compared("skewed", {"fedavg": one, "near": {1: {"top1_global": 0.5}}}, fixed=42)
    said = lead(results(plan_table(tiny(), TableSelection(seeds=(7, 8)), with_data=False), out))
    assert said[2:] == [
        "even: n = 4, seeds 0, 1 on each of divisions 42, 43.",
        "skewed: n = 3, seeds 0, 1, 2 on one division (42); FedProx: n = 1, seed 1 on division 42.",
    ]
    assert "seeds 7" not in " ".join(said)


def test_what_pairs_say() -> None:
    """Every seed on a division of its own; every division with every seed; neither."""
    assert describe_pairs(frozenset({(0, 0), (4, 4)})) == "n = 2, seeds 0, 4, each on a division of its own"
    assert describe_pairs(frozenset({(42, 0), (43, 0)})) == "n = 2, seed 0 on each of divisions 42, 43"
    assert describe_pairs(frozenset({(42, 0), (42, 1), (43, 2)})) == "n = 3, seeds by division: 0, 1 on 42; 2 on 43"


def test_runs_that_failed_stand_beside_the_figures_of_those_that_did_not(compared: Compared) -> None:
    """Of FedProx's four seeds two diverged; one was interrupted, and can be gone on with. Its row is not its method."""
    failed = {
        "fedprox seed 2, near": "training diverged",
        "fedprox seed 3, near": "training diverged",
        "fedprox seed 4, near": "interrupted",
        "fedavg seed 2": "no memory",
    }
    out = compared("even", RUNS, failed=failed)
    found = results(plan_table(tiny(), TableSelection(seeds=(0, 1)), with_data=False), out)
    lost = {key: cell.lost for key, cell in found.cells.items() if cell.lost}
    assert lost == {
        ("near", "even"): "2 of 4 diverged",
        ("fedavg", "even"): "1 of 3 failed",
        ("fedavg", "sent"): "1 of 3 failed",
    }
    assert found.failed["even: near, seed 2 on division 2"] == "training diverged"
    write(found, out)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "| FedProx | 76.00 ± 2.83 (2 of 4 diverged) | 71.25 |" in text
    assert "| FedProx | +5.00 [-7.71, +17.71] (2 of 4 diverged) |" in text
    assert "- Failed: even: near, seed 4 on division 4: interrupted" in text


def test_what_is_written_says_budget_and_refusals(compared: Compared) -> None:
    """A smaller budget is marked in the title; refused cells stand with their reason."""
    out = compared("even", RUNS)
    found = results(plan_table(tiny(), TableSelection(seeds=(0, 1), rounds_scale=0.5), with_data=False), out)
    page = write(found, out)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text.startswith("# fedpa.tiny: Two methods on digits (REDUCED BUDGET: 0.5 of the rounds)\n")
    assert "- its bytes are not told: FedProx (kilobytes)" in text
    assert "- Unheard-of is not built: Unheard-of (all)" in text
    assert page.exists()
    document = json.loads((out / "table.json").read_text(encoding="utf-8"))
    cell = next(one for one in document["cells"] if (one["row"], one["column"]) == ("near", "even"))
    assert (cell["printed"], cell["ours"], cell["n"]) == (71.25, pytest.approx(76.0), 2)
    whole = write(replace(found, plan=plan_table(tiny(), TableSelection(seeds=(0, 1)), with_data=False)), out)
    assert "REDUCED" not in whole.read_text(encoding="utf-8")


def test_a_value_of_one_round_and_its_mean_over_several(tmp_path: Path) -> None:
    """Rounds 1 to 12 have 0.01 to 0.12: the third 0.03, rounds 3 to 12 (3 + ... + 12) / 1000 = 0.075."""
    heads = [{"network": {"top1_global": number / 100}} for number in range(1, 13)]
    lines = [json.dumps({"round": number, "alternatives": head}) for number, head in enumerate(heads, 1)]
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    made = RunFolder(tmp_path)
    assert figure(made, "history.3.alternatives.network.top1_global") == 0.03
    assert figure(made, "history.3-12.alternatives.network.top1_global") == pytest.approx(0.075)
    assert figure(made, "history.3-12.alternatives.knowledge.top1_global") is None
    assert figure(made, "history.13.alternatives.network.top1_global") is None


def test_seconds_per_round_leave_out_evaluation_and_the_first_two_rounds(tmp_path: Path) -> None:
    """Round 3 took 7 seconds, round 4 in two legs 4 + 1 and 4: (7 + 9) / 2 = 8.

    Their slowest clients 4, then 3 and 1, and a second of averaging: (4 + 5) / 2 = 4.5.
    """
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "history.jsonl").touch()

    def leg(number: int, name: str, seconds: dict[str, float], *clients: float) -> dict[str, Any]:
        by_client = {str(client): length for client, length in enumerate(clients)}
        return {"round": number, "leg": name, "seconds": seconds | {"evaluate": 10.0}, "clients": by_client}

    rounds = [
        *(leg(number, "train-clients", {"train-clients": 90.0, "aggregate": 9.0}, 90.0) for number in (1, 2)),
        leg(3, "train-clients", {"train-clients": 7.0}, 4.0, 2.0),
        leg(4, "train-clients", {"train-clients": 4.0, "aggregate": 1.0}, 3.0, 1.0),
        leg(4, "retrain-heads", {"retrain-heads": 4.0}, 1.0, 1.0),
    ]
    (tmp_path / "timing.json").write_text(json.dumps({"joules": None, "rounds": rounds}))
    made = RunFolder(tmp_path)
    found = figures(made, "timing.seconds_per_round")["timing"]
    assert (found["seconds_per_round"], found["ideal_seconds_per_round"]) == (8.0, 4.5)
    assert "timing" not in figures(made, "top1_global")


def test_a_formula_says_what_gfpl_sends_where_all_classes_have_samples_for_it(tmp_path: Path) -> None:
    """Without counts, two Gaussians and d = 50: 202 scalars a pair, in exchanges of rounds 1 and 3 of 4, so half.

    As measured, by the engine's own count. In the table's file the formula's column stands with the measured one.
    """
    method = {"name": "gfpl", "components": 2, "interval": 2, "first_exchange": 0, "use_counts": False}
    ways = {"name": "ways_shots", "num_clients": 3, "ways": 2, "ways_spread": 0, "shots": 6, "shots_spread": 1}
    config = Config.from_mapping(
        {
            "data": {"name": "digits", "size": 28},
            "partition": {**ways, "client_test": "few_shot", "test_shots": 5},
            "model": {"name": "fedproto_cnn"},
            "method": method,
            "federation": {"rounds": 4, "participation": 1.0},
            "local": {"batch_size": 4, "epochs": 1, "lr": 0.01},
        }
    )
    measured = run(config, tmp_path)
    made = RunFolder(tmp_path)
    assert mixtures_up(made) == 202 * 3 * 2 / 2
    assert figure(made, "formula.mixtures_up") == measured["scalars_up_per_round"] == 606

    table = table_named("gfpl.fig7")
    beside = {column.key: formula_of(table, column) for column in table.columns}
    assert {key: other.key for key, other in beside.items() if other} == {
        key: f"{key}_formula" for key in ("sent", "clients_5", "clients_10", "clients_40", "ways_2", "ways_4", "ways_5")
    }
