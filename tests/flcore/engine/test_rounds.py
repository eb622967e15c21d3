"""The round: the same bytes however it is carried out; names, evaluation, empty rounds, failing stages."""

from __future__ import annotations

import json
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import flcore
from flcore.core.errors import RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.exchange import Failure
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import Observers, run_rounds
from flcore.io.messages import Count, TensorDict
from flcore.io.records import Record, serialise
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import BATCHNORM, ClientContext, Exchange, Replies, RoundContext, TrainedClient
from tests.cases import quick

FLCORE = str(Path(flcore.__file__).parent)

# Everything that has a memory, a sample of clients and random numbers at once.
RICH = {"federation": {"rounds": 3, "participation": 0.6}, "data__augmentation": "crop_flip"}


@pytest.mark.parametrize(
    ("method", "model"), quick([("fedproto", None), ("gfpl", None), ("fedproto", "fedproto_cnn")], 1)
)
def test_twice_gives_the_same_bytes(lab: Any, method: str, model: str | None, tmp_path: Path) -> None:
    changes = {**RICH, "method__name": method, "model": {"name": model} if model else lab.model_of(method)}
    first = lab.run(lab.experiment(**changes), tmp_path / "first")
    torch.rand(3), np.random.rand(3)
    assert lab.run(lab.experiment(**changes), tmp_path / "second").bytes == first.bytes
    other = lab.run(lab.experiment(seed=1, **changes), tmp_path / "other")
    assert other.bytes["history.jsonl"] != first.bytes["history.jsonl"]


def test_global_generators_are_not_touched(lab: Any, tmp_path: Path) -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    lab.run(lab.experiment(model={"name": "fedproto_cnn"}, **RICH), tmp_path / "run")
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_few_frames_between_a_run_and_a_loss(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten from ``run_rounds`` on; ``flcore.run`` and ``train`` call that, so that 12 precede a method's loss."""
    loss, stacks = FedAvg.loss, []

    def noted(*arguments: Any) -> dict[str, torch.Tensor]:
        stacks.append([frame for frame in traceback.extract_stack() if frame.filename.startswith(FLCORE)])
        return loss(*arguments)

    monkeypatch.setattr(FedAvg, "loss", noted)
    lab.run(lab.experiment(federation={"rounds": 1}, local={"epochs": 1}), tmp_path / "run")
    assert {frames[0].name for frames in stacks} == {"run_rounds"}
    assert max(map(len, stacks)) <= 10


class Scrambled(InlineOrchestrator):
    """Groups finish in another order: the last is trained first."""

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        items = list(items)
        done = {i: function(items[i]) for i in reversed(range(len(items)))}
        return [done[i] for i in range(len(items))]


@pytest.mark.parametrize("clients_per_task", quick([3, 1], 1))
def test_groups_and_their_order_do_not_matter(lab: Any, clients_per_task: int, tmp_path: Path) -> None:
    changes = {"method__name": "fedproto", "federation__rounds": 2}
    expected = lab.run(lab.experiment(**changes), tmp_path / "plain").bytes
    experiment = lab.experiment(**changes, engine__clients_per_task=clients_per_task)
    assert lab.run(experiment, tmp_path / "scrambled", orchestrator=Scrambled()).bytes == expected
    assert lab.run(experiment, tmp_path / "threads", orchestrator=lab.Threaded()).bytes == expected


# ---- failing stages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FedAvg):
    name = "failing"
    error: Exception | None = None

    def server_steps(self) -> Any:
        def stage(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            assert self.error is not None
            raise self.error

        return {"fuse": stage}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("nothing to fuse"), "nothing to fuse"),
        (TypeError("not a number"), "TypeError: not a number"),
        (KeyError("model"), "KeyError: 'model'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failing_stage_is_named(lab: Any, error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        lab.run(lab.experiment(algorithm=Failing(error=error)), tmp_path / "run")
    assert str(caught.value) == f"round 1, server step fuse: {said}"
    assert "in stage" in caught.value.details


@dataclass(frozen=True)
class Speechless(FedAvg):
    name = "speechless"

    def predict(self, model: Any, images: Any, server: Any, classes: Any) -> Any:
        raise IndexError("no head")


def test_a_failing_evaluation_is_named(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 2, evaluation: IndexError: no head$"):
        lab.run(lab.experiment(algorithm=Speechless(), evaluation__every=2), tmp_path / "run")


# ---- the round ---------------------------------------------------------------------------------------------------


class Recording(InlineOrchestrator):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.rounds: list[tuple[int, list[str]]] = []

    def round(self, number: int, pieces: Any, function: Any) -> Any:
        self.rounds.append((number, list(pieces)))
        return function()

    def call(self, name: str, function: Any, *arguments: Any) -> Any:
        self.names.append(name)
        return function(*arguments)

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.names.append(name)
        return [function(item) for item in items]


@pytest.mark.parametrize(
    ("method", "stages"),
    [("fedavg", ["aggregate"]), ("fedproto", ["aggregate-prototypes"]), ("local", []), ("central", ["aggregate"])],
)
def test_pieces_of_work_have_names(lab: Any, method: str, stages: list[str], tmp_path: Path) -> None:
    experiment = lab.experiment(method__name=method, federation__rounds=2, evaluation__every=2)
    checkpoint, orchestrator = Checkpoint(tmp_path / "run"), Recording()
    run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), orchestrator, Observers())
    assert orchestrator.names == ["train-clients", *stages, "train-clients", *stages, "evaluate"]
    first, second = ["train-clients", *stages], ["train-clients", *stages, "evaluate"]
    assert orchestrator.rounds == [(1, first), (2, second)]


@pytest.mark.parametrize("piece", quick(["retrain-heads", "fuse-prototypes"], 1))
def test_a_round_that_is_tried_again_goes_on_where_it_failed(lab: Any, piece: str, tmp_path: Path) -> None:
    """A server step, or the second exchange after the first was committed, fails once: same bytes as without."""

    class Retrying(InlineOrchestrator):
        def __init__(self) -> None:
            super().__init__()
            self.failed = False

        def round(self, number: int, pieces: Any, function: Any) -> Any:
            try:
                return function()
            except OSError:
                return function()

        def fail_once(self, name: str) -> None:
            if name == piece and not self.failed:
                self.failed = True
                raise OSError("no space left on device")

        def call(self, name: str, function: Any, *arguments: Any) -> Any:
            self.fail_once(name)
            return function(*arguments)

        def map(self, name: str, function: Any, items: Any) -> list[Any]:
            self.fail_once(name)
            return [function(item) for item in items]

    changes = {
        "method": {"name": "gfpl", "interval": 1, "first_exchange": 0, "components": 2},
        "model": {"name": "fedcspc_cnn", "projection_dim": 12},
        "federation": {"rounds": 1},
    }
    retrying = Retrying()
    found = lab.run(lab.experiment(**changes), tmp_path / "retried", orchestrator=retrying)
    assert retrying.failed
    assert found.bytes == lab.run(lab.experiment(**changes), tmp_path / "straight").bytes


def test_evaluation_every_so_often_and_at_the_end(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second of five rounds: 2, 4 and the last; observers hear of all rounds.

    At the start they hear how many rounds are there: none, and when it goes on after the last, all five. The wall clock
    is read at the beginning and the end of a round: at 0 and 1 of the first, 2 and 3 seconds of the second.
    """
    experiment = lab.experiment(federation__rounds=5, evaluation__every=2)
    checkpoint = Checkpoint(tmp_path / "run")
    heard: list[tuple[int, Any]] = []
    ticks, times, starts = iter(range(1000)), iter(range(1000)), list[int]()
    clocks = SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=lambda: float(next(times)))
    monkeypatch.setattr("flcore.engine.rounds.time", clocks)
    observers = Observers(lambda number, record: heard.append((number, record)), on_start=starts.append)
    state = run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), InlineOrchestrator(), observers)
    history = checkpoint.records("history.jsonl")
    assert [record["round"] for record in history] == [2, 4, 5]
    assert [(number, record is not None) for number, record in heard] == [
        (1, False), (2, True), (3, False), (4, True), (5, True),
    ]  # fmt: skip
    assert json.loads(json.dumps([record for _, record in heard if record])) == history
    timing = checkpoint.records("timing.jsonl")
    # 43, 50, 62 and 85 samples in batches of 16: 3 + 4 + 4 + 6 steps a round
    assert [(record["round"], record["leg"], record["steps"]) for record in timing] == [
        (number, "train-clients", 17) for number in (1, 2, 3, 4, 5)
    ]
    assert timing[1]["seconds"] == {"train-clients": 1.0, "aggregate": 1.0, "evaluate": 1.0}
    assert (timing[1]["began_ms"], timing[1]["ended_ms"]) == (2000, 3000)
    assert state.steps == history[-1]["steps"] == 5 * 17
    run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), InlineOrchestrator(), observers)
    assert starts == [0, 5]


def test_nobody_answers(lab: Any, tmp_path: Path) -> None:
    """With drop-out 0.999 a round is empty: the server keeps its model, nothing is counted, the run goes on."""
    experiment = lab.experiment(federation__dropout=0.999)
    run = lab.run(experiment, tmp_path / "run")
    assert [record["participants"] for record in run.history] == [[], [], []]
    assert serialise(run.state.server) == serialise({"model": experiment.setting.initial})
    assert (run.state.up, run.state.steps, run.history[0]["train_loss"]) == ({}, 0, {})


@dataclass(frozen=True)
class Measuring(FedAvg):
    """A server that writes down how many clients it heard, and in odd rounds before that something else."""

    name = "measuring"

    def round_exchanges(self, round_number: int, setting: Any) -> tuple[Exchange, ...]:
        odd = (Exchange("odd", phases=(), server_steps=("odd",)),) if round_number % 2 else ()
        return (*odd, Exchange(server_steps=("aggregate", "measure")))

    def server_steps(self) -> Any:
        def odd(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            return server, {"odd": ctx.round, "heard": -1}

        def measure(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            return server, {"heard": len(replies)}

        return {**super().server_steps(), "odd": odd, "measure": measure}


def test_facts_of_the_server_stand_in_the_history_of_their_round_alone(lab: Any, tmp_path: Path) -> None:
    """What round 1 measured is not said of round 2; they never travel."""
    run = lab.run(lab.experiment(algorithm=Measuring(), federation__participation=0.5), tmp_path / "run")
    assert [record["server"] for record in run.history] == [
        {"heard": 2, "odd": 1, "odd.heard": -1},
        {"heard": 2},
        {"heard": 2, "odd": 3, "odd.heard": -1},
    ]
    assert run.state.metrics == []
    assert set(run.state.down) == set(lab.run(lab.experiment(), tmp_path / "plain").state.down)
    plain = lab.run(lab.experiment(), tmp_path / "plain")
    assert "server" not in plain.history[0]


@dataclass(frozen=True)
class Untrue(FedAvg):
    """Says something that is not a number, though its training went well."""

    name = "untrue"

    def reply(self, ctx: Any, trained: Any) -> Any:
        message, client_state = super().reply(ctx, trained)
        return {**message, "extra": TensorDict({"x": torch.tensor([1.0, float("inf")])})}, client_state


def test_a_message_that_is_not_finite_is_a_failure(lab: Any) -> None:
    failure, _ = lab.train(lab.experiment(algorithm=Untrue()))
    assert isinstance(failure, Failure)
    assert failure.cause.startswith("extra in its reply is not finite; ")


def test_plain_calls_keep_as_many_workers_busy_as_there_are() -> None:
    """Three pieces of work that wait for each other end only if they run at the same time; results stay in order."""
    barrier = threading.Barrier(3, timeout=20)

    def work(item: int) -> tuple[int, int]:
        return item, 0 * barrier.wait()

    assert InlineOrchestrator(3).map("train-clients", work, [7, 5, 6]) == [(7, 0), (5, 0), (6, 0)]


# ---- what clients remember ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """A client remembers of odd rounds which it was, of even ones nothing; client 2 fails in round 2."""

    name = "forgetful"
    heard: ClassVar[dict[tuple[int, int], dict[str, Any]]] = {}

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> Any:
        self.heard[ctx.round, ctx.client] = dict(ctx.client_state)
        message, _ = super().reply(ctx, trained)
        if (ctx.round, ctx.client) == (2, 2):
            raise ValueError("by hand")
        return message, {"mark": Count(ctx.round)} if ctx.round % 2 else {}


@pytest.mark.parametrize("killed", [False, True])
def test_a_client_remembers_what_its_last_reply_says_if_that_is_nothing(
    lab: Any, stops: Any, killed: bool, tmp_path: Path
) -> None:
    """Round 2 knows of round 1, round 3 of nothing; who failed in round 2 still knows of round 1."""
    experiment = lab.experiment(algorithm=Forgetful(), federation={"rounds": 4, "on_client_error": "drop"})
    if killed:
        stops.run_until(experiment, tmp_path / "run", 2)
    run = lab.run(experiment, tmp_path / "run")
    heard = Forgetful.heard
    assert [heard[number, 0] for number in (1, 2, 3, 4)] == [{}, {"mark": Count(1)}, {}, {"mark": Count(3)}]
    assert heard[3, 2] == {"mark": Count(1)}
    assert run.state.client_states == {}  # round 4 was an even one
    assert list((tmp_path / "run" / "clients").iterdir()) == []


@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_what_the_engine_remembers_for_a_client_is_not_forgotten(lab: Any, model: str, tmp_path: Path) -> None:
    """Statistics of its own, where its model has such: of the last round, and alone."""
    kept = {}
    for rounds in (1, 2):
        experiment = lab.experiment(
            algorithm=Forgetful(),
            model={"name": model, "batchnorm": "local"},
            federation={"rounds": rounds, "on_client_error": "drop"},
        )
        kept[rounds] = sorted(lab.run(experiment, tmp_path / str(rounds)).client_state(0))
    own = [BATCHNORM] if experiment.setting.initial.buffers else []
    assert bool(own) == (model == "fedgen_cnn")
    assert kept == {1: sorted(["mark", *own]), 2: own}
