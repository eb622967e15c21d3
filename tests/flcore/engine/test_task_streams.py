"""Partitions with tasks: each round trains on the samples of its task, and on no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.core.errors import ConfigError
from flcore.data.dividing import make_partition
from flcore.data.partitioners import PARTITIONERS
from flcore.engine.cohort import leg_steps
from flcore.experiment.experiment import Experiment
from flcore.io.records import serialise
from flcore.methods.types import Exchange

TASKS = [[range(0, 10), range(10, 40)], [range(40, 60), range(60, 70)]]  # of client 0, of client 1


def streamed(lab: Any, schedule: str, rounds: int = 4, **changes: Any) -> Any:
    """Two clients of two tasks each: 10 and 30 samples, 20 and 10; batches of 8."""
    partition = lab.by_hand(lab.dataset, [range(40), range(40, 70)], [range(60)] * 2, tasks=TASKS)
    federation = {"rounds": rounds, "task_schedule": schedule}
    settings = {"federation": federation, "local__batch_size": 8, "model": {"name": "fedcspc_cnn"}} | changes
    return lab.experiment(partition=partition, **settings)


@pytest.mark.parametrize(
    ("schedule", "met"), [("cyclic", [0, 1, 0, 1]), ("blocked", [0, 0, 1, 1]), ("none", [None] * 4)]
)
def test_the_task_of_a_round(lab: Any, schedule: str, met: list[int | None]) -> None:
    """What is trained on, how many samples there are of each class, and how many steps that makes."""
    experiment = streamed(lab, schedule)
    for number, task in enumerate(met, start=1):
        assert experiment.task(number) == task
        for client, own in enumerate(TASKS):
            samples = [i for part in own for i in part] if task is None else list(own[task])
            assert experiment.training_indices(client, number).tolist() == samples
            labels = lab.dataset.train.labels[samples]
            assert experiment.label_counts(client, number).tolist() == torch.bincount(labels, minlength=6).tolist()
            assert leg_steps(experiment, number, Exchange(), client) == -(-len(samples) // 8)


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_a_turn_sees_the_samples_of_its_task(lab: Any, stack: bool) -> None:
    """Round 2 of cyclic: client 0 trains on 30 samples in 4 steps, client 1 on 10 in 2, and they say 30 and 10.

    What they do is what clients that hold nothing else do.
    """
    found = lab.train_stack(streamed(lab, "cyclic", engine__stack=stack), [0, 1], number=2)
    assert [found[client][0].steps for client in (0, 1)] == [4, 2]
    assert [found[client][0].message["num_samples"].value for client in (0, 1)] == [30, 10]
    partition = lab.by_hand(lab.dataset, [TASKS[0][1], TASKS[1][1]], [range(60)] * 2)
    settings = {"local__batch_size": 8, "model": {"name": "fedcspc_cnn"}, "engine__stack": stack}
    expected = lab.train_stack(lab.experiment(partition=partition, **settings), [0, 1], number=2)
    for client in (0, 1):
        assert serialise(found[client][0].message) == serialise(expected[client][0].message)


def test_without_a_schedule_all_tasks_are_there_at_once(lab: Any, tmp_path: Path) -> None:
    partition = lab.by_hand(lab.dataset, [range(40), range(40, 70)], [range(60)] * 2)
    settings = {"local__batch_size": 8, "model": {"name": "fedcspc_cnn"}, "federation__rounds": 2}
    plain = lab.run(lab.experiment(partition=partition, **settings), tmp_path / "plain")
    streaming = lab.run(streamed(lab, "none", rounds=2), tmp_path / "none")
    assert serialise(streaming.state.server) == serialise(plain.state.server)
    cyclic = lab.run(streamed(lab, "cyclic", rounds=2), tmp_path / "cyclic")
    assert cyclic.state.steps == (2 + 3) + (4 + 2)
    assert serialise(cyclic.state.server) != serialise(plain.state.server)


def test_a_partition_without_tasks_has_no_schedule(lab: Any) -> None:
    for schedule in ("cyclic", "blocked", "none"):
        experiment = lab.experiment(federation__task_schedule=schedule)
        assert [experiment.task(number) for number in (1, 2, 3)] == [None] * 3
        assert experiment.training_indices(1, 2).tolist() == lab.partition.clients[1].train.tolist()


def test_the_centralised_reference_has_the_union_in_every_round(lab: Any) -> None:
    experiment = streamed(lab, "cyclic", method__name="central")
    assert experiment.task(2) is None
    assert experiment.training_indices(0, 2).tolist() == list(range(70))


@pytest.fixture(scope="module")
def on_disk(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition of four clients with three tasks each."""
    folder = tmp_path_factory.mktemp("tasks") / "partition"
    make_partition(lab.dataset, PARTITIONERS["dirichlet"](alpha=1.0, tasks=3), num_clients=4, seed=3).save(folder)
    return folder


def test_too_few_rounds_are_refused(lab: Any, on_disk: Path) -> None:
    def open_run(**federation: Any) -> Experiment:
        return Experiment.open(lab.config(federation=federation), lab.prepared, on_disk)

    with pytest.raises(
        ConfigError, match=r"^federation\.rounds = 2: the partition has 3 tasks, and each needs a round"
    ):
        open_run(rounds=2)
    assert open_run(rounds=2, task_schedule="none").task(1) is None
    experiment = open_run(rounds=3)
    assert [experiment.task(number) for number in (1, 2, 3)] == [0, 1, 2]
    central = Experiment.open(lab.config(federation={"rounds": 2}, method__name="central"), lab.prepared, on_disk)
    assert central.task(1) is None


@pytest.mark.parametrize(
    "method",
    [
        {"name": "linear_probe"},
        {"name": "protolda_blocks"},
        {"name": "protolda_distilled"},
        {"name": "lda_head", "base": "protolda_distilled"},
    ],
    ids=lambda method: method.get("base", method["name"]),
)
def test_methods_that_ask_clients_once_refuse_tasks(lab: Any, on_disk: Path, method: dict[str, str]) -> None:
    def open_run(**federation: Any) -> Experiment:
        config = lab.config(method=method, model=lab.model_of(method["name"]), federation={"rounds": 3, **federation})
        return Experiment.open(config, lab.prepared, on_disk)

    with pytest.raises(ConfigError, match=rf"^federation\.task_schedule = cyclic: {method['name']} asks every client"):
        open_run(task_schedule="cyclic")
    assert open_run(task_schedule="none").task(1) is None


@pytest.mark.parametrize("schedule", ["cyclic", "blocked"])
def test_a_stream_from_files_covers_every_sample_once(lab: Any, on_disk: Path, schedule: str) -> None:
    federation = {"rounds": 3, "task_schedule": schedule}
    experiment = Experiment.open(lab.config(federation=federation), lab.prepared, on_disk)
    for client in range(4):
        met = torch.cat([experiment.training_indices(client, number) for number in (1, 2, 3)])
        assert sorted(met.tolist()) == experiment.partition.clients[client].train.tolist()


def test_a_stream_is_resumed_in_its_task(lab: Any, stops: Any, tmp_path: Path) -> None:
    experiment = streamed(lab, "cyclic", rounds=2, spec=lab.ToySpec())
    stops.run_until(experiment, tmp_path / "stopped", 1)
    assert lab.run(experiment, tmp_path / "stopped").bytes == lab.run(experiment, tmp_path / "whole").bytes
