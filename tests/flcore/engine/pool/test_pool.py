"""Worker processes: the same bytes as one process, however many and whatever is handed to each; deaths of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flcore.core.errors import RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.exchange import ExchangeWork, Reply, pack_results
from flcore.engine.failures import ClientError
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool import child
from flcore.engine.pool.executors import PoolExecutor, Receive, WorkerHandle, WorkerLostError
from flcore.engine.pool.process import local_pool
from flcore.engine.pool.task import Request, StoppedError, TrainRequest
from flcore.engine.rounds import run_name
from flcore.engine.run_state import RunState
from flcore.io.records import Record
from flcore.methods import METHODS
from flcore.methods.types import Replies, RoundContext

RICH = {"federation": {"rounds": 3, "participation": 0.6}, "data__augmentation": "crop_flip"}


class KillOneWorker(InlineOrchestrator):
    """Groups on threads at once; kills a worker process as soon as the first reply of round 2 is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.replies, self.calls, self.killed = folder / "legs" / "0002", 0, 0

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.calls += 1
        if self.calls == 2:
            threading.Thread(target=self._kill, args=(child.alive(),)).start()
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(function, items))

    def _kill(self, workers: list[Any]) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not any(self.replies.glob("0*.safetensors")):
            time.sleep(0.001)
        self.killed = workers[0].pid
        os.kill(self.killed, signal.SIGKILL)


@pytest.mark.parametrize("stack", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["serial", "stacked"])
def test_two_workers_one_of_which_is_killed(lab: Any, stack: bool, tmp_path: Path) -> None:
    """The killed worker is replaced and the result is that of one process; nobody is left when the pool is closed."""
    changes = {"method__name": "fedproto", "local__epochs": 8, "engine__stack": stack, "engine__stack_size": 2}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    before = {process.pid for process in child.alive()}
    steps = KillOneWorker(tmp_path / "pool")
    assert lab.run_in_pool(tmp_path / "pool", steps, engine__workers=2, **changes).bytes == expected
    assert steps.killed
    assert {process.pid for process in child.alive()} == before


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "clients_per_task"), [(1, None), (2, 1), (3, 2), (3, None)])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "central"])
def test_any_number_of_workers(
    lab: Any, workers: int, clients_per_task: int | None, method: str, tmp_path: Path
) -> None:
    changes = {**RICH, "method__name": method, "model": {"name": "fedproto_cnn"}}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    engine = {"workers": workers, "clients_per_task": clients_per_task}
    assert lab.run_in_pool(tmp_path / "pool", engine=engine, **changes).bytes == expected


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_error_here(lab: Any, erring: Any, tmp_path: Path) -> None:
    """Same words, same place in the code; no worker dies of it, and nobody is asked again."""
    with pytest.raises(ClientError) as here:
        lab.run(lab.experiment(**erring), tmp_path / "inline")
    said = "'_Trained' object has no attribute 'no_such_thing'"
    assert str(here.value) == f"round 1, client 2 (train-clients, reply): AttributeError: {said}"
    before = set(child.alive())
    experiment = lab.experiment(**erring, engine__workers=1)
    pool = local_pool(experiment, lab.prepared, lab.partition_folder, Checkpoint(tmp_path / "pool"))
    (worker,) = set(child.alive()) - before
    try:
        with pytest.raises(ClientError) as there:
            lab.run(experiment, tmp_path / "pool", pool)
        assert set(child.alive()) - before == {worker}
    finally:
        pool.close()
    assert str(there.value) == str(here.value)
    assert 'erring.py", line ' in there.value.details
    assert there.value.details == here.value.details


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_on_a_gpu(lab: Any, stops: Any, method: str, stack: bool, tmp_path: Path) -> None:
    """Two rounds in one process, then a third that starts from the state on disk, whose tensors come from the CPU."""
    changes = {"method__name": method, "engine__device": "cuda", "engine__stack": stack}
    experiment = lab.experiment(federation__rounds=3, model=lab.model_of(method), **changes)
    stops.run_until(experiment, tmp_path / "run", 2)
    run = lab.run(experiment, tmp_path / "run")
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert all(0 <= record["mean_local"] <= 1 for record in run.history)


# ---- deaths ------------------------------------------------------------------------------------------------------

# Every Python that a worker starts imports sitecustomize; here it makes the training of client 2 deadly.
DEADLY = """
import os, signal
from importlib.machinery import SourceFileLoader

plain = SourceFileLoader.exec_module

def load(self, module):
    plain(self, module)
    if module.__name__ != "flcore.engine.client":
        return
    train = module.ClientRunner.train

    def deadly(self, work, clients, states):
        if 2 in clients:
            with open(os.environ["PROTOFL_TEST_DEATHS"], "a") as file:
                file.write(f"{os.getpid()}\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, work, clients, states)

    module.ClientRunner.train = deadly

SourceFileLoader.exec_module = load
"""


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In worker processes, the training of client 2 ends with SIGKILL, every time; a line per death in this file."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PROTOFL_TEST_DEATHS", str(tmp_path / "deaths"))
    return tmp_path / "deaths"


@pytest.mark.slow
def test_a_client_that_kills_its_worker_every_time_is_left_out(lab: Any, deaths: Path, tmp_path: Path) -> None:
    """One round of four clients in one group: twice it dies at client 2, then, tried alone, twice more; 3 still trains.

    Four deaths and five workers. Client 2 received the model of 3,094 parameters, and nothing came from it.
    """
    changes = {"federation": {"rounds": 1, "on_client_error": "drop"}, "engine__workers": 1}
    run = lab.run_in_pool(tmp_path / "pool", **changes)
    assert len(set(deaths.read_text().split())) == 4
    assert run.history[0]["participants"] == [0, 1, 3]
    ((number, client, cause),) = run.failures
    assert (number, client) == (1, 2)
    assert cause.startswith("train-clients: workers died again and again training it, the last one by SIGKILL; ")
    assert run.history[0]["failures"] == [[1, 2, cause]]
    assert run.history[0]["bytes_down"]["model"] == 4 * 3094 * 4
    assert run.history[0]["bytes_up"]["model"] == 3 * 3094 * 4
    said = Replies({k: lab.train(lab.experiment(**changes), k)[0].message for k in (0, 1, 3)})
    experiment = lab.experiment(**changes)
    server = Record(experiment.method.start_server(experiment.setting))
    after, _ = experiment.method.server_steps()["aggregate"](server, said, RoundContext(experiment.setting, 1))
    for name, tensor in after["model"].params.items():
        assert torch.equal(run.state.server["model"].params[name], tensor)


@pytest.mark.slow
def test_a_client_that_kills_its_worker_every_time_stops_the_run(lab: Any, deaths: Path, tmp_path: Path) -> None:
    """And what was trained before is found again: the run goes on where it was as soon as the cause is gone."""
    changes = {"federation__rounds": 1, "engine__workers": 2}
    with pytest.raises(RunError, match=r"^round 1, client 2 \(train-clients\): workers died again and again"):
        lab.run_in_pool(tmp_path / "pool", InlineOrchestrator(), **changes)
    checkpoint = Checkpoint(tmp_path / "pool")
    run = run_name(lab.experiment(**changes)).digest
    assert checkpoint.client_results.load(1, 0, run) is not None and checkpoint.client_results.load(1, 2, run) is None
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    assert lab.run(lab.experiment(**changes), tmp_path / "pool").bytes == expected


@pytest.mark.slow
def test_workers_that_cannot_even_start_stop_the_run(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match=r"^round 1, client 0 \(train-clients\): .*the last one with exit code 3"):
        lab.run_in_pool(tmp_path / "pool", engine__workers=1)


# ---- the end of a pool -------------------------------------------------------------------------------------------


NOTHING = Reply(Record(), {}, 0, False)
"""What came of a turn of no steps that says nothing."""


class Hand(WorkerHandle):
    """A worker made of plain calls: ``work`` says what becomes of each request."""

    def __init__(self, seen: SimpleNamespace, work: Callable[[Hand], None]) -> None:
        self.seen, self.work, self.ended = seen, work, threading.Event()
        seen.hands.append(self)

    def run(self, request: Request, records: Any, receive: Receive) -> None:
        assert isinstance(request, TrainRequest)
        self.group, self.receive = request.group, receive
        self.work(self)

    def keep(self, client: int) -> None:
        """Answer for a client."""
        packed, pieces = pack_results({client: (NOTHING, Record())})
        assert pieces == []
        self.receive(packed, torch.empty(0, dtype=torch.uint8))

    def stop(self) -> None:
        self.ended.set()

    def join(self) -> None:
        self.seen.gone.append(self)


def hands(
    lab: Any, tmp_path: Path, work: Callable[[Hand], None], workers: int
) -> tuple[PoolExecutor, ExchangeWork, SimpleNamespace]:
    seen = SimpleNamespace(hands=[], gone=[])
    experiment, checkpoint = lab.experiment(), Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, Record(experiment.method.start_server(experiment.setting))))
    pool = PoolExecutor(lambda place: Hand(seen, work), workers, experiment, checkpoint)
    return pool, lab.handed_out(experiment, checkpoint.read_state()), seen


def test_a_closed_pool_starts_nobody(lab: Any, tmp_path: Path) -> None:
    """One thread's worker dies of the closing, another thread waits for a worker, a third comes afterwards."""
    at_work = threading.Event()

    def until_dismissed(hand: Hand) -> None:
        at_work.set()
        assert hand.ended.wait(20)
        raise WorkerLostError("by SIGKILL")

    pool, work, seen = hands(lab, tmp_path, until_dismissed, 1)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(pool.train, work, [[client]]) for client in (0, 1)]
        assert at_work.wait(20)
        pool.close()
        for future in asked:
            with pytest.raises(StoppedError, match=r"^training was stopped$"):
                future.result(20)
    with pytest.raises(StoppedError):
        pool.train(work, [[2]])
    pool.close()
    assert len(seen.hands) == 1
    assert seen.gone == seen.hands


def test_a_death_costs_a_worker_and_an_error_none(lab: Any, tmp_path: Path) -> None:
    """A death: a new worker and a second try, then by stacks, then given up. An error: raised as it is."""

    def die(hand: Hand) -> None:
        raise WorkerLostError("with exit code 9")

    pool, work, seen = hands(lab, tmp_path / "deaths", die, 1)
    with pytest.raises(RunError, match=r"^round 1, client 3 \(train-clients\): workers died .* with exit code 9; see"):
        pool.train(work, [[3], [1]])
    assert len(seen.hands) == 1 + 2 + 2  # the first, two deaths of the group, two of the stack
    assert seen.gone == seen.hands[:4]

    def err(hand: Hand) -> None:
        raise ClientError(1, "train-clients", [1], "reply", "TypeError: x")

    pool, work, seen = hands(lab, tmp_path / "errors", err, 1)
    for _ in range(2):
        with pytest.raises(ClientError, match=r"^round 1, client 1 \(train-clients, reply\): TypeError: x$"):
            pool.train(work, [[1]])
    assert len(seen.hands) == 1
    pool.close()


def test_a_reply_that_is_not_there_after_all_is_an_error(lab: Any, tmp_path: Path) -> None:
    pool, work, _ = hands(lab, tmp_path, lambda hand: hand.keep(0), 1)
    with pytest.raises(RunError, match=r"^round 1, client 1 \(train-clients\): the worker's reply is missing$"):
        pool.train(work, [[0], [1]])


def test_what_a_worker_sent_before_it_died_is_not_asked_for_again(lab: Any, tmp_path: Path) -> None:
    """It dies with one of two stacks done; whoever comes next is handed the other one alone."""
    asked: list[list[list[int]]] = []

    def die_after_one(hand: Hand) -> None:
        asked.append(hand.group)
        hand.keep(hand.group[0][0])
        if len(asked) < 2:
            raise WorkerLostError("by SIGKILL")

    pool, work, _ = hands(lab, tmp_path, die_after_one, 1)
    assert pool.train(work, [[3], [1]]) == {1: NOTHING, 3: NOTHING}
    assert asked == [[[3], [1]], [[1]]]
    assert pool.train(work, [[3], [1]]) == {1: NOTHING, 3: NOTHING}  # all is there: nobody is asked
    assert len(asked) == 2
    pool.close()


SLEEPY = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Sleepy(FedAvg):
    name: ClassVar[str] = "sleepy"
    summary: ClassVar[str] = "FedAvg whose turns take minutes"
    citation: ClassVar[str] = "nobody, nowhere"

    def loss_inputs(self, ctx):
        (Path(os.environ["PROTOFL_TEST_ASLEEP"]) / str(os.getpid())).touch()
        time.sleep(300)
        return super().loss_inputs(ctx)
"""

INTERRUPTED = """
import json, signal, sys
from pathlib import Path
from flcore.config.schema import Config
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.process import local_pool
from flcore.engine.rounds import Observers, run_rounds
from flcore.experiment.experiment import Experiment

if __name__ == "__main__":
    # As in a terminal: a shell that runs the tests in the background has them ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config, (prepared, partition, folder) = Config.from_mapping(json.loads(sys.argv[1])), map(Path, sys.argv[2:])
    experiment, checkpoint = Experiment.open(config, prepared, partition), Checkpoint(folder)
    experiment.setting
    try:
        executor = local_pool(experiment, prepared, partition, checkpoint)
        try:
            run_rounds(experiment, checkpoint, executor, InlineOrchestrator(2), Observers())
        finally:
            executor.close()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("when", ["loading", "training"])
def test_ctrl_c_leaves_at_once_and_quietly(
    lab: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches parent and workers, as from a terminal; nobody is replaced, nobody stays, nothing is printed.

    A turn takes minutes, and so would one that is asked for again.
    """
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    asleep = tmp_path / "asleep"
    asleep.mkdir()
    monkeypatch.setenv("PROTOFL_TEST_ASLEEP", str(asleep))
    raw = lab.mapping(plugins=[str(tmp_path / "sleepy.py")], method__name="sleepy", engine__workers=2)
    folders = [lab.prepared, lab.partition_folder, tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "interrupted.py"), json.dumps(raw), *map(str, folders)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[4], start_new_session=True,
    )  # fmt: skip
    try:
        if when == "training":
            wait_until(lambda: len(list(asleep.iterdir())) == 2, process)
        else:
            wait_until(lambda: len(group_of(process.pid)) == 3, process)
        workers = len(group_of(process.pid))
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=60)
        took = time.monotonic() - began
        assert (said, errors, process.returncode) == ("interrupted\n", "", 0)
        assert (workers, len(list(asleep.iterdir()))) == (3, 2 if when == "training" else 0)
        assert took < 30
        wait_until(lambda: group_of(process.pid) == [])
    finally:
        for pid in group_of(process.pid):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def group_of(leader: int) -> list[int]:
    """Processes of a group: parent and workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(entry.name))
    return found
