"""FedASAM by hand: ε, a step, the mean over rounds (baselines.md 10)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.fedasam import AVERAGE, AVERAGED, FedASAM
from flcore.methods.fedcspc import CALIBRATED
from flcore.methods.types import MODEL, Replies, RoundContext

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # ‖g‖ = 1: ε = 0.5·g.
        (FedASAM(rho=0.5, adaptive=False), (0.3, 0.4)),
        # T = (1.2, 2.2), T·g = (0.72, 1.76) of norm 1.901578: 0.5·(1.44·0.6, 4.84·0.8)/1.901578.
        (FedASAM(rho=0.5), (0.227180, 1.018102)),
    ],
    ids=["SAM", "ASAM"],
)
def test_the_way_uphill_by_hand(method: FedASAM, expected: tuple[float, float]) -> None:
    """Fact a: w (1, -2), g (0.6, 0.8), ρ 0.5, η 0.2."""
    weight, grad = torch.tensor([1.0, -2.0]), torch.tensor([0.6, 0.8])
    point = method.uphill({"layer.weight": weight}, {"layer.weight": grad})
    assert (point["layer.weight"] - weight).tolist() == pytest.approx(expected, abs=1e-6)


def test_one_norm_for_all_tensors_and_biases_as_they_are() -> None:
    """w 3 with T = 3.2, g 0.25; b -7 with T = 1, g 0.6: T·g = (0.8, 0.6) of norm 1, ε = 0.1·(3.2·0.8, 0.6)."""
    weights = {"head.weight": torch.tensor([3.0]), "head.bias": torch.tensor([-7.0])}
    grads = {"head.weight": torch.tensor([0.25]), "head.bias": torch.tensor([0.6])}
    point = FedASAM(rho=0.1).uphill(weights, grads)
    assert (point["head.weight"].item(), point["head.bias"].item()) == pytest.approx((3.256, -6.94))
    still = FedASAM().uphill(weights, {name: torch.zeros(1) for name in weights})
    assert all(torch.equal(still[name], value) for name, value in weights.items())


def test_one_step_by_hand(lab: Any) -> None:
    """SAM, ρ = √5·0.2, on x = (2, 0) of class 0 from zero: g is (∓1, 0) on the rows of W and ∓0.5 on b, of norm √2.5.

    ε = ρ·g/√2.5 = 0.2·√2·g. There the logits differ by 2·0.2·√2·(-2 - 0.5) = -√2: class 0 has probability p = 1/(1 +
    e^√2), the gradient on row 0 is -(1 - p)·(2, 0), on b_0 -(1 - p); and w is 0 before the step.
    """
    method = {"name": "fedasam", "rho": 0.2 * math.sqrt(5), "adaptive": False}
    reply, client_state = lab.train(lab.linear(method=method))
    wrong = 1 / (1 + math.exp(-math.sqrt(2)))
    params = reply.message[MODEL].params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.2 * wrong, 0, -0.2 * wrong, 0])
    assert params["head.bias"].tolist() == pytest.approx([0.1 * wrong, -0.1 * wrong])
    # The loss is the one whose gradient moves: at w + ε.
    assert reply.losses == pytest.approx({"cross_entropy": math.log(1 + math.exp(math.sqrt(2)))})
    assert client_state == {}


def test_the_first_pass_leaves_running_statistics_alone(lab: Any) -> None:
    """In one step from the same weights: FedAvg's counter of batches, and statistics of w + ε, not of w."""
    found, plain = (
        lab.train(lab.experiment(method__name=name, local__steps=1))[0].message[MODEL].buffers
        for name in ("fedasam", "fedavg")
    )
    assert found["encoder.1.num_batches_tracked"] == plain["encoder.1.num_batches_tracked"] == 1
    assert not torch.equal(found["encoder.1.running_mean"], plain["encoder.1.running_mean"])


def test_the_mean_over_rounds() -> None:
    """Models 2, 4, 9 of rounds 3, 4, 5 of R = 4 (0.75·4 = 3) have the means 2, 3, 5; before there is none.

    Every second round counts rounds 3 and 5: (2 + 9)/2. The model that is sent stays.
    """

    def after(rounds: dict[int, float], every: int) -> Record:
        server = Record({MODEL: Weights({"w": torch.zeros(1)})})
        for number, value in rounds.items():
            server = server | {MODEL: Weights({"w": torch.tensor([value])})}
            ctx: Any = SimpleNamespace(round=number, setting=SimpleNamespace(rounds=4))
            server, _ = FedASAM(swa=True, swa_every=every).average_rounds(server, Replies({}), ctx)
        return server

    models = {1: 7.0, 2: 7.0, 3: 2.0, 4: 4.0, 5: 9.0}
    for last, mean in ((3, 2), (4, 3), (5, 5)):
        server = after({number: value for number, value in models.items() if number <= last}, 1)
        assert server[AVERAGE].params["w"].item() == mean
        assert server[MODEL].params["w"].item() == models[last]
        assert FedASAM(swa=True).global_model(server) is server[AVERAGE]  # type: ignore[arg-type]
    assert AVERAGE not in after({1: 7.0, 2: 7.0}, 1)
    every_second = after(models, 2)
    assert (every_second[AVERAGE].params["w"].item(), every_second[AVERAGED].value) == (5.5, 2)


def test_a_run_answers_with_the_mean(lab: Any, tmp_path: Any) -> None:
    """R = 3, from round ⌈0.5·3⌉ = 2: the mean of the models of rounds 2 and 3, which are those of a run without it."""
    runs = {
        rounds: lab.run(
            lab.experiment(method={"name": "fedasam", "swa": swa, "swa_start": 0.5}, federation__rounds=rounds),
            tmp_path / f"{rounds}-{swa}",
        ).state.server
        for rounds, swa in ((2, False), (3, True))
    }
    second, third, mean = runs[2][MODEL], runs[3][MODEL], runs[3][AVERAGE]
    for name, value in mean.params.items():
        assert torch.allclose(value, (second.params[name] + third.params[name]) / 2, atol=1e-6)


def test_what_is_calibrated_for_the_mean_does_not_go_down_with_the_last_model(lab: Any, tmp_path: Any) -> None:
    """Where the mean over rounds answers, H and F are made for it; clients get the model that they do not fit."""
    for swa, down in ((False, CALIBRATED), (True, MODEL)):
        settings = {"fedasam": {"method.swa": swa, "method.swa_start": 0.5}}
        method = {"name": "fedcspc", "base": "fedasam", "base_settings": settings, "cal_epochs": 1, "n_aug": 1}
        experiment = lab.experiment(method=method, model=CSPC, federation__rounds=2)
        server = lab.run(experiment, tmp_path / str(swa)).state.server
        sent = experiment.method.broadcast(server, 0, RoundContext(experiment.setting, 3))[MODEL]
        assert (AVERAGE in server) is swa
        assert not torch.equal(server[CALIBRATED].params["head.weight"], server[MODEL].params["head.weight"])
        assert torch.equal(sent.params["head.weight"], server[down].params["head.weight"])
