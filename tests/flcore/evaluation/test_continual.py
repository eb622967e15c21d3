"""Figures of a task stream by hand (evaluation.md sections 2 and 2.1) and through the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flcore.data.tasks import TaskStream
from flcore.evaluation.continual import (
    backward_transfer,
    forgetting,
    roundwise_forgetting,
    summarise_tasks,
    task_scores,
)
from flcore.evaluation.model_selection import private_model
from flcore.evaluation.scoring import Scorer
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.types import PRIVATE
from tests.cases import quick

AFTER = [[0.9], [0.7, 0.8], [0.6, 0.5, 0.9]]


def stream(schedule: Any = "blocked", rounds: int = 4, minority: tuple[bool, ...] = (False, False, True)) -> TaskStream:
    """Client 0 meets class 0, then classes 1 and 2; client 1 class 1, then classes 0 and 1."""
    classes = [[[1, 0, 0], [0, 1, 1]], [[0, 1, 0], [1, 1, 0]]]
    return TaskStream(np.array(classes, dtype=bool), schedule, rounds, np.array(minority))


def test_forgetting_and_backward_transfer_of_the_specification() -> None:
    """Task 1: best of .9, .7 is .9, now .6: .3. Task 2: best .8, now .5: .3. F = .3; BWT = ((.6-.9) + (.5-.8))/2."""
    assert forgetting(AFTER) == pytest.approx(0.3)
    assert backward_transfer(AFTER) == pytest.approx(-0.3)


def test_forgetting_looks_at_the_best_and_transfer_at_the_first() -> None:
    """Task 1: .5, then .8, now .7: F = .8 - .7 = .1; BWT = .7 - .5 = .2. Task 2: .6 and .6: nothing."""
    after = [[0.5], [0.8, 0.6], [0.7, 0.6, 0.4]]
    assert forgetting(after) == pytest.approx(0.05)
    assert backward_transfer(after) == pytest.approx(0.1)


def test_one_task_cannot_be_forgotten() -> None:
    assert forgetting([[0.9]]) is None and backward_transfer([[0.9]]) is None


def test_roundwise_forgetting_of_the_specification() -> None:
    """Class 0: max(.5, .7) - .6 = .1; class 1: max(.2, .1) - .4 = -.2. Mean -.05; clipped (.1 + 0)/2 = .05."""
    rounds = [[0.5, 0.2], [0.7, 0.1], [0.6, 0.4]]
    assert roundwise_forgetting(rounds) == pytest.approx(-0.05)
    assert roundwise_forgetting(rounds, clip=True) == pytest.approx(0.05)
    assert roundwise_forgetting([[*record, None] for record in rounds]) == pytest.approx(-0.05)
    assert roundwise_forgetting(rounds[:1]) is None


def test_what_is_met_when() -> None:
    """Blocked, 4 rounds, 2 tasks: rounds 1, 2 and 3, 4. Cyclic: both tasks are met from round 2 on."""
    blocked, cyclic = stream(), stream("cyclic")
    assert [blocked.begun(r) for r in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [cyclic.begun(r) for r in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert [blocked.task_visit(r) for r in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert [cyclic.task_visit(r) for r in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [blocked.ends_block(r) for r in (1, 2, 3, 4)] == [False, True, False, True]
    assert not any(cyclic.ends_block(r) for r in (1, 2, 3, 4))
    assert blocked.met(2).tolist() == [[True, False, False], [False, True, False]]
    assert blocked.met(3).tolist() == [[True, True, True], [True, True, False]]


def test_a_stream_of_data_that_do_not_change() -> None:
    still = TaskStream(np.ones((2, 1, 3), dtype=bool), "none", 4, np.zeros(3, dtype=bool))
    assert (still.task(3), still.task_visit(3), still.begun(3), still.ends_block(4)) == (None, 0, 1, False)


TESTED = np.array([10, 20, 20])
PRIVATE_RIGHT = np.array([[10, 4, 0], [2, 20, 8]])
SHARED_RIGHT = np.array([5, 10, 4])


def test_accuracies_of_one_round_by_hand() -> None:
    """Round 2: client 0 has met class 0, client 1 class 1; class 2 is the minority.

    a_glo = 19/50; a_loc = (14/50 + 30/50)/2 = .44; a_sel = (10/10 + 20/20)/2 = 1. Minority: 4/20; (0 + 8/20)/2 = .2;
    nobody has met it. Task 1 is what a_sel has seen; globally class 0 for client 0, 5/10, and class 1, 10/20: .5.
    """
    found = task_scores(stream(), 2, TESTED, PRIVATE_RIGHT, SHARED_RIGHT)
    assert found["a_glo"] == pytest.approx(0.38)
    assert found["a_loc"] == pytest.approx(0.44)
    assert found["a_sel"] == pytest.approx(1.0)
    assert found["a_glo_minority"] == pytest.approx(0.2)
    assert found["a_loc_minority"] == pytest.approx(0.2)
    assert found["a_sel_minority"] is None
    assert found["by_task"] == [pytest.approx(1.0), None]
    assert found["by_task_global"] == [pytest.approx(0.5), None]


def test_after_the_second_task() -> None:
    """Client 0 has met all: 14/50; client 1 classes 0 and 1: 22/30. Minority: client 0 alone, 0/20.

    Task 2: client 0 classes 1, 2: 4/40; client 1 classes 0, 1: 22/30.
    """
    found = task_scores(stream(), 4, TESTED, PRIVATE_RIGHT, None)
    assert found["a_sel"] == pytest.approx((14 / 50 + 22 / 30) / 2)
    assert found["a_sel_minority"] == 0.0
    assert found["by_task"] == [pytest.approx(1.0), pytest.approx((4 / 40 + 22 / 30) / 2)]
    assert found["a_glo"] is None and found["a_glo_minority"] is None and found["by_task_global"] is None


def record(tasks: TaskStream, number: int, right: list[list[int]], shared: list[int]) -> dict[str, Any]:
    private, tested = np.array(right), np.array([10, 10, 10])
    return {
        "round": number,
        "participants": [1],
        "class_accuracy": [value / 10 for value in shared],
        "tested": tested.tolist(),
        "private_correct": right,
        "untrained_clients": 0,
        "tasks": task_scores(tasks, number, tested, private, np.array(shared)),
    }


def test_the_last_value_of_each_epoch_counts() -> None:
    """Cyclic, T = 2, rounds 1 to 4: epochs end with rounds 2 and 4. a_glo 12/30 and 18/30: .5, not the mean of four.

    a_loc: round 2 (3/30 + 9/30)/2 = .2, round 4 (15/30 + 21/30)/2 = .6: .4; of client 1 alone (.3 + .7)/2 = .5.
    """
    tasks = stream("cyclic")
    history = [
        record(tasks, 1, [[0, 0, 0], [0, 0, 0]], [0, 0, 0]),
        record(tasks, 2, [[1, 1, 1], [3, 3, 3]], [4, 4, 4]),
        record(tasks, 3, [[10, 10, 10], [10, 10, 10]], [10, 10, 10]),
        record(tasks, 4, [[5, 5, 5], [7, 7, 7]], [6, 6, 6]),
    ]
    found = summarise_tasks(tasks, history)
    assert found["num_last_epochs"] == 2
    assert found["last_epochs"]["a_glo"] == pytest.approx(0.5)
    assert found["last_epochs"]["a_loc"] == pytest.approx(0.4)
    assert found["last_epochs"]["a_loc_participants"] == pytest.approx(0.5)
    assert (found["forgetting"], found["backward_transfer"], found["stage_ends"]) == (None, None, [])
    assert found["roundwise_forgetting"] == pytest.approx(0.4)  # 1.0 in round 3, .6 now, in every class
    assert found["minority_classes"] == [2]


def test_only_the_last_ten_epochs_count() -> None:
    """T = 2, 24 rounds: twelve epochs, of which the first two are wrong everywhere and the others right."""
    tasks = stream("cyclic", rounds=24)
    history = [record(tasks, r, [[0] * 3] * 2 if r <= 4 else [[10] * 3] * 2, [0] * 3) for r in range(1, 25)]
    found = summarise_tasks(tasks, history)
    assert (found["num_last_epochs"], found["last_epochs"]["a_loc"]) == (10, 1.0)
    # Evaluated in rounds 4, 14 and 24 alone, epochs 2, 7 and 12 of 12: of the last ten, 7 and 12.
    sparse = summarise_tasks(tasks, [history[number - 1] for number in (4, 14, 24)])
    assert (sparse["num_last_epochs"], sparse["last_epochs"]["a_loc"]) == (2, 1.0)


def test_forgetting_of_a_blocked_run() -> None:
    """After task 1: client 0 has class 0 all right, client 1 class 1 9/10: .95. After task 2: 2/10 and 4/10: .3.

    F = .65, BWT = -.65. Globally: (6/10 + 8/10)/2 = .7, then (5/10 + 5/10)/2 = .5: .2.
    """
    tasks = stream()
    history = [
        record(tasks, 2, [[10, 0, 0], [0, 9, 0]], [6, 8, 0]),
        record(tasks, 4, [[2, 5, 5], [5, 4, 0]], [5, 5, 5]),
    ]
    found = summarise_tasks(tasks, history)
    assert (found["forgetting"], found["backward_transfer"]) == (pytest.approx(0.65), pytest.approx(-0.65))
    assert (found["forgetting_global"], found["backward_transfer_global"]) == (pytest.approx(0.2), pytest.approx(-0.2))
    assert [end["round"] for end in found["stage_ends"]] == [2, 4]


def task_lab(lab: Any, method: str = "fedavg", **changes: Any) -> Any:
    """Two clients with two tasks each of the tiny data: classes 0, 1 first, then 2; and the other way round."""
    labels = lab.dataset.train.labels
    early, late = (torch.isin(labels, torch.tensor(classes)).nonzero().flatten() for classes in ([0, 1], [2]))
    halves = [early[::2].tolist(), late[::2].tolist()], [late[1::2].tolist(), early[1::2].tolist()]
    test = [list(range(len(lab.dataset.test)))] * 2
    partition = lab.by_hand(lab.dataset, [first + second for first, second in halves], test, tasks=halves)
    changes = {"federation__rounds": 4, "federation__task_schedule": "blocked", **changes}
    return lab.experiment(partition=partition, method__name=method, **changes)


def right_by_class(experiment: Any, weights: Weights) -> list[int]:
    """Test images of each class that a model gets right, without the scorer."""
    test, module = experiment.dataset.test, experiment.new_module().eval()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in weights.values.items():
            named[name].copy_(value)
        meta = experiment.dataset.meta
        pixels = test.images.float() / 255
        images = (pixels - torch.tensor(meta.mean).view(-1, 1, 1)) / torch.tensor(meta.std).view(-1, 1, 1)
        answers = module(images)[1].argmax(1)
    return [int(((answers == c) & (test.labels == c)).sum()) for c in range(meta.num_classes)]


def test_own_models_are_scored_before_aggregation(lab: Any, tmp_path: Any) -> None:
    experiment = task_lab(lab)
    run = lab.run(experiment, tmp_path / "run")
    last = run.history[-1]
    for client in (0, 1):
        own = private_model(run.client_state(client))
        assert own is not None
        assert last["private_correct"][client] == right_by_class(experiment, own)
        assert not torch.equal(own.params["head.weight"], run.state.server["model"].params["head.weight"])
    assert last["tested"] == torch.bincount(lab.dataset.test.labels).tolist()
    assert last["tasks"]["a_glo"] == pytest.approx(last["top1_global"])


def test_keeping_own_models_changes_no_model(lab: Any, tmp_path: Any) -> None:
    kept = lab.run(task_lab(lab), tmp_path / "kept")
    plain = lab.run(task_lab(lab, evaluation__private=False), tmp_path / "plain")
    model, other = kept.state.server["model"], plain.state.server["model"]
    assert all(torch.equal(tensor, other.params[name]) for name, tensor in model.params.items())
    assert "tasks" not in plain.history[-1] and not plain.client_state(0)
    assert {key: value for key, value in kept.history[-1].items() if key in plain.history[-1]} == plain.history[-1]


def test_a_method_that_keeps_its_model_keeps_it_once(lab: Any, tmp_path: Any) -> None:
    run = lab.run(task_lab(lab, "local"), tmp_path / "run")
    client_state = run.client_state(0)
    assert PRIVATE not in client_state and private_model(client_state) is client_state["model"]


def test_who_was_never_sampled_has_the_initial_model(lab: Any, tmp_path: Any) -> None:
    """One of two clients per round, one round per task."""
    experiment = task_lab(lab, federation__participation=0.5, federation__rounds=2)
    run = lab.run(experiment, tmp_path / "run")
    first = run.history[0]
    (sampled,) = first["participants"]
    assert first["untrained_clients"] == 1
    assert first["private_correct"][1 - sampled] == right_by_class(experiment, experiment.setting.initial)


def test_the_end_of_every_task_is_evaluated(lab: Any, tmp_path: Any) -> None:
    blocked = lab.run(task_lab(lab, evaluation__every=100), tmp_path / "blocked")
    assert [record["round"] for record in blocked.history] == [2, 4]
    cyclic = task_lab(lab, evaluation__every=100, federation__task_schedule="cyclic")
    assert [record["round"] for record in lab.run(cyclic, tmp_path / "cyclic").history] == [4]


def test_clients_are_tested_on_what_they_have_met(lab: Any) -> None:
    """A model that always says class 2: before the second task client 0 (classes 0, 1) has nothing right, client 1
    (class 2) everything; after it both are tested on all classes."""
    experiment = task_lab(lab)
    weights = {name: torch.zeros_like(value) for name, value in experiment.setting.initial.params.items()}
    weights["head.bias"] = torch.tensor([0.0, 0.0, 1.0] + [0.0] * (len(weights["head.bias"]) - 3))
    server: Record = {"model": Weights(weights, experiment.setting.initial.buffers)}
    scorer = Scorer(experiment)
    assert scorer.score(server, lambda k: {}, round_number=2).local_accuracy == [0.0, 1.0]
    labels = lab.dataset.test.labels
    share = int((labels == 2).sum()) / int((labels <= 2).sum())
    assert scorer.score(server, lambda k: {}).local_accuracy == pytest.approx([share, share])


@pytest.mark.parametrize("method", quick(["fedper", "fedrep"], 1))
def test_a_shared_base_is_completed_by_the_mean_of_the_clients_tops(lab: Any, method: str, tmp_path: Any) -> None:
    """Weighted by samples: 43 and 50 of clients 0 and 1, and so on (baselines.md section 21)."""
    experiment = lab.experiment(method__name=method)
    run = lab.run(experiment, tmp_path / "run")
    own = [
        lab.client_model(experiment.method, run.state.server, k, run.client_state(k), experiment.setting)
        for k in range(4)
    ]
    sizes = torch.tensor([len(client.train) for client in lab.partition.clients], dtype=torch.float64)
    shares = sizes / sizes.sum()

    def mean(name: str) -> torch.Tensor:
        return sum(share * model.params[name].double() for share, model in zip(shares, own, strict=True)).float()

    whole = {**own[0].params, "head.weight": mean("head.weight"), "head.bias": mean("head.bias")}
    right = right_by_class(experiment, Weights(whole, own[0].buffers))
    assert run.history[-1]["top1_global"] == pytest.approx(sum(right) / len(lab.dataset.test))
    assert torch.equal(own[0].params["encoder.0.weight"], own[1].params["encoder.0.weight"])
