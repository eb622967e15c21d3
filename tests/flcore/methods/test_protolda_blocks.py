"""ProtoLDA by blocks: the head of ProtoLDA itself, for any division; what travels (protolda.md section 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flcore.io.messages import TensorDict
from flcore.methods.protolda_blocks import BLOCK, MOMENT_PRODUCTS
from flcore.methods.types import MODEL


def blocks(lab: Any, partition: Any = None, rounds: int = 1, **method: Any) -> Any:
    settings = {"name": "protolda_blocks", "wire": "float64", "exchanges": 6, **method}
    model = lab.model_of("protolda_blocks")
    return lab.experiment(partition=partition, model=model, method=settings, federation={"rounds": rounds})


def test_it_is_protolda_once_all_directions_are_there(lab: Any, tmp_path: Path) -> None:
    """D = 24 features, class means of rank 5: five blocks."""
    run = lab.run(blocks(lab), tmp_path / "blocks")
    exact = lab.experiment(
        model=lab.model_of("protolda"), method={"name": "protolda", "wire": "float64"}, federation={"rounds": 1}
    )
    expected = lab.run(exact, tmp_path / "exact").state.server[MODEL].params
    for name, value in run.state.server[MODEL].params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
    assert run.history[-1]["server"]["residual"] < 1e-6
    assert run.history[-1]["server"]["directions"] <= 24


def test_a_division_gives_the_same_head(lab: Any, tmp_path: Path) -> None:
    heads = []
    for name, parts in {"halves": [range(1, 240, 2), range(0, 240, 2)], "one": [range(240)]}.items():
        partition = lab.by_hand(lab.dataset, parts, [range(60)] * len(parts))
        run = lab.run(blocks(lab, partition, exchanges=2), tmp_path / name)
        heads.append(run.state.server[MODEL].params["head.weight"])
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-6, atol=1e-6)


def test_later_rounds_change_nothing_and_cost_nothing(lab: Any, tmp_path: Path) -> None:
    run = lab.run(blocks(lab, rounds=3, exchanges=2), tmp_path / "run")
    assert [record["bytes_up"] for record in run.history[1:]] == [run.history[0]["bytes_up"]] * 2
    assert [record["bytes_down"] for record in run.history[1:]] == [run.history[0]["bytes_down"]] * 2


def test_bytes_of_one_run(lab: Any, tmp_path: Path) -> None:
    """Two blocks of five directions (class means of six classes have rank 5), D = 24, 4 clients, float32."""
    run = lab.run(blocks(lab, exchanges=2, wire="float32"), tmp_path / "run")
    up, down = run.history[-1]["bytes_up"], run.history[-1]["bytes_down"]
    assert up["products"] == down["block"] == 4 * 2 * 24 * 5 * 4
    assert up["margins"] == 4 * (6 * 8 + 24 * 6 * 4 + 24 * 4)
    assert down["head"] == 4 * (6 * 24 + 6) * 4


def test_weights_and_noise_are_protoldas(lab: Any, tmp_path: Path) -> None:
    """Balanced classes give ProtoLDA's balanced head; with noise every block is one more release: 1 + 5 + 1 + 6."""
    model, one = lab.model_of("protolda"), {"rounds": 1}
    exact = {"name": "protolda", "wire": "float64", "balance": True}
    expected = lab.run(lab.experiment(model=model, method=exact, federation=one), tmp_path / "exact")
    run = lab.run(blocks(lab, balance=True), tmp_path / "blocks")
    for name, value in expected.state.server[MODEL].params.items():
        torch.testing.assert_close(run.state.server[MODEL].params[name], value, rtol=1e-4, atol=1e-4)
    noisy = blocks(lab, noise_multiplier=5.0)
    assert noisy.method.privacy(1)["releases"] == 13
    run = lab.run(noisy, tmp_path / "noisy")
    changed = run.state.server[MODEL].params["head.weight"]
    assert not torch.allclose(changed, expected.state.server[MODEL].params["head.weight"], atol=1e-3)
    # The same block in the first two exchanges behind 1 + 5 + 1: what comes back differs by its noise, in every number.
    server = run.state.server | {BLOCK: TensorDict({"vectors": torch.eye(24)[:, :2]})}
    first, second = (
        lab.train(noisy, 0, exchange=exchange, server=server, client_state=run.client_state(0))[0].message
        for exchange in (7, 8)
    )
    assert (first[MOMENT_PRODUCTS]["products"] != second[MOMENT_PRODUCTS]["products"]).all()
