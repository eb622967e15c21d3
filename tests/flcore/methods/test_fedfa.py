"""FedFA by hand: a turn with its two updates, anchors of passes, the server (baselines.md 19)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.engine.client import ClientRunner
from flcore.engine.local.plan import phase_layout, plan_batches
from flcore.engine.local.step import by_pass
from flcore.io.messages import Count, TensorDict
from flcore.io.records import Record
from flcore.math.losses.basic import anchor_distance
from flcore.math.prototypes.class_means import class_sums
from flcore.methods.fedfa import ANCHORS, FedFA, average_anchors, first_anchors, moved_anchors
from flcore.methods.types import NUM_SAMPLES, Exchange, Replies


def test_the_distance_by_hand() -> None:
    """Fact a: class 0 is (0 + 2)/2 away, class 1 by 1, class 2 has no sample: 2/3, times λ = 0.1. Padding is none."""
    features = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    anchors = torch.tensor([[1.0, 0], [0, 1], [0, 0]])
    labels = torch.tensor([0, 0, 1])
    assert 0.1 * anchor_distance(features, labels, anchors).item() == pytest.approx(0.0666667)
    padded = torch.cat([features, torch.full((1, 2), 9.0)])
    weight = torch.tensor([1.0, 1, 1, 0])
    assert anchor_distance(padded, torch.tensor([0, 0, 1, 0]), anchors, weight).item() == pytest.approx(2 / 3)


def test_anchors_move_by_passes() -> None:
    """Fact b: m = 0.5, anchor 1, mean 3: 2. A pass without the class leaves it; a second one with mean 5: 3.5."""
    means, present = torch.tensor([[[3.0], [9.0]], [[5.0], [9.0]]]), torch.tensor([[True, False], [True, False]])
    start = torch.tensor([[1.0], [7.0]])
    assert moved_anchors(start, means[:1], present[:1], 0.5).tolist() == [[2.0], [7.0]]
    assert moved_anchors(start, means, present, 0.5).tolist() == [[3.5], [7.0]]
    assert torch.equal(moved_anchors(start, means[:0], present[:0], 0.5), start)


@pytest.mark.parametrize(("classes", "dim"), [(3, 4), (3, 3), (5, 2)])
def test_first_anchors(classes: int, dim: int) -> None:
    setting: Any = SimpleNamespace(num_classes=classes, feature_dim=dim, seed=1)
    anchors = first_anchors(setting)
    assert torch.allclose(anchors.norm(dim=1), torch.ones(classes))
    assert len(torch.unique(anchors, dim=0)) == classes
    products = anchors @ anchors.mT
    assert torch.equal(products, torch.eye(classes)) == (dim >= classes)


def test_a_turn_by_hand(lab: Any) -> None:
    """x = (2, 0) of class 0 is its own feature, head 0, one step at 0.1: W_0 = (0.1, 0), b_0 = 0.05, row 1 opposite.

    Then the logits differ by 0.3 on the anchor (1, 0) of class 0 and by 0.1, the wrong way, on (0, 1) of class 1. With
    q = 1/(1 + e^0.3) = 0.43 and p = 1/(1 + e^-0.1) = 0.52 row 0 has the gradient (-q, p)/2, b_0 (p - q)/2 > 0;
    Adam's first step is its rate against the sign of each. L_a = ½·‖(2, 0) - (1, 0)‖²; a_0 = ½·(1, 0) + ½·(2, 0).
    """
    reply, client_state = lab.train(lab.linear(method={"name": "fedfa", "calibration_lr": 0.01}))
    params = reply.message["model"].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.11, -0.01, -0.11, 0.01])
    assert params["head.bias"].tolist() == pytest.approx([0.04, -0.04])
    calibration = (math.log(1 + math.exp(-0.3)) + math.log(1 + math.exp(0.1))) / 2
    expected = {"cross_entropy": math.log(2), "anchors": 0.1 * 0.5, "calibration": calibration}
    assert reply.losses == pytest.approx(expected)
    assert reply.message[ANCHORS]["anchors"].tolist() == [[1.5, 0], [0, 1]]
    assert client_state == {}


def test_the_two_optimisers_know_nothing_of_each_other(lab: Any) -> None:
    """With λ = 0 and next to no rate of calibration a turn of several steps is FedAvg's: momentum goes on between."""
    changes = {"local__momentum": 0.9, "local__epochs": 2}
    method = {"name": "fedfa", "lambda_anchor": 0, "calibration_lr": 1e-12}
    found, plain = (
        lab.train(lab.experiment(method=one, **changes))[0].message["model"].params
        for one in (method, {"name": "fedavg"})
    )
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in plain.items())


def test_means_of_mini_batches_of_a_pass() -> None:
    """Classes 0 and 1 of C = 3; three samples of class 0 have mean 2, one of class 1 is 8: row 1 of two passes."""
    found = class_sums(torch.tensor([[1.0], [2.0], [3.0], [8.0]]), torch.tensor([0, 0, 0, 1]), 3)
    means, counts = by_pass(found, torch.tensor(1), 2)
    assert means.squeeze(-1).tolist() == [[0, 0, 0], [2, 8, 0]]
    assert counts.tolist() == [[0, 0, 0], [1, 1, 0]]
    both = by_pass((found[0].expand(2, 3, 1), found[1].expand(2, 3)), torch.tensor([1, 0]), 2)
    assert both[1].tolist() == [counts.tolist(), counts.flip(0).tolist()]


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_anchors_of_a_turn(lab: Any, stack: bool) -> None:
    """Features that stand still (no encoder): every anchor from the mini-batches as they were laid out, two passes.

    Classes are spread unevenly over mini-batches of two, so that the mean of their means is not the mean of samples.
    """
    pixels, labels = [[1, 0], [2, 0], [5, 1], [0, 3], [0, 9]], [0, 0, 0, 1, 1]
    dataset = lab.toy_dataset([*pixels, [7, 7]], [*labels, 2], None, None)
    experiment = lab.experiment(
        dataset,
        lab.by_hand(dataset, [range(5), [5]], [[0]] * 2),
        lab.ToySpec(),
        local={"lr": 0.01, "batch_size": 2, "epochs": 2},
        method={"name": "fedfa", "anchor_momentum": 0.25},
        engine__stack=stack,
    )
    ctx = lab.receive(
        ClientRunner(experiment), 1, Exchange(), 0, Record(experiment.method.start_server(experiment.setting)), Record()
    )
    (phase,) = experiment.method.phases()
    layout = phase_layout(5, experiment.config.local, phase, 1, skip_single=False)
    tape = plan_batches(experiment, experiment.new_module(), [ctx], phase, 0, [layout])
    assert tape.pass_numbers.tolist() == [[0, 0, 0, 1, 1, 1]]
    anchors = ctx.received[ANCHORS]["anchors"].clone()
    for number in (0, 1):
        steps = [step for step, own in enumerate(tape.pass_numbers[0]) if own == number]
        for label in (0, 1):
            rows = [[int(row) for row in tape.positions[step, 0, : tape.sizes[0, step]]] for step in steps]
            held = [[pixels[row] for row in batch if labels[row] == label] for batch in rows]
            means = torch.stack([torch.tensor(own).float().mean(0) for own in held if own])
            anchors[label] = 0.25 * anchors[label] + 0.75 * means.mean(0)
    found = lab.train_stack(experiment, [0, 1])[0][0].message[ANCHORS]["anchors"]
    assert torch.allclose(found, anchors, atol=1e-6)


def test_the_servers_mean_by_hand() -> None:
    """n = 1 and 3: class 0 (1 + 3·5)/4 = 4, class 1 (3 + 3·3)/4 = 3. Holders alone: nobody has class 1, it stays 7."""
    told = {0: [[1.0], [3.0]], 1: [[5.0], [3.0]]}
    held = {0: [True, False], 1: [True, False]}
    for mean, expected in (("all", [[4.0], [3.0]]), ("holders", [[4.0], [7.0]])):
        replies = {
            client: {
                NUM_SAMPLES: Count(size),
                ANCHORS: TensorDict(
                    {"anchors": torch.tensor(told[client])}
                    | ({"held": torch.tensor(held[client])} if mean == "holders" else {})
                ),
            }
            for client, size in ((0, 1), (1, 3))
        }
        server = Record({ANCHORS: TensorDict({"anchors": torch.tensor([[9.0], [7.0]])})})
        ctx: Any = None
        found, _ = average_anchors(server, Replies(replies), ctx)
        assert found[ANCHORS]["anchors"].tolist() == expected  # type: ignore[index]


def test_what_is_on_where() -> None:
    assert not FedFA(lambda_anchor=0, use_calibration=False).has_anchors
    assert [len(FedFA(use_calibration=on).phases()[0].updates) for on in (False, True)] == [1, 2]
