"""FeSEM: E-step, M-step and first clusters by hand, and who gets what (baselines.md 18 and 21)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flcore.engine.client import ClientRunner
from flcore.io.messages import Count, TensorDict, Weights
from flcore.io.records import Record, serialise
from flcore.methods.fesem import (
    CLUSTER_ASSIGNMENT,
    FeSEM,
    assign,
    assignment_of,
    centre_slot,
    cluster_means,
    cluster_models,
    spread_models,
    squared_distance,
)
from flcore.methods.types import MODEL, NUM_SAMPLES, Metrics, Replies, RoundContext

TWO = {"name": "fesem", "centres": 2}
# Sample A = (2, 0) of class 0 and three samples B = (0, 4) of class 1.
PIXELS, LABELS = [[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1]


def scalar(value: float) -> Weights:
    return Weights({"w": torch.tensor([float(value)])})


def scalars(*values: float) -> dict[int, Weights]:
    return {number: scalar(value) for number, value in enumerate(values)}


def values(models: dict[int, Weights]) -> dict[int, float]:
    return {number: model.params["w"].item() for number, model in models.items()}


def by_hand(lab: Any, clients: list[list[int]], **changes: Any) -> Any:
    """A linear model that starts at zero, full batches, plain SGD with learning rate 0.1."""
    return lab.linear(PIXELS, LABELS, clients, **({"method": TWO} | changes))


def weights_of(model: Weights) -> list[float]:
    """W_00, W_01 and b_0 of the linear model; the other row is their negative."""
    return [*model.params["head.weight"][0].tolist(), model.params["head.bias"][0].item()]


def server_of(centres: list[float], assignment: list[int]) -> Record:
    named = {centre_slot(j): scalar(value) for j, value in enumerate(centres)}
    return Record({CLUSTER_ASSIGNMENT: TensorDict({"centre": torch.tensor(assignment)})}) | named


def replies_of(models: dict[int, float], sizes: dict[int, int] | None = None) -> Replies:
    counts = sizes or {}
    return Replies({k: {MODEL: scalar(value), NUM_SAMPLES: Count(counts.get(k, 1))} for k, value in models.items()})


def after_round(lab: Any, method: FeSEM, server: Record, replies: Replies, number: int = 2) -> tuple[Record, Metrics]:
    facts: dict[str, float] = {}
    for stage in method.server_steps().values():
        held, found = stage(server, replies, RoundContext(lab.experiment().setting, number))
        server, facts = Record(held), {**facts, **found}
    return server, facts


def test_one_round_of_clusters_by_hand(lab: Any) -> None:
    """Section 18 a: w = 0, 1, 9, 11 and centres 0 and 10 give (0, 0, 1, 1), then 0.5 and 10.

    Objective: 2·0.5² + 2·1 = 2.5. Client 1 came from centre 1; client 4 was not sampled and stays at 1.
    """
    server = server_of([0.0, 10.0], [0, 1, 1, 1, 1])
    replies = replies_of({3: 11, 0: 0, 2: 9, 1: 1})
    before = serialise(server)
    after, facts = after_round(lab, FeSEM(centres=2), server, replies)
    assert assignment_of(after) == [0, 0, 1, 1, 1]
    assert values({j: after[centre_slot(j)] for j in range(2)}) == {0: 0.5, 1: 10}
    assert facts == {"moved": 1, "cluster_size_0": 2, "cluster_size_1": 3, "objective": 2.5}
    assert serialise(server) == before


def test_means_weighted_by_samples(lab: Any) -> None:
    """w = 0 and 1 with 1 and 3 samples: 0.75 instead of 0.5; clients without a sample leave their centre alone."""
    server = server_of([0.0, 10.0], [0, 0, 1])
    replies = replies_of({0: 0, 1: 1, 2: 9}, {0: 1, 1: 3, 2: 0})
    after, _ = after_round(lab, FeSEM(centres=2, weighted=True), server, replies)
    assert values({j: after[centre_slot(j)] for j in range(2)}) == {0: 0.75, 1: 10}
    plain, _ = after_round(lab, FeSEM(centres=2), server, replies)
    assert values({j: plain[centre_slot(j)] for j in range(2)}) == {0: 0.5, 1: 9}


def test_of_equally_near_centres_the_first_counts() -> None:
    assert assign(scalars(5), scalars(0, 10)) == {0: 0}


def test_distances_are_over_parameters_alone() -> None:
    """(3 − 0)² + (4 − 0)² = 25 over two tensors, whatever the statistics; these are averaged with their cluster."""
    first = Weights({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}, {"mean": torch.tensor([100.0])})
    second = Weights({"a": torch.zeros(1), "b": torch.zeros(1, 2)}, {"mean": torch.tensor([0.0])})
    assert squared_distance(first, second) == 25
    assert cluster_means({0: first, 1: second}, {0: 1, 1: 1}, {0: 1, 1: 1})[1].buffers["mean"].item() == 50


def test_distances_are_summed_in_float64() -> None:
    """(10⁴)² + 1,000·1² = 100,001,000; in float32, whose steps are 8 there, the ones behind the first would be lost."""
    first = Weights({f"{number}": torch.tensor([1e4 if number == 0 else 1.0]) for number in range(1001)})
    second = Weights({name: torch.zeros(1) for name in first.params})
    assert squared_distance(first, second) == 100_001_000


def test_an_empty_cluster_gets_the_farthest_client() -> None:
    """All of 0, 1, 9 are nearer to 5 than to 100: squares 25, 16, 16. Client 0 goes; means are 5 and 0."""
    models = scalars(0, 1, 9)
    found = assign(models, scalars(5, 100))
    assert found == {0: 1, 1: 0, 2: 0}
    assert values(cluster_means(models, found, dict.fromkeys(models, 1))) == {0: 5, 1: 0}


def test_no_cluster_is_emptied_for_another() -> None:
    """Two models and three centres: each is alone at its own; with the absent member of centre 0 client 0 may go."""
    models, centres = scalars(1, 9), scalars(0, 10, 50)
    assert assign(models, centres) == {0: 0, 1: 1}
    assert assign(models, centres, {0: 1}) == {0: 2, 1: 1}
    assert assign(models, centres, {0: 1, 2: 1}) == {0: 0, 1: 1}


NUMBERS = st.integers(-20, 20).map(float)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, st.integers(0, 2)), min_size=1, max_size=9), st.lists(NUMBERS, min_size=3, max_size=3)
)
@example([(0.0, 1), (1.0, 1), (9.0, 1)], [5.0, 5.0, 100.0])
def test_the_objective_never_rises(clients: list[tuple[float, int]], centres: list[float]) -> None:
    """Section 18 b: over E and M with fixed w, from any assignment, with empty clusters too."""
    models, start = scalars(*(value for value, _ in clients)), scalars(*centres)
    before = sum((value - centres[r]) ** 2 for value, r in clients)
    found = assign(models, start)
    moved = {**start, **cluster_means(models, found, dict.fromkeys(models, 1))}
    after = sum(squared_distance(models[k], moved[j]) for k, j in found.items())
    assert after <= before + 1e-3
    assert all(after <= sum((value - centres[r]) ** 2 for value, _ in clients) + 1e-3 for r in range(3))


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_found(seed: int) -> None:
    """Groups 0.02 wide and 100 apart: a second start in the group of the first has a chance below 10⁻⁷."""
    found = cluster_models(scalars(0, 100, 0.01, 100.01, 0.02), 2, np.random.default_rng(seed))
    assert found[0] == found[2] == found[4] != found[1] == found[3]


def test_starts_are_drawn_by_squared_distance() -> None:
    """After 0 come 1 and 3 with chances 1/10 and 9/10: about 100 draws, standard deviation 0.03."""
    drawn = [
        [model.params["w"].item() for model in spread_models(scalars(0, 1, 3), 2, np.random.default_rng(seed))]
        for seed in range(300)
    ]
    assert np.mean([first == 0 for first, _ in drawn]) == pytest.approx(1 / 3, abs=0.1)
    assert np.mean([second == 3 for first, second in drawn if first == 0]) == pytest.approx(0.9, abs=0.1)


def test_fewer_different_models_than_clusters() -> None:
    models = scalars(7, 7, 7)
    assert len(spread_models(models, 3, np.random.default_rng(0))) == 1
    assert cluster_models(models, 3, np.random.default_rng(0)) == {0: 0, 1: 0, 2: 0}
    assert len(set(cluster_models(scalars(1, 2, 1), 5, np.random.default_rng(0)).values())) == 2


def test_a_client_that_failed_at_first(lab: Any) -> None:
    """Client 1 gives no model: it is in no cluster and starts from centre 0; when it answers it is assigned."""
    method = FeSEM(centres=2)
    after, facts = after_round(lab, method, server_of([0.0, 0.0], [-1, -1, -1]), replies_of({0: 0, 2: 10}), 1)
    first, unknown, third = assignment_of(after)
    assert {first, third} == {0, 1} and unknown == -1
    assert method.broadcast(after, 1, RoundContext(lab.experiment().setting, 2)) == {MODEL: after[centre_slot(0)]}
    assert facts["moved"] == 0
    assert [facts[f"cluster_size_{j}"] for j in range(2)] == [1, 1]
    later, facts = after_round(lab, method, after, replies_of({1: 9}))
    assert assignment_of(later) == [first, third, third]
    assert facts["moved"] == 0


def test_a_round_by_hand(lab: Any, tmp_path: Any) -> None:
    """Clients 0, 1, 2 hold A: W_0 = (0.1, 0), b_0 = 0.05; client 3 three B: W_0 = (0, −0.2), b_0 = −0.05.

    Two clusters of equal models, objective 0. Weighted by members 3:1 the mean is (0.075, −0.05), 0.025. Of the test
    images A = (2, 0) and B = (0, 4), the first model (margins 2·0.25 and 2·0.05) calls both class 0, the other one
    (2·(−0.05) and 2·(−0.85)) class 1.
    """
    experiment = by_hand(lab, [[0], [0], [0], [1, 2, 3]])
    run = lab.run(experiment, tmp_path / "run")
    method, setting, server = experiment.method, experiment.setting, run.state.server
    expected = [[0.1, 0, 0.05]] * 3 + [[0, -0.2, -0.05]]
    for client in range(4):
        own = lab.client_model(method, server, client, Record(), setting)
        assert weights_of(own) == pytest.approx(expected[client], abs=1e-7)
        assert method.broadcast(server, client, RoundContext(setting, 2)) == {MODEL: own}
    assert weights_of(method.global_model(server)) == pytest.approx([0.075, -0.05, 0.025])
    sizes = {run.history[0]["server"][f"cluster_size_{j}"] for j in range(2)}
    assert sizes == {1, 3}
    assert run.history[0]["server"]["objective"] == pytest.approx(0, abs=1e-12)
    assert run.history[0]["local_accuracy"] == [0.5] * 4


def test_everybody_takes_part_in_the_first_round(lab: Any, tmp_path: Any) -> None:
    """Afterwards the cohorts of FedAvg; and who was not sampled keeps its centre."""
    changes = {"federation": {"rounds": 3, "participation": 0.5}}
    fedavg = lab.run(lab.experiment(**changes, local__lr=1e-3), tmp_path / "fedavg")
    experiment = lab.experiment(**changes, method=TWO)
    cohorts = [record["participants"] for record in fedavg.history]
    assert len(cohorts[0]) == 2
    run = lab.run(experiment, tmp_path / "run")
    assert [record["participants"] for record in run.history] == [[0, 1, 2, 3], *cohorts[1:]]
    method, setting = experiment.method, experiment.setting
    assert [method.round_exchanges(number, setting)[0].participants for number in (1, 2, 9)] == [
        "all",
        "cohort",
        "cohort",
    ]
    assert FeSEM(centres=1).round_exchanges(1, setting)[0].participants == "cohort"
    for record in run.history:
        facts = record["server"]
        assert facts["cluster_size_0"] + facts["cluster_size_1"] == 4
        assert facts["moved"] <= len(record["participants"])


def two_centres(experiment: Any) -> Record:
    """Clients 0 and 1 at the initial model, 2 and 3 at twice its parameters."""
    initial = experiment.setting.initial
    other = Weights({name: 2 * tensor for name, tensor in initial.params.items()}, initial.buffers)
    assignment = TensorDict({"centre": torch.tensor([0, 0, 1, 1])})
    return Record({centre_slot(0): initial, centre_slot(1): other, CLUSTER_ASSIGNMENT: assignment})


def test_a_client_gets_its_own_centre(lab: Any) -> None:
    """Client 2 starts from, and answers with, centre 1; with steps of nothing it sends it back."""
    experiment = lab.experiment(method=TWO, local__lr=1e-30)
    server = two_centres(experiment)
    worker, method, setting = ClientRunner(experiment), experiment.method, experiment.setting
    (exchange,) = method.round_exchanges(2, setting)
    for client, number in ((0, 0), (2, 1)):
        inbox = lab.receive(worker, 2, exchange, client, server, Record()).received
        assert set(inbox) == {"model"}
        assert inbox[MODEL] is server[centre_slot(number)]
        assert lab.client_model(method, server, client, Record(), setting) is server[centre_slot(number)]
        reply, _ = lab.train(experiment, client, number=2, server=server)
        sent = reply.message[MODEL].params
        assert all(torch.allclose(sent[name], tensor) for name, tensor in inbox[MODEL].params.items())


def test_who_answers(lab: Any) -> None:
    """Section 21: each client with its own centre, globally the mean over centres, weighted by members."""
    experiment = lab.experiment(method=TWO)
    facts = ("trains", "has_global_model", "has_vote", "predicts_from_client_state", "can_be_base")
    assert [getattr(experiment.method, fact) for fact in facts] == ["cohort", False, False, False, False]
    start = Record(experiment.method.start_server(experiment.setting))
    assert lab.same(experiment.method.global_model(start), experiment.setting.initial)
    server = two_centres(experiment) | {CLUSTER_ASSIGNMENT: TensorDict({"centre": torch.tensor([0, -1, 1, 1])})}
    shared = experiment.method.global_model(server)
    for name, tensor in experiment.setting.initial.params.items():
        assert torch.allclose(shared.params[name], (1 + 2 * 2) / 3 * tensor)
    assert list(shared.buffers) == list(experiment.setting.initial.buffers)
