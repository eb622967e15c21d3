"""Worker processes: the same bytes as one process, however many and whatever is handed to each; deaths of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import Observers, PlainSteps, run_rounds
from flcore.errors import RunError
from flcore.methods import METHODS

RICH = {"federation": {"rounds": 3, "participation": 0.6}, "data__augmentation": "crop_flip"}


class KillOneWorker(PlainSteps):
    """Tasks on threads at once; kills a worker process as soon as the first reply of round 2 is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.replies, self.calls, self.killed = folder / "legs" / "0002", 0, 0

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.calls += 1
        if self.calls == 2:
            threading.Thread(target=self._kill, args=(multiprocessing.active_children(),)).start()
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
    before = {process.pid for process in multiprocessing.active_children()}
    steps = KillOneWorker(tmp_path / "pool")
    assert lab.run_in_pool(tmp_path / "pool", steps, engine__workers=2, **changes).bytes == expected
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
    assert lab.run_in_pool(tmp_path / "pool", engine=engine, **changes).bytes == expected


@pytest.mark.slow
def test_a_worker_says_what_went_wrong(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 1, client \d: training diverged"):
        lab.run_in_pool(tmp_path / "pool", engine__workers=3, local__lr=1e6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_on_a_gpu(lab: Any, stops: Any, method: str, stack: bool, tmp_path: Path) -> None:
    """Two rounds in one process, then a third that starts from the state on disk, whose tensors come from the CPU."""
    changes = {"method__name": method, "engine__device": "cuda", "engine__stack": stack}
    experiment = lab.experiment(federation__rounds=3, **changes)
    checkpoint = Checkpoint(tmp_path / "run")

    def stop(number: int, record: Any) -> None:
        if number == 2:
            raise stops.Crash

    with pytest.raises(stops.Crash):
        run_rounds(experiment, checkpoint, InlineExecutor(experiment, checkpoint), PlainSteps(), Observers(stop))
    run = lab.run(experiment, tmp_path / "run")
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert all(0 <= record["mean_local"] <= 1 for record in run.history)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("clients_per_task", [1, 2, None])
def test_any_number_of_workers_with_stacks(
    lab: Any, workers: int, clients_per_task: int | None, tmp_path: Path
) -> None:
    """Stacks are a matter of the cohort: who trains them, and how many are handed out at a time, changes no byte."""
    engine = {"stack": True, "stack_size": 2}
    changes = {**RICH, "method__name": "fedproto", "model": {"name": "fedproto_cnn"}}
    expected = lab.run(lab.experiment(engine=engine, **changes), tmp_path / "inline").bytes
    engine |= {"workers": workers, "clients_per_task": clients_per_task}
    assert lab.run_in_pool(tmp_path / "pool", engine=engine, **changes).bytes == expected


# ---- deaths ------------------------------------------------------------------------------------------------------

# Every Python that a worker starts imports sitecustomize; here it makes the training of client 2 deadly.
DEADLY = """
import os, signal, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "flcore.engine.client":
            return None
        spec = PathFinder.find_spec(name, path)
        plain = spec.loader.exec_module

        def load(module):
            plain(module)
            train = module.Worker.train

            def deadly(self, place, clients, server, memories):
                if 2 in clients:
                    with open(os.environ["PROTOFL_TEST_DEATHS"], "a") as file:
                        file.write(f"{os.getpid()}\\n")
                    os.kill(os.getpid(), signal.SIGKILL)
                return train(self, place, clients, server, memories)

            module.Worker.train = deadly

        spec.loader.exec_module = load
        return spec

sys.meta_path.insert(0, Watch())
"""


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In worker processes, the training of client 2 ends with SIGKILL, every time; a line per death in this file."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PROTOFL_TEST_DEATHS", str(tmp_path / "deaths"))
    return tmp_path / "deaths"


def test_a_client_that_kills_its_worker_every_time_is_left_out(lab: Any, deaths: Path, tmp_path: Path) -> None:
    """One round of four clients in one task: twice it dies at client 2, then, tried alone, twice more; 3 still trains.

    Four deaths and five workers. Client 2 received the model of 3,094 parameters, and nothing came from it.
    """
    changes = {"federation": {"rounds": 1, "on_client_error": "drop"}, "engine__workers": 1}
    run = lab.run_in_pool(tmp_path / "pool", **changes)
    assert len(set(deaths.read_text().split())) == 4
    assert run.history[0]["participants"] == [0, 1, 3]
    ((number, client, cause),) = run.state.failures
    assert (number, client) == (1, 2)
    assert cause.startswith("workers died again and again training it")
    assert run.history[0]["failures"] == [[1, 2, cause]]
    assert run.history[0]["bytes_down"]["model"] == 4 * 3094 * 4
    assert run.history[0]["bytes_up"]["model"] == 3 * 3094 * 4
    said = {k: lab.train(lab.experiment(**changes), k)[0].message for k in (0, 1, 3)}
    experiment = lab.experiment(**changes)
    server = experiment.method.start_server(experiment.setting)
    expected = experiment.method.stages()["aggregate"](server, said, experiment.setting, 1)["model"]
    for name, tensor in expected.params.items():
        assert torch.equal(run.state.server["model"].params[name], tensor)


@pytest.mark.slow
def test_a_client_that_kills_its_worker_every_time_stops_the_run(lab: Any, deaths: Path, tmp_path: Path) -> None:
    """And what was trained before is found again: the run goes on where it was as soon as the cause is gone."""
    changes = {"federation__rounds": 1, "engine__workers": 2}
    with pytest.raises(RunError, match=r"^round 1, client 2: workers died again and again training it"):
        lab.run_in_pool(tmp_path / "pool", PlainSteps(), **changes)
    checkpoint = Checkpoint(tmp_path / "pool")
    assert checkpoint.load_reply(1, 0) is not None and checkpoint.load_reply(1, 2) is None
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    assert lab.run(lab.experiment(**changes), tmp_path / "pool").bytes == expected


@pytest.mark.slow
def test_workers_that_cannot_even_start_stop_the_run(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match=r"^round 1, client 0: workers died again and again"):
        lab.run_in_pool(tmp_path / "pool", engine__workers=1)
