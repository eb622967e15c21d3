"""Rounds of several legs: each is trained, worked on, counted and committed on its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import Place
from flcore.engine.cohort import select_cohort
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import PlainSteps
from flcore.errors import RunError
from flcore.losses.basic import cross_entropy
from flcore.messages import Prototypes, Weights
from flcore.methods.fedavg import FedAvg
from flcore.methods.vocabulary import Context, Leg, Phase, Turn
from flcore.prototypes import average_prototypes, class_means
from flcore.records import Record, payload_of, serialise


@dataclass(frozen=True)
class TwoLegs(FedAvg):
    """All clients say the mean features of their classes under the initial model; the server averages them.

    Then the cohort gets the global model with those means, trains, and trains its head on the means as well.
    """

    name = "two-legs"
    head_steps: int = 2

    def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
        on_means = Phase(("head.",), steps=self.head_steps, source="pseudo", loss=self.loss_on_means)
        return (
            Leg("collect", who="all", phases=(), stages=("average-means",)),
            Leg("train-clients", phases=(Phase(), on_means), stages=("aggregate",)),
        )

    def broadcast(self, server: Record, client: int, setting: Any) -> Record:
        return {"model": server["model"], "means": server["means"]} if "means" in server else {}

    def context(self, turn: Turn) -> Context:
        means = payload_of(Prototypes, turn.inbox, "means")
        classes = means.present.nonzero().flatten()
        return {"pseudo": {"inputs": means.means[classes], "labels": classes}}

    def loss(self, model: Any, batch: Any, context: Context) -> dict[str, Tensor]:
        assert "pseudo" not in context  # samples of a phase are no constants of a loss
        return super().loss(model, batch, context)

    def loss_on_means(self, model: Any, batch: Any, context: Context) -> dict[str, Tensor]:
        return {"on_means": cross_entropy(model.classify(batch.images), batch.labels, batch.weight)}

    def reply(self, turn: Turn, trained: Any) -> tuple[Record, Record]:
        if turn.leg == "collect":
            assert trained.steps == 0
            return {"means": class_means(*trained.features(turn.setting.initial), turn.setting.num_classes)}, {}
        return super().reply(turn, trained)

    def stages(self) -> Any:
        def average(server: Record, replies: Any, setting: Any, number: int) -> Record:
            uploads = {client: payload_of(Prototypes, message, "means") for client, message in replies.items()}
            none = Prototypes.empty(setting.num_classes, setting.feature_dim)
            return {**server, "means": average_prototypes(uploads, none)}

        def aggregate(server: Record, replies: Any, setting: Any, number: int) -> Record:
            averaged = super(TwoLegs, self).stages()["aggregate"](server, replies, setting, number)
            return {name: payload for name, payload in averaged.items() if name != "means"}

        return {"average-means": average, "aggregate": aggregate}


PIXELS, LABELS = [[2, 0], [0, 4], [1, 0]], [0, 1, 0]


def by_hand(lab: Any, **changes: Any) -> Any:
    """Client 0 holds (2, 0) of class 0; client 1 holds (0, 4) of class 1 and (1, 0) of class 0. Features are pixels."""
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    partition = lab.by_hand(dataset, [[0], [1, 2]], [[0], [1, 2]])
    settings = {"local": {"lr": 0.1, "batch_size": 100}, "federation": {"rounds": 2}} | changes
    return lab.experiment(dataset, partition, lab.ToySpec(), TwoLegs(), **settings)


def test_two_legs_by_hand(lab: Any, tmp_path: Path) -> None:
    """Leg 1: class 0 is (2, 0) and (1, 0) at the two clients: mean (1.5, 0); class 1 is (0, 4).

    Leg 2 at client 0, from zero: one step on (2, 0): W_0 = 0.1·(1/2)·(2, 0) = (0.1, 0), b_0 = 0.05, row 1 opposite.
    Then two steps of the head on (1.5, 0) of class 0 and (0, 4) of class 1, both in each: the arithmetic below.
    """
    experiment = by_hand(lab, federation__rounds=1)
    worker_server = experiment.method.start_server(experiment.setting)
    said = [lab.train(experiment, client, server=worker_server)[0].message for client in (0, 1)]
    assert said[0]["means"].means.tolist() == [[2, 0], [0, 0]]
    assert said[1]["means"].means.tolist() == [[1, 0], [0, 4]]
    means = Prototypes(torch.tensor([[1.5, 0.0], [0.0, 4.0]]), torch.tensor([True, True]))
    reply, _ = lab.train(experiment, 0, leg=1, server={**worker_server, "means": means})
    weight, bias = torch.tensor([[0.1, 0.0], [-0.1, 0.0]]), torch.tensor([0.05, -0.05])
    for _ in range(2):
        errors = torch.softmax(means.means @ weight.T + bias, dim=1) - torch.eye(2)
        weight, bias = weight - 0.1 * errors.T @ means.means / 2, bias - 0.1 * errors.mean(dim=0)
    found = reply.message["model"].params
    assert torch.allclose(found["head.weight"], weight, atol=1e-6)
    assert torch.allclose(found["head.bias"], bias, atol=1e-6)
    assert reply.steps == 1 + 2
    assert set(reply.losses) == {"cross_entropy", "on_means"}
    run = lab.run(experiment, tmp_path / "run")
    assert set(run.state.server) == {"model"}


def test_traffic_is_counted_per_leg(lab: Any, tmp_path: Path) -> None:
    """Leg 1: nothing goes down, 1 + 2 prototypes of 2·4 + 8 = 16 bytes come up.

    Leg 2: to both clients the model of 6 parameters, 24 bytes, and two prototypes, 32 bytes; up 24 bytes and a count of
    8 each. Over two rounds everything twice.
    """
    run = lab.run(by_hand(lab), tmp_path / "run")
    first, last = run.history
    assert first["bytes_up"] == {"means": 3 * 16, "model": 2 * 24, "num_samples": 2 * 8}
    assert first["bytes_down"] == {"means": 2 * 32, "model": 2 * 24}
    assert last["bytes_up"] == {name: 2 * size for name, size in first["bytes_up"].items()}
    assert last["bytes_down"] == {name: 2 * size for name, size in first["bytes_down"].items()}
    assert first["scalars_up"] == 3 * 2 + 2 * 6


class Watching(PlainSteps):
    """Names of what is done, and what is committed whenever clients are about to work."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.names: list[str] = []
        self.states: list[Any] = []
        self._checkpoint = Checkpoint(folder)

    def call(self, name: str, function: Any, *arguments: Any) -> Any:
        self.names.append(name)
        return super().call(name, function, *arguments)

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.names.append(name)
        self.states.append(self._checkpoint.read_state())
        return super().map(name, function, items)


def test_each_leg_is_named_and_committed(lab: Any, tmp_path: Path) -> None:
    steps = Watching(tmp_path / "run")
    run = lab.run(by_hand(lab), tmp_path / "run", steps=steps)
    one = ["collect", "average-means", "train-clients", "aggregate", "evaluate"]
    assert steps.names == one * 2
    assert [(s.place, s.legs) for s in steps.states] == [
        (Place(1, 0), 0), (Place(1, 1), 1), (Place(2, 0), 2), (Place(2, 1), 3),
    ]  # fmt: skip
    assert ["means" in state.server for state in steps.states] == [False, True, False, True]
    assert (run.state.round, run.state.leg, run.state.legs) == (2, 0, 4)
    assert [record["round"] for record in run.history] == [1, 2]
    assert [record["round"] for record in run.checkpoint.records("timing.jsonl")] == [1, 1, 2, 2]
    assert run.state.steps == run.history[-1]["steps"] == 2 * 2 * 3


def test_one_leg_asks_everybody_and_the_other_the_cohort(lab: Any, tmp_path: Path) -> None:
    """Half of four clients train; all four say the mean of each class they hold, of 8·4 + 8 bytes."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}, "model": {"name": "fedgen_cnn", "feature_dim": 8}}
    experiment = lab.experiment(algorithm=TwoLegs(), **changes)
    collect, train = experiment.method.legs(1, experiment.setting)
    assert select_cohort(experiment, 1, collect).trainers == (0, 1, 2, 3)
    assert len(select_cohort(experiment, 1, train).trainers) == 2
    run = lab.run(experiment, tmp_path / "run")
    held = int((lab.partition.counts > 0).sum())
    assert run.history[0]["bytes_up"]["means"] == held * (8 * 4 + 8)
    assert run.history[0]["bytes_up"]["num_samples"] == 2 * 8
    assert run.history[0]["participants"] == list(select_cohort(experiment, 1, train).trainers)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_anywhere_in_two_legs(lab: Any, stops: Any, after: bool, tmp_path: Path) -> None:
    """4 + 2 replies and three states: nine files, before and after each of which the run was stopped once."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}, "spec": lab.ToySpec(encoder=True)}
    seen = stops.everywhere(lab, lab.experiment(algorithm=TwoLegs(), **changes), tmp_path, after=after)
    assert seen["replace"] >= 9


def test_stopped_between_the_legs_the_first_is_not_done_again(lab: Any, stops: Any, tmp_path: Path) -> None:
    experiment = by_hand(lab)
    expected = lab.run(experiment, tmp_path / "whole").bytes

    class Stopping(Watching):
        def map(self, name: str, function: Any, items: Any) -> list[Any]:
            if len(self.states) == 1:
                raise stops.Crash
            return super().map(name, function, items)

    with pytest.raises(stops.Crash):
        lab.run(experiment, tmp_path / "run", steps=Stopping(tmp_path / "run"))
    assert Checkpoint(tmp_path / "run").read_state().place == Place(1, 1)
    again = Watching(tmp_path / "run")
    assert lab.run(experiment, tmp_path / "run", steps=again).bytes == expected
    assert again.names[0] == "train-clients"


def test_phases_of_both_legs_have_random_numbers_of_their_own(lab: Any) -> None:
    """Two legs with one pass each: the second goes through the samples in another order than the first."""

    @dataclass(frozen=True)
    class Twice(FedAvg):
        def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
            return Leg("first"), Leg("second")

    experiment = lab.experiment(algorithm=Twice())
    models = [lab.train(experiment, leg=leg)[0].message["model"] for leg in (0, 1)]
    assert serialise({"m": models[0]}) != serialise({"m": models[1]})
    again = lab.train(lab.experiment(), leg=0)[0].message["model"]
    assert serialise({"m": again}) == serialise({"m": models[0]})


@dataclass(frozen=True)
class Nested(FedAvg):
    """A second leg whose stages are none: what its clients say is only counted."""

    def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
        return Leg("train-clients"), Leg("report", who="all", phases=(), stages=())


def test_a_leg_without_phases_and_stages_changes_nothing_but_the_traffic(lab: Any, tmp_path: Path) -> None:
    """Everybody receives the model and sends it back as it came."""
    plain = lab.run(lab.experiment(federation__rounds=1), tmp_path / "plain")
    nested = lab.run(lab.experiment(algorithm=Nested(), federation__rounds=1), tmp_path / "nested")
    assert serialise(nested.state.server) == serialise(plain.state.server)
    assert nested.state.steps == plain.state.steps
    for found, expected in ((nested.state.up, plain.state.up), (nested.state.down, plain.state.down)):
        assert {name: size.bytes for name, size in found.items()} == {
            name: 2 * size.bytes for name, size in expected.items()
        }


def test_the_legs_of_a_round_may_depend_on_the_round(lab: Any, tmp_path: Path) -> None:
    """A warm-up leg in round 1 only: legs count 2, then 1 a round."""

    @dataclass(frozen=True)
    class WarmingUp(FedAvg):
        def legs(self, round_number: int, setting: Any) -> tuple[Leg, ...]:
            return (Leg("warm-up"), Leg()) if round_number == 1 else (Leg(),)

    steps = Watching(tmp_path / "run")
    run = lab.run(lab.experiment(algorithm=WarmingUp()), tmp_path / "run", steps=steps)
    assert [state.place for state in steps.states] == [Place(1, 0), Place(1, 1), Place(2, 0), Place(3, 0)]
    assert (run.state.round, run.state.legs) == (3, 4)
    resumed = lab.run(lab.experiment(algorithm=WarmingUp()), tmp_path / "run")
    assert resumed.bytes == run.bytes


def test_a_failing_client_of_the_second_leg_is_named_by_its_round(lab: Any, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Diverging(TwoLegs):
        def begin(self, turn: Turn) -> Weights:
            start = super().begin(turn)
            return start if turn.leg == "collect" else Weights({n: t / 0 for n, t in start.params.items()})

    experiment = lab.experiment(algorithm=Diverging())
    with pytest.raises(RunError, match=r"^round 1, client 0: training diverged"):
        lab.run(experiment, tmp_path / "run")
    assert Checkpoint(tmp_path / "run").read_state().place == Place(1, 1)
    checkpoint = Checkpoint(tmp_path / "run")
    with pytest.raises(RunError, match=r"^round 1, client 3: training diverged"):
        InlineExecutor(experiment, checkpoint).train(checkpoint.read_state(), [[3]])
