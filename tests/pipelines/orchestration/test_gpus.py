"""GPUs: which a process sees, and what their limits are called. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.orchestration.gpus import limit_name, visible_gpus


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


def test_a_limit_is_of_one_gpu_of_one_machine() -> None:
    names = {limit_name(gpu, machine) for gpu in ("0", "1") for machine in ("a", "b")}
    assert len(names) == 4 and limit_name("1", "b") == "protofl-gpu-b-1"
    assert limit_name("0") != limit_name("0", "another")
