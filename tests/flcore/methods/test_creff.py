"""CReFF: gradients and stages by hand, FedAvg beneath it to the bit (baselines.md 20 and 23)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.engine.client import ClientRunner
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Payloads, Record
from flcore.math.losses.basic import cross_entropy, gradient_distance
from flcore.methods.creff import CLASSIFIER, GRADIENTS, CReFF, mean_gradients
from flcore.methods.types import Exchange, Replies, RoundContext

T = torch.tensor
SMALL = {"name": "creff", "per_class": 5, "match_steps": 3, "retrain_epochs": 3}
"""Server stages that cost nothing, for tests of everything else."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_real_gradients_by_hand(lab: Any) -> None:
    """h̃ = 0 with bias (ln 3, 0): softmax (3/4, 1/4) everywhere. Client 0 holds (2, 0) of class 0, (0, 4), (2, 2) of 1.

    Class 0: errors (-1/4, 1/4), feature (2, 0). Class 1: errors (3/4, -3/4), mean feature (1, 3). Local training moves
    the encoder, which starts as the identity; gradients are those of before. Client 1 holds class 1 alone, (0, 1).
    """
    pixels = [[2, 0], [0, 4], [2, 2], [0, 1]]
    experiment = lab.linear(pixels, [0, 1, 1, 1], [[0, 1, 2], [3]], encoder=True, method=SMALL)
    model = Weights({"encoder.1.weight": torch.eye(2), "head.weight": torch.eye(2), "head.bias": torch.zeros(2)})
    classifier = Weights({"head.weight": torch.zeros(2, 2), "head.bias": T([math.log(3), 0])})
    server = {"model": model, "classifier": classifier}
    reply, client_state = lab.train(experiment, server=server)
    assert client_state == {}
    assert not torch.equal(reply.message["model"].params["encoder.1.weight"], torch.eye(2))
    gradients = reply.message[GRADIENTS]
    assert gradients["classes"].tolist() == [0, 1]
    rows = [-0.5, 0, 0.5, 0, 0.75, 2.25, -0.75, -2.25]
    assert gradients["weight"].flatten().tolist() == pytest.approx(rows)
    assert gradients["bias"].flatten().tolist() == pytest.approx([-0.25, 0.25, 0.75, -0.75])
    other = lab.train(experiment, 1, server=server)[0].message[GRADIENTS]
    assert other["classes"].tolist() == [1]
    assert other["weight"].flatten().tolist() == pytest.approx([0, 0.75, 0, -0.75])


def test_draws_of_a_large_class(lab: Any) -> None:
    """40 samples with unit vectors as features, h̃ = 0: ∇W_1 = (1/2)·mean of the draws, each of 32 different samples.

    So feature i has the share k_i/320 with k_i of the 10 draws; other rounds and clients draw others.
    """
    experiment = lab.experiment(method=SMALL)
    method, setting = experiment.method, experiment.setting
    zero = Weights({"head.weight": torch.zeros(6, 40), "head.bias": torch.zeros(6)})
    server = Record(method.start_server(setting)) | {CLASSIFIER: zero}
    found = []
    for number, client in ((1, 0), (1, 0), (2, 0), (1, 1)):
        ctx = lab.receive(ClientRunner(experiment), number, Exchange(), client, server, Record())
        gradients = method.real_gradients(ctx, torch.eye(40), torch.full((40,), 2))
        found.append(gradients["weight"][0])
        taken = found[-1][1] * 6 * 320
        assert torch.allclose(taken, taken.round(), atol=1e-3)
        assert taken.sum().item() == pytest.approx(320, rel=1e-5)
        assert taken.max() <= 10.001
        assert taken.min() < 9.5
        assert gradients["bias"][0].tolist() == pytest.approx([1 / 6, 1 / 6, -5 / 6, 1 / 6, 1 / 6, 1 / 6])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_local_training_is_fedavg(lab: Any, tmp_path: Any) -> None:
    """Section 23, 1: w_g, training losses and the score of FedAvg's head are those of FedAvg to the bit."""
    changes = {"federation__participation": 0.5, "local__momentum": 0.5}
    plain = lab.run(lab.experiment(method__name="fedavg", **changes), tmp_path / "fedavg")
    run = lab.run(lab.experiment(method=SMALL, **changes), tmp_path / "creff")
    assert lab.same({"model": run.state.server["model"]}, plain.state.server)
    for found, expected in zip(run.history, plain.history, strict=True):
        assert found["train_loss"] == expected["train_loss"]
        assert found["alternatives"]["fedavg_head"]["top1_global"] == expected["top1_global"]
        assert found["alternatives"]["fedavg_head"]["mean_local"] == expected["mean_local"]
    model = lab.experiment(method=SMALL).method.global_model(run.state.server)
    for name, value in model.params.items():
        kind = "classifier" if name.startswith("head.") else "model"
        assert torch.equal(value, run.state.server[kind].params[name])
    assert not torch.equal(model.params["head.weight"], run.state.server["model"].params["head.weight"])


def test_gradients_count_clients_not_samples() -> None:
    """Class 0 at client 0 alone; class 2 at both: the mean of 2 and 6. Class 1 nowhere."""
    first = TensorDict(
        {"classes": T([0, 2]), "weight": T([[[1.0]] * 3, [[2.0]] * 3]), "bias": T([[4.0] * 3, [2.0] * 3])}
    )
    second = TensorDict({"classes": T([2]), "weight": T([[[6.0]] * 3]), "bias": T([[0.0] * 3])})
    found = [mean_gradients(uploads, 3) for uploads in ({3: first, 5: second}, {5: second, 3: first})]
    for present, (weight, bias) in found:
        assert present.tolist() == [0, 2]
        assert weight[:, :, 0].tolist() == [[1.0] * 3, [0.0] * 3, [4.0] * 3]
        assert bias.tolist() == [[4.0] * 3, [0.0] * 3, [1.0] * 3]


def test_a_step_of_matching_is_a_step_of_sgd_on_the_printed_loss() -> None:
    """Σ_c D(∇_h̃ CE(h̃(U_c), c), G_c) with gradients of gradients by autograd, and U ← U - lr·∇U of it."""
    features, weight, bias = random(2, 3, 4), random(3, 4, seed=1), random(3, seed=2)
    labels, wanted = T([0, 2]), (random(2, 3, 4, seed=3), random(2, 3, seed=4))
    moving = features.clone().requires_grad_()
    head = (weight.clone().requires_grad_(), bias.clone().requires_grad_())
    distances = []
    for row, label in enumerate(labels.tolist()):
        loss = cross_entropy(moving[row] @ head[0].T + head[1], torch.full((3,), label))
        found = torch.autograd.grad(loss, head, create_graph=True)
        distances.append(
            gradient_distance(found[0], wanted[0][row]) + gradient_distance(found[1][None], wanted[1][row][None])
        )
    total = torch.stack(distances).sum()
    total.backward()
    method = CReFF(match_steps=1, feature_lr=0.7)
    moved, before, after = method.matched(features, labels, (weight, bias), wanted)
    assert torch.allclose(moved, features - 0.7 * moving.grad, atol=1e-6)
    assert before == pytest.approx(total.item() / 2, rel=1e-6)
    _, again, _ = CReFF(match_steps=0).matched(moved, labels, (weight, bias), wanted)
    assert after == pytest.approx(again, rel=1e-6)
    assert after < before


def started(lab: Any, **options: Any) -> tuple[CReFF, RoundContext, Record]:
    """A method, the first exchange and what the server holds then."""
    experiment = lab.experiment(method={**SMALL, **options})
    server = Record(experiment.method.start_server(experiment.setting))
    return experiment.method, RoundContext(experiment.setting, 1), server


def test_one_step_of_the_classifier_by_hand() -> None:
    """Features (1, 0) of class 0 and (0, 1) of class 1, zero classifier: probabilities 1/2, both in one batch.

    ∇W = ½·[(-½, ½)ᵀ(1, 0) + (½, -½)ᵀ(0, 1)] = [[-¼, ¼], [¼, -¼]], ∇b = 0; learning rate 2.
    """
    start = (torch.zeros(2, 2), torch.zeros(2))
    method = CReFF(retrain_epochs=1, retrain_lr=2.0)
    weight, bias = method.retrained(*start, torch.eye(2), T([0, 1]), torch.Generator())
    assert weight.tolist() == [[0.5, -0.5], [-0.5, 0.5]]
    assert bias.tolist() == [0, 0]
    assert not start[0].any()


def test_the_classifier_is_trained_by_sgd() -> None:
    """Against autograd in the same order; the last batch of a pass has 2 of the 7 features, not 5."""
    features, labels = random(7, 3), T([0, 1, 2, 3, 0, 1, 1])
    weight, bias = random(4, 3, seed=1), random(4, seed=2)
    method = CReFF(retrain_epochs=3, retrain_lr=0.3, retrain_batch=5)
    found = method.retrained(weight, bias, features, labels, torch.Generator().manual_seed(5))
    head = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for rows in torch.split(torch.randperm(7, generator=generator), 5):
            gradients = torch.autograd.grad(cross_entropy(features[rows] @ head[0].T + head[1], labels[rows]), head)
            with torch.no_grad():
                for value, gradient in zip(head, gradients, strict=True):
                    value -= 0.3 * gradient
    assert torch.allclose(found[0], head[0], atol=1e-6)
    assert torch.allclose(found[1], head[1], atol=1e-6)


def test_every_round_has_a_fresh_classifier(lab: Any) -> None:
    """Within ±1/√d at first, others in other rounds; before the first round it is the head of the model."""
    method, first, server = started(lab, retrain_epochs=0)
    for name, value in server[CLASSIFIER].params.items():
        assert torch.equal(value, first.setting.initial.params[name])
    exchanges = (first, first, RoundContext(first.setting, 2))
    fresh = [method.retrain_classifier(server, Replies({}), ctx)[0][CLASSIFIER] for ctx in exchanges]
    assert lab.same(fresh[0], fresh[1])
    assert not lab.same(fresh[0], fresh[2])
    values = torch.cat([value.flatten() for value in fresh[0].params.values()])
    assert values.abs().max() <= 1 / math.sqrt(8)
    assert values.min() < -0.2
    assert values.max() > 0.2


def upload(classes: list[int], weight: Tensor, bias: Tensor) -> Payloads:
    return {GRADIENTS: TensorDict({"classes": T(classes), "weight": weight, "bias": bias})}


def test_features_that_run_away_stop_the_run(lab: Any) -> None:
    method, ctx, server = started(lab, feature_lr=1e38)
    replies = Replies({0: upload([3], random(1, 6, 8), random(1, 6))})
    with pytest.raises(ArithmeticError, match=r"federated features diverged .*; lower method\.feature_lr"):
        method.match_gradients(server, replies, ctx)


def test_private_statistics_serve_the_received_body(lab: Any, tmp_path: Any) -> None:
    """Under `batchnorm: local` gradients are those of the body with the client's own statistics."""
    model = {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "local"}
    experiment = lab.experiment(method=SMALL, model=model, federation__rounds=2)
    run = lab.run(experiment, tmp_path / "run")
    client_state, server = run.client_state(0), run.state.server
    ctx = lab.receive(ClientRunner(experiment), 3, Exchange(), 0, server, client_state)
    used = ctx.with_statistics(ctx.received["model"]).buffers
    assert lab.same(Weights({}, used), client_state["batchnorm"])
    assert set(client_state) == {"batchnorm"}
    own, initial = (lab.train(experiment, number=3, server=server, client_state=kept)[0] for kept in (client_state, {}))
    assert not torch.equal(own.message["gradients"]["weight"], initial.message["gradients"]["weight"])
