"""VHL by hand, its limit cases, what it sends once, and what clients keep (baselines.md sections 8, 21 to 23)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flcore.messages import Arrays, Weights
from flcore.methods.vhl import VHL, note_holders
from flcore.methods.vocabulary import Turn
from flcore.records import measure, serialise

SMALL = {"name": "vhl", "per_class": 5, "virtual_batch": 8}


def same(first: Weights, second: Weights) -> bool:
    """Equal to the bit, names and order included."""
    return first.header() == second.header() and serialise({"model": first}) == serialise({"model": second})


def apart(first: Weights, second: Weights) -> float:
    """Largest difference of two models' values."""
    return max(float((first.values[name].float() - second.values[name].float()).abs().max()) for name in first.values)


def toy(lab: Any, **method: Any) -> Any:
    """One sample (2, 0) of class 0 of two; a linear model that starts at zero, one step with learning rate 0.1."""
    dataset = lab.toy_dataset([[2, 0], [0, 4]], [0, 1], None, None)
    options = {"name": "vhl", "per_class": 3, "virtual_batch": 6, "lambda_a": 0} | method
    local = {"lr": 0.1, "batch_size": 100}
    partition = lab.by_hand(dataset, [[0]], [[0, 1]])
    return lab.experiment(dataset, partition, lab.ToySpec(), method=options, local=local, federation={"rounds": 1})


def from_zero(lab: Any, experiment: Any) -> Any:
    """A client's reply from a model that is zero in its additional outputs, too."""
    server = experiment.method.start_server(experiment.setting)
    zero = Weights({name: torch.zeros_like(value) for name, value in server["model"].params.items()})
    return lab.train(experiment, server={**server, "model": zero})[0]


def test_a_step_with_outputs_of_their_own(lab: Any) -> None:
    """Four outputs, probabilities 1/4. Real: gradient of the bias (-3/4, 1/4, 1/4, 1/4).

    Virtual, three each of outputs 2 and 3: (1/4, 1/4, -1/4, -1/4). Sum (-1/2, 1/2, 0, 0), times -0.1. Both losses ln 4.
    """
    reply = from_zero(lab, toy(lab))
    assert reply.message["model"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05, 0, 0], abs=1e-7)
    assert reply.losses == {
        "cross_entropy": pytest.approx(math.log(4)),
        "virtual": pytest.approx(math.log(4)),
    }


def test_a_step_with_the_outputs_of_the_classes(lab: Any) -> None:
    """Two outputs, probabilities 1/2. Real: (-1/2, 1/2); virtual, three of each: (0, 0). λ_v = 2: virtual 2 ln 2."""
    reply, _ = lab.train(toy(lab, label_style="patch", lambda_v=2.0))
    assert reply.message["model"].params["head.bias"].tolist() == pytest.approx([0.05, -0.05])
    assert reply.losses["virtual"] == pytest.approx(2 * math.log(2))


def test_what_the_head_learns_of_the_virtual_images(lab: Any) -> None:
    """Row 2 is virtual class 0, of three of the six images p_i: its gradient is x/4 + (1/6)·Σ_i (1/4 - [y_i = 0])·p_i.

    x = (2, 0); pixels of this data set are their own normalised values.
    """
    experiment = toy(lab)
    reply = from_zero(lab, experiment)
    images = experiment.method.start_server(experiment.setting)["virtual"]["images"].flatten(1).double()
    shares = torch.tensor([0.25 - 1] * 3 + [0.25] * 3, dtype=torch.float64)
    expected = -0.1 * (torch.tensor([2.0, 0.0]) / 4 + (shares.unsqueeze(1) * images).sum(0) / 6)
    assert reply.message["model"].params["head.weight"][2].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "outputs"),
    [({}, 20), ({"label_style": "patch"}, 10), ({"lambda_v": 0.0}, 10), ({"lambda_a": 0.0}, 20)],
)
def test_outputs(options: dict[str, Any], outputs: int) -> None:
    assert VHL(**options).num_outputs(10) == outputs


def test_the_outputs_of_virtual_classes_never_win(lab: Any) -> None:
    """A virtual output with the largest bias by far: the answer is still the best of the classes."""

    class Head:
        def features(self, images: torch.Tensor) -> torch.Tensor:
            return images

        def classify(self, features: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.0, 2.0, 1.0, 99.0, 5.0, 7.0]])

    images = torch.zeros(1, 1)
    assert VHL().predict(Head(), images, {}, None).tolist() == [[0.0, 2.0, 1.0]]  # type: ignore[arg-type]
    assert VHL(label_style="patch").predict(Head(), images, {}, None).shape == (1, 6)  # type: ignore[arg-type]


# ---- limit cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_without_its_terms_it_is_fedavg(lab: Any, model: str, tmp_path: Any) -> None:
    """To the bit, messages included; ``align_epochs`` = 0 is another way to have no contrastive part."""
    changes = {"model": {"name": model}, "federation__participation": 0.5, "local__momentum": 0.5}
    runs = {
        name: lab.run(lab.experiment(method=options, **changes), tmp_path / name)
        for name, options in {
            "fedavg": {"name": "fedavg"},
            "off": SMALL | {"lambda_v": 0, "lambda_a": 0},
            "never": SMALL | {"lambda_v": 0, "align_epochs": 0},
            "on": SMALL | {"label_style": "patch"},
        }.items()
    }
    expected = runs["fedavg"].state.server["model"]
    for name in ("off", "never"):
        assert same(runs[name].state.server["model"], expected)
        assert runs[name].history == runs["fedavg"].history
        assert set(runs[name].state.server) == {"model"}
    assert not same(runs["on"].state.server["model"], expected)


def test_everything_but_the_new_outputs_starts_like_fedavg(lab: Any) -> None:
    plain = lab.experiment(method__name="fedavg").setting.initial
    wide = lab.experiment(method=SMALL).setting.initial
    assert wide.params["head.weight"].shape[0] == 2 * plain.params["head.weight"].shape[0]
    for name, value in plain.values.items():
        assert torch.equal(wide.values[name][: len(value)] if value.ndim else wide.values[name], value)


@pytest.mark.parametrize("options", [{}, {"passes": "separate", "label_style": "patch"}, {"lambda_v": 0}])
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_stacked_clients_learn_the_same(lab: Any, model: str, options: dict[str, Any]) -> None:
    replies = []
    for stack in (False, True):
        experiment = lab.experiment(method=SMALL | options, model={"name": model}, engine__stack=stack)
        turns = lab.train_stack(experiment, range(4))
        replies.append([turns[client][0] for client in range(4)])
    for one, other in zip(*replies, strict=True):
        assert apart(one.message["model"], other.message["model"]) < 1e-4
        assert other.losses == pytest.approx(one.losses, abs=1e-3)


@pytest.mark.parametrize("stack", [False, True])
def test_poor_clients(lab: Any, stack: bool, tmp_path: Any) -> None:
    """A single sample, one class, fewer samples than a batch, and two classes that nobody holds."""
    labels = lab.dataset.train.labels
    rows = [(labels == label).nonzero().flatten().tolist() for label in range(4)]
    clients = [rows[0][:1], rows[1][:20], rows[2][:3] + rows[3][:2]]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 3)
    changes = {"engine__stack": stack, "partition__num_clients": 3, "local__epochs": 2}
    run = lab.run(lab.experiment(partition=partition, method=SMALL, **changes), tmp_path / "run")
    assert not run.state.failures
    assert all(bool(value.isfinite().all()) for value in run.state.server["model"].params.values())


# ---- the contrastive part lasts so many passes ---------------------------------------------------------------------


def aligned(lab: Any, method: VHL, samples: int, model: str = "fedgen_cnn") -> list[float]:
    """The draws of two passes in batches of 16; BatchNorm skips a last batch of one."""
    setting = lab.experiment(model={"name": model}).setting
    per_pass = math.ceil(samples / 16) - (samples % 16 == 1 and model == "fedgen_cnn")
    counts = torch.tensor([samples, 0, 0, 0, 0, 0])
    turn = Turn(setting, 1, "train-clients", 0, counts, {}, {})
    drawn = method.draws(turn, 2 * per_pass, torch.Generator().manual_seed(0))
    assert drawn["virtual"].shape == (2 * per_pass, min(method.virtual_batch, 6 * method.per_class))
    return drawn["aligned"].tolist()


@pytest.mark.parametrize(
    ("samples", "model", "expected"),
    [
        (40, "fedgen_cnn", [1, 1, 1, 0, 0, 0]),
        (33, "fedgen_cnn", [1, 1, 0, 0]),
        (33, "fedproto_cnn", [1, 1, 1, 0, 0, 0]),
        (16, "fedgen_cnn", [1, 0]),
    ],
)
def test_alignment_in_the_first_pass(lab: Any, samples: int, model: str, expected: list[float]) -> None:
    assert aligned(lab, VHL(align_epochs=1), samples, model) == expected
    assert aligned(lab, VHL(align_epochs=5), samples, model) == [1.0] * len(expected)


def test_after_the_alignment_the_contrast_is_nought(lab: Any) -> None:
    """One of two passes: the mean of the term over steps is about half of what it is with two."""
    contrast = {}
    for epochs in (1, 2):
        experiment = lab.experiment(method=SMALL | {"align_epochs": epochs}, local__epochs=2)
        reply, _ = lab.train(experiment)
        contrast[epochs] = reply.losses["contrast"]
    assert 0.4 < contrast[1] / contrast[2] < 0.65


# ---- traffic and memory --------------------------------------------------------------------------------------------


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


def test_counted_bytes_are_those_of_the_message(lab: Any) -> None:
    experiment = lab.experiment(method=SMALL)
    server = experiment.method.start_server(experiment.setting)
    message = experiment.method.broadcast(server, 0, experiment.setting)
    assert sum(size.bytes for size in measure(message).values()) == len(serialise(message))
    assert measure(message)["virtual"].bytes == 7680


def test_all_clients_hold_the_same_set_for_ever(lab: Any, tmp_path: Any) -> None:
    """Fact (b), in rounds 1 and R."""
    first, last = (
        lab.run(
            lab.experiment(method=SMALL, federation={"rounds": rounds, "participation": 0.5}), tmp_path / str(rounds)
        )
        for rounds in (1, 6)
    )
    expected = serialise({"virtual": first.state.server["virtual"]})
    for run in (first, last):
        for client in run.state.memories:
            assert serialise(run.memory(client)) == expected
    assert len(first.state.memories) == 2
    assert len(last.state.memories) > 2
    other = lab.experiment(seed=1, method=SMALL)
    assert serialise({"virtual": other.method.start_server(other.setting)["virtual"]}) != expected


def test_a_memory_is_written_once(lab: Any) -> None:
    experiment = lab.experiment(method=SMALL)
    server = experiment.method.start_server(experiment.setting)
    reply, memory = lab.train(experiment, server=server)
    assert set(memory) == {"virtual"}
    knows = note_holders(server, {0: reply.message}, experiment.setting, 1)
    again, kept = lab.train(experiment, server=knows, memory=memory, number=2)
    assert "virtual" not in again.down
    assert (kept, again.remembers) == ({}, False)


@pytest.mark.parametrize("stack", [False, True])
def test_private_statistics_do_not_push_it_out(lab: Any, stack: bool, tmp_path: Any) -> None:
    """With model.batchnorm=local the engine remembers statistics anew in every round."""
    changes = {"method": SMALL, "model": {"name": "fedgen_cnn", "feature_dim": 8, "batchnorm": "local"}}
    run = lab.run(lab.experiment(engine__stack=stack, **changes), tmp_path / "run")
    expected = run.state.server["virtual"]["images"]
    for client in range(4):
        assert set(run.memory(client)) == {"virtual", "batchnorm"}
        assert torch.equal(run.memory(client)["virtual"]["images"], expected)


def test_holders_are_noted_without_changing_what_came_in() -> None:
    before = {"holders": Arrays({"clients": torch.zeros(4, dtype=torch.bool)})}
    after = note_holders(before, {3: {}, 1: {}}, None, 1)  # type: ignore[arg-type]
    assert after["holders"]["clients"].tolist() == [False, True, False, True]  # type: ignore[index]
    assert not before["holders"]["clients"].any()


def test_features_of_the_set_for_analyses(lab: Any) -> None:
    experiment = lab.experiment(method=SMALL)
    server = experiment.method.start_server(experiment.setting)
    found = experiment.method.generated_features(server, experiment.setting, 3, torch.Generator())
    features, labels = found
    assert features.shape == (18, 8)
    assert labels.tolist() == [label for label in range(6) for _ in range(3)]
    off = replace(experiment.method, lambda_v=0.0, lambda_a=0.0)
    assert (
        off.generated_features(off.start_server(experiment.setting), experiment.setting, 3, torch.Generator()) is None
    )
