"""The round: same bytes however it is carried out, interrupted or resumed; cohorts, batches, BatchNorm, failures."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flcore.config import Config, LocalConfig
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import BATCHNORM, Worker, batch_positions
from flcore.engine.executors import InlineExecutor, PoolExecutor
from flcore.engine.optimizers import Adam, Sgd, learning_rate, make_optimizer
from flcore.engine.rounds import (
    Observers,
    PlainSteps,
    client_groups,
    code_fingerprint,
    run_name,
    run_rounds,
    sample_cohort,
)
from flcore.errors import ProtoflError, RunError
from flcore.messages import Count, Weights, save_record, serialise
from flcore.methods import METHODS
from flcore.methods.base import Phase
from flcore.methods.fedavg import FedAvg
from flcore.methods.local import Local
from flcore.models import extract_weights, load_weights
from flcore.rng import torch_stream

# Everything that has a memory, a sample of clients and random numbers at once.
RICH = {"federation": {"rounds": 3, "participation": 0.6}, "data__augmentation": "crop_flip"}


def weights_of(record: Any) -> Weights:
    return record["model"]


# ---- same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn"])
def test_twice_gives_the_same_bytes(lab: Any, method: str, model: str, tmp_path: Path) -> None:
    changes = {**RICH, "method__name": method, "model": {"name": model}}
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


class Scrambled(PlainSteps):
    """Groups finish in another order: the last is trained first."""

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        items = list(items)
        done = {i: function(items[i]) for i in reversed(range(len(items)))}
        return [done[i] for i in range(len(items))]


class Threaded(PlainSteps):
    """Groups run on threads at once, as under an orchestrator."""

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(function, items))


@pytest.mark.parametrize("steps", [Scrambled(), Threaded()], ids=["scrambled", "threads"])
@pytest.mark.parametrize("clients_per_task", [1, 3])
@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_groups_and_their_order_do_not_matter(
    lab: Any, steps: Any, clients_per_task: int, method: str, tmp_path: Path
) -> None:
    expected = lab.run(lab.experiment(method__name=method), tmp_path / "plain").bytes
    experiment = lab.experiment(method__name=method, engine__clients_per_task=clients_per_task)
    checkpoint = Checkpoint(tmp_path / "grouped")
    run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), steps, Observers())
    assert lab.committed(tmp_path / "grouped") == expected


def test_a_finished_run_is_left_alone(lab: Any, tmp_path: Path) -> None:
    experiment = lab.experiment()
    expected = lab.run(experiment, tmp_path / "run").bytes

    class Refusing:
        def train(self, state: Any, clients: Any) -> Any:
            raise AssertionError("trained again")

    assert lab.run(experiment, tmp_path / "run", Refusing()).bytes == expected


def test_another_run_in_the_folder_is_dropped(lab: Any, tmp_path: Path) -> None:
    lab.run(lab.experiment(method__name="fedproto"), tmp_path / "run")
    expected = lab.run(lab.experiment(), tmp_path / "fresh").bytes
    assert lab.run(lab.experiment(), tmp_path / "run").bytes == expected


def test_other_code_starts_anew(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = lab.experiment()
    lab.run(experiment, tmp_path / "run")
    assert Checkpoint(tmp_path / "run").load(run_name(experiment)) is not None
    monkeypatch.setattr("flcore.engine.rounds.code_fingerprint", lambda: "other code")
    assert Checkpoint(tmp_path / "run").load(run_name(experiment)) is None
    assert len(code_fingerprint()) == 64


def test_a_state_written_by_other_code_counts_as_none(tmp_path: Path) -> None:
    save_record(tmp_path / "state.safetensors", {"n": Count(1)}, {"run": "other", "round_number": 3})
    assert Checkpoint(tmp_path).load("this run") is None


# ---- interrupted -------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """As sudden as a kill: nothing in the library catches it."""


def crash_points(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Counter[str]:
    """Stop at the n-th operation on the disk (before or after it is carried out); count them."""
    seen: Counter[str] = Counter()

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            seen["all"] += 1
            seen[name] += 1
            now = seen["all"] == at
            if now and not after:
                raise Crash
            result = original(*arguments, **keywords)
            if now:
                raise Crash
            return result

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
        patch(owner, name)
    return seen


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_at_every_operation_on_the_disk(lab: Any, after: bool, tmp_path: Path) -> None:
    """Two rounds of two of four clients with memories: stopping anywhere and going on gives the same bytes."""
    experiment = lab.experiment(method__name="fedproto", federation={"rounds": 2, "participation": 0.5})
    experiment.setting  # noqa: B018 - built once, for all attempts
    expected = lab.run(experiment, tmp_path / "whole").bytes
    at, finished = 0, False
    while not finished:
        at += 1
        folder = tmp_path / f"stopped-{at}"
        with pytest.MonkeyPatch.context() as patch:
            seen = crash_points(patch, at, after=after)
            try:
                lab.run(experiment, folder)
                finished = True
            except Crash:
                pass
        assert lab.run(experiment, folder).bytes == expected, (at, seen)
    # 4 replies, 4 memories, 3 states: at least 11 files appeared, and every appearance was a crash once.
    assert seen["replace"] >= 11
    assert at > seen["replace"]


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.executors import InlineExecutor
from flcore.engine.experiment import Experiment
from flcore.engine.rounds import Observers, PlainSteps, run_rounds

torch.set_num_threads(1)
raw, prepared, partition, whole, killed = json.loads(sys.argv[1]), *map(Path, sys.argv[2:])

def run(folder):
    experiment = Experiment.open(Config.from_mapping(raw), prepared, partition)
    checkpoint = Checkpoint(folder)
    run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), PlainSteps(), Observers())

def child(folder):
    pid = os.fork()
    if pid == 0:
        run(folder)
        os._exit(0)
    return pid

start = time.monotonic()
assert os.waitpid(child(whole), 0)[1] == 0
duration = time.monotonic() - start
kills, rounds = 0, set()
chance = random.Random()
while True:
    pid = child(killed)
    time.sleep(chance.uniform(0, duration / 12))
    if kills < 14:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        kills += 1
        continue
    assert status == 0
    break
print(kills)
"""


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_killed_at_random_moments(lab: Any, method: str, tmp_path: Path) -> None:
    """A real process, killed up to 14 times and started again until it is done, ends with the same bytes."""
    batchnorm = "local" if method == "fedavg" else "aggregate"
    raw = lab.mapping(
        method__name=method,
        model={"name": "fedgen_cnn", "batchnorm": batchnorm},
        federation={"rounds": 12, "participation": 0.75},
    )
    (tmp_path / "killed.py").write_text(KILLED)
    folders = [lab.prepared, lab.partition_folder, tmp_path / "whole", tmp_path / "killed"]
    command = [sys.executable, str(tmp_path / "killed.py"), json.dumps(raw), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6
    assert lab.committed(tmp_path / "killed") == lab.committed(tmp_path / "whole")
    assert len(Checkpoint(tmp_path / "killed").records("history.jsonl")) == 12


def test_a_damaged_reply_is_trained_again(lab: Any, tmp_path: Path) -> None:
    """A reply that was cut off, one whose memory is gone, and a whole one that is used as it is."""
    experiment = lab.experiment(method__name="fedproto", federation__rounds=1)
    expected = lab.run(experiment, tmp_path / "whole").bytes
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, experiment.method.start_server(experiment.setting)), run_name(experiment))
    executor = InlineExecutor(experiment, checkpoint)
    executor.train(checkpoint.read_state(), [0, 1, 2])
    damaged = checkpoint.reply_file(1, 0)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    checkpoint.memory_file(1, 1).unlink()
    assert checkpoint.load_reply(1, 0) is checkpoint.load_reply(1, 1) is checkpoint.load_reply(1, 3) is None
    whole = checkpoint.reply_file(1, 2).stat().st_mtime_ns
    mended = executor.train(checkpoint.read_state(), [0, 1, 2])
    assert checkpoint.reply_file(1, 2).stat().st_mtime_ns == whole
    assert set(mended) == {0, 1, 2}
    assert lab.run(experiment, tmp_path / "run").bytes == expected


def test_history_behind_the_commit_is_dropped(lab: Any, tmp_path: Path) -> None:
    """A kill between the history line and the state: the line, and half of another, are written again."""
    two = lab.run(lab.experiment(), tmp_path / "run").bytes["history.jsonl"]
    checkpoint = Checkpoint(tmp_path / "run")
    with (tmp_path / "run" / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "top1_global": 0.9}\n{"round": 5, "to')
    state = checkpoint.load(run_name(lab.experiment()))
    assert state is not None
    assert state.round == 3
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == two


def test_only_the_current_memories_are_kept(lab: Any, tmp_path: Path) -> None:
    run = lab.run(lab.experiment(method__name="fedproto", federation__participation=0.5), tmp_path / "run")
    names = {f"{client:04d}.{number:04d}.safetensors" for client, number in run.state.memories.items()}
    assert {path.name for path in (tmp_path / "run" / "clients").iterdir()} == names
    took_part = {client: record["round"] for record in run.history for client in record["participants"]}
    assert dict(run.state.memories) == took_part
    assert not (tmp_path / "run" / "rounds").exists()


# ---- the pool ----------------------------------------------------------------------------------------------------


def pool_run(lab: Any, folder: Path, steps: Any, **changes: Any) -> Any:
    experiment = lab.experiment(**changes)
    executor = PoolExecutor(experiment.config, lab.prepared, lab.partition_folder, Checkpoint(folder))
    try:
        return (
            lab.run(experiment, folder, executor) if steps is None else _with(experiment, folder, executor, steps, lab)
        )
    finally:
        executor.close()


def _with(experiment: Any, folder: Path, executor: Any, steps: Any, lab: Any) -> Any:
    run_rounds(experiment, Checkpoint(folder), executor, steps, Observers())
    return lab.committed(folder)


class KillOneWorker(Threaded):
    """Kills a worker process as soon as the first reply of round 2 is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.replies, self.calls, self.killed = folder / "rounds" / "0002", 0, 0

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.calls += 1
        if self.calls == 2:
            threading.Thread(target=self._kill, args=(multiprocessing.active_children(),)).start()
        return super().map(name, function, items)

    def _kill(self, workers: list[Any]) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not any(self.replies.glob("0*.safetensors")):
            time.sleep(0.001)
        self.killed = workers[0].pid
        os.kill(self.killed, signal.SIGKILL)


def test_two_workers_one_of_which_is_killed(lab: Any, tmp_path: Path) -> None:
    """The killed worker is replaced and the result is that of one process; nobody is left when the pool is closed."""
    changes = {"method__name": "fedproto", "local__epochs": 8}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    before = {process.pid for process in multiprocessing.active_children()}
    steps = KillOneWorker(tmp_path / "pool")
    assert pool_run(lab, tmp_path / "pool", steps, engine__workers=2, **changes) == expected
    assert steps.killed
    assert {process.pid for process in multiprocessing.active_children()} == before


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "clients_per_task"), [(1, None), (2, 1), (3, 2), (3, None)])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "central"])
def test_any_number_of_workers(
    lab: Any, workers: int, clients_per_task: int | None, method: str, tmp_path: Path
) -> None:
    changes = {**RICH, "method__name": method, "model": {"name": "fedproto_cnn"}}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    engine = {"workers": workers, "clients_per_task": clients_per_task}
    assert pool_run(lab, tmp_path / "pool", Threaded(), engine=engine, **changes) == expected


@pytest.mark.slow
def test_a_worker_says_what_went_wrong(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 1, client \d: training diverged"):
        pool_run(lab, tmp_path / "pool", Threaded(), engine__workers=3, local__lr=1e6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu(lab: Any, method: str, tmp_path: Path) -> None:
    """Two rounds in one process, then a third that starts from the state on disk, whose tensors come from the CPU."""
    changes = {"method__name": method, "engine__device": "cuda"}
    experiment = lab.experiment(federation__rounds=3, **changes)
    checkpoint = Checkpoint(tmp_path / "run")

    def stop(number: int, record: Any) -> None:
        if number == 2:
            raise Crash

    with pytest.raises(Crash):
        run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), PlainSteps(), Observers(stop))
    run = lab.run(experiment, tmp_path / "run")
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert all(0 <= record["mean_local"] <= 1 for record in run.history)


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "local"])
def test_divergence_names_round_and_client(lab: Any, method: str, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"^round 1, client 0: training diverged \(mean loss: cross_entropy .*lower local\.lr"
    ):
        lab.run(lab.experiment(method__name=method, local__lr=1e6), tmp_path / "run")
    assert not (tmp_path / "run" / "history.jsonl").exists()  # nothing of the failed round was committed
    assert Checkpoint(tmp_path / "run").read_state().round == 0


def test_an_infinite_loss_is_a_failure(lab: Any) -> None:
    """Head rows ±2e38 for pixel 0: logits of (1, 0) differ by 4e38, beyond float32; the gradient is finite."""
    dataset = lab.toy_dataset([[1, 0], [0, 1]], [1, 1], None, None)
    experiment = lab.experiment(dataset, lab.by_hand(dataset, [[0, 1]]), lab.ToySpec())
    huge = Weights({"head.weight": torch.tensor([[2e38, 0.0], [-2e38, 0.0]]), "head.bias": torch.zeros(2)})
    with pytest.raises(RunError, match="round 1, client 0"):
        Worker(experiment).train(1, 0, {"model": huge}, {})


@dataclass(frozen=True)
class Failing(FedAvg):
    name = "failing"

    def stages(self) -> Any:
        def stage(server: Any, replies: Any, setting: Any, number: int) -> Any:
            raise ValueError("nothing to fuse")

        return {"fuse": stage}


def test_a_failing_stage_is_named(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 1, server stage fuse: nothing to fuse$"):
        lab.run(lab.experiment(algorithm=Failing()), tmp_path / "run")


# ---- the round ---------------------------------------------------------------------------------------------------


class Recording(PlainSteps):
    def __init__(self) -> None:
        self.names: list[str] = []

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
def test_steps_have_names(lab: Any, method: str, stages: list[str], tmp_path: Path) -> None:
    experiment = lab.experiment(method__name=method, federation__rounds=2, evaluation__every=2)
    checkpoint, steps = Checkpoint(tmp_path / "run"), Recording()
    run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), steps, Observers())
    assert steps.names == ["train-clients", *stages, "train-clients", *stages, "evaluate"]


def test_evaluation_every_so_often_and_at_the_end(lab: Any, tmp_path: Path) -> None:
    """Every second of five rounds: 2, 4 and the last; observers hear of all rounds; the clock is an argument."""
    experiment = lab.experiment(federation__rounds=5, evaluation__every=2)
    checkpoint = Checkpoint(tmp_path / "run")
    heard: list[tuple[int, Any]] = []
    ticks = iter(range(1000))
    observers = Observers(lambda number, record: heard.append((number, record)), lambda: float(next(ticks)))
    state = run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), PlainSteps(), observers)
    history = checkpoint.records("history.jsonl")
    assert [record["round"] for record in history] == [2, 4, 5]
    assert [(number, record is not None) for number, record in heard] == [
        (1, False), (2, True), (3, False), (4, True), (5, True),
    ]  # fmt: skip
    assert json.loads(json.dumps([record for _, record in heard if record])) == history
    timing = checkpoint.records("timing.jsonl")
    assert [record["round"] for record in timing] == [1, 2, 3, 4, 5]
    assert set(timing[1]["seconds"]) == {"train-clients", "aggregate", "evaluate"}
    # 43, 50, 62 and 85 samples in batches of 16: 3 + 4 + 4 + 6 steps a round
    assert state.steps == history[-1]["steps"] == 5 * 17


def test_nobody_answers(lab: Any, tmp_path: Path) -> None:
    """With drop-out 0.999 a round is empty: the server keeps its model, nothing is counted, the run goes on."""
    experiment = lab.experiment(federation__dropout=0.999)
    run = lab.run(experiment, tmp_path / "run")
    assert [record["participants"] for record in run.history] == [[], [], []]
    assert serialise({"m": weights_of(run.state.server)}) == serialise({"m": experiment.setting.initial})
    assert (run.state.up, run.state.steps, run.history[0]["train_loss"]) == ({}, 0, {})


def many(lab: Any, count: int = 20, **changes: Any) -> Any:
    partition = lab.by_hand(lab.dataset, [[k] for k in range(count)])
    return lab.experiment(partition=partition, **changes)


@pytest.mark.parametrize(("participation", "size"), [(1.0, 20), (0.5, 10), (0.1, 2), (0.01, 1), (0.13, 3)])
def test_cohort_size(lab: Any, participation: float, size: int) -> None:
    """max(1, round(s·K)) of K = 20, without replacement, ascending."""
    for number in range(1, 6):
        cohort = sample_cohort(many(lab, federation__participation=participation), number)
        assert len(cohort) == len(set(cohort)) == size
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(20))


def test_cohorts_depend_on_seed_and_round_only(lab: Any) -> None:
    def cohorts(**changes: Any) -> list[list[int]]:
        experiment = many(lab, **{"federation__participation": 0.3, **changes})
        return [sample_cohort(experiment, number) for number in range(1, 8)]

    expected = cohorts()
    for method in ("fedprox", "fedproto"):
        assert cohorts(method__name=method) == expected
    assert cohorts(local__lr=0.5, model={"name": "fedproto_cnn"}, federation__rounds=9) == expected
    assert cohorts(seed=1) != expected
    assert len({tuple(cohort) for cohort in expected}) > 1
    # Round 5 alone, without its predecessors: what makes resuming possible.
    assert sample_cohort(many(lab, federation__participation=0.3), 5) == expected[4]


def test_every_client_is_sampled_alike(lab: Any) -> None:
    """400 rounds of 5 of 20: each about 100 times, ± 5·√(400·0.25·0.75) = ± 43."""
    experiment = many(lab, federation__participation=0.25)
    times = Counter(client for number in range(1, 401) for client in sample_cohort(experiment, number))
    assert all(57 < times[client] < 143 for client in range(20))


def test_references_train_everybody(lab: Any) -> None:
    changes = {"federation__participation": 0.1, "federation__dropout": 0.9}
    assert sample_cohort(many(lab, method__name="local", **changes), 3) == list(range(20))
    assert sample_cohort(many(lab, method__name="central", **changes), 3) == [0]


def test_dropout_removes_from_the_same_cohort(lab: Any) -> None:
    """200 rounds of 10: with probability 0.3 about 600 of 2000 are gone, ± 5·√(2000·0.3·0.7) = ± 102."""
    whole, partial_ = (
        many(lab, federation__participation=0.5),
        many(lab, federation={"participation": 0.5, "dropout": 0.3}),
    )
    lost = 0
    for number in range(1, 201):
        before, after = sample_cohort(whole, number), sample_cohort(partial_, number)
        assert set(after) <= set(before)
        assert after == sorted(after)
        lost += len(before) - len(after)
    assert 498 < lost < 702


@given(st.lists(st.integers(0, 99), unique=True).map(sorted), st.integers(0, 8), st.none() | st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_groups_cover_the_cohort_in_order(cohort: list[int], workers: int, clients_per_task: int | None) -> None:
    groups = client_groups(cohort, workers, clients_per_task)
    assert [client for group in groups for client in group] == cohort
    assert all(groups)
    if cohort and clients_per_task is None:
        assert len(groups) == min(max(workers, 1), len(cohort))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    if clients_per_task is not None:
        assert all(len(group) <= clients_per_task for group in groups)
        assert len(groups) == math.ceil(len(cohort) / clients_per_task)


# ---- batches -----------------------------------------------------------------------------------------------------


def positions(size: int, batch: int, epochs: int, steps: int | None, seed: int = 0) -> list[list[int]]:
    generator = torch_stream(seed, "batches", 1)
    return [part.tolist() for part in batch_positions(size, batch, epochs, steps, generator)]


def test_a_pass_takes_every_sample_once() -> None:
    """10 samples in batches of 4, two passes: 4, 4, 2, 4, 4, 2; shuffled anew."""
    batches = positions(10, 4, 2, None)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == list(range(10))
    assert batches[:3] != batches[3:]
    assert positions(10, 4, 2, None) == batches != positions(10, 4, 2, None, seed=1)


def test_steps_chain_passes_and_are_cut() -> None:
    """Seven steps of the same passes: 4, 4, 2, 4, 4, 2, 4; epochs do not matter."""
    batches = positions(10, 4, 1, 7)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert batches[:6] == positions(10, 4, 2, None)
    assert [len(batch) for batch in positions(3, 4, 5, 2)] == [3, 3]


def test_runs_of_both_kinds_count_their_steps(lab: Any) -> None:
    """Client 0 has 43 samples: 3 batches of 16 a pass."""
    for changes, expected in (({"local__epochs": 2}, 6), ({"local__steps": 5}, 5), ({"local__steps": 2}, 2)):
        experiment = lab.experiment(**changes)
        reply, _ = Worker(experiment).train(1, 0, experiment.method.start_server(experiment.setting), {})
        assert reply.steps == expected


def small(lab: Any, sizes: list[int], **changes: Any) -> Any:
    """Clients of so many samples each, of the tiny images."""
    ends = np.cumsum(sizes)
    clients = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return lab.experiment(partition=lab.by_hand(lab.dataset, clients, [range(60)] * len(sizes)), **changes)


def steps_of(experiment: Any, client: int = 0) -> int:
    return Worker(experiment).train(1, client, experiment.method.start_server(experiment.setting), {})[0].steps


def test_a_batch_of_one_is_skipped_where_there_is_batchnorm(lab: Any) -> None:
    """17 samples in batches of 16: the last batch has one sample."""
    assert steps_of(small(lab, [17])) == 1
    assert steps_of(small(lab, [17], model={"name": "fedproto_cnn"})) == 2
    assert steps_of(small(lab, [17], local={"batch_size": 16, "steps": 4})) == 2


def test_a_batch_of_one_is_used_where_batchnorm_is_frozen(lab: Any) -> None:
    """Baselines.md section 0: skip where the model has BatchNorm *in training mode*."""
    assert steps_of(small(lab, [17], model={"name": "fedgen_cnn", "batchnorm": "frozen"})) == 2


def test_batches_of_one_and_batchnorm_are_refused(lab: Any, tmp_path: Path) -> None:
    try:
        run = lab.run(small(lab, [8, 8], local={"batch_size": 1}), tmp_path / "run")
    except ProtoflError:
        return
    assert run.state.steps > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["fedgen_cnn", "fedproto_cnn", "fedcspc_cnn"])
def test_small_clients_and_single_classes(lab: Any, method: str, model: str, tmp_path: Path) -> None:
    """One sample; fewer than a batch; one class only; a class nobody holds: no error and no NaN (section 23, 5)."""
    labels = lab.dataset.train.labels
    single = (labels == 2).nonzero().flatten().tolist()[:20]
    rest = [i for i in range(240) if int(labels[i]) in (0, 1)]
    partition = lab.by_hand(lab.dataset, [rest[:1], rest[1:6], single], [range(60)] * 3)
    run = lab.run(lab.experiment(partition=partition, method__name=method, model={"name": model}), tmp_path / "run")
    text = (tmp_path / "run" / "history.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert len(run.history) == 3


# ---- BatchNorm ---------------------------------------------------------------------------------------------------


def test_aggregated_statistics_are_averaged_like_weights(lab: Any, tmp_path: Path) -> None:
    """Clients of 43, 50, 62, 85 samples count 3, 4, 4, 6 batches: (129 + 200 + 248 + 510)/240 = 4.53, rounded 5.

    Running means: the same weights, from what each client says.
    """
    experiment = lab.experiment(federation__rounds=1)
    server = experiment.method.start_server(experiment.setting)
    worker = Worker(experiment)
    said = [weights_of(worker.train(1, client, server, {})[0].message) for client in range(4)]
    name = "encoder.1.running_mean"
    sizes = [43, 50, 62, 85]
    expected = sum(size / 240 * model.buffers[name].double() for size, model in zip(sizes, said, strict=True))
    assert [int(model.buffers["encoder.1.num_batches_tracked"]) for model in said] == [3, 4, 4, 6]
    run = lab.run(experiment, tmp_path / "run")
    buffers = weights_of(run.state.server).buffers
    assert torch.allclose(buffers[name], expected.float(), rtol=1e-6, atol=1e-8)
    assert int(buffers["encoder.1.num_batches_tracked"]) == 5
    assert "model_buffers" in run.history[0]["bytes_up"]
    assert run.state.memories == {}


def test_local_statistics_stay_at_home_and_are_kept(lab: Any, tmp_path: Path) -> None:
    """Two rounds of client 0 (3 batches each): its counter is 6. Nothing of it travels; the server has none."""
    run = lab.run(lab.experiment(model__batchnorm="local", federation__rounds=2), tmp_path / "run")
    assert set(run.history[-1]["bytes_up"]) == {"model", "num_samples"}
    assert set(run.history[-1]["bytes_down"]) == {"model"}
    assert weights_of(run.state.server).buffers == {}
    counters = [int(run.memory(k)[BATCHNORM].buffers["encoder.1.num_batches_tracked"]) for k in range(4)]
    assert counters == [6, 8, 8, 12]
    means = [run.memory(k)[BATCHNORM].buffers["encoder.1.running_mean"] for k in range(4)]
    assert not torch.equal(means[0], means[1])
    assert all(set(run.memory(k)) == {BATCHNORM} and run.memory(k)[BATCHNORM].params == {} for k in range(4))


def test_a_client_goes_on_from_its_own_statistics(lab: Any) -> None:
    """With 0 kept, training starts from the initial statistics; with something kept, from that."""
    experiment = lab.experiment(model__batchnorm="local")
    server = experiment.method.start_server(experiment.setting)
    worker = Worker(experiment)
    _, kept = worker.train(1, 0, server, {})
    worker.train(1, 1, server, {})  # another client on the same module in between
    _, fresh = worker.train(1, 0, server, {})
    assert serialise(fresh) == serialise(kept)
    _, further = worker.train(1, 0, server, kept)
    assert int(further[BATCHNORM].buffers["encoder.1.num_batches_tracked"]) == 6


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_local_statistics_of_a_method_that_keeps_its_model(lab: Any, method: str, tmp_path: Path) -> None:
    """Personal models with private statistics are what they are under any policy: local equals aggregate."""
    changes = {"method__name": method}
    expected = lab.run(lab.experiment(**changes), tmp_path / "aggregate")
    found = lab.run(lab.experiment(model__batchnorm="local", **changes), tmp_path / "local")
    assert [r["local_accuracy"] for r in found.history] == [r["local_accuracy"] for r in expected.history]


@pytest.mark.parametrize("method", METHODS)
def test_frozen_statistics_never_change(lab: Any, method: str, tmp_path: Path) -> None:
    experiment = lab.experiment(model__batchnorm="frozen", method__name=method)
    run = lab.run(experiment, tmp_path / "run")
    assert "model_buffers" not in run.history[-1]["bytes_up"] | run.history[-1]["bytes_down"]
    worker = Worker(experiment)
    worker.train(1, 0, experiment.method.start_server(experiment.setting), {})
    for name, tensor in experiment.setting.initial.buffers.items():
        assert torch.equal(worker.module.state_dict()[name], tensor)
    trained = extract_weights(worker.module).params
    assert not any(torch.equal(trained[name], tensor) for name, tensor in experiment.setting.initial.params.items())


def test_no_client_reaches_the_next(lab: Any) -> None:
    """A worker that has trained others gives the reply of a new one, bit for bit."""
    for model in ("fedgen_cnn", "fedproto_cnn"):
        experiment = lab.experiment(method__name="fedproto", model={"name": model}, local__momentum=0.9)
        server = experiment.method.start_server(experiment.setting)
        used = Worker(experiment)
        for client in (2, 1, 3):
            used.train(1, client, server, {})
        first, second = (worker.train(1, 0, server, {}) for worker in (used, Worker(experiment)))
        assert serialise(first[0].message) == serialise(second[0].message)
        assert serialise(first[1]) == serialise(second[1])


def test_no_dropout_noise_is_left_for_evaluation(lab: Any) -> None:
    """A worker that has just trained answers as one that loads the same weights."""
    experiment = lab.experiment(model={"name": "fedproto_cnn"})
    server = experiment.method.start_server(experiment.setting)
    used, fresh = Worker(experiment), Worker(experiment)
    reply, _ = used.train(1, 0, server, {})
    load_weights(fresh.module, weights_of(reply.message))
    images = lab.dataset.test.images
    assert torch.equal(used.scores(images, server, None), fresh.scores(images, server, None))


# ---- phases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phased(Local):
    name = "phased"
    parts: tuple[Phase, ...] = ()

    def phases(self) -> tuple[Phase, ...]:
        return self.parts


@pytest.mark.parametrize(("moves", "stays"), [("head.", "encoder."), ("encoder.", "head.")])
def test_a_phase_moves_its_part_and_nothing_else(lab: Any, moves: str, stays: str) -> None:
    """The frozen part is the same to the bit, BatchNorm statistics included (baselines.md section 16)."""
    experiment = lab.experiment(
        algorithm=Phased(parts=(Phase((moves,)),)), local__weight_decay=0.1, local__momentum=0.9
    )
    _, memory = Worker(experiment).train(1, 0, {}, {})
    initial, found = experiment.setting.initial, memory["model"]
    for before, after in ((initial.params, found.params), (initial.buffers, found.buffers)):
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor) == name.startswith(stays), name


def test_phases_follow_each_other_with_their_own_lengths(lab: Any) -> None:
    """Head for two passes of 3 batches, then body for 4 mini-batches, then all as configured (one pass): 6 + 4 + 3."""
    parts = (Phase(("head.",), epochs=2), Phase(("encoder.",), steps=4), Phase())
    reply, _ = Worker(lab.experiment(algorithm=Phased(parts=parts))).train(1, 0, {}, {})
    assert reply.steps == 13


# ---- optimisers --------------------------------------------------------------------------------------------------


def torch_twin(ours: Any, params: list[torch.Tensor]) -> Any:
    if isinstance(ours, Adam):
        return torch.optim.Adam(params, lr=ours.lr, weight_decay=ours.weight_decay)
    return torch.optim.SGD(params, lr=ours.lr, momentum=ours.momentum, weight_decay=ours.weight_decay)


def five_steps(ours: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of both after each of five steps on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    mine = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [tensor.clone().requires_grad_() for tensor in mine]
    twin = torch_twin(ours, theirs)
    for _ in range(5):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for tensor, grad in zip(theirs, grads, strict=True):
            tensor.grad = grad.clone()
        twin.step()
        ours.step(mine, [grad.clone() for grad in grads])
        yield from zip(mine, [tensor.detach() for tensor in theirs], strict=True)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_sgd_is_torchs_to_the_bit(momentum: float, weight_decay: float) -> None:
    for mine, theirs in five_steps(Sgd(0.1, momentum, weight_decay)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_adam_is_torchs(weight_decay: float) -> None:
    """To a relative 1e-6: a few roundings of float32 (1.2e-7) per step may fall in another order."""
    for mine, theirs in five_steps(Adam(0.01, weight_decay)):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_momentum_by_hand() -> None:
    """w = 1, gradients 1 and 1, lr 0.1, momentum 0.5: v = 1, w = 0.9; v = 1.5, w = 0.75. Decay 1: v = 2, w = 0.8."""
    w = [torch.tensor([1.0])]
    optimizer = Sgd(0.1, 0.5)
    for expected in (0.9, 0.75):
        optimizer.step(w, [torch.tensor([1.0])])
        assert w[0].item() == pytest.approx(expected)
    w = [torch.tensor([1.0])]
    Sgd(0.1, 0.0, 1.0).step(w, [torch.tensor([1.0])])
    assert w[0].item() == pytest.approx(0.8)


def test_the_first_step_of_adam_is_the_learning_rate() -> None:
    """m̂ = g, v̂ = g²: a step of lr·g/(|g| + 1e-8), whatever the gradient's size."""
    for gradient in (3.0, -0.002):
        w = [torch.tensor([1.0])]
        Adam(0.01).step(w, [torch.tensor([gradient])])
        assert w[0].item() == pytest.approx(1 - math.copysign(0.01, gradient), abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {1: 0.8, 7: 0.8}),
        ("exponential", {1: 0.8, 2: 0.4, 4: 0.1}),  # 0.8·0.5^(t-1)
        ("step", {1: 0.8, 3: 0.8, 4: 0.4, 6: 0.4, 7: 0.2}),  # halved every three rounds
        ("cosine", {1: 0.8, 5: 0.4, 3: 0.4 * (1 + math.cos(math.pi / 4)), 8: 0.4 * (1 + math.cos(math.pi * 7 / 8))}),
    ],
)
def test_learning_rate_of_a_round(schedule: Any, expected: dict[int, float]) -> None:
    """lr 0.8, decay 0.5, every 3 rounds, of 8 rounds; cosine: 0.4·(1 + cos(π(t-1)/8)), 0.4 in round 5."""
    local = LocalConfig(lr=0.8, schedule=schedule, decay=0.5, decay_every=3)
    assert {number: learning_rate(local, number, 8) for number in expected} == pytest.approx(expected)


def test_the_configured_optimiser_is_made_afresh() -> None:
    sgd = make_optimizer(LocalConfig(lr=0.8, momentum=0.5, weight_decay=0.1, schedule="exponential", decay=0.5), 2, 8)
    assert sgd == Sgd(0.4, 0.5, 0.1)
    assert make_optimizer(LocalConfig(optimizer="adam", lr=0.1, weight_decay=0.2), 1, 8) == Adam(0.1, 0.2)


def test_the_schedule_reaches_training(lab: Any) -> None:
    """Toy model, one sample (2, 0) of class 0, from zero: round 3 at decay 0.5 moves by a quarter of 0.1."""
    dataset = lab.toy_dataset([[2, 0], [0, 1]], [0, 1], None, None)
    local = {"lr": 0.1, "schedule": "exponential", "decay": 0.5}
    experiment = lab.experiment(dataset, lab.by_hand(dataset, [[0], [1]]), lab.ToySpec(), local=local)
    reply, _ = Worker(experiment).train(3, 0, experiment.method.start_server(experiment.setting), {})
    assert weights_of(reply.message).params["head.weight"][0, 0].item() == pytest.approx(0.025)


def test_a_run_is_named_by_its_data_too(lab: Any) -> None:
    other = replace(lab.partition, fingerprint="other")
    assert lab.experiment(partition=other).hash != lab.experiment().hash
    assert lab.experiment(engine__workers=2).hash == lab.experiment().hash
    assert Config.from_mapping(lab.mapping()).engine.workers == 0


def test_when_images_are_normalised_changes_no_bit(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client too large to be normalised whole is normalised batch by batch: element-wise, hence the same."""
    at_once = lab.run(lab.experiment(), tmp_path / "at-once")
    monkeypatch.setattr("flcore.engine.client._ClientSamples._MOST_BYTES", 0)
    by_batch = lab.run(lab.experiment(), tmp_path / "by-batch")
    assert serialise(at_once.state.server) == serialise(by_batch.state.server)
