"""GFPL: its message, its two exchanges by hand, its limit cases to the bit, its heads (gfpl.md, section 8)."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.core.rng import torch_stream
from flcore.engine.client import ClientRunner
from flcore.engine.local.compiled import CompiledTrainer
from flcore.io.messages import Count, Mixtures, TensorDict, Weights
from flcore.io.records import Payloads, Record
from flcore.math.prototypes.gaussians import Mixture, pack_mixtures, unpack_mixtures
from flcore.methods.gfpl import FRAME, GFPL, MIXTURES, RETRAIN_LEG
from flcore.methods.types import Batch, Exchange, Replies, RoundContext
from tests.cases import quick

EXCHANGING = {"name": "gfpl", "first_exchange": 0, "interval": 1}


def close(*expected: float) -> Any:
    return pytest.approx(expected, abs=1e-5)


def toy(lab: Any, pixels: list[list[int]], labels: list[int], clients: list[Any], **changes: Any) -> Any:
    """A linear model for two classes that starts at zero; features are pixels; full batches, learning rate 0.1."""
    return lab.linear(pixels, labels, clients, ([[1, 0], [0, 1]], [0, 1]), **changes)


def test_exchanges(lab: Any) -> None:
    """Fact 9: t = 10, 20, ... of rounds counted from 0. t1 = 4, S_T = 3: t = 6, 9, ...; t1 = 0 starts at once."""
    setting = lab.experiment().setting
    plain, late, early = GFPL(), GFPL(first_exchange=4, interval=3), GFPL(first_exchange=0, interval=3)
    for method, expected in ((plain, [10, 20, 30]), (late, [6, 9]), (early, [0, 3, 6])):
        rounds = range(expected[-1] + 1)
        assert [t for t in rounds if method.exchanges(t + 1)] == expected
        assert [t for t in rounds if method.round_exchanges(t + 1, setting) != (Exchange(server_steps=()),)] == expected
    assert not any(GFPL(use_pfg=False).exchanges(number) for number in range(1, 40))
    reply, client_state = lab.train(toy(lab, [[0, 4]], [1], [[0]], method={"name": "gfpl", "first_exchange": 1}))
    assert (reply.message, set(client_state)) == ({}, {"model"})  # in round 1, which has none


def test_the_frame_is_everybodys_and_is_not_sent(lab: Any) -> None:
    experiment = lab.experiment(method=EXCHANGING)
    method, setting = experiment.method, experiment.setting
    server = Record(method.start_server(setting))
    worker = ClientRunner(experiment)
    frames = [
        method.loss_inputs(
            lab.receive(worker, number, method.round_exchanges(number, setting)[0], client, server, Record())
        )["frame"]
        for client, number in ((0, 1), (3, 1), (0, 2))
    ]
    assert all(torch.equal(frame, server[FRAME]["frame"]) for frame in frames)
    other = lab.experiment(method=EXCHANGING, seed=1)
    assert not torch.equal(other.method.frame(other.setting), frames[0])


def fused_by_hand(lab: Any, tmp_path: Path, **options: Any) -> Any:
    """Client 0: class 0 at (2, 0), (4, 0), mean (3, 0), variance (1, 0). Client 1: six times (7, 0), variance 0.

    One Gaussian each, merged at any distance. Client 1 also holds (0, 4) of class 1, once.
    """
    method = {**EXCHANGING, "components": 1, "merge_distance": 1e12, **options}
    experiment = toy(lab, [[2, 0], [4, 0], *[[7, 0]] * 6, [0, 4]], [0] * 8 + [1], [[0, 1], range(2, 9)], method=method)
    return lab.run(experiment, tmp_path / "run")


def test_mixtures_are_fused_by_counts(lab: Any, tmp_path: Path) -> None:
    """Weights 2:6: mean 0.25·3 + 0.75·7 = 6, variance 0.25·(1 + 9) + 0.75·(0 + 1) = 3.25; all plus the floor 1e-4."""
    run = fused_by_hand(lab, tmp_path)
    fused = unpack_mixtures(run.state.server["mixtures"])
    assert list(fused) == [0, 1]
    assert fused[0].weights.tolist() == [1.0]
    assert fused[0].means[0].tolist() == close(6, 0)
    assert fused[0].variances[0].tolist() == close(3.2501, 1e-4)
    assert fused[1].means[0].tolist() == close(0, 4)
    assert run.history[0]["server"] == {"components_uploaded": 3, "components": 2, "classes": 2}
    # d = 2: 5 scalars for each of three (client, class) pairs up, for each of two Gaussians to two clients down.
    assert run.history[0]["scalars_up"] == 15
    assert run.history[0]["bytes_up"] == {"mixtures": 60 + 3 * 24}
    assert run.history[0]["bytes_down"] == {"mixtures": 2 * (40 + 2 * 16)}


def test_without_counts_clients_weigh_alike_and_do_not_tell(lab: Any, tmp_path: Path) -> None:
    """Mean (3 + 7)/2 = 5, variance ((1 + 4) + (0 + 4))/2 = 4.5; two integers for each class instead of three."""
    run = fused_by_hand(lab, tmp_path, use_counts=False)
    fused = unpack_mixtures(run.state.server["mixtures"])[0]
    assert fused.means[0].tolist() == close(5, 0)
    assert fused.variances[0].tolist() == close(4.5001, 1e-4)
    assert run.history[0]["bytes_up"] == {"mixtures": 60 + 3 * 16}


def test_distance_per_dimension_is_a_switch(lab: Any, tmp_path: Path) -> None:
    """(3, 0), variances (1.0001, 1e-4) and (7, 0), 1e-4: mean variance 0.50010 of the first dimension, so

    D = 16/8/0.50010 + ½·ln(0.50010/sqrt(1.0001·1e-4)) = 3.99920 + ½·3.91212 = 5.95526 (the second dimension is equal);
    over d = 2 it is 2.97763.
    """
    distance = 2 / 0.5001 + 0.5 * math.log(0.5001 / math.sqrt(1.0001 * 1e-4))
    assert distance == pytest.approx(5.95526, abs=1e-4)
    for threshold, per_dim, expected in ((5.9, False, 3), (6.0, False, 2), (2.9, True, 3), (3.0, True, 2)):
        options = {"merge_distance": threshold, "bd_per_dim": per_dim}
        run = fused_by_hand(lab, tmp_path / f"{threshold}", **options)
        assert run.history[0]["server"]["components"] == expected


def test_loss_of_local_training() -> None:
    """Fact 8: λ = 2 times the regression 0.252992 plus CE 0.407606 of logits (2, 1, 0): 0.913589."""
    a, b = 0.816497, -0.408248
    frame = torch.tensor([[a, b, b], [b, a, b], [b, b, a], [0, 0, 0]])
    model = SimpleNamespace(
        classify=lambda features: torch.tensor([[2.0, 1.0, 0.0]]),
        apply_extra=lambda name, features: {"projection": torch.tensor([[1.0, 1.0, 0.0, 0.0]])}[name],
    )
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]))
    terms = GFPL().both_heads(model, torch.zeros(1, 5), batch, {"frame": frame})  # type: ignore[arg-type]
    assert terms["cross_entropy"].item() == pytest.approx(0.407606, abs=1e-6)
    assert terms["dot_regression"].item() == pytest.approx(2 * 0.252992, abs=2e-6)
    assert sum(term.item() for term in terms.values()) == pytest.approx(0.913589, abs=2e-6)
    assert set(GFPL(use_dcs=False).both_heads(model, torch.zeros(1, 5), batch, {})) == {"cross_entropy"}  # type: ignore[arg-type]
    alone = GFPL(use_ce=False, head="etf").both_heads(model, torch.zeros(1, 5), batch, {"frame": frame})  # type: ignore[arg-type]
    assert {name: term.item() for name, term in alone.items()} == {"dot_regression": terms["dot_regression"].item()}


POINT = pack_mixtures({0: Mixture(torch.ones(1), torch.tensor([[3.0, 0.0]]), torch.full((1, 2), 1e-20))}, None, 2)


@pytest.mark.parametrize(("own", "factor"), [(None, 1), (0.2, 2)])
def test_retraining_by_hand(lab: Any, own: float | None, factor: float) -> None:
    """Pseudo-features are all (3, 0) of class 0, head zero: row 0 has gradient (-1/2)·(3, 0), bias -1/2, lr 0.1.

    W_0 = (0.15, 0), b_0 = 0.05; twice that at 0.2. Two features in one batch: one step.
    """
    method = {**EXCHANGING, "use_dcs": False, "samples_per_class": 2, "retrain_lr": own}
    experiment = toy(lab, [[0, 4]], [1], [[0]], method=method)
    reply, client_state = lab.train(experiment, exchange=1, server={"mixtures": POINT})
    params = client_state["model"].params
    assert params["head.weight"].flatten().tolist() == close(0.15 * factor, 0, -0.15 * factor, 0)
    assert params["head.bias"].tolist() == close(0.05 * factor, -0.05 * factor)
    assert reply.losses == pytest.approx({"retrain_cross_entropy": math.log(2)})
    assert (reply.steps, reply.message) == (1, {})


def test_the_rate_of_the_retraining_is_sgds_whatever_trains_on_images(lab: Any) -> None:
    """Two steps on (3, 0) of class 0 at 0.1, momentum 1/2; local is Adam with decay, which have no say.

    p = 1/2 in the first: g = -1/2·(3, 1), W_0 = 0.15, b_0 = 0.05. Logits then ±(0.45 + 0.05): p = 1/(1 + e^-1), g =
    (p - 1)·(3, 1) = -0.268941·(3, 1), v = -(0.25 + 0.268941)·(3, 1): W_0 = 0.15 + 0.1556824, b_0 = 0.05 + 0.0518941.
    """
    method = {**EXCHANGING, "use_dcs": False, "samples_per_class": 2, "retrain_lr": 0.1, "retrain_momentum": 0.5}
    local = {"lr": 0.1, "batch_size": 1, "epochs": 1, "optimizer": "adam", "weight_decay": 0.1}
    experiment = toy(lab, [[0, 4]], [1], [[0]], method=method, local=local)
    _, client_state = lab.train(experiment, exchange=1, server={"mixtures": POINT})
    params = client_state["model"].params
    assert params["head.weight"].flatten().tolist() == close(0.3056824, 0, -0.3056824, 0)
    assert params["head.bias"].tolist() == close(0.1018941, -0.1018941)


def test_how_long_the_retraining_is(lab: Any) -> None:
    """MNIST's 160 features in batches of 4 are 40 steps; here one class of 16 in batches of 6: 3 steps, twice 6."""
    for epochs in (1, 2):
        method = {**EXCHANGING, "retrain_epochs": epochs}
        experiment = toy(lab, [[0, 4]], [1], [[0]], method=method, local={"lr": 0.1, "batch_size": 6, "epochs": 5})
        reply, _ = lab.train(experiment, exchange=1, server={"mixtures": POINT})
        assert reply.steps == 3 * epochs


def pseudo(lab: Any, experiment: Any, client: int, server: Payloads, client_state: Payloads | None = None) -> Any:
    """What a client retrains on."""
    exchange = experiment.method.round_exchanges(1, experiment.setting)[1]
    assert exchange.name == RETRAIN_LEG
    ctx = lab.receive(ClientRunner(experiment), 1, exchange, client, Record(server), Record(client_state))
    return experiment.method.loss_inputs(ctx)


def test_every_class_or_the_clients_own(lab: Any) -> None:
    """Client 0 holds class 1 alone; r = 3 of each fused class, in their order; negative entries are kept or cut."""
    two = pack_mixtures(
        {label: Mixture(torch.ones(1), torch.full((1, 2), -5.0), torch.ones(1, 2)) for label in (0, 1)}, None, 2
    )
    for classes, expected in (("all", [0, 0, 0, 1, 1, 1]), ("local", [1, 1, 1])):
        method = {**EXCHANGING, "samples_per_class": 3, "retrain_classes": classes}
        found = pseudo(lab, toy(lab, [[0, 4]], [1], [[0]], method=method), 0, {"mixtures": two})["pseudo"]
        assert found["labels"].tolist() == expected
        assert found["inputs"].shape == (len(expected), 2)
        assert (found["inputs"] < 0).all()
    clipped = toy(lab, [[0, 4]], [1], [[0]], method={**EXCHANGING, "clip_nonneg": True})
    assert (pseudo(lab, clipped, 0, {"mixtures": two})["pseudo"]["inputs"] == 0).all()


def test_clients_draw_their_own_features(lab: Any) -> None:
    spread = pack_mixtures({0: Mixture(torch.ones(1), torch.zeros(1, 2), torch.ones(1, 2))}, None, 2)
    experiment = toy(lab, [[0, 4], [0, 4]], [1, 1], [[0], [1]], method=EXCHANGING)
    first, again, other = (
        pseudo(lab, experiment, client, {"mixtures": spread})["pseudo"]["inputs"] for client in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_own_mixtures_stay_at_home(lab: Any, tmp_path: Path) -> None:
    """Nothing travels and no stage runs; what is drawn is of the own class, here a single point (0, 4) twice.

    The retraining moves on from the head after local training.
    """
    method = {**EXCHANGING, "retrain_source": "own", "variance_floor": 1e-12, "samples_per_class": 2}
    experiment = toy(lab, [[0, 4], [0, 4], [2, 0]], [1, 1, 0], [[0, 1], [2]], method=method)
    reply, client_state = lab.train(experiment)
    assert (reply.message, set(client_state)) == ({}, {"model", "mixtures"})
    found = pseudo(lab, experiment, 0, {}, client_state)["pseudo"]
    assert found["labels"].tolist() == [1, 1]
    assert torch.allclose(found["inputs"], torch.tensor([[0.0, 4.0]]), atol=1e-4)
    assert experiment.method.server_steps() == {}
    run = lab.run(experiment, tmp_path / "run")
    assert (run.state.up, run.state.down) == ({}, {})
    assert set(run.client_state(0)) == {"model", "heads_before", "retrained"}
    assert not torch.equal(
        run.client_state(0)["model"].values["head.weight"], client_state["model"].values["head.weight"]
    )


def sent(lab: Any, **options: Any) -> Mixtures:
    """What a client with (3, 4) twice and (6, 8) of class 0, and (0, 5) of class 1, sends; one Gaussian per class."""
    method = {**EXCHANGING, "components": 1, "use_dcs": False, "variance_floor": 0.01, **options}
    experiment = toy(lab, [[3, 4], [3, 4], [6, 8], [0, 5]], [0, 0, 0, 1], [range(4)], method=method)
    found: Mixtures = lab.train(experiment)[0].message["mixtures"]
    return found


def test_small_classes_are_withheld(lab: Any, tmp_path: Path) -> None:
    """Three samples of class 0, one of class 1; without any class an empty message goes up, and nothing changes."""
    for least, classes in ((1, [0, 1]), (2, [0]), (3, [0]), (4, [])):
        found = sent(lab, min_count=least)
        assert found.classes.tolist() == classes
        assert found.counts is not None and found.counts.tolist() == [3, 1][: len(classes)]
        assert found.means.shape == (len(classes), 2)
    changes = {"local": {"lr": 0.1, "weight_decay": 0.1}, "federation": {"rounds": 2}}
    run = lab.run(lab.experiment(method={**EXCHANGING, "min_count": 1000}, **changes), tmp_path / "nobody")
    without = lab.run(lab.experiment(method={**EXCHANGING, "use_pfg": False}, **changes), tmp_path / "without")
    assert run.history[-1]["server"] == {"components_uploaded": 0, "components": 0, "classes": 0}
    assert sum(run.history[-1]["bytes_up"].values()) == sum(run.history[-1]["bytes_down"].values()) == 0
    assert all(
        lab.same(run.client_state(client)["model"], without.client_state(client)["model"]) for client in range(4)
    )
    assert run.state.steps == without.state.steps


def test_own_mixtures_are_not_withheld(lab: Any) -> None:
    """They stay at home."""
    method = {**EXCHANGING, "retrain_source": "own", "min_count": 9, "proto_clip": 0.5}
    _, client_state = lab.train(toy(lab, [[0, 4]], [1], [[0]], method=method))
    assert client_state["mixtures"].means.tolist() == [[0, 4]]


def test_means_and_deviations_are_clipped(lab: Any) -> None:
    """Class 0: mean (4, 16/3) of length 20/3, to 2: (1.2, 1.6); class 1: (0, 5) to (0, 2).

    Deviations: variances 2 and 32/9 plus the floor of length sqrt(5.5756) = 2.3613, to 2; of class 1 the floor's, 0.1.
    """
    found = sent(lab, proto_clip=2.0)
    assert found.means.flatten().tolist() == close(1.2, 1.6, 0, 2)
    shrink = 2 / math.sqrt(2.01 + 32 / 9 + 0.01)
    expected = (shrink * math.sqrt(2.01), shrink * math.sqrt(32 / 9 + 0.01), 0.1, 0.1)
    assert found.deviations.flatten().tolist() == close(*expected)
    assert found.weights.tolist() == [1, 1]


def test_noise_of_mixtures(lab: Any) -> None:
    """Two means and two deviations of length at most C = 2: Δ = 2·2·sqrt(4) = 8, at z = 0.5 N(0, 4²) everywhere.

    A seed gives eight numbers; 25 seeds two hundred, whose deviation has a standard error of 4/sqrt(400) = 0.2.
    Deviations never fall below the floor's 0.1.
    """
    clipped, noises, lowest = sent(lab, proto_clip=2.0), [], []
    for seed in range(25):
        method = {**EXCHANGING, "components": 1, "use_dcs": False, "variance_floor": 0.01}
        method |= {"proto_clip": 2.0, "proto_noise": 0.5}
        pixels = [[3, 4], [3, 4], [6, 8], [0, 5]]
        found = lab.train(toy(lab, pixels, [0, 0, 0, 1], [range(4)], method=method, seed=seed))[0].message["mixtures"]
        noises.append(found.means - clipped.means)
        lowest.append(float(found.deviations.min()))
    assert torch.stack(noises).std().item() == pytest.approx(4, abs=1.2)
    assert min(lowest) == pytest.approx(0.1, abs=1e-6)


def test_parts_can_be_switched_off_alone(lab: Any, tmp_path: Path) -> None:
    """Without DCS there is one head, and mixtures travel; without PFG two heads, and nothing travels."""
    single = lab.experiment(method={**EXCHANGING, "use_dcs": False}, federation__rounds=1)
    assert "extra.projection.weight" not in single.setting.initial.values
    run = lab.run(single, tmp_path / "single")
    assert run.state.up["mixtures"].scalars > 0
    assert set(run.history[-1]["alternatives"]) == {"own_classes", "before_retraining"}
    dual = lab.experiment(method={**EXCHANGING, "use_pfg": False}, federation__rounds=1)
    assert {name for name in dual.setting.initial.values if name.startswith("extra")} == {
        "extra.projection.weight", "extra.projection.bias",
    }  # fmt: skip
    run = lab.run(dual, tmp_path / "dual")
    assert (run.state.up, run.state.down) == ({}, {})
    assert set(run.history[-1]["alternatives"]) == {"own_classes", "etf_head", "sum_head"}


@pytest.mark.parametrize("classes", quick(["local", "all"], 1))
def test_retraining_of_a_stack(lab: Any, classes: str) -> None:
    """1e-4 of each array's largest value, also where clients retrain on different numbers of features."""
    method = {**EXCHANGING, "retrain_classes": classes}
    changes = {"model": {"name": "fedproto_cnn"}, "local__momentum": 0.5}
    serial = lab.experiment(method=method, **changes)
    stacked = lab.experiment(method=method, engine__stack=True, **changes)
    first = lab.train_stack(serial, range(4))
    messages = Replies({client: reply.message for client, (reply, _) in first.items()})
    start, ctx = Record(serial.method.start_server(serial.setting)), RoundContext(serial.setting, 1)
    server, _ = serial.method.server_steps()["fuse-prototypes"](start, messages, ctx)
    client_states = {client: client_state for client, (_, client_state) in first.items()}
    found = [lab.train_stack(run, range(4), client_states, exchange=1, server=server) for run in (serial, stacked)]
    for client in range(4):
        (reply, client_state), (other, other_memory) = found[0][client], found[1][client]
        assert other.losses == pytest.approx(dict(reply.losses), rel=1e-4)
        assert other.steps == reply.steps
        before, after = client_states[client]["model"].values, client_state["model"].values
        for name, value in after.items():
            far = 1e-4 * max(float(value.abs().max()), 1e-3)
            assert torch.allclose(other_memory["model"].values[name], value, atol=far), name
            moves = name.startswith(("head.", "extra.projection."))
            assert torch.equal(value, before[name]) != moves, name  # fact 9: the body to the bit


ENGINES: dict[str, dict[str, Any]] = {
    "serial": {},
    "compiled stack": {"engine__stack": True, "engine__compile": "default"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("holders", [(1, 2), ()])
def test_who_has_nothing_to_draw_from_takes_no_step(lab: Any, engine: str, holders: tuple[int, ...]) -> None:
    """Not even one of weight decay, beside clients that retrain: 16 pseudo-features of one class, in a mini-batch."""
    method = {**EXCHANGING, "retrain_source": "own"}
    local = {"lr": 0.1, "batch_size": 16, "weight_decay": 0.1}
    experiment = lab.experiment(method=method, model={"name": "fedproto_cnn"}, local=local, **ENGINES[engine])
    dim = experiment.setting.feature_dim
    own = pack_mixtures({0: Mixture(torch.ones(1), torch.ones(1, dim), torch.ones(1, dim))}, None, dim)
    start: Payloads = {"model": experiment.setting.initial}
    client_states = {client: Record({**start, MIXTURES: own} if client in holders else start) for client in range(4)}
    trainer = CompiledTrainer(experiment, lab.DirectMaker()) if "compiled" in engine else None
    worker = ClientRunner(experiment, trainer)
    found = lab.train_stack(experiment, range(4), client_states, exchange=1, worker=worker)
    assert {client: reply.steps for client, (reply, _) in found.items()} == {k: int(k in holders) for k in range(4)}
    for client, (reply, client_state) in found.items():
        assert lab.same(client_state["model"], experiment.setting.initial) == (client not in holders)
        assert set(reply.losses) == (
            {"retrain_cross_entropy", "retrain_dot_regression"} if client in holders else set()
        )


class Given:
    """Features are the images; logits (3, 2, 0); the projection is (1, 1, 0, 0)."""

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def features(self, images: Tensor) -> Tensor:
        self.asked.append(images)
        return images

    def classify(self, features: Tensor) -> Tensor:
        return torch.tensor([[3.0, 2.0, 0.0]])

    def apply_extra(self, name: str, features: Tensor) -> Tensor:
        return torch.tensor({"projection": [[1.0, 1.0, 0.0, 0.0]]}[name])


def answered(method: GFPL, classes: list[bool] | None = None, way: str | None = None) -> list[float]:
    """Scores; the model was asked for features of the very images, so that ways to answer can share them."""
    a, b = 0.816497, -0.408248
    frame = torch.tensor([[a, b, b], [b, a, b], [b, b, a], [0, 0, 0]])
    held = None if classes is None else torch.tensor(classes)
    predict = method.predict if way is None else method.predictors()[way]
    model, images, server = Given(), torch.zeros(1, 1), Record({"frame": TensorDict({"frame": frame})})
    found: list[float] = predict(model, images, server, held)[0].tolist()  # type: ignore[arg-type]
    assert [asked is images for asked in model.asked] == [True]
    return found


def test_heads() -> None:
    """Logits; cosines (fact 2); softmax(3, 2, 0) = (e³, e², 1)/28.474593 = (0.705385, 0.259496, 0.035119) + cosines."""
    cosines = (0.288675, 0.288675, -0.577350)
    total = [p + c for p, c in zip((0.705385, 0.259496, 0.035119), cosines, strict=True)]
    expected: dict[Any, Any] = {"linear": (3, 2, 0), "etf": cosines, "sum": total}
    for head, scores in expected.items():
        assert answered(GFPL(head=head)) == close(*scores)
        others = {f"{name}_head" for name in expected if name != head}
        assert set(GFPL(head=head).predictors()) == {*others, "own_classes", "before_retraining"}
        for other in others:
            assert answered(GFPL(head=head), way=other) == close(*expected[other.removesuffix("_head")])


def test_without_cross_entropy_the_frame_alone_answers(lab: Any) -> None:
    """The linear head stays as it began, so that neither it nor a sum with it is a way to answer."""
    method = GFPL(use_ce=False, head="etf")
    assert answered(method) == close(0.288675, 0.288675, -0.577350)
    assert set(method.predictors()) == {"own_classes", "before_retraining"}
    experiment = toy(lab, [[0, 4], [4, 0]], [0, 1], [[0, 1]], method={"name": "gfpl", "use_ce": False, "head": "etf"})
    _, client_state = lab.train(experiment)
    before, after = experiment.setting.initial.params, client_state["model"].params
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert not torch.equal(after["extra.projection.weight"], before["extra.projection.weight"])


def test_own_classes() -> None:
    """Class 0 is not held: out of reach where only own classes count; a global answer knows no own classes."""
    held = [False, True, True]
    assert answered(GFPL(), held) == [3, 2, 0]
    assert answered(GFPL(), held, "own_classes") == [-math.inf, 2, 0]
    own = GFPL(eval_classes="own")
    assert answered(own, held) == [-math.inf, 2, 0]
    assert answered(own, held, "all_classes") == [3, 2, 0]
    assert answered(own) == [3, 2, 0]
    assert answered(own, held, "etf_head")[0] == -math.inf


def test_what_is_scored_before_the_retraining(lab: Any) -> None:
    """A feature f has the logits (1, 0) by the new head and (0, 2) by the one of before, which round 3 retrained.

    Rounds without an exchange say no number; and nothing is scored without a retraining.
    """
    experiment = lab.experiment(method__name="gfpl", model={"name": "fedproto_cnn"})
    weights, images = experiment.setting.initial, lab.dataset.test.images[:1]
    bias = torch.zeros(6)

    def with_head(label: int) -> Weights:
        head = {"head.weight": torch.zeros_like(weights.params["head.weight"]), "head.bias": bias.clone()}
        head["head.bias"][label] = 1.0
        return Weights({**weights.params, **head})

    heads = {name: value for name, value in with_head(1).params.items() if name.startswith(("head.", "extra."))}
    known = {"heads_before": Weights(heads), "retrained": Count(3)}
    before = experiment.method.predictors()["before_retraining"]
    for said, label in (({"round": Count(3)}, 1), ({"round": Count(4)}, 0), ({}, 0)):
        found = lab.scores(experiment, with_head(0), images, {**known, **said}, predict=before)
        assert found.argmax().item() == label
    assert "before_retraining" not in GFPL(use_pfg=False).predictors()


def test_generated_features_are_drawn_from_the_last_mixtures(lab: Any) -> None:
    experiment = toy(lab, [[0, 4]], [1], [[0]], method=EXCHANGING)
    method, setting = experiment.method, experiment.setting
    for server in (method.start_server(setting), {"mixtures": pack_mixtures({}, None, 2)}):
        assert method.generated_features(Record(server), setting, 3, torch_stream(0, "draw")) is None
    features, labels = method.generated_features(Record({"mixtures": POINT}), setting, 3, torch_stream(0, "draw"))
    assert torch.allclose(features, torch.tensor([[3.0, 0.0]] * 3), atol=1e-6)
    assert labels.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("feature_dim", "classes", "asked", "expected"),
    [(50, 10, None, 50), (512, 10, None, 128), (512, 100, None, 128), (8, 20, None, 20), (50, 62, 80, 80)],
)
def test_length_of_the_projection(feature_dim: int, classes: int, asked: int | None, expected: int) -> None:
    """As long as the feature, but from K to 128 (gfpl.md, section 2: 50 for MNIST, 128 for CIFAR)."""
    layer = GFPL(projection_dim=asked).extra_layers(feature_dim, classes, feature_dim)["projection"]
    assert layer.weight.shape == (expected, feature_dim)
