"""GPUs: which a process sees, which worker is bound to which, and what their limits are called. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flcore.config.sections import EngineConfig
from pipelines.orchestration.gpus import limit_name, visible_gpus, worker_devices


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Three GPUs, as NVIDIA's driver shows them."""
    for bus in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"):
        (tmp_path / bus).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("2, 0", ["2", "0"]),
        ("", []),
        ("1,-1,2", ["1"]),  # CUDA ignores what follows an entry that it cannot read
        ("GPU-8932f937", ["GPU-8932f937"]),
    ],
)
def test_a_process_sees_what_its_environment_lets_it(driver: Path, said: str | None, seen: list[str]) -> None:
    environment = {} if said is None else {"CUDA_VISIBLE_DEVICES": said}
    assert visible_gpus(environment, driver) == seen


def test_without_a_driver_there_is_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "none") == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == []


def test_the_page_says_where_each_worker_trains() -> None:
    """Devices are counted as the process sees them: cuda:0 of a process that sees GPUs 2 and 5 is GPU 2."""
    on_gpus = EngineConfig(device="cuda", workers=3)
    assert worker_devices(on_gpus, ["2", "5"]) == ["cuda:0 (GPU 2)", "cuda:1 (GPU 5)", "cuda:0 (GPU 2)"]
    assert worker_devices(EngineConfig(device="cuda", workers=0), ["2"]) == ["cuda:0 (GPU 2)"]
    assert worker_devices(EngineConfig(workers=2), ["2"]) == ["CPU", "CPU"]
    assert worker_devices(EngineConfig(workers=0), ["2"]) == []
    assert worker_devices(on_gpus, []) == ["no GPU is there"] * 3
    shared = EngineConfig(name="ray", device="cuda", workers=2, gpus_per_worker=0.25)
    assert worker_devices(shared, []) == ["0.25 of a GPU, by Ray"] * 2


def test_a_limit_is_of_one_gpu_of_one_machine() -> None:
    names = {limit_name(gpu, machine) for gpu in ("0", "1") for machine in ("a", "b")}
    assert len(names) == 4 and limit_name("1", "b") == "protofl-gpu-b-1"
    assert limit_name("0") != limit_name("0", "another")
