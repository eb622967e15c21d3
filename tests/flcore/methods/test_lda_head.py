"""A discriminant over a finished model: the base's part to the bit, the head by hand, what it sends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.io.records import serialise
from flcore.methods.lda_head import SUMS, LdaHead
from flcore.methods.types import MODEL, RoundContext
from tests.cases import quick


@pytest.mark.parametrize("base", quick(["moon", "fedavg"], 1))
def test_the_bases_part_is_the_bases_run(lab: Any, base: str, tmp_path: Path) -> None:
    changes = {"federation": {"rounds": 2, "participation": 0.75}}
    alone = lab.run(lab.experiment(method={"name": base}, **changes), tmp_path / "base")
    experiment = lab.experiment(method={"name": "lda_head", "base": base}, **changes)
    found = lab.run(experiment, tmp_path / "lda")
    assert serialise(found.state.server.without(LdaHead.head_slot)) == serialise(alone.state.server)
    for client in range(4):
        assert serialise(found.client_state(client)) == serialise(alone.client_state(client))
    last = found.history[1]["alternatives"]["before_discriminant"]
    assert last["top1_global"] == alone.history[1]["top1_global"]
    assert found.history[1]["server"] == {"shrinkage": 0.01, "answers": 4}
    sent = experiment.method.broadcast(found.state.server, 0, RoundContext(experiment.setting, 2, LdaHead.collect_leg))
    assert serialise(sent) == serialise({MODEL: alone.state.server[MODEL]})


def test_the_head_by_hand(lab: Any, tmp_path: Path) -> None:
    """Pixels as features, two clients: class 0 at 0 and 2, class 1 at 4 and 6: protolda.md 3a."""
    dataset = lab.toy_dataset([[0], [2], [4], [6]], [0, 0, 1, 1], [[1], [5]], [0, 1])
    partition = lab.by_hand(dataset, [[0, 2], [1, 3]], [[0, 1]] * 2)
    method = {"name": "lda_head", "shrinkage": 0.3, "wire": "float64"}
    experiment = lab.experiment(dataset, partition, lab.ToySpec(), method=method, federation={"rounds": 1})
    run = lab.run(experiment, tmp_path / "run")
    head = experiment.method.global_model(run.state.server).params
    assert head["head.weight"].flatten().tolist() == pytest.approx([-0.8, 0.8])
    assert head["head.bias"].tolist() == pytest.approx([math.log(0.5) + 1.6, math.log(0.5) - 3.2])
    assert run.history[-1]["top1_global"] == 1.0


def test_what_it_sends(lab: Any) -> None:
    """d = 8: 28 correlations in float32, 8 variances; k classes with an id, a count and 8 sums each."""
    experiment = lab.experiment(method={"name": "lda_head"}, federation={"rounds": 1})
    server = experiment.method.start_server(experiment.setting)
    reply, _ = lab.train(experiment, 0, exchange=1, server=server)
    held = int((torch.from_numpy(lab.partition.counts[0]) > 0).sum())
    assert set(reply.message) == {SUMS}
    assert sum(size.bytes for size in reply.up.values()) == held * (8 + 8 + 8 * 4) + (28 + 8) * 4
