"""Class means of features as they were during training, for methods that ask for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flcore.core.errors import RunError
from flcore.engine.client import ClientRunner
from flcore.engine.client_data import ClientData
from flcore.engine.local.plan import phase_layout, plan_batches
from flcore.engine.local.step import add_class_sums
from flcore.evaluation.forward import Forward
from flcore.io.records import serialise
from flcore.math.prototypes.class_means import class_means
from flcore.methods.api import Method
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedmlp import FedMLP
from flcore.methods.fedpa import FedPA
from flcore.methods.fedproto import FedProto
from flcore.methods.types import Exchange, Phase

RUNNING = {"proto_mode": "running"}


def test_sums_of_two_mini_batches() -> None:
    """Sums 6 and 3 of two and one samples, twice: 12 and 6 of four and two."""
    one = torch.tensor([[6.0], [3.0]]), torch.tensor([2.0, 1.0])
    twice = add_class_sums(add_class_sums(None, one), one)
    assert twice is not None and twice[0].tolist() == [[12], [6]] and twice[1].tolist() == [4, 2]
    assert add_class_sums(one, None) == one


@pytest.mark.parametrize(
    ("size", "local", "skip", "first"),
    [
        (10, {"epochs": 2}, False, {"none": 6, "all": 0, "last_pass": 3}),  # 4, 4, 2, 4, 4, 2
        (9, {"epochs": 2}, True, {"none": 4, "all": 0, "last_pass": 2}),  # 4, 4, (1), 4, 4, (1)
        (10, {"steps": 4}, False, {"none": 4, "all": 0, "last_pass": 1}),  # 4, 4, 2, 4: as many as a pass has
        (10, {"steps": 2}, False, {"none": 2, "all": 0, "last_pass": 0}),
        (0, {"epochs": 2}, False, {"none": 0, "all": 0, "last_pass": 0}),
    ],
)
def test_which_steps_are_noted(lab: Any, size: int, local: Any, skip: bool, first: dict[str, int]) -> None:
    experiment = lab.experiment(local={"batch_size": 4, **local})
    worker = ClientRunner(experiment)
    ctx = lab.receive(worker, 1, Exchange(), 0, experiment.method.start_server(experiment.setting), {})
    for note, expected in first.items():
        phase = Phase(record_features=note)  # type: ignore[arg-type]
        layout = phase_layout(size, experiment.config.local, phase, 1, skip_single=skip)
        tape = plan_batches(experiment, experiment.new_module(), [ctx], phase, 0, [layout])
        assert tape.recorded_from.tolist() == [expected]


def one_batch(lab: Any, **changes: Any) -> Any:
    """A client with all of five samples of three classes in every mini-batch; a linear encoder; no dropout."""
    dataset = lab.toy_dataset([[2, 0], [0, 4], [1, 1], [3, 5], [0, 1]], [0, 1, 1, 0, 2], None, None)
    partition = lab.by_hand(dataset, [[0, 1, 2, 3, 4]], [[0]])
    settings = {"local": {"lr": 0.5, "batch_size": 5} | changes.pop("local", {})}
    return lab.experiment(dataset, partition, lab.ToySpec(encoder=True), **settings, **changes)


def prototypes(lab: Any, method: dict[str, Any], **local: int) -> torch.Tensor:
    reply, _ = lab.train(one_batch(lab, method=method, local=local))
    found = reply.message["prototypes"]
    assert found.present.all()
    return torch.as_tensor(found.means)


@pytest.mark.parametrize("method", [{"name": "fedproto"}, {"name": "fedmlp", "alpha": 0}], ids=["fedproto", "fedmlp"])
def test_the_last_pass_has_the_weights_before_it(lab: Any, method: dict[str, Any]) -> None:
    """One mini-batch per epoch: the features of the third are those of the model that the second has left."""
    running = prototypes(lab, method | RUNNING, epochs=3)
    assert torch.allclose(running, prototypes(lab, method, epochs=2), atol=1e-6)
    assert not torch.allclose(running, prototypes(lab, method, epochs=3), atol=1e-3)
    assert not torch.allclose(running, prototypes(lab, method, epochs=1), atol=1e-3)


def test_all_passes(lab: Any) -> None:
    """FedPA's code: of three steps, the mean of the features under the initial weights and after each of two steps.

    The head starts at zero, so that the first step leaves the encoder, and the features, where they were.
    """
    method = {"name": "fedpa", "use_ge": False}
    experiment = one_batch(lab, method=method)
    (data,) = ClientData.of(experiment, [0], 1)
    features = Forward(experiment).part(experiment.setting.initial, data, "features")
    start = class_means(features, data.labels, 3).means
    one, two = (prototypes(lab, method, steps=steps) for steps in (1, 2))
    assert torch.allclose(start, one, atol=1e-6) and not torch.allclose(one, two, atol=1e-2)
    assert torch.allclose(prototypes(lab, method | RUNNING, steps=3), (start + one + two) / 3, atol=1e-6)


@pytest.mark.parametrize("name", ["fedproto", "fedmlp", "fedpa"])
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_nothing_else_changes(lab: Any, name: str, model: str) -> None:
    """The first round's weights and losses to the bit; other prototypes, of the same classes."""
    changes = {"model": {"name": model}, "local__epochs": 2}
    method = {"name": name} | ({"alpha": 0} if name == "fedmlp" else {})
    found = [lab.train(lab.experiment(method=method | mode, **changes)) for mode in ({}, RUNNING)]
    (final, _), (running, _) = found
    weights = [reply.message.get("model") or client_state["model"] for reply, client_state in found]
    assert serialise({"m": weights[0]}) == serialise({"m": weights[1]})
    assert final.losses == running.losses
    ours, theirs = final.message["prototypes"], running.message["prototypes"]
    assert torch.equal(ours.present, theirs.present) and not torch.allclose(ours.means, theirs.means, atol=1e-4)


@pytest.mark.parametrize("name", ["fedproto", "fedpa"])
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_stacked_clients(lab: Any, name: str, model: str) -> None:
    """Clients of unequal sizes: padding takes no part, and each notes the last pass of its own."""
    changes = {"method": {"name": name} | RUNNING, "model": {"name": model}, "local__epochs": 2}
    serial, stacked = (
        lab.train_stack(lab.experiment(engine__stack=stack, **changes), range(4)) for stack in (False, True)
    )
    assert len({int(size) for size in lab.partition.counts.sum(axis=1)}) > 1
    for client in range(4):
        ours, theirs = (found[client][0].message["prototypes"] for found in (serial, stacked))
        assert torch.equal(ours.present, theirs.present)
        assert torch.allclose(ours.means, theirs.means, atol=1e-4)


@pytest.mark.parametrize("stack", [False, True])
def test_a_loss_that_notes_nothing_is_named(lab: Any, stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedProto, "loss", FedAvg.loss)
    with pytest.raises(RunError, match="fedproto: a phase records features, but the loss never calls"):
        lab.train_stack(lab.experiment(method={"name": "fedproto"} | RUNNING, engine__stack=stack), range(2))


def test_who_asks(lab: Any) -> None:
    """FedProto's code has the last epoch, FedPA's all mini-batches; who sends no prototypes notes none."""
    setting = lab.experiment().setting

    def note(method: Method) -> str:
        ((phase,),) = (exchange.phases for exchange in method.round_exchanges(2, setting))
        return phase.record_features

    assert [note(method) for method in (FedProto(), FedMLP(), FedPA())] == ["none"] * 3
    asked = (FedProto(proto_mode="running"), FedMLP(proto_mode="running"), FedPA(proto_mode="running"))
    assert [note(method) for method in asked] == ["last_pass", "last_pass", "all"]
    assert note(FedPA(preset="authors")) == "all"
    assert note(FedPA(proto_mode="running", use_po=False, use_ad=False)) == "none"
