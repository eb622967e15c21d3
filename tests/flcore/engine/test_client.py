"""A client's turn: BatchNorm policies, phases, and that nothing of one client reaches the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.client import ClientRunner
from flcore.engine.client_data import ClientData
from flcore.engine.exchange import Failure
from flcore.engine.local.serial import SerialTrainer, TrainJob
from flcore.evaluation.forward import Forward
from flcore.io.messages import Weights
from flcore.io.records import Record, serialise
from flcore.math.prototypes.class_means import class_means
from flcore.methods import METHODS
from flcore.methods.local import Local
from flcore.methods.types import BATCHNORM, Phase
from flcore.models import load_weights
from tests.cases import quick


def weights_of(record: Any) -> Weights:
    return record["model"]


# ---- BatchNorm ---------------------------------------------------------------------------------------------------


def test_aggregated_statistics_are_averaged_like_weights(lab: Any, tmp_path: Path) -> None:
    """Clients of 43, 50, 62, 85 samples count 3, 4, 4, 6 batches: (129 + 200 + 248 + 510)/240 = 4.53, rounded 5.

    Running means: the same weights, from what each client says.
    """
    experiment = lab.experiment(federation__rounds=1)
    server = experiment.method.start_server(experiment.setting)
    said = [weights_of(lab.train(experiment, client, server=server)[0].message) for client in range(4)]
    name = "encoder.1.running_mean"
    sizes = [43, 50, 62, 85]
    expected = sum(size / 240 * model.buffers[name].double() for size, model in zip(sizes, said, strict=True))
    assert [int(model.buffers["encoder.1.num_batches_tracked"]) for model in said] == [3, 4, 4, 6]
    run = lab.run(experiment, tmp_path / "run")
    buffers = weights_of(run.state.server).buffers
    assert torch.allclose(buffers[name], expected.float(), rtol=1e-6, atol=1e-8)
    assert int(buffers["encoder.1.num_batches_tracked"]) == 5
    assert "model_buffers" in run.history[0]["bytes_up"]
    assert run.state.client_states == {}


def test_local_statistics_stay_at_home_and_are_kept(lab: Any, tmp_path: Path) -> None:
    """Two rounds of client 0 (3 batches each): its counter is 6. Nothing of it travels; the server has none."""
    run = lab.run(lab.experiment(model__batchnorm="local", federation__rounds=2), tmp_path / "run")
    assert set(run.history[-1]["bytes_up"]) == {"model", "num_samples"}
    assert set(run.history[-1]["bytes_down"]) == {"model"}
    assert weights_of(run.state.server).buffers == {}
    counters = [int(run.client_state(k)[BATCHNORM].buffers["encoder.1.num_batches_tracked"]) for k in range(4)]
    assert counters == [6, 8, 8, 12]
    means = [run.client_state(k)[BATCHNORM].buffers["encoder.1.running_mean"] for k in range(4)]
    assert not torch.equal(means[0], means[1])
    assert all(
        set(run.client_state(k)) == {BATCHNORM} and run.client_state(k)[BATCHNORM].params == {} for k in range(4)
    )


def test_a_client_goes_on_from_its_own_statistics(lab: Any) -> None:
    """With 0 kept, training starts from the initial statistics; with something kept, from that."""
    experiment = lab.experiment(model__batchnorm="local")
    server = experiment.method.start_server(experiment.setting)
    worker = ClientRunner(experiment)
    _, kept = lab.train(experiment, 0, server=server, worker=worker)
    lab.train(experiment, 1, server=server, worker=worker)  # another client on the same module in between
    _, fresh = lab.train(experiment, 0, server=server, worker=worker)
    assert serialise(fresh) == serialise(kept)
    _, further = lab.train(experiment, 0, server=server, client_state=kept, worker=worker)
    assert int(further[BATCHNORM].buffers["encoder.1.num_batches_tracked"]) == 6


@pytest.mark.parametrize("method", quick(["fedproto", "local"], 1))
def test_local_statistics_of_a_method_that_keeps_its_model(lab: Any, method: str, tmp_path: Path) -> None:
    """Personal models with private statistics are what they are under any policy: local equals aggregate."""
    changes = {"method__name": method}
    expected = lab.run(lab.experiment(**changes), tmp_path / "aggregate")
    found = lab.run(lab.experiment(model__batchnorm="local", **changes), tmp_path / "local")
    assert [r["local_accuracy"] for r in found.history] == [r["local_accuracy"] for r in expected.history]


@pytest.mark.parametrize(
    "method",
    quick([name for name in METHODS if not name.startswith(("protolda", "closed", "linear"))], ["fedavg", "fedproto"]),
)
def test_frozen_statistics_never_change(lab: Any, method: str, tmp_path: Path) -> None:
    settings = {"name": method} | ({"use_ca": False} if method == "fedcspc" else {})  # this model has no projection
    experiment = lab.experiment(model__batchnorm="frozen", method=settings, federation__rounds=1)
    run = lab.run(experiment, tmp_path / "run")
    assert "model_buffers" not in run.history[-1]["bytes_up"] | run.history[-1]["bytes_down"]
    trainer, ctx = SerialTrainer(experiment), ClientRunner(experiment)
    exchange = next(
        exchange for exchange in experiment.method.round_exchanges(1, experiment.setting) if exchange.phases
    )
    server = Record(experiment.method.start_server(experiment.setting))
    contexts, data = [lab.receive(ctx, 1, exchange, 0, server, Record())], ClientData.of(experiment, [0], 1)
    (outcome,) = trainer.train(TrainJob(contexts, data, [experiment.setting.initial], exchange.phases, 0))
    initial = experiment.setting.initial
    assert all(torch.equal(outcome.weights.buffers[name], tensor) for name, tensor in initial.buffers.items())
    assert not any(torch.equal(outcome.weights.params[name], tensor) for name, tensor in initial.params.items())


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_no_client_reaches_the_next(lab: Any, model: str, stack: bool) -> None:
    """A worker that has trained others gives the replies of a new one, bit for bit."""
    changes = {"model": {"name": model}, "local__momentum": 0.9, "engine__stack": stack}
    experiment = lab.experiment(method__name="fedproto", **changes)
    used = ClientRunner(experiment)
    lab.train_stack(experiment, [3, 1], worker=used)
    first, second = (lab.train_stack(experiment, [0, 2], worker=worker) for worker in (used, ClientRunner(experiment)))
    for client in (0, 2):
        assert serialise(first[client][0].message) == serialise(second[client][0].message)
        assert serialise(first[client][1]) == serialise(second[client][1])


def test_no_dropout_noise_is_left_for_evaluation(lab: Any) -> None:
    """Prototypes of a worker that has just trained are the class means of its trained model, asked afresh."""
    experiment = lab.experiment(model={"name": "fedproto_cnn"}, method__name="fedproto")
    reply, client_state = lab.train(experiment)
    (data,) = ClientData.of(experiment, [0], 1)
    features = Forward(experiment).part(client_state["model"], data, "features")
    expected = class_means(features, data.labels, experiment.setting.num_classes)
    assert torch.equal(reply.message["prototypes"].means, expected.means)


# ---- phases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phased(Local):
    name = "phased"
    parts: tuple[Phase, ...] = ()

    def phases(self) -> tuple[Phase, ...]:
        return self.parts


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize(("moves", "stays"), [("head.", "encoder."), ("encoder.", "head.")])
def test_a_phase_moves_its_part_and_nothing_else(lab: Any, moves: str, stays: str, stack: bool) -> None:
    """The frozen part is the same to the bit, BatchNorm statistics included (baselines.md section 16)."""
    changes = {"local__weight_decay": 0.1, "local__momentum": 0.9, "engine__stack": stack}
    experiment = lab.experiment(algorithm=Phased(parts=(Phase((moves,)),)), **changes)
    for _, client_state in lab.train_stack(experiment, [0, 1]).values():
        initial, found = experiment.setting.initial, client_state["model"]
        for before, after in ((initial.params, found.params), (initial.buffers, found.buffers)):
            for name, tensor in before.items():
                assert torch.equal(after[name], tensor) == name.startswith(stays), name


def test_phases_follow_each_other_with_their_own_lengths(lab: Any) -> None:
    """Head for two passes of 3 batches, then body for 4 mini-batches, then all as configured (one pass): 6 + 4 + 3."""
    parts = (Phase(("head.",), epochs=2), Phase(("encoder.",), steps=4), Phase())
    reply, _ = lab.train(lab.experiment(algorithm=Phased(parts=parts)))
    assert reply.steps == 13


# ---- what a turn and a trained client say ------------------------------------------------------------------------


def test_a_turn_says_where_it_is(lab: Any) -> None:
    """Client 2's counts are those of the partition; what it received is the broadcast; its stream is its own."""
    experiment = lab.experiment(method__name="fedproto")
    server = experiment.method.start_server(experiment.setting)
    exchange = experiment.method.round_exchanges(4, experiment.setting)[0]
    ctx = lab.receive(ClientRunner(experiment), 4, exchange, 2, server, {"model": experiment.setting.initial})
    assert (ctx.round, ctx.exchange, ctx.client, ctx.task) == (4, "train-clients", 2, None)
    assert ctx.class_counts.tolist() == lab.partition.counts[2].tolist()
    assert set(ctx.received) == {"prototypes"} and set(ctx.client_state) == {"model"}
    draws = {name: torch.rand(3, generator=ctx.stream(*key)).tolist() for name, key in {
        "a": ("a",), "b": ("b",), "a0": ("a", 0), "a1": ("a", 1),
    }.items()}  # fmt: skip
    assert len({tuple(values) for values in draws.values()}) == 4
    assert torch.rand(3, generator=ctx.stream("a")).tolist() == draws["a"]


@dataclass(frozen=True)
class Looking(Local):
    """Keeps what a trained client can be asked."""

    name = "looking"

    def reply(self, ctx: Any, trained: Any) -> Any:
        asked = {
            "features": trained.features(),
            "initial": trained.features(ctx.setting.initial),
            "encoded": trained.encoded(),
        }
        found = {name: Weights({"x": values, "y": labels.float()}) for name, (values, labels) in asked.items()}
        assert trained.num_samples == int(ctx.class_counts.sum())
        return {}, {"model": trained.weights, **found}


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize("model", quick(["fedcspc_cnn", "fedgen_cnn", "fedproto_cnn"], 1))
def test_features_of_the_trained_and_of_another_model(lab: Any, model: str, stack: bool) -> None:
    """In evaluation mode, in the order of the client's samples, with the weights asked for; asking changes nothing."""
    experiment = lab.experiment(algorithm=Looking(), model={"name": model}, engine__stack=stack)
    for client, (_, client_state) in lab.train_stack(experiment, [1, 3]).items():
        module = experiment.new_module().eval()
        images = lab.dataset.train.images[experiment.trainers[client]].float() / 255
        images = (images - 0.3) / 0.3
        assert experiment.dataset.meta.mean == pytest.approx((0.3,))
        for weights, asked, part in (
            (client_state["model"], "features", module.features),
            (experiment.setting.initial, "initial", module.features),
            (client_state["model"], "encoded", module.encode),
        ):
            load_weights(module, weights)
            with torch.no_grad():
                assert torch.allclose(part(images), client_state[asked].params["x"], rtol=1e-4, atol=1e-5), asked
            labels = lab.dataset.train.labels[experiment.trainers[client]]
            assert torch.equal(client_state[asked].params["y"], labels.float())


def test_a_stack_of_one_client_gives_one_reply(lab: Any) -> None:
    found = lab.train_stack(lab.experiment(engine__stack=True), [2])
    assert list(found) == [2] and not isinstance(found[2], Failure)
