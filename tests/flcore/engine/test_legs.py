"""Rounds of several legs: each is trained, worked on, counted and committed on its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.core.errors import RunError
from flcore.core.rng import torch_stream
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.cohort import Cohort, participants_of, select_cohort
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.io.messages import Prototypes, Weights
from flcore.io.records import Key, Record, serialise
from flcore.math.losses.basic import cross_entropy
from flcore.math.prototypes.class_means import average_prototypes, class_means
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import MODEL, ClientContext, Exchange, LossInputs, Phase, Replies, RoundContext

MEANS = Key("means", Prototypes)


@dataclass(frozen=True)
class TwoLegs(FedAvg):
    """All clients say the mean features of their classes under the initial model; the server averages them.

    Then the cohort gets the global model with those means, trains, and trains its head on the means as well.
    """

    name = "two-legs"
    head_steps: int = 2

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        on_means = Phase(("head.",), steps=self.head_steps, source="pseudo", loss=self.loss_on_means)
        return (
            Exchange("collect", participants="all", phases=(), server_steps=("average-means",)),
            Exchange("train-clients", phases=(Phase(), on_means), server_steps=("aggregate",)),
        )

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Record:
        return server.only(MODEL, MEANS) if MEANS in server else Record()

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        means = ctx.received[MEANS]
        classes = means.present.nonzero().flatten()
        return {"pseudo": {"inputs": means.means[classes], "labels": classes}}

    def loss(self, model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
        assert "pseudo" not in context  # samples of a phase are no constants of a loss
        return super().loss(model, batch, context)

    def loss_on_means(self, model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
        return {"on_means": cross_entropy(model.classify(batch.images), batch.labels, batch.weight)}

    def reply(self, ctx: ClientContext, trained: Any) -> tuple[Record, Record]:
        if ctx.exchange == "collect":
            assert trained.steps == 0
            return {"means": class_means(*trained.features(ctx.setting.initial), ctx.setting.num_classes)}, {}
        return super().reply(ctx, trained)

    def server_steps(self) -> Any:
        def average(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            none = Prototypes.empty(ctx.setting.num_classes, ctx.setting.feature_dim)
            return server | {MEANS: average_prototypes(replies.of(MEANS), none)}, {}

        def aggregate(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            averaged, facts = super(TwoLegs, self).server_steps()["aggregate"](server, replies, ctx)
            return Record(averaged).without(MEANS), facts

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

    Exchange 2 at client 0, from zero: one step on (2, 0): W_0 = 0.1·(1/2)·(2, 0) = (0.1, 0), b_0 = 0.05, row 1
    opposite. Then two steps of the head on (1.5, 0) of class 0 and (0, 4) of class 1, both in each: the arithmetic
    below.
    """
    experiment = by_hand(lab, federation__rounds=1)
    worker_server = experiment.method.start_server(experiment.setting)
    said = [lab.train(experiment, client, server=worker_server)[0].message for client in (0, 1)]
    assert said[0]["means"].means.tolist() == [[2, 0], [0, 0]]
    assert said[1]["means"].means.tolist() == [[1, 0], [0, 4]]
    means = Prototypes(torch.tensor([[1.5, 0.0], [0.0, 4.0]]), torch.tensor([True, True]))
    reply, _ = lab.train(experiment, 0, exchange=1, server={**worker_server, "means": means})
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

    Exchange 2: to both clients the model of 6 parameters, 24 bytes, and two prototypes, 32 bytes; up 24 bytes and a
    count of 8 each. Over two rounds everything twice.
    """
    run = lab.run(by_hand(lab), tmp_path / "run")
    first, last = run.history
    assert first["bytes_up"] == {"means": 3 * 16, "model": 2 * 24, "num_samples": 2 * 8}
    assert first["bytes_down"] == {"means": 2 * 32, "model": 2 * 24}
    assert last["bytes_up"] == {name: 2 * size for name, size in first["bytes_up"].items()}
    assert last["bytes_down"] == {name: 2 * size for name, size in first["bytes_down"].items()}
    assert first["scalars_up"] == 3 * 2 + 2 * 6


class Watching(InlineOrchestrator):
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
    """Two samples and two steps of the head, in the second exchange alone: 6 steps a round."""
    watching = Watching(tmp_path / "run")
    run = lab.run(by_hand(lab), tmp_path / "run", orchestrator=watching)
    one = ["collect", "average-means", "train-clients", "aggregate", "evaluate"]
    assert watching.names == one * 2
    assert [(s.place, s.exchanges) for s in watching.states] == [
        ((1, 0), 0), ((1, 1), 1), ((2, 0), 2), ((2, 1), 3),
    ]  # fmt: skip
    assert ["means" in state.server for state in watching.states] == [False, True, False, True]
    assert (run.state.round, run.state.exchange, run.state.exchanges) == (2, 0, 4)
    assert [record["round"] for record in run.history] == [1, 2]
    timing = run.checkpoint.records("timing.jsonl")
    assert [(record["round"], record["leg"], record["steps"]) for record in timing] == [
        (1, "collect", 0), (1, "train-clients", 6), (2, "collect", 0), (2, "train-clients", 6),
    ]  # fmt: skip
    assert [set(record["seconds"]) for record in timing[:2]] == [set(one[:2]), set(one[2:])]
    assert run.state.steps == run.history[-1]["steps"] == 2 * 6


def test_one_leg_asks_everybody_and_the_other_the_cohort(lab: Any, tmp_path: Path) -> None:
    """Half of four clients train; all four say the mean of each class they hold, of 8·4 + 8 bytes."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}, "model": {"name": "fedgen_cnn", "feature_dim": 8}}
    experiment = lab.experiment(algorithm=TwoLegs(), **changes)
    (collect, train), cohort = experiment.method.round_exchanges(1, experiment.setting), select_cohort(experiment, 1)
    assert participants_of(experiment, collect, cohort, ()) == (0, 1, 2, 3)
    assert participants_of(experiment, train, cohort, ()) == cohort.trainers
    assert len(cohort.trainers) == 2
    run = lab.run(experiment, tmp_path / "run")
    held = int((lab.partition.counts > 0).sum())
    assert run.history[0]["bytes_up"]["means"] == held * (8 * 4 + 8)
    assert run.history[0]["bytes_up"]["num_samples"] == 2 * 8
    assert run.history[0]["participants"] == list(cohort.trainers)


@dataclass(frozen=True)
class TrainsTwice(FedAvg):
    """The cohort trains; then all clients take a step, and then all are asked; the server counts answers each time."""

    name = "trains-twice"

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        again = Exchange("again", participants="all", phases=(Phase(steps=1),), server_steps=("count",))
        return (
            *super().round_exchanges(round_number, setting),
            again,
            Exchange("ask", participants="all", phases=(), server_steps=("count",)),
        )

    def server_steps(self) -> Any:
        def count(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            return server, {"heard": len(replies)}

        return {**super().server_steps(), "count": count}


def test_no_leg_of_a_round_hides_another(lab: Any, tmp_path: Path) -> None:
    """Two of four clients train: round 1 says of them what it says where there are no other exchanges."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}}
    run = lab.run(lab.experiment(algorithm=TrainsTwice(), **changes), tmp_path / "run")
    [record], [plain] = run.history, lab.run(lab.experiment(**changes), tmp_path / "plain").history
    assert record["participants"] == plain["participants"]
    assert len(record["participants"]) == 2
    for key in ("train_loss", "train_loss_max"):
        assert record[key].keys() == {"cross_entropy", "again.cross_entropy"}
        assert record[key]["cross_entropy"] == plain[key]["cross_entropy"] != record[key]["again.cross_entropy"]
    assert record["server"] == {"heard": 4, "again.heard": 4, "train-clients.heard": 2}


@dataclass(frozen=True)
class NoisyTwice(FedAvg):
    """In both exchanges clients say noise that is drawn for one purpose, and the server draws its own."""

    name = "noisy-twice"
    second: str = "again"

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        exchanges = (
            Exchange("noise", phases=(), server_steps=("draw",)),
            Exchange(self.second, phases=(), server_steps=("draw",)),
        )
        return exchanges if round_number == 1 else exchanges[1:]

    def reply(self, ctx: ClientContext, trained: Any) -> tuple[Record, Record]:
        drawn = torch.rand(1, generator=ctx.stream("noise"))
        return {"said": Prototypes(drawn.reshape(1, 1), torch.tensor([True]))}, {}

    def server_steps(self) -> Any:
        def draw(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            means = [float(message["said"].means[0, 0]) for message in replies.values()]
            own = float(torch.rand(1, generator=ctx.stream("noise")))
            return server, {"noise": sum(means), "own": own, "numpy": ctx.numpy_stream("noise").random()}

        return {**super().server_steps(), "draw": draw}


def test_noise_of_two_legs_is_not_the_same(lab: Any, tmp_path: Path) -> None:
    """The first exchange has the streams of a round with one exchange; the second one draws others, in every round."""
    setting = lab.experiment().setting
    run = lab.run(lab.experiment(algorithm=NoisyTwice(), federation__rounds=2), tmp_path / "run")
    first, second = (record["server"] for record in run.history)
    for name in ("noise", "own", "numpy"):
        assert len({first[name], first[f"noise.{name}"], second[name]}) == 3
    plain = float(torch.rand(1, generator=torch_stream(setting.seed, "noise", 1)))
    assert first["noise.own"] == pytest.approx(plain)


def test_two_legs_of_a_round_have_two_names(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 1: noisy-twice .*\bnoise\b"):
        lab.run(lab.experiment(algorithm=NoisyTwice(second="noise")), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_anywhere_in_two_legs(lab: Any, stops: Any, after: bool, tmp_path: Path) -> None:
    """4 + 2 replies and three states: nine files, after each of which the run was stopped once."""
    changes = {"federation": {"rounds": 1, "participation": 0.5}, "spec": lab.ToySpec(encoder=True)}
    seen = stops.everywhere(lab, lab.experiment(algorithm=TwoLegs(), **changes), tmp_path, after=after)
    assert seen["replace"] >= 9


def test_stopped_between_the_legs_the_first_is_not_done_again(lab: Any, stops: Any, tmp_path: Path) -> None:
    """Nor are the seconds that it took forgotten."""
    experiment = by_hand(lab)
    expected = lab.run(experiment, tmp_path / "whole").bytes
    with pytest.raises(stops.Crash):
        lab.run(experiment, tmp_path / "run", orchestrator=stops.Stopping(at=2))
    checkpoint = Checkpoint(tmp_path / "run")
    assert checkpoint.read_state().place == (1, 1)
    first = checkpoint.records("timing.jsonl")
    again = Watching(tmp_path / "run")
    assert lab.run(experiment, tmp_path / "run", orchestrator=again).bytes == expected
    assert again.names[0] == "train-clients"
    exchanges = ["collect", "train-clients"] * 2
    assert checkpoint.records("timing.jsonl")[:1] == first
    assert [record["leg"] for record in checkpoint.records("timing.jsonl")] == exchanges


def test_phases_of_both_legs_have_random_numbers_of_their_own(lab: Any) -> None:
    """Two exchanges with one pass each: the second goes through the samples in another order than the first."""

    @dataclass(frozen=True)
    class Twice(FedAvg):
        def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
            return Exchange("first"), Exchange("second")

    experiment = lab.experiment(algorithm=Twice())
    models = [lab.train(experiment, exchange=exchange)[0].message["model"] for exchange in (0, 1)]
    assert serialise({"m": models[0]}) != serialise({"m": models[1]})
    again = lab.train(lab.experiment(), exchange=0)[0].message["model"]
    assert serialise({"m": again}) == serialise({"m": models[0]})


@dataclass(frozen=True)
class Nested(FedAvg):
    """A second exchange whose stages are none: what its clients say is only counted."""

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        return Exchange("train-clients"), Exchange("report", participants="all", phases=(), server_steps=())


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
    """A warm-up exchange in round 1 only: exchanges count 2, then 1 a round."""

    @dataclass(frozen=True)
    class WarmingUp(FedAvg):
        def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
            return (Exchange("warm-up"), Exchange()) if round_number == 1 else (Exchange(),)

    watching = Watching(tmp_path / "run")
    run = lab.run(lab.experiment(algorithm=WarmingUp()), tmp_path / "run", orchestrator=watching)
    assert [state.place for state in watching.states] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert (run.state.round, run.state.exchanges) == (3, 4)
    resumed = lab.run(lab.experiment(algorithm=WarmingUp()), tmp_path / "run")
    assert resumed.bytes == run.bytes


def test_a_failing_client_of_the_second_leg_is_named_by_its_round(lab: Any, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Diverging(TwoLegs):
        def initial_weights(self, ctx: ClientContext) -> Weights:
            start = super().initial_weights(ctx)
            return start if ctx.exchange == "collect" else Weights({n: t / 0 for n, t in start.params.items()})

    experiment = lab.experiment(algorithm=Diverging())
    with pytest.raises(RunError, match=r"^round 1, client 0 \(train-clients, local training\): training diverged"):
        lab.run(experiment, tmp_path / "run")
    assert Checkpoint(tmp_path / "run").read_state().place == (1, 1)
    checkpoint = Checkpoint(tmp_path / "run")
    with pytest.raises(RunError, match=r"^round 1, client 3 \(train-clients, local training\): training diverged"):
        InlineExecutor(experiment, checkpoint).train(lab.handed_out(experiment, checkpoint.read_state()), [[3]])


# ---- one cohort per round ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retraining(FedAvg):
    """After training, the same clients are asked again: over two images of their own, or over what they were sent."""

    name = "retraining"
    source: str | None = None
    poisoned: tuple[int, ...] = ()

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        again = (Phase(("head.",), steps=2, source=self.source),)
        report = Exchange("report", participants="all", phases=(), server_steps=())
        return Exchange("train-clients"), Exchange("retrain-clients", phases=again), report

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        dim = ctx.setting.feature_dim
        return {"pseudo": {"inputs": torch.zeros(2, dim), "labels": torch.tensor([0, 1])}} if self.source else {}

    def loss(self, model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
        features = batch.images if batch.images.ndim == 2 else model.features(batch.images)
        return {"cross_entropy": cross_entropy(model.classify(features), batch.labels, batch.weight)}

    def reply(self, ctx: ClientContext, trained: Any) -> Any:
        if ctx.client in self.poisoned and ctx.exchange == "train-clients":
            raise TypeError("no reply")
        return super().reply(ctx, trained)


def timed(lab: Any, algorithm: Any, **federation: Any) -> Any:
    """Clients of 1, 2, 3 and 4 images in batches of one, half a simulated second each."""
    clients = [range(0, 1), range(1, 3), range(3, 6), range(6, 10)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * 4)
    settings = {"local__batch_size": 1, "federation": {"rounds": 2, "step_seconds": 0.5, **federation}}
    return lab.experiment(partition=partition, algorithm=algorithm, model={"name": "fedcspc_cnn"}, **settings)


@pytest.mark.parametrize(
    ("source", "deadline", "expected"),
    [
        (None, 2.0, Cohort((0, 1), (2, 3), 2.0)),  # 1.5, 2, 2.5 and 3 seconds
        (None, 2.9, Cohort((0, 1, 2), (3,), 2.9)),
        ("pseudo", 1.2, Cohort((0, 1), (2, 3), 1.2)),  # what they were sent costs no time: 0.5, 1, 1.5 and 2
    ],
)
def test_the_cohort_is_that_of_the_whole_round(lab: Any, source: str, deadline: float, expected: Cohort) -> None:
    """Each client's own images of all exchanges together decide who is in time."""
    experiment = timed(lab, Retraining(source=source), deadline=deadline)
    assert select_cohort(experiment, 1) == expected


@pytest.mark.parametrize("source", [None, "pseudo"])
def test_who_was_late_in_one_leg_does_not_come_back_in_the_next(
    lab: Any, stops: Any, source: str | None, tmp_path: Path
) -> None:
    """Deadline 2 (1.2) seconds a round: 0 and 1 train and retrain, 2 and 3 are only sent both messages.

    The exchange for all is for all. Two rounds: two exchanges for 4, of which 2 answer, and one for 4, who all do.
    """
    deadline, watching = 1.2 if source else 2.0, stops.Stopping()
    experiment = timed(lab, Retraining(source=source), deadline=deadline)
    run = lab.run(experiment, tmp_path / "run", orchestrator=watching)
    one = [("train-clients", [0, 1]), ("retrain-clients", [0, 1]), ("report", [0, 1, 2, 3])]
    assert watching.asked == one * 2
    assert [record["simulated_seconds"] for record in run.history] == [deadline, 2 * deadline]
    assert [record["stragglers"] for record in run.history] == [[2, 3]] * 2
    model = 4 * experiment.setting.initial.num_parameters
    assert run.history[-1]["bytes_down"]["model"] == 2 * (4 + 4 + 4) * model
    assert run.history[-1]["bytes_up"]["model"] == 2 * (2 + 2 + 4) * model


def test_whoever_failed_in_one_leg_is_out_of_the_next(lab: Any, stops: Any, tmp_path: Path) -> None:
    """Client 2 fails in training: it does not retrain, not even after a stop in between; next round it is back."""
    experiment = timed(lab, Retraining(poisoned=(2,)), on_client_error="drop")
    whole = lab.run(experiment, tmp_path / "whole")
    assert [(number, client) for number, client, _ in whole.failures] == [(1, 2), (2, 2)]
    stopping, again = stops.Stopping(at=2), stops.Stopping()
    with pytest.raises(stops.Crash):
        lab.run(experiment, tmp_path / "run", orchestrator=stopping)
    assert lab.run(experiment, tmp_path / "run", orchestrator=again).bytes == whole.bytes
    train, retrain = ("train-clients", [0, 1, 2, 3]), ("retrain-clients", [0, 1, 3])
    report = ("report", [0, 1, 2, 3])
    assert stopping.asked + again.asked == [train, retrain, retrain, report, train, retrain, report]
