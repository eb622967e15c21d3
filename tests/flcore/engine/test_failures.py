"""Clients that fail: named, or left out and counted, and the same after a resume; with stacks and without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Failure
from flcore.engine.pool.executors import InlineExecutor
from flcore.errors import RunError
from flcore.messages import Weights
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedproto import FedProto
from flcore.methods.vocabulary import Turn
from flcore.records import serialise


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "local"])
def test_divergence_names_round_and_client(lab: Any, method: str, stack: bool, tmp_path: Path) -> None:
    """All four diverge; serially client 0 is the first to be tried, in a stack the first is that of most steps, 3."""
    first = 3 if stack else 0
    expected = rf"^round 1, client {first}: training diverged \(mean loss: cross_entropy .*lower local\.lr"
    with pytest.raises(RunError, match=expected):
        lab.run(lab.experiment(method__name=method, local__lr=1e6, engine__stack=stack), tmp_path / "run")
    assert not (tmp_path / "run" / "history.jsonl").exists()  # nothing of the failed round was committed
    assert Checkpoint(tmp_path / "run").read_state().round == 0


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_an_infinite_loss_is_a_failure(lab: Any, stack: bool) -> None:
    """Head rows ±2e38 for pixel 0: logits of (1, 0) differ by 4e38, beyond float32; the gradient is finite."""
    dataset = lab.toy_dataset([[1, 0], [0, 1]], [1, 1], None, None)
    experiment = lab.experiment(dataset, lab.by_hand(dataset, [[0, 1]]), lab.ToySpec(), engine__stack=stack)
    huge = Weights({"head.weight": torch.tensor([[2e38, 0.0], [-2e38, 0.0]]), "head.bias": torch.zeros(2)})
    failure, _ = lab.train(experiment, server={"model": huge})
    assert isinstance(failure, Failure)
    assert failure.cause.startswith("training diverged (mean loss: cross_entropy inf)")
    assert failure.down["model"].bytes == 24


@dataclass(frozen=True)
class Poisoned(FedProto):
    """FedProto in which client 2 starts from weights that are not numbers in the rounds given."""

    name = "fedproto"
    rounds: tuple[int, ...] = (1, 2, 3)

    def begin(self, turn: Turn) -> Weights:
        start = super().begin(turn)
        if turn.client != 2 or turn.round not in self.rounds:
            return start
        return Weights({name: tensor * torch.nan for name, tensor in start.params.items()}, start.buffers)


@dataclass(frozen=True)
class Deaf(FedProto):
    """FedProto whose server does not hear client 2 in the rounds given."""

    name = "fedproto"
    rounds: tuple[int, ...] = (1, 2, 3)

    def stages(self) -> Any:
        ((name, stage),) = super().stages().items()

        def hear(server: Any, replies: Any, setting: Any, number: int) -> Any:
            heard = {k: message for k, message in replies.items() if k != 2 or number not in self.rounds}
            return stage(server, heard, setting, number)

        return {name: hear}


def dropping(lab: Any, algorithm: Any, **changes: Any) -> Any:
    return lab.experiment(algorithm=algorithm, federation={"rounds": 3, "on_client_error": "drop"}, **changes)


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_the_others_go_on_as_if_it_had_not_answered(lab: Any, stack: bool, tmp_path: Path) -> None:
    """The server's prototypes and the memories of clients 0, 1 and 3 are, to the bit, those of a server deaf to 2."""
    run = lab.run(dropping(lab, Poisoned(), engine__stack=stack), tmp_path / "dropped")
    expected = lab.run(dropping(lab, Deaf(), engine__stack=stack), tmp_path / "deaf")
    assert serialise(run.state.server) == serialise(expected.state.server)
    for client in (0, 1, 3):
        assert serialise(run.memory(client)) == serialise(expected.memory(client))
    assert run.memory(2) == {}
    # It received every broadcast all the same, and sent nothing.
    assert run.history[-1]["bytes_down"] == expected.history[-1]["bytes_down"]
    assert run.history[-1]["bytes_up"]["prototypes"] < expected.history[-1]["bytes_up"]["prototypes"]
    assert [record["participants"] for record in run.history] == [[0, 1, 3]] * 3


def test_failures_are_recorded_and_counted(lab: Any, tmp_path: Path) -> None:
    """Client 2 fails in rounds 1 and 3; what it learnt in round 2 it still has."""
    run = lab.run(dropping(lab, Poisoned(rounds=(1, 3))), tmp_path / "run")
    assert [(number, client) for number, client, _ in run.state.failures] == [(1, 2), (3, 2)]
    assert all(cause.startswith("training diverged") for _, _, cause in run.state.failures)
    assert [len(record["failures"]) for record in run.history] == [1, 1, 2]
    assert [record["participants"] for record in run.history] == [[0, 1, 3], [0, 1, 2, 3], [0, 1, 3]]
    assert run.state.memories == {0: 3, 1: 3, 2: 2, 3: 3}


def test_a_run_without_failures_does_not_mention_them(lab: Any, tmp_path: Path) -> None:
    run = lab.run(dropping(lab, FedAvg()), tmp_path / "run")
    assert all("failures" not in record for record in run.history)
    stopping = lab.run(lab.experiment(), tmp_path / "stopping")
    assert serialise(run.state.server) == serialise(stopping.state.server)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failure_survives_a_resume(lab: Any, stops: Any, after: bool, tmp_path: Path) -> None:
    experiment = lab.experiment(
        spec=lab.ToySpec(encoder=True),
        algorithm=Poisoned(rounds=(1,)),
        federation={"rounds": 1, "on_client_error": "drop"},
    )
    stops.everywhere(lab, experiment, tmp_path, after=after)
    assert [(n, k) for n, k, _ in Checkpoint(tmp_path / "whole").read_state().failures] == [(1, 2)]


def test_a_failure_on_the_disk_is_not_tried_again(lab: Any, tmp_path: Path) -> None:
    experiment = dropping(lab, Poisoned(rounds=(1,)))
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, experiment.method.start_server(experiment.setting), run="run"))
    executor, state = InlineExecutor(experiment, checkpoint), checkpoint.read_state()
    assert isinstance(executor.train(state, [[2]])[2], Failure)
    path = checkpoint.reply_file(1, 2).with_suffix(".json")
    path.write_text(path.read_text().replace("training diverged", "as it was"))
    again = executor.train(state, [[2]])[2]
    assert isinstance(again, Failure) and again.cause.startswith("as it was")


def test_everybody_fails(lab: Any, tmp_path: Path) -> None:
    """A round without any reply: the server keeps what it has, and the run goes on to its end."""
    changes = {"federation": {"rounds": 2, "on_client_error": "drop"}, "local__lr": 1e6}
    experiment = lab.experiment(**changes)
    run = lab.run(experiment, tmp_path / "run")
    assert serialise(run.state.server) == serialise({"model": experiment.setting.initial})
    assert len(run.state.failures) == 2 * 4
    assert run.history[-1]["participants"] == []
    assert run.history[-1]["bytes_up"] == {}
    assert run.history[-1]["bytes_down"]["model"] == 2 * 4 * 3094 * 4
