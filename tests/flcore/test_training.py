"""A run's folder after training: what `timing.json` says, and that results outlive the checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.cpu_class import processor_class
from flcore.core.errors import DataError, RunError
from flcore.engine import rounds
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.rounds import Observers
from flcore.experiment.run_folder import read_run_config
from flcore.running import describe_environment, train

TWO_LEGS = {
    "method": {"name": "gfpl", "interval": 1, "first_exchange": 1, "components": 2},
    "federation": {"rounds": 2},
    "evaluation__every": 2,
}


def set_clocks(monkeypatch: pytest.MonkeyPatch, wall: Iterable[float] = itertools.count()) -> None:
    """Clocks that go on by one per reading, or as ``wall`` says."""
    ticks, times = itertools.count(), iter(wall)
    monkeypatch.setattr(
        rounds, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=lambda: next(times))
    )


def test_steps_per_second_count_the_seconds_of_every_leg(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes on by one whenever it is read: each exchange takes one second.

    GFPL trains in all three, one in the first round and two in the second: steps divided by 3 seconds, whatever fusing
    and scoring take.
    """
    set_clocks(monkeypatch)
    train(lab.config(**TWO_LEGS), lab.prepared, lab.partition_folder, tmp_path / "run")
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert [record["leg"] for record in timing["rounds"]] == ["train-clients", "train-clients", "retrain-heads"]
    steps = sum(record["steps"] for record in timing["rounds"])
    assert all(record["steps"] for record in timing["rounds"])
    assert timing["steps_per_second"] == steps / 3
    assert sum(timing["seconds"].values()) > 3


def test_replies_from_before_an_interruption_are_no_speed(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first round, after three of four clients: a second is measured for the fourth client's steps.

    The clients have 43, 50, 62 and 85 samples: 3, 4, 4 and 6 batches of 16, 17 steps a round. Of the two rounds 6 and
    17 steps are measured, in a second each.
    """
    config = lab.config(federation__rounds=2, engine__durable_every=0.0)
    experiment = lab.experiment(federation__rounds=2, engine__durable_every=0.0)

    class Stopping(InlineOrchestrator):
        def map(self, name: str, function: Any, items: Any) -> list[Any]:
            (group,) = items
            function([stack for stack in group if stack != [3]])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, lab.prepared, lab.partition_folder, tmp_path / "run", orchestrator=Stopping())
    set_clocks(monkeypatch)
    train(config, lab.prepared, lab.partition_folder, tmp_path / "run")
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    sizes = [len(own.train) for own in experiment.partition.clients]
    steps = [-(-size // config.local.batch_size) for size in sizes]
    assert [record["steps"] for record in timing["rounds"]] == [steps[3], sum(steps)]
    assert timing["steps_per_second"] == (steps[3] + sum(steps)) / 2
    metrics = json.loads((tmp_path / "run" / "history.jsonl").read_text().splitlines()[-1])
    assert metrics["steps"] == 2 * sum(steps)


def test_seconds_and_joules_of_each_client(lab: Any, tmp_path: Path) -> None:
    """A meter that goes on by one joule per reading: each of three training exchanges takes one, shared by seconds."""
    joules = iter(range(1000))
    observers = Observers(meters={"joules": lambda: float(next(joules))})
    train(lab.config(**TWO_LEGS), lab.prepared, lab.partition_folder, tmp_path / "run", observers=observers)
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    exchanges = timing["rounds"]
    assert all(record["clients"] and min(record["clients"].values()) > 0 for record in exchanges)
    assert all(sum(record["clients"].values()) < record["seconds"][record["leg"]] for record in exchanges)
    for client, spent in timing["clients"].items():
        own = [record["clients"].get(client, 0.0) for record in exchanges]
        assert spent["seconds"] == pytest.approx(sum(own), rel=1e-12)
        shares = [mine / sum(record["clients"].values()) for mine, record in zip(own, exchanges, strict=True)]
        assert spent["joules"] == pytest.approx(sum(shares), rel=1e-12)
    assert sum(spent["joules"] for spent in timing["clients"].values()) == pytest.approx(3, rel=1e-12)


def test_the_folder_says_when_and_nothing_of_who_watches(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds, read at 100 and 101.5, 103 and 104.5 seconds: from 100,000 to 104,500 ms."""
    config = lab.config(federation__rounds=2, tracking__uri="http://user:secret@127.0.0.1:5000")
    set_clocks(monkeypatch, (100.0, 101.5, 103.0, 104.5))
    train(config, lab.prepared, lab.partition_folder, tmp_path / "run")
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert (timing["began_ms"], timing["ended_ms"]) == (100_000, 104_500)
    assert [record["ended_ms"] for record in timing["rounds"]] == [101_500, 104_500]
    assert "tracking" not in json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"secret" in path.read_bytes()]


class StopError(Exception):
    """A run is left after its first round."""


def leave_after_a_round(lab: Any, config: Config, folder: Path, environment: Any = None) -> None:
    def stop(number: int, record: object) -> None:
        raise StopError

    observers = Observers(on_round=stop)
    with pytest.raises(StopError):
        train(config, lab.prepared, lab.partition_folder, folder, observers=observers, environment=environment)


def test_a_run_that_goes_on_elsewhere_says_where_it_began(lab: Any, tmp_path: Path) -> None:
    """Two rounds on two machines: no one of them gives its last bits."""
    config, folder = lab.config(federation__rounds=2), tmp_path / "run"
    here = describe_environment(config)
    there = {**here, "processor": "another class"}
    leave_after_a_round(lab, config, folder, there)
    assert "earlier_environments" not in read_run_config(folder)
    train(config, lab.prepared, lab.partition_folder, folder, environment=here)
    assert (read_run_config(folder)["environment"], read_run_config(folder)["earlier_environments"]) == (here, [there])


def test_a_refused_start_leaves_what_is_said_of_the_run(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited code on another machine is refused; with the code as it was the run still says where it began."""
    config, folder = lab.config(federation__rounds=2), tmp_path / "run"
    here = describe_environment(config)
    there = {**here, "processor": "another class"}
    leave_after_a_round(lab, config, folder, there)
    before = (folder / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        edited = {**rounds.code_modules(config), "flcore/core/rng.py": "edited since"}
        patch.setattr(rounds, "code_modules", lambda config: edited)
        with pytest.raises(RunError, match="pass restart=True"):
            train(config, lab.prepared, lab.partition_folder, folder, environment=here)
    assert (folder / "config.json").read_bytes() == before
    train(config, lab.prepared, lab.partition_folder, folder, environment=here)
    assert read_run_config(folder)["earlier_environments"] == [there]


def test_a_run_goes_on_where_its_data_have_moved(lab: Any, tmp_path: Path) -> None:
    """They are read anyway, and are the same."""
    folder = tmp_path / "run"
    leave_after_a_round(lab, lab.config(federation__rounds=2, data__root="first"), folder)
    moved = lab.config(federation__rounds=2, data__root="second")
    train(moved, lab.prepared, lab.partition_folder, folder)
    assert read_run_config(folder)["config"]["data"]["root"] == "second"


def test_a_flipped_bit_of_an_image_stops_the_run_before_it_trains(lab: Any, tmp_path: Path) -> None:
    """Length and header are those of the file that was prepared: only the content's digest can tell."""
    shutil.copytree(lab.prepared, tmp_path / "prepared")
    images = tmp_path / "prepared" / "train.safetensors"
    images.write_bytes(images.read_bytes()[:-1] + bytes([images.read_bytes()[-1] ^ 1]))
    with pytest.raises(DataError, match=r"content differs from the fingerprint .*prepare the data again"):
        train(lab.config(), tmp_path / "prepared", lab.partition_folder, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds names of open files in /proc")
def test_results_are_durable_before_the_checkpoint_goes(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        sync(handle)
        if (tmp_path / "run" / "checkpoint").exists():
            path = Path(f"/proc/self/fd/{handle}").readlink().relative_to(tmp_path)
            made = path.name.removeprefix(".").split(".jsonl.")  # under a name of its own until it is whole
            synced.append((path.parent / (f"{made[0]}.jsonl" if len(made) > 1 else path.name)).as_posix())

    monkeypatch.setattr(os, "fsync", fsync)
    config = lab.config(method__name="fedproto", federation__rounds=1)
    train(config, lab.prepared, lab.partition_folder, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint").exists()
    results = {"model.safetensors", "server.safetensors", "history.jsonl", "clients/0003.safetensors"}
    assert {f"run/{name}" for name in results} | {"run", "run/clients"} <= set(synced)


@pytest.mark.slow
def test_the_class_of_processor_is_the_same_however_many_threads_ask() -> None:
    """A new process with two threads gives the name of this one, and has two threads afterwards."""
    program = (
        "import torch; torch.set_num_threads(2)\n"
        "from flcore.core.cpu_class import processor_class\n"
        "print(processor_class(), torch.get_num_threads())"
    )
    asked = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert asked.stdout.split() == [processor_class(), "2"]
    assert describe_environment(Config())["processor"] == processor_class()
