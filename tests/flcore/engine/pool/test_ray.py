"""engine.name = ray: the bytes of one process, whatever the actors share with it, and deaths of actors."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.pool.ray import ray_pool
from flcore.errors import ConfigError, RunError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One Ray on this machine for all tests here."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
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


def test_the_same_bytes_as_in_one_process(lab: Any, cluster: Any, tmp_path: Path) -> None:
    """Two actors, a method with memories, a cohort that changes; stacked, which is what nobody else does alike."""
    engine = {"stack": True, "stack_size": 2, "clients_per_task": 1}
    expected = lab.run(lab.experiment(**RICH, engine=engine), tmp_path / "inline").bytes
    found = run_on_ray(lab, tmp_path / "ray", **RICH, engine={**engine, "name": "ray", "workers": 2})
    assert found.bytes == expected
    assert {path.name for path in (tmp_path / "ray" / "clients").iterdir()} == {
        f"{client:04d}.{leg:04d}.safetensors" for client, leg in found.state.memories.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize(("workers", "method"), [(0, "local"), (0, "fedavg"), (3, "fedproto")])
def test_any_method_on_any_number_of_actors(
    lab: Any, cluster: Any, workers: int, method: str, stack: bool, tmp_path: Path
) -> None:
    """BatchNorm statistics are private, so that every method has a memory."""
    changes = {
        "method__name": method,
        "federation": {"rounds": 2, "participation": 0.75},
        "model": {"name": "fedgen_cnn", "batchnorm": "local"},
        "data__augmentation": "crop_flip",
    }
    engine = {"stack": stack, "stack_size": 2}
    expected = lab.run(lab.experiment(**changes, engine=engine), tmp_path / "inline").bytes
    engine |= {"name": "ray", "workers": workers}
    assert run_on_ray(lab, tmp_path / "ray", engine=engine, **changes).bytes == expected


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
def test_actors_on_another_disk(lab: Any, cluster: Any, tmp_path: Path) -> None:
    """Where the prepared data do not lie at the same path, as on a node of a cluster, those sent are used."""
    here = tmp_path / "prepared"
    shutil.copytree(lab.prepared, here)
    experiment = lab.experiment(engine={"name": "ray", "workers": 1})
    expected = lab.run(lab.experiment(), tmp_path / "inline").bytes
    pool = ray_pool(experiment, here, lab.partition_folder, Checkpoint(tmp_path / "ray"))
    shutil.rmtree(here)
    try:
        assert lab.run(experiment, tmp_path / "ray", pool).bytes == expected
    finally:
        pool.close()


@pytest.mark.slow
def test_an_actor_says_what_went_wrong(lab: Any, cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 1, client \d: training diverged"):
        run_on_ray(lab, tmp_path / "ray", local__lr=1e6)


@pytest.mark.slow
def test_a_failed_client_is_left_out_on_ray_too(lab: Any, cluster: Any, tmp_path: Path) -> None:
    changes = {"federation": {"rounds": 2, "on_client_error": "drop"}, "local__lr": 1e6}
    expected = lab.run(lab.experiment(**changes), tmp_path / "inline")
    found = run_on_ray(lab, tmp_path / "ray", **changes)
    assert found.bytes == expected.bytes
    assert len(found.state.failures) == 8


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, lab: Any, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    experiment = lab.experiment(engine__name="ray")
    with pytest.raises(ConfigError, match=r"^engine\.name = ray: Ray is not installed; pip install 'protofl\[ray\]'"):
        ray_pool(experiment, lab.prepared, lab.partition_folder, Checkpoint(tmp_path))
