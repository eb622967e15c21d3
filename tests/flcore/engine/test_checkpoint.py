"""What is on disk: a run stopped or killed at any moment and started again ends with the same bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.core.errors import Cure, DataError, RunError
from flcore.core.host import host_id
from flcore.engine import rounds
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client_results import StateFiles
from flcore.engine.exchange import Failure, Reply
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import Observers, run_name, run_rounds
from flcore.engine.run_state import RunName, RunState
from flcore.experiment import provenance
from flcore.io import disk
from flcore.io.files import read_tensors, sealed
from flcore.io.messages import Count, Size, TensorDict
from flcore.io.records import Record, save_record
from flcore.io.rows import Rows
from flcore.methods.fedavg import FedAvg
from tests.cases import quick


@pytest.mark.parametrize(("after", "step"), quick([(True, 7), (True, 1), (False, 1)], 1))
def test_stopped_at_every_operation_on_the_disk(lab: Any, stops: Any, after: bool, step: int, tmp_path: Path) -> None:
    """Two rounds of two of four clients with memories: stopping anywhere and going on gives the same bytes."""
    changes = {"method__name": "fedproto", "federation": {"rounds": 2, "participation": 0.5}}
    experiment = lab.experiment(spec=lab.ToySpec(encoder=True), **changes)
    seen = stops.everywhere(lab, experiment, tmp_path, after=after, step=step)
    # 4 replies, 2 files of memories, 3 servers, 3 states: every appearance of a file was a crash once.
    assert seen["replace"] >= 12


@pytest.mark.slow
def test_stopped_at_every_operation_on_the_disk_with_stacks(lab: Any, stops: Any, tmp_path: Path) -> None:
    """A stack without its replies is trained again, to the same bytes."""
    changes = {"engine": {"stack": True, "stack_size": 2}, "federation__rounds": 1, "method__name": "fedproto"}
    experiment = lab.experiment(spec=lab.ToySpec(encoder=True), **changes)
    seen = stops.everywhere(lab, experiment, tmp_path, after=True)
    # Replies of 2 stacks, 1 file of memories, 2 servers, 2 states.
    assert seen["replace"] >= 2 + 1 + 2 + 2


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from flcore.config.schema import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client_results import StateFiles
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.pool.process import local_pool
from flcore.engine import rounds
from flcore.engine.rounds import Observers, run_rounds
from flcore.experiment.experiment import Experiment

def run(config, prepared, partition, folder):
    experiment = Experiment.open(config, prepared, partition)
    checkpoint = Checkpoint(folder, durable_every=config.engine.durable_every)
    if config.engine.workers:
        executor = local_pool(experiment, prepared, partition, checkpoint)
    else:
        executor = InlineExecutor(experiment, checkpoint)
    run_rounds(experiment, checkpoint, executor, InlineOrchestrator(), Observers())
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
        state = folder / "state.json"
        replies = sorted(path.name for path in folder.glob("legs/*/0*"))
        return state.stat().st_mtime_ns if state.exists() else 0, replies
    except FileNotFoundError:  # it is just being cleared away
        return progress(folder)

if __name__ == "__main__":
    torch.set_num_threads(1)
    raw, seconds, times = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    prepared, partition, killed = map(Path, sys.argv[4:])
    config, chance, exchanges = Config.from_mapping(raw), random.Random(), set()
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
        if (killed / "state.json").exists():
            exchanges.add(Checkpoint(killed).read_state().exchanges)
    print(kills, len(exchanges))
"""


def killed_and_resumed(lab: Any, raw: Any, seconds: float, times: int, tmp_path: Path) -> tuple[int, int]:
    """Kill a real process so many times, each up to so many seconds after it did something; then let it finish.

    Returns how often it was killed and between how many different exchanges.
    """
    (tmp_path / "killed.py").write_text(KILLED)
    folders = [lab.prepared, lab.partition_folder, tmp_path / "killed"]
    command = [sys.executable, str(tmp_path / "killed.py"), json.dumps(raw), str(seconds), str(times)]
    done = subprocess.run(
        [*command, *map(str, folders)], capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=900
    )
    assert done.returncode == 0, done.stderr
    kills, exchanges = map(int, done.stdout.split())
    return kills, exchanges


KILLABLE = {
    "held": {"model": {"name": "fedgen_cnn", "batchnorm": "local"}, "engine__durable_every": 1e9},
    "fedproto": {"method__name": "fedproto", "evaluation__snapshots": [0, 3]},
    # Results of a stack arrive one by one; those that wait for the disk are lost, so here none waits.
    "stacked": {
        "method__name": "fedproto",
        "engine": {"stack": True, "stack_size": 2, "durable_every": 0},
    },
}


def test_what_a_killed_process_left_half_written_aside_is_swept(tmp_path: Path) -> None:
    """A process that has ended, killed while it wrote a snapshot: its half a file goes when the round is done again."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / "rounds").mkdir()
    name = f".0003.server.safetensors.{host_id()}.{ended.pid}.140219336833920.tmp"
    (tmp_path / "rounds" / name).write_bytes(b"half")
    checkpoint.snapshots.keep_round(3, Record(), {})
    assert [path.name for path in tmp_path.rglob("*.*")] == ["0003.server.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", KILLABLE)
def test_killed_twenty_times_and_resumed_gives_the_same_bytes(
    lab: Any, workers: int, case: str, tmp_path: Path
) -> None:
    """Workers that lose their parent finish what they do and leave; what they still write is what it had to be."""
    # A small learning rate: with 0.05 FedProto's features grow without bound after some forty rounds.
    changes = {**KILLABLE[case], "federation": {"rounds": 400, "participation": 0.75}, "local__lr": 0.002}
    kills, exchanges = killed_and_resumed(
        lab, lab.mapping(**changes, engine__workers=workers), 0.3 + workers / 4, 20, tmp_path
    )
    assert kills == 20
    assert exchanges >= 4  # not twenty times at the same place; how far a run gets in between depends on the machine
    assert lab.committed(tmp_path / "killed") == lab.run(lab.experiment(**changes), tmp_path / "whole").bytes
    assert len(Checkpoint(tmp_path / "killed").records("history.jsonl")) == 400


def test_a_damaged_reply_is_trained_again(lab: Any, tmp_path: Path) -> None:
    """A reply that was cut off, one of whose memory a byte has changed, and whole ones that are used as they are."""
    experiment = lab.experiment(method__name="fedproto", federation__rounds=1)
    expected = lab.run(experiment, tmp_path / "whole").bytes
    checkpoint = Checkpoint(tmp_path / "run")
    start = Record(experiment.method.start_server(experiment.setting))
    checkpoint.start(RunState(0, start, run=run_name(experiment)))
    executor = InlineExecutor(experiment, checkpoint)
    executor.train(lab.handed_out(experiment, checkpoint.read_state()), [[0], [1], [2], [3]])
    parts = [checkpoint.client_results.part_file(1, client) for client in range(4)]  # one by one, in this order
    parts[0].write_bytes(parts[0].read_bytes()[:-5])
    content = bytearray(parts[1].read_bytes())
    content[-1] ^= 1  # the arrays stand at the end
    parts[1].write_bytes(content)
    again = Checkpoint(tmp_path / "run")
    state = again.load(run_name(experiment))
    assert [again.client_results.load(1, client, state.run.digest) is None for client in range(4)] == [
        *(True, True, False, False)
    ]
    whole = [part.stat().st_mtime_ns for part in parts[2:]]
    mended = InlineExecutor(experiment, again).train(lab.handed_out(experiment, state), [[0], [1], [2], [3]])
    assert [part.stat().st_mtime_ns for part in parts[2:]] == whole
    assert [path.name for path in sorted(parts[0].parent.iterdir())] == [f"{n:04d}.safetensors" for n in range(6)]
    assert set(mended) == {0, 1, 2, 3}
    assert lab.run(experiment, tmp_path / "run").bytes == expected


def test_a_file_system_that_is_away_after_a_commit_repeats_no_round(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no longer counts cannot be listed once: the exchange is committed, and another try resumes after it."""
    listed, away = Path.iterdir, [OSError(errno.ESTALE, "Stale file handle")]

    def iterdir(path: Path) -> Any:
        if path.name == "clients" and away:
            raise away.pop()
        return listed(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        run = lab.run(lab.experiment(federation__rounds=2), tmp_path / "run")
    assert not away
    assert [record["round"] for record in run.history] == [1, 2]


def test_records_behind_the_commit_are_dropped(lab: Any, tmp_path: Path) -> None:
    """A kill between the lines and the state: a line, and half of another, are written again; timing likewise."""
    written = lab.run(lab.experiment(), tmp_path / "run").bytes["history.jsonl"]
    checkpoint = Checkpoint(tmp_path / "run")
    timing = (tmp_path / "run" / "timing.jsonl").read_bytes()
    for name in ("history.jsonl", "timing.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"round": 4, "top1_global": 0.9}\n{"round": 5, "to')
    state = checkpoint.load(run_name(lab.experiment()))
    assert state is not None
    assert (state.round, state.evaluated, state.exchanges) == (3, 3, 3)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == written
    assert (tmp_path / "run" / "timing.jsonl").read_bytes() == timing


def test_only_the_current_memories_are_kept(lab: Any, tmp_path: Path) -> None:
    run = lab.run(lab.experiment(method__name="fedproto", federation__participation=0.5), tmp_path / "run")
    names = {f"{number:04d}.safetensors" for number in run.state.client_states.values()}
    assert {path.name for path in (tmp_path / "run" / "clients").iterdir()} == names
    took_part = {client: record["round"] for record in run.history for client in record["participants"]}
    assert dict(run.state.client_states) == took_part
    assert not (tmp_path / "run" / "legs").exists()


# ---- what cannot be gone on with: refused, and thrown away on request alone ----------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(lab: Any, experiment: Any, folder: Path, error: type[Exception]) -> str:
    """The message with which a run is refused; nothing in its folder changes. With ``restart`` it begins anew."""
    before = contents(folder)
    with pytest.raises(error) as caught:
        lab.run(experiment, folder)
    assert contents(folder) == before
    fresh = lab.run(experiment, folder.with_name("fresh")).bytes
    assert lab.run(experiment, folder, restart=True).bytes == fresh
    return str(caught.value)


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "none").load(RunName("run")) is None
    (tmp_path / "empty").mkdir()
    assert Checkpoint(tmp_path / "empty").load(RunName("run")) is None


@pytest.mark.parametrize(
    ("damaged", "content"),
    quick(
        [
            ("server.0003.safetensors", b"short"),
            ("history.jsonl", None),
            ("clients/0003.safetensors", b"short"),
            ("state.json", b'{"round": 3, "ser'),
            ("state.json", None),
            ("state.json", "timing.jsonl"),
            ("history.jsonl", b'{"round": 1}\n{"rou'),
            ("timing.jsonl", b""),
            ("clients/0003.safetensors", None),
        ],
        2,
    ),
)
def test_a_damaged_checkpoint_is_refused_with_the_cure(
    lab: Any, damaged: str, content: bytes | str | None, tmp_path: Path
) -> None:
    """Cut off, gone, or a line of another file, with a check sum of its own.

    Hours of training may be behind it, so that is for people to decide.
    """
    experiment = lab.experiment(method__name="fedproto", spec=lab.ToySpec(encoder=True))
    lab.run(experiment, tmp_path / "run")
    path = tmp_path / "run" / damaged
    if isinstance(content, str):
        content = (tmp_path / "run" / content).read_bytes().splitlines()[0]
    path.unlink() if content is None else path.write_bytes(content)
    said = refused(lab, experiment, tmp_path / "run", DataError)
    assert said.startswith(f"{path}: ")
    assert "pass restart=True" in said


def test_a_checkpoint_of_another_run_is_refused(lab: Any, tmp_path: Path) -> None:
    lab.run(lab.experiment(method__name="fedproto", spec=lab.ToySpec()), tmp_path / "run")
    said = refused(lab, lab.experiment(spec=lab.ToySpec()), tmp_path / "run", RunError)
    assert said.startswith(f"{tmp_path / 'run'}: holds another run: its configuration, data or partition differ; ")
    assert "pass restart=True" in said


def test_a_checkpoint_of_other_code_is_refused_and_what_changed_is_named(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"flcore.core.rng": "1", "flcore.core.optim": "1", "flcore.math.losses.basic": "1"}
    monkeypatch.setattr(rounds, "code_modules", lambda config: dict(code))
    lab.run(lab.experiment(spec=lab.ToySpec()), tmp_path / "run")
    code |= {"flcore.core.rng": "2", "flcore.core.schedules": "1"}
    del code["flcore.math.losses.basic"]
    said = refused(lab, lab.experiment(spec=lab.ToySpec()), tmp_path / "run", RunError)
    assert "holds this run by other code" in said
    assert "changed since then: flcore.core.rng, flcore.core.schedules and flcore.math.losses.basic; " in said


def test_an_edit_that_the_run_does_not_use_keeps_its_checkpoint(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another method's docstring, between a kill and the next start: the run goes on. Its own method's: refused."""
    library = tmp_path / "flcore"
    for path in provenance.ROOT.rglob("*.py"):
        copy = library / path.relative_to(provenance.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(rounds, "code_modules", lambda config: provenance.code_modules(config, library))
    done = lab.run(lab.experiment(), tmp_path / "run").bytes

    def edit(module: str) -> None:
        path = library / module
        path.write_text(path.read_text().replace('"""', '"""Edited. ', 1))

    edit("methods/fedproto.py")
    assert lab.run(lab.experiment(), tmp_path / "run", Refusing()).bytes == done
    edit("methods/fedavg.py")
    with pytest.raises(RunError, match=r"changed since then: flcore\.methods\.fedavg; "):
        lab.run(lab.experiment(), tmp_path / "run", Refusing())


class Refusing:
    """An executor that must not be asked."""

    def train(self, state: Any, group: Any) -> Any:
        raise AssertionError("trained again")


def test_a_checkpoint_of_another_version_is_refused(lab: Any, tmp_path: Path) -> None:
    """One with a state of other keys; and one of before, whose state had another name."""
    experiment = lab.experiment(spec=lab.ToySpec())
    (tmp_path / "run").mkdir()
    whole = json.dumps(sealed({"run": "r", "code": {}, "server": {}, "facts": {}}))  # facts were in place of told
    for state in ('{"round_number": 3}', whole):
        (tmp_path / "run" / "state.json").write_text(state)
        assert "another version of protofl; " in refused(lab, experiment, tmp_path / "run", RunError)
    (tmp_path / "old").mkdir()
    save_record(tmp_path / "old" / "state.safetensors", {"n": Count(1)}, {"run": "other"})
    assert "state.json: not found; " in refused(lab, experiment, tmp_path / "old", DataError)


def test_restart_goes_on_with_what_can_be_gone_on_with(lab: Any, tmp_path: Path) -> None:
    """The result is the same, and the same command may be given again after a kill without losing anything."""
    done = lab.run(lab.experiment(), tmp_path / "run").bytes
    assert lab.run(lab.experiment(), tmp_path / "run", Refusing(), restart=True).bytes == done


def test_nothing_is_begun_over_a_run(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, Record({"n": Count(5)}), run=RunName("run")))
    checkpoint.start(RunState(0, Record({"n": Count(6)}), run=RunName("run")), replace=True)
    with pytest.raises(RunError) as told:
        checkpoint.start(RunState(0, Record({"n": Count(7)}), run=RunName("run")))
    assert Cure.START_OVER in str(told.value)
    assert checkpoint.read_state().server == {"n": Count(6)}


# ---- what a state and a reply say --------------------------------------------------------------------------------


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    """Every field away from its default; the place is the next exchange of the round after the last complete one."""
    name = RunName("run", {"flcore.core.rng": "a"})
    state = RunState(
        round=3,
        server=Record({"n": Count(5)}),
        client_states={0: 2, 11: 6},
        up={"model": Size(3, 12)},
        down={"model": Size(4, 16), "model_buffers": Size(0, 8)},
        steps=77,
        exchange=1,
        exchanges=7,
        evaluated=3,
        failures=((1, 2, 'it "broke"\n'), (3, 0, "ü")),
        simulated_seconds=0.1 + 0.2,
        run=name,
        metrics=[{"leg": "first", "server": {"distance": float("inf")}, "participants": [0, 11]}],
    )
    checkpoint = Checkpoint(tmp_path / "c")
    for client, exchange in state.client_states.items():
        checkpoint.states.save(exchange, {client: Record()}, name.digest)
    checkpoint.start(state)
    assert Checkpoint(tmp_path / "c").read_state() == checkpoint.read_state() == state
    assert state.place == (4, 1)


def test_replies_and_failures_come_back_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    reply = Reply({"n": Count(5)}, {"cross_entropy": 0.1}, 3, True)
    failure = Failure("too large: 1e+30", "reply", "Traceback\n  line 1")
    checkpoint.client_results.add(1, {4: (reply, Record({"kept": Count(2)}))}, "run")
    checkpoint.client_results.add(1, {5: (failure, Record())}, "run")
    for results in (checkpoint.client_results, Checkpoint(tmp_path / "c").client_results):
        assert results.load_all(1, (4, 5, 6), "run") == {4: reply, 5: failure, 6: None}
        assert results.states(1, (4, 5), "run") == {4: {"kept": Count(2)}, 5: {}}
        with pytest.raises(DataError):
            results.states(1, (4, 6), "run")
        assert results.load_all(2, (4, 5), "run") == results.load_all(1, (4, 5), "another") == {4: None, 5: None}


def test_one_damaged_row_is_no_damage_to_the_others(tmp_path: Path) -> None:
    """Three clients' states in a file, the arrays of two of them stacked; a bit of client 5's array changes."""
    states = {4: {"n": Count(2)}, 5: {"n": Count(3)}, 6: {"table": TensorDict({"x": torch.arange(3.0)})}}
    files = StateFiles(tmp_path)
    files.save(7, states, "run")
    arrays, _ = read_tensors(files.path(7), "")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "0/n/value": [[2], [3]],
        "1/table/x": [[0.0, 1.0, 2.0]],
    }
    assert [files.load(7, client, "run")["n"].value for client in (4, 5)] == [2, 3]
    content = files.path(7).read_bytes()
    three = (3).to_bytes(8, "little")
    assert content.count(three) == 1
    files.path(7).write_bytes(content.replace(three, (2).to_bytes(8, "little")))
    files.close()
    assert files.load(7, 4, "run") == states[4]
    assert files.load(7, 6, "run")["table"].named["x"].tolist() == [0.0, 1.0, 2.0]
    for client, exchange, run in ((5, 7, "run"), (8, 7, "run"), (4, 7, "another"), (4, 6, "run")):
        files.close()
        with pytest.raises(DataError):
            files.load(exchange, client, run)


def test_a_file_of_states_takes_over_older_ones_when_most_are_obsolete(tmp_path: Path) -> None:
    """Four clients have states. Rows in files with a valid one: 4, 4 + 3 = 7, 4 + 3 + 2 = 9 > 2 · 4, then 4 + 1."""
    checkpoint = Checkpoint(tmp_path)
    checkpoint.start(RunState(0, Record()))
    states: dict[int, int] = {}
    files = []
    for exchange, clients in enumerate([(0, 1, 2, 3), (0, 1, 2), (0, 1), (2,)], start=1):
        replies = {client: Reply(Record(), {}, 1, True) for client in clients}
        for client, reply in replies.items():
            kept = Record({"n": Count(10 * exchange + client)})
            checkpoint.client_results.add(exchange, {client: (reply, kept)}, checkpoint.run)
        states = checkpoint.keep_states(states, replies, exchange)
        after = RunState(exchange, Record(), client_states=states, exchanges=exchange)
        checkpoint.commit(after, None, {"round": exchange, "seconds": {}})
        files.append(sorted(path.stem for path in (tmp_path / "clients").iterdir()))
    assert files == [["0001"], ["0001", "0002"], ["0003"], ["0003", "0004"]]
    kept_by = {client: checkpoint.client_state(client, states)["n"] for client in range(4)}
    assert kept_by == {0: Count(30), 1: Count(31), 2: Count(42), 3: Count(13)}
    without = Reply(Record(), {}, 1, False)
    checkpoint.client_results.add(5, {2: (without, Record())}, checkpoint.run)
    assert checkpoint.keep_states(states, {2: without}, 5) == {0: 3, 1: 3, 3: 3}


def test_a_leg_that_is_committed_leaves_no_replies(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, Record()))
    reply = Reply({}, {}, 3, True)
    checkpoint.client_results.add(1, {4: (reply, Record({"kept": Count(2)}))}, checkpoint.run)
    states = checkpoint.keep_states({}, {4: reply}, 1)
    checkpoint.states.save(2, {5: {"kept": Count(3)}}, checkpoint.run)  # of an exchange that was interrupted
    (tmp_path / "c" / "clients" / ".0005.safetensors.77.tmp").write_bytes(b"of a process that was killed")
    assert (tmp_path / "c" / "legs").exists()
    checkpoint.commit(RunState(1, Record(), client_states=states, exchanges=1), None, {"round": 1, "seconds": {}})
    assert not (tmp_path / "c" / "legs").exists()
    assert [path.name for path in (tmp_path / "c" / "clients").iterdir()] == ["0001.safetensors"]
    checkpoint.start(RunState(0, Record()), replace=True)
    assert list((tmp_path / "c" / "clients").iterdir()) == []
    assert checkpoint.records("timing.jsonl") == []


@pytest.mark.parametrize("refused", ["state.json", "timing.jsonl"])
def test_a_commit_that_failed_and_is_tried_again_leaves_one_line(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an orchestrator repeats a round in the same process: the history has each round once."""
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, Record()))
    states = [RunState(number, Record(), exchanges=number, evaluated=number) for number in (1, 2)]
    checkpoint.commit(states[0], {"round": 1}, {"round": 1})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(original: Any) -> Any:
        def operation(*paths: Path) -> Any:
            if paths[-1].name == refused:
                raise full
            return original(*paths)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", fails(disk.rename))
        patch.setattr(disk, "open_end", fails(disk.open_end))
        with pytest.raises(OSError, match="No space left"):
            checkpoint.commit(states[1], {"round": 2}, {"round": 2})
    (tmp_path / "c" / "history.jsonl").open("a").write('{"rou')  # and one torn in the middle
    checkpoint.commit(states[1], {"round": 2}, {"round": 2})
    for name in ("history.jsonl", "timing.jsonl"):
        assert checkpoint.records(name) == [{"round": 1}, {"round": 2}]


def test_a_disk_that_keeps_what_is_done_with_stops_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that is committed is committed: to try it again because of litter would count it twice."""
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.start(RunState(0, Record({"n": Count(5)})))

    def busy(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove", busy)
        checkpoint.commit(RunState(1, Record({"n": Count(6)}), exchanges=1), None, {"round": 1})
    assert {path.name for path in (tmp_path / "c").glob("server.*")} == {
        "server.0000.safetensors",
        "server.0001.safetensors",
    }
    checkpoint.commit(RunState(2, Record({"n": Count(7)}), exchanges=2), None, {"round": 2})
    assert [path.name for path in (tmp_path / "c").glob("server.*")] == ["server.0002.safetensors"]


# ---- what is written, and when it is durable ---------------------------------------------------------------------


@dataclass(frozen=True)
class Constant(FedAvg):
    """FedAvg whose server holds a table that never changes."""

    name = "constant"

    def start_server(self, setting: Any) -> dict[str, Any]:
        return {**super().start_server(setting), "table": TensorDict({"x": torch.arange(1000.0)})}

    def broadcast(self, server: Record, client: int, ctx: Any) -> Record:
        return server.without("table")

    def server_steps(self) -> Any:
        aggregate = super().server_steps()["aggregate"]

        def beside(server: Record, replies: Any, ctx: Any) -> Any:
            after, facts = aggregate(server, replies, ctx)
            return server | after, facts

        return {"aggregate": beside}


def test_what_the_server_did_not_change_is_not_written_again(lab: Any, stops: Any, tmp_path: Path) -> None:
    """The table stays in the first file, the model moves to the last one; also after going on."""
    experiment = lab.experiment(algorithm=Constant(), federation__rounds=2)
    with pytest.raises(stops.Crash):
        lab.run(experiment, tmp_path / "run", orchestrator=stops.Stopping(at=2))
    files = {"server.0000.safetensors", "server.0001.safetensors"}
    assert {path.name for path in (tmp_path / "run").glob("server.*")} == files
    run = lab.run(experiment, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "state.json").read_text())["server"] == {"model": 2, "table": 0}
    files = {"server.0000.safetensors", "server.0002.safetensors"}
    assert {path.name for path in (tmp_path / "run").glob("server.*")} == files
    assert run.state.server["table"].arrays()["x"].tolist() == list(range(1000))
    assert (tmp_path / "run" / "server.0002.safetensors").stat().st_size > 3094 * 4
    assert Checkpoint(tmp_path / "run").read_state().server.keys() == {"model", "table"}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds names of open files in /proc")
def test_all_that_a_state_names_is_durable_before_it_is(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every appearance of a state: the files that it names, the records, and the folders that name them."""
    sync, rename, synced, appearances = os.fsync, Path.replace, set[Path](), []

    def fsync(handle: int) -> None:
        sync(handle)
        synced.add(Path(f"/proc/self/fd/{handle}").readlink())

    def replace(path: Path, target: Path) -> Path:
        if target.name == "state.json":
            state, folder = json.loads(path.read_text()), target.parent
            named = {path} | {folder / f"server.{exchange:04d}.safetensors" for exchange in state["server"].values()}
            named |= {folder / f"clients/{int(exchange):04d}.safetensors" for exchange in state["states"]}
            if state["exchanges"]:
                named |= {folder, folder / "history.jsonl", folder / "timing.jsonl", folder / "clients"}
            assert named <= synced
            appearances.append(state["exchanges"])
            synced.difference_update({folder, folder / "history.jsonl", folder / "timing.jsonl", folder / "clients"})
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    lab.run(lab.experiment(method__name="fedproto", spec=lab.ToySpec()), tmp_path / "run")
    assert appearances == [0, 1, 2, 3]
    assert tmp_path / "run" in synced  # the name of the last state


class Power:
    """A disk that forgets what nobody waited for: contents of files, or the name of the newest state."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.synced, self.named = folder, dict[Path, bytes](), b""
        sync = os.fsync

        def fsync(handle: int) -> None:
            sync(handle)
            path = Path(f"/proc/self/fd/{handle}").readlink()
            if path.is_file():
                self.synced[path.with_name(re.sub(r"^\.(.*)\.[0-9a-f]{8}\.\d+\.\d+\.tmp$", r"\1", path.name))] = (
                    path.read_bytes()
                )
            elif path == folder and (folder / "state.json").exists():
                self.named = (folder / "state.json").read_bytes()

        monkeypatch.setattr(os, "fsync", fsync)

    def fails(self, lost: str) -> None:
        if lost == "names":
            (self.folder / "state.json").write_bytes(self.named)
            return
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            whole = self.synced.get(path, b"")
            if not path.read_bytes().startswith(whole):  # written anew since then
                whole = b""
            path.write_bytes(whole or path.read_bytes()[: path.stat().st_size // 3])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds names of open files in /proc")
@pytest.mark.parametrize("lost", quick(["contents", "names", "nothing"], 1))
def test_a_power_failure_takes_what_nobody_waited_for(
    lab: Any, stops: Any, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second a round, durable after two: of five rounds and a half a kill takes the half, lost power one more."""
    changes = {"method__name": "fedproto", "federation__rounds": 7, "evaluation__snapshots": [0, 3, 5]}
    experiment = lab.experiment(spec=lab.ToySpec(), **changes)
    whole = lab.run(experiment, tmp_path / "whole").bytes
    power, stopping, folder = Power(tmp_path / "run", monkeypatch), stops.Stopping(at=6), tmp_path / "run"

    def begin(orchestrator: InlineOrchestrator) -> None:
        checkpoint = Checkpoint(folder, durable_every=2.0, clock=lambda: float(len(stopping.asked)))
        run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), orchestrator, Observers())

    with pytest.raises(stops.Crash):
        begin(stopping)
    assert not list(folder.glob("legs/*"))  # replies of the last second are in memory
    if lost != "nothing":
        power.fails(lost)
    found = Checkpoint(folder, durable_every=2.0).load(run_name(experiment))
    assert found is not None
    assert found.exchanges == (5 if lost == "nothing" else 4)
    begin(InlineOrchestrator())
    assert lab.committed(folder) == whole


def test_a_run_goes_on_with_another_durability(lab: Any, stops: Any, tmp_path: Path) -> None:
    """First no state but the first is durable, then every one is: the second file goes, the bytes are the same."""
    experiment, folder = lab.experiment(method__name="fedproto", spec=lab.ToySpec()), tmp_path / "run"
    whole = lab.run(experiment, tmp_path / "whole").bytes
    checkpoint = Checkpoint(folder, durable_every=1e9)
    with pytest.raises(stops.Crash):
        run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), stops.Stopping(at=3), Observers())
    assert json.loads((folder / "durable.json").read_text())["exchanges"] == 0
    assert (folder / "server.0000.safetensors").exists()
    assert lab.run(experiment, folder).bytes == whole
    assert not (folder / "durable.json").exists()


def test_answers_are_written_when_they_have_waited(tmp_path: Path) -> None:
    """Held for two seconds: the first two are written with the second, the third is not."""
    now = 0.0
    checkpoint = Checkpoint(tmp_path / "c", durable_every=2.0, clock=lambda: now)
    checkpoint.start(RunState(0, Record()))
    reply, failure = Reply(Record({"n": Count(1)}), {}, 3, True), Failure("too large")
    now = 1.0
    checkpoint.client_results.add(1, {4: (reply, Record({"kept": Count(2)}))}, "run")
    assert not (tmp_path / "c" / "legs").exists()
    now = 3.0
    checkpoint.client_results.add(1, {5: (failure, Record())}, "run")
    now = 4.0
    checkpoint.client_results.add(1, {6: (reply, Record())}, "run")
    (part,) = (tmp_path / "c" / "legs" / "0001").iterdir()
    assert part.name == "0000.safetensors"
    assert set(Rows(part, 1, "run")) == {4, 5}
    assert [checkpoint.client_results.load(1, client, "run") for client in (4, 5, 6)] == [reply, failure, reply]


@pytest.mark.slow
def test_stopped_anywhere_while_a_damaged_run_is_thrown_away(lab: Any, stops: Any, tmp_path: Path) -> None:
    """Stopped at any moment, the same command (with ``restart``) ends with the same bytes."""
    experiment = lab.experiment(spec=lab.ToySpec(), federation__rounds=1)

    def damaged(folder: Path) -> None:
        lab.run(experiment, folder)
        (folder / "history.jsonl").unlink()

    seen = stops.everywhere(lab, experiment, tmp_path, after=True, before=damaged, restart=True)  # compares the bytes
    assert seen["replace"] > 0
