"""What is on disk: a run stopped or killed at any moment and started again ends with the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flcore.engine import rounds
from flcore.engine.checkpoint import Checkpoint, RunState
from flcore.engine.client import Failure, Place, Reply
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import run_name
from flcore.messages import Count, Size


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_stopped_at_every_operation_on_the_disk(lab: Any, stops: Any, after: bool, tmp_path: Path) -> None:
    """Two rounds of two of four clients with memories: stopping anywhere and going on gives the same bytes."""
    changes = {"method__name": "fedproto", "federation": {"rounds": 2, "participation": 0.5}}
    experiment = lab.experiment(spec=lab.ToySpec(encoder=True), **changes)
    seen = stops.everywhere(lab, experiment, tmp_path, after=after)
    # 4 replies, 4 memories, 3 states: at least 11 files appeared, and every appearance was a crash once.
    assert seen["replace"] >= 11


@pytest.mark.slow
def test_stopped_at_every_operation_on_the_disk_with_stacks(lab: Any, stops: Any, tmp_path: Path) -> None:
    """A stack with a reply missing is trained whole again, to the same bytes as those that are there."""
    changes = {"engine": {"stack": True, "stack_size": 2}, "federation__rounds": 1, "method__name": "fedproto"}
    experiment = lab.experiment(spec=lab.ToySpec(encoder=True), **changes)
    assert stops.everywhere(lab, experiment, tmp_path, after=True)["replace"] >= 10  # 4 replies, 4 memories, 2 states


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from flcore.config import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.executors import InlineExecutor, local_pool
from flcore.engine.experiment import Experiment
from flcore.engine import rounds
from flcore.engine.rounds import Observers, PlainSteps, run_rounds

def run(config, prepared, partition, folder):
    experiment, checkpoint = Experiment.open(config, prepared, partition), Checkpoint(folder)
    if config.engine.workers:
        executor = local_pool(experiment, prepared, partition, checkpoint)
    else:
        executor = InlineExecutor(experiment, checkpoint)
    run_rounds(experiment, checkpoint, executor, PlainSteps(), Observers())
    executor.close()

def child(*arguments):
    pid = os.fork()
    if pid == 0:
        try:
            run(*arguments)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return None if found == 0 else status

def progress(folder):
    "What changes on the disk as soon as a run does something."
    try:
        state = folder / "state.safetensors"
        replies = sorted(path.name for path in folder.glob("legs/*/0*"))
        return state.stat().st_mtime_ns if state.exists() else 0, replies
    except FileNotFoundError:  # it is just being cleared away
        return progress(folder)

if __name__ == "__main__":
    torch.set_num_threads(1)
    raw, seconds, times = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rounds.code_fingerprint = lambda: sys.argv[4]
    prepared, partition, killed = map(Path, sys.argv[5:])
    config, chance, legs = Config.from_mapping(raw), random.Random(), set()
    kills = 0
    while True:
        before, pid, status = progress(killed), child(config, prepared, partition, killed), None
        if kills < times:
            if chance.random() < 0.75:  # else: perhaps while it is still starting
                while progress(killed) == before and status is None:
                    time.sleep(0.001)
                    status = ended(pid)
            time.sleep(chance.uniform(0, seconds))
            status = ended(pid) if status is None else status
            if status is None:
                os.kill(pid, signal.SIGKILL)
        if status is None:
            status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            break
        kills += 1
        if (killed / "state.safetensors").exists():
            legs.add(Checkpoint(killed).read_state().legs)
    print(kills, len(legs))
"""


def killed_and_resumed(lab: Any, raw: Any, seconds: float, times: int, tmp_path: Path) -> tuple[int, int]:
    """Kill a real process so many times, each up to so many seconds after it did something; then let it finish.

    Returns how often it was killed and between how many different legs.
    """
    (tmp_path / "killed.py").write_text(KILLED)
    folders = [lab.prepared, lab.partition_folder, tmp_path / "killed"]
    command = [
        sys.executable,
        str(tmp_path / "killed.py"),
        json.dumps(raw),
        str(seconds),
        str(times),
        rounds.code_fingerprint(),
    ]
    done = subprocess.run(
        [*command, *map(str, folders)], capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=900
    )
    assert done.returncode == 0, done.stderr
    kills, legs = map(int, done.stdout.split())
    return kills, legs


KILLABLE = {
    "fedavg": {"model": {"name": "fedgen_cnn", "batchnorm": "local"}},
    "fedproto": {"method__name": "fedproto"},
    "stacked": {"method__name": "fedproto", "engine__stack": True, "engine__stack_size": 2},
}


@pytest.mark.parametrize("case", ["fedproto"])
def test_killed_at_random_moments(lab: Any, case: str, tmp_path: Path) -> None:
    """A real process, killed five times and started again until it is done, ends with the same bytes."""
    changes = {**KILLABLE[case], "federation": {"rounds": 30, "participation": 0.75}}
    kills, _ = killed_and_resumed(lab, lab.mapping(**changes), 0.2, 5, tmp_path)
    assert kills == 5
    assert lab.committed(tmp_path / "killed") == lab.run(lab.experiment(**changes), tmp_path / "whole").bytes


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", KILLABLE)
def test_killed_twenty_times_and_resumed_gives_the_same_bytes(
    lab: Any, workers: int, case: str, tmp_path: Path
) -> None:
    """Workers that lose their parent finish what they do and leave; what they still write is what it had to be."""
    # A small learning rate: with 0.05 FedProto's features grow without bound after some forty rounds.
    changes = {**KILLABLE[case], "federation": {"rounds": 200, "participation": 0.75}, "local__lr": 0.002}
    kills, legs = killed_and_resumed(
        lab, lab.mapping(**changes, engine__workers=workers), 0.3 + workers / 4, 20, tmp_path
    )
    assert kills == 20
    assert legs >= 4  # not twenty times at the same place; how far a run gets in between depends on the machine
    assert lab.committed(tmp_path / "killed") == lab.run(lab.experiment(**changes), tmp_path / "whole").bytes
    assert len(Checkpoint(tmp_path / "killed").records("history.jsonl")) == 200


def test_a_damaged_reply_is_trained_again(lab: Any, tmp_path: Path) -> None:
    """A reply that was cut off, one whose memory is gone, and a whole one that is used as it is."""
    experiment = lab.experiment(method__name="fedproto", federation__rounds=1)
    expected = lab.run(experiment, tmp_path / "whole").bytes
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, experiment.method.start_server(experiment.setting), run=run_name(experiment)))
    executor = InlineExecutor(experiment, checkpoint)
    executor.train(checkpoint.read_state(), [[0], [1], [2]])
    damaged = checkpoint.reply_file(1, 0)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    checkpoint.memory_file(1, 1).unlink()
    assert checkpoint.load_reply(1, 0) is checkpoint.load_reply(1, 1) is checkpoint.load_reply(1, 3) is None
    whole = checkpoint.reply_file(1, 2).stat().st_mtime_ns
    mended = executor.train(checkpoint.read_state(), [[0], [1], [2]])
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
    assert not (tmp_path / "run" / "legs").exists()


# ---- what a state and a reply say --------------------------------------------------------------------------------


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    """Every field away from its default; the place is the next leg of the round after the last complete one."""
    state = RunState(
        round=3,
        server={"n": Count(5)},
        memories={0: 2, 11: 6},
        up={"model": Size(3, 12)},
        down={"model": Size(4, 16), "model_buffers": Size(0, 8)},
        steps=77,
        leg=1,
        legs=7,
        failures=((1, 2, 'it "broke"\n'), (3, 0, "ü")),
        simulated_seconds=0.1 + 0.2,
        run="run",
    )
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(state)
    assert checkpoint.read_state() == state == checkpoint.load("run")
    assert checkpoint.load("another") is None
    assert state.place == Place(4, 1)


def test_replies_and_failures_come_back_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, {}, run="run"))
    reply = Reply({"n": Count(5)}, {"cross_entropy": 0.1}, 3, True, {"model": Size(1, 4)}, {"n": Size(0, 8)})
    failure = Failure("too large: 1e+30", {"model": Size(1, 4)})
    checkpoint.save_reply(1, 4, reply, {"kept": Count(2)})
    checkpoint.save_failure(1, 5, failure)
    assert checkpoint.load_reply(1, 4) == reply
    assert checkpoint.memory(4, {4: 1}) == {"kept": Count(2)}
    assert checkpoint.load_reply(1, 5) == failure
    assert checkpoint.load_reply(1, 6) is checkpoint.load_reply(2, 4) is checkpoint.load_reply(2, 5) is None
    assert {path.name for path in (tmp_path / "c" / "legs" / "0001").iterdir()} == {"0004.safetensors", "0005.json"}


def test_a_leg_that_is_committed_leaves_no_replies(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, {}, run="run"))
    reply = Reply({}, {}, 3, True, {}, {})
    checkpoint.save_reply(1, 4, reply, {"kept": Count(2)})
    checkpoint.save_reply(1, 5, reply, {"kept": Count(3)})
    checkpoint.commit(RunState(1, {}, memories={4: 1}, legs=1, run="run"), None, {"round": 1, "seconds": {}})
    assert not (tmp_path / "c" / "legs").exists()
    assert [path.name for path in (tmp_path / "c" / "clients").iterdir()] == ["0004.0001.safetensors"]
    checkpoint.start(RunState(0, {}, run="run"))
    assert list((tmp_path / "c" / "clients").iterdir()) == []
    assert checkpoint.records("timing.jsonl") == []
