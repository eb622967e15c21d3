"""CCVR: the calibration by hand, what it sends (baselines.md, section 7); bases are in test_on_top.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flcore.core.errors import ConfigError
from flcore.core.rng import torch_stream
from flcore.io.messages import Weights
from flcore.io.records import Record, serialise
from flcore.math.prototypes.gaussians import from_upper_triangles
from flcore.methods.ccvr import CCVR, STATISTICS, hidden_units, last_linear, signed_power
from flcore.methods.types import MODEL, Replies, RoundContext
from flcore.models import Backbone

SHORT = {"per_class": 20, "epochs": 2}


def calibrated(experiment: Any, server: Record) -> Weights:
    """The model that answers."""
    model: Weights = experiment.method.global_model(server)
    return model


def toy(lab: Any, pixels: list[list[int]], labels: list[int], clients: list[Any], **changes: Any) -> Any:
    """A linear model for two classes that starts at zero; features are pixels."""
    return lab.linear(pixels, labels, clients, ([[1, 0], [0, 1]], [0, 1]), **changes)


def test_a_base_that_calibrates_too(lab: Any, tmp_path: Path) -> None:
    """FedCSPC keeps its own stage `calibrate`, message and answer; the head is trained on from its calibrated one."""
    own = {"method.cal_epochs": 2, "method.n_aug": 1, "method.clusters": 2, "method.n_repeat": 2}
    method = {"name": "ccvr", "base": "fedcspc", "base_settings": {"fedcspc": own}, **SHORT}
    model = {"name": "fedcspc_cnn", "projection_dim": 16}
    experiment = lab.experiment(method=method, model=model, federation__rounds=1)
    method, setting = experiment.method, experiment.setting
    stages = method.server_steps()
    assert stages["calibrate"] == method.base_method.server_steps()["calibrate"]
    assert stages["calibrate-head"] == method.store_head
    assert [exchange.server_steps[-1] for exchange in method.round_exchanges(1, setting)] == [
        "build-exemplars",
        "calibrate-head",
    ]
    server = lab.run(experiment, tmp_path / "run").state.server
    assert set(method.broadcast(server, 0, RoundContext(setting, 1))) == {"model", "encoder_prototypes"}
    below, after = method.base_method.global_model(server), calibrated(experiment, server)
    for name, value in below.params.items():
        assert torch.equal(after.params[name], value) != name.startswith("head."), name
    sent = method.broadcast(server, 0, RoundContext(setting, 1, CCVR.collect_leg))
    assert lab.same(sent[MODEL], below) and not lab.same(below, server[MODEL])


def test_traffic(lab: Any, tmp_path: Path) -> None:
    """d = 8: each of a client's classes has 8 + 8·9/2 = 44 float32 and two integers; all four clients answer.

    P = 3,094 parameters (test_traffic.py) go down to the three of the cohort, then to all four, with 192
    bytes of statistics each; up they come from the cohort alone.
    """
    changes = {"federation": {"rounds": 1, "participation": 0.75}}
    run = lab.run(lab.experiment(method={"name": "ccvr", **SHORT}, **changes), tmp_path / "run")
    pairs = int((lab.partition.counts > 0).sum())
    assert run.history[0]["bytes_up"] == {
        "model": 3 * 3094 * 4, "model_buffers": 3 * 192, "num_samples": 24, "statistics": pairs * (44 * 4 + 16),
    }  # fmt: skip
    assert run.history[0]["bytes_down"] == {"model": 7 * 3094 * 4, "model_buffers": 7 * 192}
    assert run.history[0]["scalars_up"] == 3 * 3094 + 44 * pairs


def statistics_of(lab: Any, experiment: Any, client: int, server: Record | None = None) -> Any:
    """A client's answer in the last exchange of the last round."""
    held = server or experiment.method.start_server(experiment.setting)
    reply, _ = lab.train(experiment, client, number=experiment.config.federation.rounds, exchange=1, server=held)
    return reply.message[STATISTICS]


def from_clients(lab: Any, experiment: Any, *clients: int) -> Replies:
    return Replies({client: {STATISTICS: statistics_of(lab, experiment, client)} for client in clients})


A, B = [[0, 0], [2, 0]], [[1, 3], [3, 3], [2, 6]]


def test_statistics_by_hand(lab: Any) -> None:
    """B: mean (2, 4), unbiased covariance [[1, 0], [0, 3]] as (1, 0, 3); a class of one sample (5, 7) has zeros."""
    experiment = toy(lab, [*A, *B, [5, 7]], [0, 0, 0, 0, 0, 1], [[0, 1], [2, 3, 4, 5]], method__name="ccvr")
    found = statistics_of(lab, experiment, 1)
    assert found["classes"].tolist() == [0, 1]
    assert found["counts"].tolist() == [3, 1]
    assert found["means"].tolist() == [[2, 4], [5, 7]]
    assert found["covariances"].tolist() == [[1, 0, 3], [0, 0, 0]]


def virtual(lab: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """What the server draws from A and B of class 0; class 1 has one sample."""
    experiment = toy(
        lab, [*A, *B, [5, 7]], [0, 0, 0, 0, 0, 1], [[0, 1], [2, 3, 4, 5]], method={"name": "ccvr", **options}
    )
    replies = from_clients(lab, experiment, 1, 0)
    return experiment.method.virtual_features(experiment.setting.initial, replies, experiment.setting)


def test_virtual_features_of_pooled_samples(lab: Any) -> None:
    """Fact a: mean (1.6, 2.4), covariance [[1.3, 1.2], [1.2, 6.3]], of 50,000 draws to about 2 %."""
    features, labels = virtual(lab, per_class=50_000)
    assert labels.tolist() == [0] * 50_000
    assert features.dtype == torch.float32
    assert features.mean(0).tolist() == pytest.approx([1.6, 2.4], abs=0.05)
    assert torch.cov(features.T).flatten().tolist() == pytest.approx([1.3, 1.2, 1.2, 6.3], abs=0.15)


def test_single_samples_take_part_if_asked(lab: Any) -> None:
    """One sample has covariance 0: it is drawn as itself."""
    features, labels = virtual(lab, per_class=3, min_count=1)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert features[3:].tolist() == [[5, 7]] * 3


def of_the_body(lab: Any, **options: Any) -> Any:
    """Nothing is learnt by the base; two clients hold (2, 0) of class 0, once each."""
    method = {"name": "ccvr", "per_class": 4, "epochs": 1, "lr": 0.1, **options}
    return toy(lab, [[2, 0], [2, 0]], [0, 0], [[0], [1]], method=method, local={"lr": 1e-12, "batch_size": 100})


def test_calibration_by_hand(lab: Any, tmp_path: Path) -> None:
    """Two samples in all, covariance 0: four times (2, 0) of class 0, head zero, one step of 0.1.

    Row 0 has gradient (-1/2)·(2, 0), bias -1/2: W_0 = (0.1, 0), b_0 = 0.05. The loss was ln 2; now the logits differ by
    2·(0.2 + 0.05) = 0.5 and it is ln(1 + e^-0.5) = 0.474077.
    """
    assert math.log(1 + math.exp(-0.5)) == pytest.approx(0.474077, abs=1e-6)
    experiment = of_the_body(lab)
    run = lab.run(experiment, tmp_path / "run")
    params = calibrated(experiment, run.state.server).params
    assert params["head.weight"].flatten().tolist() == pytest.approx([0.1, 0, -0.1, 0], abs=1e-6)
    assert params["head.bias"].tolist() == pytest.approx([0.05, -0.05], abs=1e-6)
    assert run.history[0]["server"] == pytest.approx(
        {
            "calibration_loss_before": math.log(2),
            "calibration_loss": 0.474077,
            "calibration_features": 4,
            "calibration_classes": 1,
        },
        abs=1e-6,
    )


def test_the_head_of_before_answers_until_then(lab: Any, tmp_path: Path) -> None:
    """Image (2, 0): before all logits are 0 (to the 1e-12 of the base's step), now ±(0.1·2 + 0.05) = ±0.25."""
    experiment = of_the_body(lab)
    server = lab.run(experiment, tmp_path / "run").state.server
    image = lab.toy_dataset([[2, 0]], [0], None, None).train.images
    for held, expected in ((server, [0.25, -0.25]), (server.without("calibrated_head"), [0, 0])):
        found = lab.scores(experiment, calibrated(experiment, held), image, held)
        assert found.tolist()[0] == pytest.approx(expected, abs=1e-6)


def test_passes_and_batches_of_the_calibration(lab: Any, tmp_path: Path) -> None:
    """Second step, probability p = 1/(1 + e^0.5) of class 1: W_00 = 0.1 + 0.1·2p = 0.1755081; twice over the four, or

    once over them in batches of two.
    """
    expected = 0.1 + 0.2 / (1 + math.exp(0.5))
    assert expected == pytest.approx(0.1755081, abs=1e-7)
    for number, options in enumerate(({"epochs": 2}, {"batch_size": 2})):
        experiment = of_the_body(lab, **options)
        run = lab.run(experiment, tmp_path / f"{number}")
        found = calibrated(experiment, run.state.server).params["head.weight"][0, 0].item()
        assert found == pytest.approx(expected, abs=1e-6)


def test_without_a_class_of_enough_samples_the_model_stays(lab: Any, tmp_path: Path) -> None:
    experiment = of_the_body(lab, min_count=3)
    run = lab.run(experiment, tmp_path / "run")
    assert "calibrated_head" not in run.state.server and "server" not in run.history[0]
    assert lab.same(calibrated(experiment, run.state.server), run.state.server[MODEL])


def test_private_batchnorm_statistics(lab: Any, tmp_path: Path) -> None:
    """Each client looks through its own; they and what the base remembers stay what they were."""
    changes = {"federation__rounds": 2, "model": {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "local"}}
    alone = lab.run(lab.experiment(method__name="moon", **changes), tmp_path / "moon")
    found = lab.run(lab.experiment(method={"name": "ccvr", "base": "moon", **SHORT}, **changes), tmp_path / "ccvr")
    for client in range(4):
        assert serialise(found.client_state(client)) == serialise(alone.client_state(client))
    last = found.history[-1]["alternatives"]["before_calibration"]["mean_local"]
    assert last == alone.history[-1]["mean_local"]


class Projecting(Backbone):
    """Pixels, a hidden layer with ReLU, a linear projection (perhaps with ReLU), a head."""

    def __init__(self, inputs: int, num_classes: int, end: nn.Module | None) -> None:
        layers = [nn.Linear(inputs, 3), nn.ReLU(), nn.Linear(3, 5)]
        projection = nn.Sequential(*layers, *([end] if end else []))
        super().__init__(nn.Flatten(), projection, nn.Linear(5, num_classes))


@dataclass(frozen=True)
class ProjectingSpec:
    name: ClassVar[str] = "projecting"
    summary: ClassVar[str] = "toy"
    end: bool = False

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return Projecting(shape[0] * shape[1] * shape[2], num_classes, nn.ReLU() if self.end else None)


def projecting(lab: Any, end: bool = False, **options: Any) -> Any:
    method = {"name": "ccvr", "tap": "hidden", **SHORT, **options}
    return lab.experiment(spec=ProjectingSpec(end), method=method, federation__rounds=1)


def test_hidden_units_are_what_the_last_layer_reads(lab: Any) -> None:
    """W a + b of them are the features."""
    setting = projecting(lab).setting
    assert last_linear(setting) == "projection.2."
    with pytest.raises(ConfigError, match=r"method\.tap = hidden: the model's projection does not end in a linear"):
        CCVR(tap="hidden").start_server(projecting(lab, end=True).setting)
    encoded = torch.randn(7, 256, generator=torch_stream(0, "encoded"))
    params = setting.initial.params
    hidden = hidden_units(encoded, setting.initial, setting)
    expected = (encoded @ params["projection.0.weight"].T + params["projection.0.bias"]).relu()
    assert torch.allclose(hidden, expected, atol=1e-5)
    features = hidden @ params["projection.2.weight"].T + params["projection.2.bias"]
    assert torch.allclose(features, setting.network.project(encoded, {}), atol=1e-5)


def test_statistics_of_hidden_units_are_those_of_features(lab: Any, tmp_path: Path) -> None:
    """Mapped on the server they give the Gaussians of the features; 3 + 6 = 9 scalars travel instead of 5 + 15 = 20."""
    hidden, plain = projecting(lab), projecting(lab, tap="feature")
    setting = hidden.setting
    found, expected = (statistics_of(lab, experiment, 0) for experiment in (hidden, plain))
    assert (found["means"].shape[1], found["covariances"].shape[1]) == (3, 6)
    assert (expected["means"].shape[1], expected["covariances"].shape[1]) == (5, 15)
    params = setting.initial.params
    weight, bias = params["projection.2.weight"], params["projection.2.bias"]
    assert torch.allclose(found["means"] @ weight.T + bias, expected["means"], atol=1e-5)
    inner, outer = (from_upper_triangles(one["covariances"]) for one in (found, expected))
    assert torch.allclose(weight @ inner @ weight.T, outer, atol=1e-5)
    run = lab.run(hidden, tmp_path / "run")
    pairs = int((lab.partition.counts > 0).sum())
    assert run.history[0]["bytes_up"]["statistics"] == pairs * (9 * 4 + 16)
    assert run.history[0]["server"]["calibration_loss"] < run.history[0]["server"]["calibration_loss_before"]


def test_the_map_is_that_of_the_trained_model(lab: Any) -> None:
    """Not of the initial one: with another last layer the server maps through that one."""
    experiment = projecting(lab)
    method, setting = experiment.method, experiment.setting
    other = Weights({**setting.initial.params, "projection.2.bias": setting.initial.params["projection.2.bias"] + 9})
    replies = from_clients(lab, experiment, 0)
    first, second = (method.virtual_features(model, replies, setting)[0] for model in (setting.initial, other))
    assert torch.allclose(second, first + 9, atol=1e-4)


def test_signed_power_and_back() -> None:
    """Roots 2, 0, -3 of 4, 0, -9; the inverse is the power 2; power 1 leaves the very tensor."""
    values = torch.tensor([4.0, 0.0, -9.0])
    assert signed_power(values, 0.5).tolist() == pytest.approx([2, 0, -3])
    assert signed_power(signed_power(values, 0.5), 2.0).tolist() == pytest.approx([4, 0, -9])
    assert signed_power(values, 1.0) is values


def test_statistics_of_transformed_features(lab: Any) -> None:
    """Features 1 and 9 have roots 1 and 3: mean 2, variance 2; draws are squares again, equal samples themselves."""
    method = {"name": "ccvr", "power": 0.5, "per_class": 5}
    experiment = toy(lab, [[1, 4], [9, 4], [4, 9], [4, 9]], [0, 0, 1, 1], [[0, 1, 2, 3]], method=method)
    found = statistics_of(lab, experiment, 0)
    assert found["means"][0].tolist() == pytest.approx([2, 2])
    assert found["covariances"][0].tolist() == pytest.approx([2, 0, 0])
    replies = Replies({0: {STATISTICS: found}})
    features, labels = experiment.method.virtual_features(experiment.setting.initial, replies, experiment.setting)
    assert features[labels == 0][:, 1].tolist() == pytest.approx([4] * 5)
    assert features[labels == 1].flatten().tolist() == pytest.approx([4, 9] * 5)


def test_a_calibration_that_diverges_says_so(lab: Any) -> None:
    """The same feature (2, 0) of both classes: at 3e38 the head jumps further with every change of the class."""
    method = {"name": "ccvr", "per_class": 4, "lr": 3e38, "batch_size": 1}
    experiment = toy(lab, [[2, 0]] * 4, [0, 0, 1, 1], [[0, 1, 2, 3]], method=method)
    server, replies = Record(experiment.method.start_server(experiment.setting)), from_clients(lab, experiment, 0)
    with pytest.raises(ArithmeticError, match=r"the calibration diverged .* lower method\.lr"):
        experiment.method.store_head(server, replies, RoundContext(experiment.setting, 1, CCVR.collect_leg))
