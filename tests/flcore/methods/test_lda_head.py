"""A discriminant over a finished model: the head by hand, and what it sends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.methods.lda_head import SUMS


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
