"""VHL by hand, its limit cases, what it sends once, and what clients keep (baselines.md sections 8, 21 to 23)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Record
from flcore.methods.kit.virtual_images import VIRTUAL
from flcore.methods.types import MODEL, ClientContext, Replies, RoundContext
from flcore.methods.vhl import HOLDERS, VHL, note_holders
from tests.cases import quick

SMALL = {"name": "vhl", "per_class": 5, "virtual_batch": 8}


def started(experiment: Any) -> Record:
    return Record(experiment.method.start_server(experiment.setting))


def toy(lab: Any, **method: Any) -> Any:
    """One sample (2, 0) of class 0 of two; a linear model that starts at zero, one step with learning rate 0.1."""
    options = {"name": "vhl", "per_class": 3, "virtual_batch": 6, "lambda_a": 0} | method
    return lab.linear(clients=[[0]], method=options)


def from_zero(lab: Any, experiment: Any) -> Any:
    """A client's reply from a model that is zero in its additional outputs, too."""
    server = started(experiment)
    zero = Weights({name: torch.zeros_like(value) for name, value in server[MODEL].params.items()})
    return lab.train(experiment, server=server | {MODEL: zero})[0]


def test_a_step_with_outputs_of_their_own(lab: Any) -> None:
    """Four outputs, probabilities 1/4. Real: gradient of the bias (-3/4, 1/4, 1/4, 1/4).

    Virtual, three each of outputs 2 and 3: (1/4, 1/4, -1/4, -1/4). Sum (-1/2, 1/2, 0, 0), times -0.1. Both losses ln 4.
    """
    reply = from_zero(lab, toy(lab))
    assert reply.message["model"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05, 0, 0], abs=1e-7)
    assert reply.losses == {"cross_entropy": pytest.approx(math.log(4)), "virtual": pytest.approx(math.log(4))}


def test_a_step_with_the_outputs_of_the_classes(lab: Any) -> None:
    """Two outputs, probabilities 1/2. Real: (-1/2, 1/2); virtual, three of each: (0, 0). λ_v = 2: virtual 2 ln 2."""
    reply, _ = lab.train(toy(lab, label_style="patch", lambda_v=2.0))
    assert reply.message["model"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    assert reply.losses["virtual"] == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize("kind", ["gaussian", "stylegan"])
def test_what_the_head_learns_of_the_virtual_images(lab: Any, kind: str) -> None:
    """Row 2 is virtual class 0, of three of the six images p_i: its gradient is x/4 + (1/6)·Σ_i (1/4 - [y_i = 0])·p_i.

    x = (2, 0); pixels of this data set are their own normalised values.
    """
    experiment = toy(lab, images=kind)
    reply = from_zero(lab, experiment)
    images = experiment.method.virtual_set(experiment.setting).flatten(1).double()
    shares = torch.tensor([0.25 - 1] * 3 + [0.25] * 3, dtype=torch.float64)
    expected = -0.1 * (torch.tensor([2.0, 0.0]) / 4 + (shares.unsqueeze(1) * images).sum(0) / 6)
    assert reply.message["model"].params["head.weight"][2].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "outputs"), [({}, 20), ({"label_style": "patch"}, 10), ({"lambda_v": 0.0}, 10), ({"lambda_a": 0.0}, 20)]
)
def test_outputs(options: dict[str, Any], outputs: int) -> None:
    assert VHL(**options).num_outputs(10) == outputs


def test_the_outputs_of_virtual_classes_never_win() -> None:
    """A virtual output with the largest bias by far: the answer is still the best of the classes."""

    class Head:
        def features(self, images: torch.Tensor) -> torch.Tensor:
            return images

        def classify(self, features: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.0, 2.0, 1.0, 99.0, 5.0, 7.0]])

    images = torch.zeros(1, 1)
    assert VHL().predict(Head(), images, {}, None).tolist() == [[0.0, 2.0, 1.0]]  # type: ignore[arg-type]
    assert VHL(label_style="patch").predict(Head(), images, {}, None).shape == (1, 6)  # type: ignore[arg-type]


def test_everything_but_the_new_outputs_starts_like_fedavg(lab: Any) -> None:
    plain = lab.experiment(method__name="fedavg").setting.initial
    wide = lab.experiment(method=SMALL).setting.initial
    assert wide.params["head.weight"].shape[0] == 2 * plain.params["head.weight"].shape[0]
    for name, value in plain.values.items():
        assert torch.equal(wide.values[name][: len(value)] if value.ndim else wide.values[name], value)


def aligned(method: VHL, setting: Any, steps: int, per_pass: int) -> list[float]:
    """Which of so many steps have the contrastive part."""
    drawn = method.random_inputs(
        ClientContext(setting, 1, steps_per_pass=per_pass), steps, torch.Generator().manual_seed(0)
    )
    assert drawn["virtual"].shape == (steps, min(method.virtual_batch, 6 * method.per_class))
    return drawn["aligned"].tolist()


def test_alignment_in_the_first_passes(lab: Any) -> None:
    """Passes of two steps, three and a half of them."""
    setting = lab.experiment().setting
    for epochs, expected in ((1, [1, 1, 0, 0, 0, 0, 0]), (2, [1, 1, 1, 1, 0, 0, 0]), (5, [1] * 7)):
        assert aligned(VHL(align_epochs=epochs), setting, 7, 2) == expected


@pytest.mark.parametrize(("batchnorm", "steps"), [("aggregate", 1), ("frozen", 2)])
def test_a_pass_is_as_long_as_training_makes_it(lab: Any, batchnorm: str, steps: int) -> None:
    """17 samples in batches of 16: BatchNorm skips the single one, unless frozen. Two passes, the first aligned."""
    noted: list[tuple[int, list[float]]] = []

    class Watched(VHL):
        def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Any:
            drawn = super().random_inputs(ctx, steps, generator)
            noted.append((ctx.steps_per_pass, drawn["aligned"].tolist()))
            return drawn

    partition = lab.by_hand(lab.dataset, [range(17)], [range(10)])
    experiment = lab.experiment(
        partition=partition,
        algorithm=Watched(per_class=5, virtual_batch=8, align_epochs=1),
        model={"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": batchnorm},
        local__epochs=2,
        partition__num_clients=1,
    )
    lab.train(experiment)
    assert noted == [(steps, [1.0] * steps + [0.0] * steps)]


def test_after_the_alignment_the_contrast_is_nought(lab: Any) -> None:
    """One of two passes: the mean of the term over steps is about half of what it is with two."""
    contrast = {}
    for epochs in (1, 2):
        experiment = lab.experiment(method=SMALL | {"align_epochs": epochs}, local__epochs=2)
        reply, _ = lab.train(experiment)
        contrast[epochs] = reply.losses["contrast"]
    assert 0.4 < contrast[1] / contrast[2] < 0.65


def test_the_virtual_set_travels_once(lab: Any, tmp_path: Any) -> None:
    """C·M·pixels = 6·5·256 = 7,680 bytes as uint8, at a client's first round; nothing else differs from FedAvg.

    fedgen_cnn at 1x16x16 with d = 8 has 3,094 parameters for 6 classes; 6 more outputs are 6·8 + 6 = 54 (C·d + C).
    Two of four clients a round: in the end those who took part at all have it.
    """
    changes = {"federation": {"rounds": 6, "participation": 0.5}}
    run = lab.run(lab.experiment(method=SMALL, **changes), tmp_path / "run")
    seen: set[int] = set()
    for number, record in enumerate(run.history, start=1):
        seen |= set(record["participants"])
        assert record["bytes_down"]["virtual"] == 7680 * len(seen)
        assert record["bytes_down"]["model"] == record["bytes_up"]["model"] == number * 2 * 4 * (3094 + 54)
        assert set(record["bytes_up"]) == {"model", "model_buffers", "num_samples"}
    assert len(seen) > 2  # so that the set came later than in the first round to somebody
    holders = run.state.server["holders"]["clients"]
    assert holders.nonzero().flatten().tolist() == sorted(seen)


def test_all_clients_learn_from_the_set_that_was_sent(lab: Any) -> None:
    """Fact (b), in rounds 1 and R, by whomever it is drawn; a function of the seed alone."""
    experiment, again, other = (lab.experiment(method=SMALL, seed=seed) for seed in (0, 0, 1))
    sent = experiment.method.broadcast(started(experiment), 0, RoundContext(experiment.setting, 1))[VIRTUAL]["images"]
    for client, number in ((0, 1), (3, 9)):
        ctx = ClientContext(again.setting, number, client=client)
        assert torch.equal(again.method.loss_inputs(ctx)["virtual"]["images"], sent)
    assert torch.equal(experiment.method.virtual_images(started(experiment), experiment.setting), sent)
    assert not torch.equal(other.method.virtual_set(other.setting), sent)


@pytest.mark.parametrize("stack", quick([False, True], 1))
@pytest.mark.parametrize(("batchnorm", "remembered"), quick([("local", {"batchnorm"}), ("aggregate", set())], 1))
def test_nobody_keeps_the_set(lab: Any, stack: bool, batchnorm: str, remembered: set[str], tmp_path: Any) -> None:
    """It can be drawn again: neither the server's state nor a memory grows with it."""
    changes = {"method": SMALL, "model": {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": batchnorm}}
    run = lab.run(lab.experiment(engine__stack=stack, federation__rounds=2, **changes), tmp_path / "run")
    assert set(run.state.server) == {"model", "holders"}
    assert {name for client in range(4) for name in run.client_state(client)} == remembered


def test_holders_are_noted_without_changing_what_came_in() -> None:
    before = Record({HOLDERS: TensorDict({"clients": torch.zeros(4, dtype=torch.bool)})})
    after, _ = note_holders(before, Replies({3: {}, 1: {}}), None)  # type: ignore[arg-type]
    assert after[HOLDERS]["clients"].tolist() == [False, True, False, True]
    assert not before[HOLDERS]["clients"].any()


def test_features_of_the_set_for_analyses(lab: Any) -> None:
    experiment = lab.experiment(method=SMALL)
    features, labels = experiment.method.generated_features(
        started(experiment), experiment.setting, 3, torch.Generator()
    )
    assert features.shape == (18, 8)
    assert labels.tolist() == [label for label in range(6) for _ in range(3)]
    off = replace(experiment.method, lambda_v=0.0, lambda_a=0.0)
    server = Record(off.start_server(experiment.setting))
    assert off.generated_features(server, experiment.setting, 3, torch.Generator()) is None
    assert off.virtual_images(server, experiment.setting) is None
