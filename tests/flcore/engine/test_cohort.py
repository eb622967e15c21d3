"""Who takes part, who is waited for, and who is trained together: functions of seed and round, small cases by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.core.errors import ConfigError, RunError
from flcore.engine import cohort as stacking
from flcore.engine.cohort import Cohort, groups, leg_steps, participants_of, select_cohort, stacks
from flcore.experiment.experiment import Experiment
from flcore.io.records import serialise
from flcore.methods.types import Exchange, Phase
from flcore.sampling.samplers import Uniform


def trainers(experiment: Any, number: int) -> list[int]:
    (exchange,) = experiment.method.round_exchanges(number, experiment.setting)
    return list(participants_of(experiment, exchange, select_cohort(experiment, number), ()))


def many(lab: Any, count: int = 20, **changes: Any) -> Any:
    partition = lab.by_hand(lab.dataset, [[k] for k in range(count)])
    return lab.experiment(partition=partition, **changes)


@pytest.mark.parametrize(("participation", "size"), [(1.0, 20), (0.5, 10), (0.1, 2), (0.01, 1), (0.13, 3)])
def test_cohort_size(lab: Any, participation: float, size: int) -> None:
    """max(1, round(s·K)) of K = 20, without replacement, ascending."""
    for number in range(1, 6):
        cohort = trainers(many(lab, federation__participation=participation), number)
        assert len(cohort) == len(set(cohort)) == size
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(20))


def test_cohorts_depend_on_seed_and_round_only(lab: Any) -> None:
    def cohorts(**changes: Any) -> list[list[int]]:
        experiment = many(lab, **{"federation__participation": 0.3, **changes})
        return [trainers(experiment, number) for number in range(1, 8)]

    expected = cohorts()
    for method in ("fedprox", "fedproto"):
        assert cohorts(method__name=method) == expected
    assert cohorts(local__lr=0.5, model={"name": "fedproto_cnn"}, federation__rounds=9) == expected
    assert cohorts(seed=1) != expected
    assert len({tuple(cohort) for cohort in expected}) > 1
    # Round 5 alone, without its predecessors: what makes resuming possible.
    assert trainers(many(lab, federation__participation=0.3), 5) == expected[4]


def test_a_sampler_chooses_before_drop_out_and_never_the_centralised_trainer(lab: Any) -> None:
    """Round robin of 5 of 20: four rounds ask everybody once; who drops out is missing, and nobody takes its place."""
    changes: Any = {"federation__participation": 0.25, "federation__sampler": "round_robin"}
    rounds = [trainers(many(lab, **changes), number) for number in range(1, 5)]
    assert sorted(chain(*rounds)) == list(range(20)) and all(len(cohort) == 5 for cohort in rounds)
    fewer = [trainers(many(lab, **changes, federation__dropout=0.5), number) for number in range(1, 5)]
    assert all(set(left) <= set(cohort) for left, cohort in zip(fewer, rounds, strict=True))
    assert 0 < sum(map(len, fewer)) < 20
    trace = {"federation": {"sampler": "trace", "sampler_options": {"rounds": {"2": [1]}}}}
    assert trainers(lab.experiment(**trace, method__name="central"), 1) == [0]
    assert [trainers(lab.experiment(**trace), number) for number in (1, 2)] == [[], [1]]


def test_clients_of_a_trace_that_there_are_not_are_refused(lab: Any) -> None:
    config = lab.config(federation={"sampler": "trace", "sampler_options": {"rounds": {"2": [4]}}})
    with pytest.raises(ConfigError, match=r"^federation\.sampler = trace: .*client 4 in round 2"):
        Experiment.open(config, lab.prepared, lab.partition_folder)


@pytest.mark.parametrize("chosen", [[0, 0], [0, 1, 2, 3, 4, 5], [99]])
def test_a_sampler_that_chooses_wrongly_is_stopped(
    lab: Any, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uniform, "sample", lambda *_: chosen)
    with pytest.raises(RunError, match=r"^round 3: federation\.sampler = uniform chose"):
        select_cohort(many(lab, federation__participation=0.25), 3)


def test_a_run_by_a_trace_with_an_empty_round(lab: Any, tmp_path: Path) -> None:
    """Nobody in round 1: the model stays as it was made, and the run goes on; killed or not, the same bytes."""
    federation = {"rounds": 2, "sampler": "trace", "sampler_options": {"rounds": {"2": [0, 3]}}}
    run = lab.run(lab.experiment(federation=federation), tmp_path / "run")
    assert [record["participants"] for record in run.history] == [[], [0, 3]]


def test_every_client_is_sampled_alike(lab: Any) -> None:
    """400 rounds of 5 of 20: each about 100 times, ± 5·√(400·0.25·0.75) = ± 43."""
    experiment = many(lab, federation__participation=0.25)
    times = Counter(client for number in range(1, 401) for client in trainers(experiment, number))
    assert all(57 < times[client] < 143 for client in range(20))


def test_references_train_everybody(lab: Any) -> None:
    changes: Any = {"federation__participation": 0.1, "federation__dropout": 0.9}
    assert trainers(many(lab, method__name="local", **changes), 3) == list(range(20))
    assert trainers(many(lab, method__name="central", **changes), 3) == [0]


def test_dropout_removes_from_the_same_cohort(lab: Any) -> None:
    """200 rounds of 10: with probability 0.3 about 600 of 2000 are gone, ± 5·√(2000·0.3·0.7) = ± 102."""
    whole, partial_ = (
        many(lab, federation__participation=0.5),
        many(lab, federation={"participation": 0.5, "dropout": 0.3}),
    )
    lost = 0
    for number in range(1, 201):
        before, after = trainers(whole, number), trainers(partial_, number)
        assert set(after) <= set(before)
        assert after == sorted(after)
        lost += len(before) - len(after)
    assert 498 < lost < 702


# ---- speeds, oversampling, deadline ------------------------------------------------------------------------------


def sized(lab: Any, sizes: list[int], **changes: Any) -> Any:
    """Clients of so many samples each, in batches of one, half a simulated second per step: sizes/2 seconds a turn."""
    ends = np.cumsum(sizes)
    clients = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    partition = lab.by_hand(lab.dataset, clients, [range(60)] * len(sizes))
    settings = {"federation__step_seconds": 0.5, "local__batch_size": 1, "model": {"name": "fedcspc_cnn"}}
    return lab.experiment(partition=partition, **(settings | changes))


def test_nobody_is_waited_for_where_nothing_is_simulated(lab: Any) -> None:
    assert select_cohort(sized(lab, [1, 2, 3, 4]), 1) == Cohort((0, 1, 2, 3), (), 0.0)


def test_the_fastest_of_those_invited(lab: Any) -> None:
    """Seconds 2, 1.5, 1, 0.5. Wanted 2 of 4, invited 4: the last two are first, after 1 second."""
    experiment = sized(lab, [4, 3, 2, 1], federation__participation=0.5, federation__oversampling=2)
    assert select_cohort(experiment, 1) == Cohort((2, 3), (0, 1), 1.0)


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        (5.0, Cohort((0, 1, 2, 3), (), 2.0)),  # all are back before it
        (2.0, Cohort((0, 1, 2, 3), (), 2.0)),  # in time to the second
        (1.9, Cohort((0, 1, 2), (3,), 1.9)),
        (1.0, Cohort((0, 1), (2, 3), 1.0)),
        (0.4, Cohort((), (0, 1, 2, 3), 0.4)),  # nobody
    ],
)
def test_the_deadline(lab: Any, deadline: float, expected: Cohort) -> None:
    """Seconds 0.5, 1, 1.5, 2; the round lasts until the last reply or, where somebody is missing, the deadline."""
    assert select_cohort(sized(lab, [1, 2, 3, 4], federation__deadline=deadline), 1) == expected


def test_oversampling_and_a_deadline(lab: Any) -> None:
    """Seconds 0.5, 1, 1.5, 2, wanted 2, invited ceil(2·1.5) = 3 of 4: the two fastest of them, if before 0.7 s.

    Client 0 is the only one who can be, if it is invited at all.
    """
    federation = {"participation": 0.5, "oversampling": 1.5, "deadline": 0.7, "step_seconds": 0.5, "rounds": 30}
    invited = []
    for number in range(1, 31):
        found = select_cohort(sized(lab, [1, 2, 3, 4], federation=federation), number)
        invited.append(sorted(found.trainers + found.stragglers))
        assert len(invited[-1]) == 3
        assert found.trainers == ((0,) if 0 in invited[-1] else ())
        assert found.seconds == 0.7
    assert len({tuple(clients) for clients in invited}) == 4  # each is left out now and then


def test_ties_go_to_the_smaller_id(lab: Any) -> None:
    experiment = sized(lab, [2, 2, 2, 2], federation__participation=0.5, federation__oversampling=2)
    assert select_cohort(experiment, 1) == Cohort((0, 1), (2, 3), 1.0)


def test_oversampling_is_rounded_up_and_never_above_everybody(lab: Any) -> None:
    """Of 20: wanted 10. 10·1.1 = 11 (11.000000000000002 in floating point), 10·1.15 = 11.5: 12; 10·3: 20."""
    for factor, invited in ((1.0, 10), (1.1, 11), (1.15, 12), (3.0, 20)):
        experiment = many(lab, federation={"participation": 0.5, "oversampling": factor, "deadline": 99.0})
        found = select_cohort(experiment, 1)
        assert (len(found.trainers), len(found.stragglers)) == (10, invited - 10)


def test_the_steps_of_a_leg(lab: Any) -> None:
    """5 samples in batches of 2: 3 steps a pass. A pass, two passes, 7 steps; what has a source costs none."""
    experiment = sized(lab, [5], local__batch_size=2)
    phases = (Phase(), Phase(epochs=2), Phase(steps=7), Phase(steps=100, source="pseudo"))
    assert [leg_steps(experiment, 1, Exchange(phases=(phase,)), 0) for phase in phases] == [3, 6, 7, 0]
    assert leg_steps(experiment, 1, Exchange(phases=phases), 0) == 16


def alone(lab: Any, seed: int, number: int, **federation: float) -> float:
    """Logarithm of the speed factor of a single client: its seconds over the plain ones, 0.5 per step."""
    partition = lab.by_hand(lab.dataset, [range(3)], [range(60)])
    options = {"deadline": 1e9, "step_seconds": 0.5, "rounds": 99, **federation}
    experiment = lab.experiment(partition=partition, seed=seed, federation=options, local={"batch_size": 1})
    return math.log(select_cohort(experiment, number).seconds / 1.5)


def test_speeds_stay_and_jitter_changes(lab: Any) -> None:
    """The spread is a factor on one draw per client, the same in all rounds; jitter is drawn anew in each; both add."""
    spread = [alone(lab, 0, number, speed_spread=0.5) for number in (1, 2, 9)]
    assert spread[0] == pytest.approx(spread[1]) == pytest.approx(spread[2]) != 0
    assert alone(lab, 0, 1, speed_spread=1.0) == pytest.approx(2 * spread[0])
    jitter = [alone(lab, 0, number, speed_jitter=0.5) for number in (1, 2, 9)]
    assert len({round(value, 9) for value in jitter}) == 3
    assert alone(lab, 0, 2, speed_spread=0.5, speed_jitter=0.5) == pytest.approx(spread[1] + jitter[1])
    assert alone(lab, 1, 1, speed_spread=0.5) != pytest.approx(spread[0])


def test_speeds_are_log_normal(lab: Any) -> None:
    """150 jitters of standard deviation 0.5: mean 0 ± 5·0.5/√150 = ± 0.21, deviation 0.5 ± 5·0.5/√300 = ± 0.15."""
    partition = lab.by_hand(lab.dataset, [range(3)], [range(60)])
    federation = {"deadline": 1e9, "step_seconds": 0.5, "rounds": 200, "speed_jitter": 0.5}
    experiment = lab.experiment(partition=partition, federation=federation, local={"batch_size": 1})
    values = np.log([select_cohort(experiment, number).seconds / 1.5 for number in range(1, 151)])
    assert abs(values.mean()) < 0.21
    assert abs(values.std() - 0.5) < 0.15


def test_simulating_speeds_changes_nobody_elses_draw(lab: Any) -> None:
    """With a deadline that everybody meets, the cohorts are those without; drop-out removes the same clients."""
    plain = {"participation": 0.5, "dropout": 0.3, "rounds": 20}
    timed = plain | {"deadline": 1e9, "speed_spread": 1.0, "speed_jitter": 1.0}
    experiments = [many(lab, federation=federation) for federation in (plain, timed)]
    for number in range(1, 21):
        assert trainers(experiments[0], number) == trainers(experiments[1], number)


def test_who_is_late_depends_on_seed_and_round_only(lab: Any) -> None:
    federation = {"participation": 0.5, "oversampling": 1.6, "speed_spread": 0.5, "speed_jitter": 0.5, "rounds": 9}

    def cohorts(**changes: Any) -> list[Cohort]:
        experiment = many(lab, **{"federation": federation, **changes})
        return [select_cohort(experiment, number) for number in range(1, 10)]

    expected = cohorts()
    assert cohorts() == cohorts(method__name="fedprox") == cohorts(local__lr=0.5) == expected
    assert cohorts(seed=1) != expected
    assert all(len(cohort.trainers) == 10 and len(cohort.stragglers) == 6 for cohort in expected)


def test_everybody_of_a_leg_for_all_is_waited_for(lab: Any) -> None:
    experiment = sized(lab, [1, 2, 3, 4], method__name="local", federation__deadline=0.4)
    assert trainers(experiment, 1) == [0, 1, 2, 3]
    assert select_cohort(experiment, 1) == Cohort(())


def test_stragglers_receive_and_send_nothing(lab: Any, tmp_path: Path) -> None:
    """Seconds 0.5, 1, 1.5, 2; deadline 1.2; 3 rounds: down 4·3 models, up 2·3; 3.6 simulated seconds.

    The result is that of a federation whose third and fourth client always stay away.
    """
    federation = {"deadline": 1.2, "step_seconds": 0.5, "rounds": 3}
    experiment = sized(lab, [1, 2, 3, 4], federation=federation)
    run = lab.run(experiment, tmp_path / "run")
    model = experiment.setting.initial.num_parameters * 4
    assert run.history[-1]["bytes_down"] == {"model": 12 * model}
    assert run.history[-1]["bytes_up"] == {"model": 6 * model, "num_samples": 6 * 8}
    assert [(record["participants"], record["stragglers"]) for record in run.history] == [([0, 1], [2, 3])] * 3
    assert [record["simulated_seconds"] for record in run.history] == pytest.approx([1.2, 2.4, 3.6])
    assert run.state.steps == 3 * (1 + 2)
    first = lab.by_hand(lab.dataset, [range(1), range(1, 3)], [range(60)] * 2)
    plain = {"local__batch_size": 1, "model": {"name": "fedcspc_cnn"}, "federation": {"rounds": 3}}
    two = lab.run(lab.experiment(partition=first, **plain), tmp_path / "two")
    assert serialise(two.state.server) == serialise(run.state.server)
    assert "stragglers" not in two.history[0] and "simulated_seconds" not in two.history[0]


def test_a_deadline_that_nobody_meets(lab: Any, tmp_path: Path) -> None:
    """Three rounds without aggregation: the model stays, four downloads a round are paid, 0.4 seconds each pass."""
    experiment = sized(lab, [1, 2, 3, 4], federation={"deadline": 0.4, "step_seconds": 0.5, "rounds": 3})
    run = lab.run(experiment, tmp_path / "run")
    assert serialise(run.state.server) == serialise({"model": experiment.setting.initial})
    assert run.history[-1]["bytes_down"] == {"model": 12 * 4 * experiment.setting.initial.num_parameters}
    assert (run.state.up, run.state.steps) == ({}, 0)
    assert run.history[-1]["simulated_seconds"] == pytest.approx(1.2)
    assert run.history[-1]["stragglers"] == [0, 1, 2, 3]


def test_a_run_with_stragglers_is_resumed(lab: Any, stops: Any, tmp_path: Path) -> None:
    federation = {"rounds": 2, "participation": 0.5, "oversampling": 2, "speed_jitter": 1.0}
    experiment = lab.experiment(spec=lab.ToySpec(), federation=federation)
    stops.run_until(experiment, tmp_path / "stopped", 1)
    assert lab.run(experiment, tmp_path / "stopped").bytes == lab.run(experiment, tmp_path / "whole").bytes


# ---- groups and stacks --------------------------------------------------------------------------------------------

COHORTS = st.lists(st.integers(0, 99), unique=True).map(sorted)


@given(COHORTS, st.integers(0, 8), st.none() | st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_groups_cover_the_cohort_in_order(cohort: list[int], workers: int, clients_per_task: int | None) -> None:
    found = [list(chain(*group)) for group in groups([[client] for client in cohort], workers, clients_per_task)]
    assert [client for group in found for client in group] == cohort
    assert all(found)
    if cohort and clients_per_task is None:
        assert len(found) == min(max(workers, 1), len(cohort))
        assert max(map(len, found)) - min(map(len, found)) <= 1
    if clients_per_task is not None:
        assert all(len(group) <= clients_per_task for group in found)
        assert len(found) == math.ceil(len(cohort) / clients_per_task)


@given(COHORTS, st.integers(1, 9), st.integers(0, 8), st.none() | st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_a_stack_is_never_divided(cohort: list[int], size: int, workers: int, clients_per_task: int | None) -> None:
    whole = [cohort[i : i + size] for i in range(0, len(cohort), size)]
    handed = groups(whole, workers, clients_per_task)
    assert [stack for group in handed for stack in group] == whole
    assert all(handed)


def test_nobody_makes_no_group(lab: Any) -> None:
    assert groups([], 3, None) == groups([], 0, 2) == []
    assert stacks(lab.experiment(engine__stack=True), 1, Exchange(), ()) == []
    assert stacks(lab.experiment(), 1, Exchange(), ()) == []


def test_without_stacking_each_is_alone(lab: Any) -> None:
    assert stacks(lab.experiment(), 1, Exchange(), (0, 2, 3)) == [[0], [2], [3]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_stacks_are_even_and_of_similar_lengths(lab: Any, sizes: list[int], limit: int) -> None:
    """As few stacks as the limit allows, differing by one client at most; no step count lies within another stack's."""
    experiment = sized(lab, sizes, engine={"stack": True, "stack_size": limit})
    found = stacks(experiment, 1, Exchange(), range(len(sizes)))
    assert sorted(chain(*found)) == list(range(len(sizes)))
    assert len(found) == math.ceil(len(sizes) / limit)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    steps = [[sizes[client] for client in stack] for stack in found]
    assert all(min(first) >= max(second) for first, second in pairwise(steps))


def test_stacks_by_hand(lab: Any) -> None:
    """Steps 1, 4, 2, 4, 3: in falling order, ties by id: 1, 3, 4, 2, 0; in stacks of at most 3: 3 + 2."""
    experiment = sized(lab, [1, 4, 2, 4, 3], engine={"stack": True, "stack_size": 3})
    assert stacks(experiment, 1, Exchange(), range(5)) == [[1, 3, 4], [2, 0]]


def test_memory_limits_a_stack(lab: Any) -> None:
    """fedgen_cnn at 16×16 with d features and 6 classes has 984 + 257·d + 6·(d + 1) weights; four copies, and 64 KiB.

    d = 4096: 1,078,238 weights, 17.3 MB a client: 4 fit into 70 MiB (73.4 MB), none into 16 MiB, so each is alone.
    d = 8: 0.1 MB a client: all 16 fit into 16 MiB, and without a limit of their number stacks are of 8 on a CPU.
    """
    partition = lab.by_hand(lab.dataset, [[client] for client in range(16)], [range(60)] * 16)

    def number_of(dim: int, client_state: int, size: int | None = 16) -> int:
        engine = {"stack": True, "stack_size": size, "stack_memory_mb": client_state}
        model = {"name": "fedgen_cnn", "feature_dim": dim}
        experiment = lab.experiment(partition=partition, model=model, engine=engine, local__batch_size=1)
        return len(stacks(experiment, 1, Exchange(), range(16)))

    assert number_of(4096, 70) == 4
    assert number_of(4096, 16) == 16
    assert number_of(8, 16) == 1
    assert number_of(8, 16, None) == 2


def test_the_stack_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cohort of 10 in stacks of up to 8 is twice 5: smaller stacks share its program; 6 to 8 have the limit's."""
    monkeypatch.setattr(stacking, "stack_limit", lambda experiment: 8)
    of_ten: Any = SimpleNamespace(cohort_size=10)
    assert [stacking.program_stack(of_ten, clients) for clients in range(1, 9)] == [5] * 5 + [8] * 3
