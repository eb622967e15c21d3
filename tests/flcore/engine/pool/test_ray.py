"""engine.name = ray: the bytes of one process, whatever the actors share with it, and deaths of actors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.core.errors import ConfigError, RunError
from flcore.core.loaded_code import digests
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.failures import ClientError
from flcore.engine.pool import ray as pools
from flcore.engine.pool.ray import RayWorker, ray_pool


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One Ray on this machine for all tests here."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray = pytest.importorskip("ray")
    # Ray believes what it is told: nothing here asks the GPU for anything.
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield ray
    ray.shutdown()


def run_on_ray(lab: Any, folder: Path, steps: Any = None, prepared: Path | None = None, **changes: Any) -> Any:
    experiment = lab.experiment(**{"engine__name": "ray", **changes})
    pool = ray_pool(experiment, prepared or lab.prepared, lab.partition_folder, Checkpoint(folder))
    try:
        return lab.run(experiment, folder, pool, steps or lab.Threaded())
    finally:
        pool.close()


RICH = {"method__name": "fedproto", "federation": {"rounds": 3, "participation": 0.75}}


@pytest.mark.slow
def test_the_same_bytes_as_in_one_process(lab: Any, cluster: Any, tmp_path: Path) -> None:
    """Two actors, a method with memories, a cohort that changes; stacked, which is what nobody else does alike."""
    engine = {"stack": True, "stack_size": 2, "clients_per_task": 1}
    expected = lab.run(lab.experiment(**RICH, engine=engine), tmp_path / "inline").bytes
    found = run_on_ray(lab, tmp_path / "ray", **RICH, engine={**engine, "name": "ray", "workers": 2})
    assert found.bytes == expected
    assert {path.name for path in (tmp_path / "ray" / "clients").iterdir()} == {
        f"{exchange:04d}.safetensors" for exchange in found.state.client_states.values()
    }


def actors() -> list[int]:
    """Processes of Ray workers that hold an actor and descend from this process."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (OSError, ValueError):
                continue

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid, title in titles.items() if title.startswith("ray::RayWorker") and ours(pid)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the actors in /proc")
def test_an_actor_that_is_killed_is_replaced(lab: Any, cluster: Any, tmp_path: Path) -> None:
    """SIGKILL while it trains in round 2; the bytes are those of one process."""
    changes = {"method__name": "fedproto", "local__epochs": 20}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline").bytes
    seen = SimpleNamespace(rounds=0, killed=0)

    class Killing(lab.Threaded):  # type: ignore[name-defined]
        def map(self, name: str, function: Any, items: Any) -> list[Any]:
            seen.rounds += 1
            if seen.rounds == 2:
                thread = threading.Thread(target=self.kill)
                thread.start()
            return super().map(name, function, items)

        @staticmethod
        def kill() -> None:
            time.sleep(0.2)
            seen.killed = actors()[0]
            os.kill(seen.killed, signal.SIGKILL)

    found = run_on_ray(lab, tmp_path / "ray", Killing(), engine={"name": "ray", "workers": 2}, **changes)
    assert seen.killed and found.bytes == expected
    assert seen.killed not in actors()


@pytest.mark.slow
def test_actors_on_another_disk(lab: Any, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other data lie at the same path, as may be on a node of a cluster, those sent are used; sent once."""
    experiment = lab.experiment(engine={"name": "ray", "workers": 2, "clients_per_task": 1})
    expected = lab.run(lab.experiment(), tmp_path / "inline").bytes
    other = {"prepared": {"meta.json": b"other"}, "partition": {"manifest.json": b"other"}}
    monkeypatch.setattr(pools._Shared, "descriptions", other)
    sent: list[int] = []
    data = pools._Shared.data
    monkeypatch.setattr(pools._Shared, "data", lambda shared: sent.append(1) or data(shared))
    put: list[Any] = []
    keep = cluster.put
    monkeypatch.setattr(cluster, "put", lambda value: put.append(value) or keep(value))
    pool = ray_pool(experiment, lab.prepared, lab.partition_folder, Checkpoint(tmp_path / "ray"))
    try:
        assert lab.run(experiment, tmp_path / "ray", pool).bytes == expected
    finally:
        pool.close()
    assert len([value for value in put if isinstance(value, dict)]) == 1 <= len(sent) <= 2


def started(cluster: Any) -> tuple[Any, pools._Actor, Path]:
    """An actor that has nothing to do, its handle, and its folder."""
    actor = cluster.remote(num_cpus=1)(RayWorker).remote(0, {}, {}, {})
    folder = cluster.get(actor.__ray_call__.remote(lambda worker: worker._folder.name))
    assert Path(folder).is_dir()
    return actor, pools._Actor(cluster, actor, None), Path(folder)  # type: ignore[arg-type]


def dies(cluster: Any, actor: Any) -> bool:
    """Ray kills without waiting for the death: calls may still be answered for a moment."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            cluster.get(actor.__ray_call__.remote(lambda worker: None), timeout=60)
        except cluster.exceptions.RayActorError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_an_actor_that_leaves_takes_its_folder_along(cluster: Any) -> None:
    actor, handle, folder = started(cluster)
    handle.stop()
    handle.join()
    assert not folder.exists()
    assert dies(cluster, actor)


@pytest.mark.slow
def test_an_actor_that_does_not_answer_is_not_waited_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs for ten minutes: killed after half a second where nobody knows of its work, else without being asked."""
    monkeypatch.setattr(pools, "_SECONDS_TO_LEAVE", 0.5)
    for known in (False, True):
        actor, handle, folder = started(cluster)
        actor.__ray_call__.remote(lambda worker: time.sleep(600))
        began = time.monotonic()
        with handle._at_work if known else nullcontext():
            handle.stop()
        handle.join()
        assert dies(cluster, actor)
        assert time.monotonic() - began < 60
        shutil.rmtree(folder)


def test_an_actor_looks_for_the_files_by_what_describes_them(tmp_path: Path) -> None:
    """Found where all description files are the same; where there are none nothing can be told."""
    for name, content in (("prepared", b"1"), ("partition", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_bytes(content)
    worker, places = (
        RayWorker(0, {}, {}, digests()),
        {name: str(tmp_path / name) for name in ("prepared", "partition")},
    )
    same = {"prepared": {"meta.json": b"1"}, "partition": {"meta.json": b"2"}}
    assert worker.find_data(places, same)
    assert not worker.find_data(places, same | {"partition": {"meta.json": b"3"}})
    assert not worker.find_data(places, same | {"partition": {"meta.json": b"2", "more.json": b""}})
    assert not worker.find_data(places, same | {"partition": {}})
    assert not worker.find_data({**places, "partition": str(tmp_path / "none")}, same)
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [{"compile": "none"}, {"stack": True, "stack_size": 2}, {"compile": "default"}],
    ids=["serial", "stacked", "compiled"],
)
def test_the_same_client_is_dropped_wherever_it_trains(
    lab: Any, cluster: Any, erring: Any, engine: dict[str, Any], tmp_path: Path
) -> None:
    """Client 2's reply fails in this process, in one of two processes and on one of two actors: equal bytes."""
    base = {**erring, "federation": {"rounds": 2, "on_client_error": "drop"}}
    two = {**engine, "workers": 2, "clients_per_task": 2}
    here = lab.run(lab.experiment(**base, engine=engine), tmp_path / "here")
    assert [(number, client) for number, client, _ in here.failures] == [(1, 2), (2, 2)]
    assert [record["participants"] for record in here.history] == [[0, 1, 3]] * 2
    in_processes = lab.run_in_pool(tmp_path / "processes", **base, engine=two)
    on_actors = run_on_ray(lab, tmp_path / "actors", **base, engine={**two, "name": "ray"})
    assert here.bytes == in_processes.bytes == on_actors.bytes


@pytest.mark.slow
def test_an_error_in_an_actor_is_the_error_here(lab: Any, cluster: Any, erring: Any, tmp_path: Path) -> None:
    """Same words, same place in the code."""
    with pytest.raises(ClientError) as here:
        lab.run(lab.experiment(**erring), tmp_path / "inline")
    with pytest.raises(ClientError) as there:
        run_on_ray(lab, tmp_path / "ray", **erring)
    assert str(there.value) == str(here.value)
    lines = [line for line in here.value.details.splitlines() if "erring.py" not in line]  # an actor has its own copy
    assert [line for line in there.value.details.splitlines() if "erring.py" not in line] == lines


def pool_of(lab: Any, folder: Path, workers: int, gpus: float = 0.0) -> Any:
    experiment = lab.experiment(engine={"name": "ray", "workers": workers, "gpus_per_worker": gpus})
    return ray_pool(experiment, lab.prepared, lab.partition_folder, Checkpoint(folder))


@pytest.mark.slow
def test_more_actors_than_cpus_are_refused_in_a_line(lab: Any, cluster: Any, tmp_path: Path) -> None:
    """Ray was started with 4 CPUs, as by an earlier run of this process: a fifth actor would never be created."""
    said = r"^engine\.workers = 5: Ray has 4 CPUs, and each worker takes 1; set engine\.workers=4, add nodes, or"
    with pytest.raises(ConfigError, match=said):
        pool_of(lab, tmp_path, 5)
    said = r"^engine\.workers = 4: Ray has 1 GPUs, and each worker takes 0\.3; set engine\.workers=3, add nodes, or"
    with pytest.raises(ConfigError, match=said):
        pool_of(lab, tmp_path, 4, gpus=0.3)


@pytest.mark.parametrize(
    ("resource", "each", "workers"),
    [(4, 1, 4), (2, 0.6, 2), (0.3, 0.1, 3), (1.5, 0.5, 3), (0.9, 1, 0), (5, 2, 2), (0, 0.25, 0)],
)
def test_a_share_of_a_gpu_is_on_one_gpu(resource: float, each: float, workers: int) -> None:
    """Of 0.6 one fits on each of two, though 2 / 0.6 is more than 3. In binary 0.3 / 0.1 is below 3."""
    assert pools._fitting(resource, each) == workers


@pytest.mark.slow
def test_cpus_that_others_hold_are_waited_for_and_not_for_ever(
    lab: Any, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else has 3 of 4: one is left for two workers. When they are given back after the warning, it goes on."""
    monkeypatch.setattr(pools, "_SECONDS_FOR_ROOM", 3.0)  # the warning comes after the first: two to spare
    holder = cluster.remote(num_cpus=3)(RayWorker).remote(0, {}, {}, {})
    cluster.get(holder.__ray_call__.remote(lambda worker: worker.close()))
    until = time.monotonic() + 60
    while cluster.available_resources().get("CPU", 0) != 1:  # pools of earlier tests let go, and Ray hears of it
        assert time.monotonic() < until
        time.sleep(0.05)

    def give_back() -> None:
        until = time.monotonic() + 60  # where nothing is told, the pool itself gives up by then
        while len(caplog.messages) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        cluster.kill(holder)

    try:
        said = r"^engine\.workers = 2: of Ray's 4 CPUs 1 are free after 3 s; .*, or set engine\.workers=1$"
        with pytest.raises(RunError, match=said):
            pool_of(lab, tmp_path, 2)
        monkeypatch.setattr(pools, "_SECONDS_FOR_ROOM", 60.0)
        threading.Thread(target=give_back).start()
        pool_of(lab, tmp_path, 2).close()
        assert caplog.messages == ["engine.workers = 2: 1 of Ray's CPUs are free; waiting for the others"] * 2
    finally:
        cluster.kill(holder)


@pytest.mark.slow
def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, lab: Any, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    experiment = lab.experiment(engine__name="ray")
    with pytest.raises(ConfigError, match=r"^engine\.name = ray: Ray is not installed; pip install 'protofl\[ray\]'"):
        ray_pool(experiment, lab.prepared, lab.partition_folder, Checkpoint(tmp_path))


ON_RAY = """
import flcore

TINY = {"data": {"limit_per_class": 4}, "partition": {"num_clients": 2, "alpha": 1.0, "min_size": 1}}
flcore.run({**TINY, "federation": {"rounds": 1}, "engine": {"name": "ray", "workers": 1}}, "run")
"""


def on_ray(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run on a Ray of its own, started from a folder."""
    command = [sys.executable, "-P", "-c", ON_RAY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_a_path_that_is_too_long_for_sockets_is_named(cluster: Any, tmp_path: Path) -> None:
    """Sockets have paths of at most 107 bytes, and Ray's lie below TMPDIR."""
    long = tmp_path / ("x" * 110)
    long.mkdir()
    done = on_ray(tmp_path, TMPDIR=str(long))
    [last] = done.stderr.strip().splitlines()[-1:]
    assert done.returncode != 0 and "ConfigError" in last and "TMPDIR" in last
