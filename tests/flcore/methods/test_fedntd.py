"""FedNTD: two steps by hand, its teacher, its limit cases to the bit, and its traffic (baselines.md 5, 22 and 23)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from flcore.io.messages import Weights
from flcore.methods.api import teacher_output
from flcore.methods.fedntd import FedNTD
from flcore.methods.types import Batch
from flcore.models.network import View

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}


@pytest.mark.parametrize(("tau", "squared"), [(1.0, False), (2.0, False), (2.0, True)])
def test_two_steps_by_hand(lab: Any, tau: float, squared: bool) -> None:
    """x = (1, 0) of class 0, head W = 0, b = (0, ln 2, 0), learning rate 0.1, β = 3.

    Step 1: softmax (1/4, 1/2, 1/4) has gradient (-3/4, 1/2, 1/4), on b as on the column of W that x reads; teacher and
    student are one, the distillation and its gradient are 0. Step 2: z = (0.15, ln 2 - 0.1, -0.05), teacher (ln 2, 0)
    on classes 1 and 2. With p, q the teacher's and the student's probability of class 1 among the two, at temperature
    τ, the distillation adds β·(q - p)/τ to the gradient of z_1 and the opposite to that of z_2.
    """
    beta, rate = 3.0, 0.1
    method = {"name": "fedntd", "beta": beta, "tau": tau, "tau_squared": squared}
    local = {"lr": rate, "batch_size": 100, "epochs": 2}
    experiment = lab.linear([[1, 0], [0, 1], [1, 1]], [0, 1, 2], [[0], [1, 2]], method=method, local=local)
    model = Weights({"head.weight": torch.zeros(3, 2), "head.bias": torch.tensor([0, math.log(2), 0])})
    reply, client_state = lab.train(experiment, server={"model": model})
    logits = [0.15, math.log(2) - 0.1, -0.05]
    total = sum(map(math.exp, logits))
    p = 1 / (1 + math.exp(-math.log(2) / tau))
    q = 1 / (1 + math.exp(-(logits[1] - logits[2]) / tau))
    factor = beta * (tau**2 if squared else 1)
    pull = factor * (q - p) / tau
    second = [math.exp(logits[0]) / total - 1, math.exp(logits[1]) / total + pull, math.exp(logits[2]) / total - pull]
    steps = [-rate * (a + b) for a, b in zip((-3 / 4, 1 / 2, 1 / 4), second, strict=True)]
    params = reply.message["model"].params
    assert params["head.weight"][:, 0].tolist() == pytest.approx(steps, abs=1e-6)
    assert params["head.bias"].tolist() == pytest.approx([steps[0], math.log(2) + steps[1], steps[2]], abs=1e-6)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert reply.losses["distillation"] == pytest.approx(factor * divergence / 2, abs=1e-6)
    assert model.params["head.bias"].tolist() == pytest.approx([0, math.log(2), 0])
    assert client_state == {}


@pytest.mark.parametrize("model", [{"name": "fedgen_cnn"}, {"name": "fedproto_cnn"}], ids=["batchnorm", "dropout"])
def test_the_teacher_is_in_evaluation_mode(lab: Any, model: dict[str, Any]) -> None:
    """In the first step teacher and student have the same weights.

    Without dropout and BatchNorm they agree; with them they cannot, and the teacher's pass leaves the client's running
    statistics alone: those of one step are FedAvg's.
    """
    plain, _ = lab.train(lab.experiment(model=CSPC, method__name="fedntd", local__steps=1))
    assert plain.losses["distillation"] == pytest.approx(0, abs=1e-7)
    reply, _ = lab.train(lab.experiment(model=model, method__name="fedntd", local__steps=1))
    assert reply.losses["distillation"] > 1e-4
    averaged, _ = lab.train(lab.experiment(model=model, method__name="fedavg", local__steps=1))
    found, expected = (r.message["model"].buffers for r in (reply, averaged))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_classes_leave_fedavg_and_a_warning(lab: Any) -> None:
    local = {"lr": 0.1, "batch_size": 100, "epochs": 3}
    experiments = {beta: lab.linear(method={"name": "fedntd", "beta": beta}, local=local) for beta in (0.0, 1.0)}
    with pytest.warns(UserWarning, match="two classes"):
        server = experiments[1.0].method.start_server(experiments[1.0].setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiments[0.0].method.start_server(experiments[0.0].setting)
        lab.experiment(method__name="fedntd").method.start_server(lab.experiment().setting)
    on, off = (lab.train(experiments[beta], server=server)[0] for beta in (1.0, 0.0))
    assert on.losses["distillation"] == 0
    assert lab.same(on.message, off.message)


class OneModel(View):
    """Features are the images, logits (f, 0, 0); other weights may be asked, or not."""

    def __init__(self, others: bool) -> None:
        self.others = others

    @property
    def params(self) -> dict[str, torch.Tensor]:
        return {}

    def call_part(self, part: str, inputs: torch.Tensor, weights: Any) -> torch.Tensor:
        assert weights is None or self.others, "asked in the step although it is known"
        made = inputs if weights is None else inputs + weights["shift"]
        return made if part == "features" else torch.cat([made, torch.zeros(len(made), 2)], 1)

    def for_extra_inputs(self) -> View:
        return self

    def record_features(self, features: torch.Tensor) -> None:
        raise NotImplementedError


def test_a_teacher_that_is_known_is_not_asked() -> None:
    """The same loss from logits that were looked up as from the model; x = 1 of class 2, others (1, 0).

    Teacher (1 + 3 + 3, 0): the head's shift comes on top of the features'.
    """
    images, labels = torch.ones(1, 1), torch.tensor([2])
    inputs = {"teacher": {"shift": torch.tensor([3.0])}}
    asked = FedNTD().loss(OneModel(True), Batch(images, labels), inputs)
    answer = teacher_output(OneModel(True), Batch(images, labels), inputs, "teacher", "logits")
    assert answer.tolist() == [[7.0, 0.0, 0.0]]
    known = Batch(images, labels, per_sample={"teacher": answer})
    assert FedNTD().loss(OneModel(False), known, {})["distillation"] == asked["distillation"] > 0
