"""GPUs: which a process sees, and what their limits are called. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.orchestration import gpus


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs, as NVIDIA's driver shows them."""
    for bus in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
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
@pytest.mark.usefixtures("driver")
def test_a_process_sees_what_its_environment_lets_it(
    said: str | None, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert gpus.visible_gpus() == seen


@pytest.mark.parametrize("said", ["", "0"])
def test_without_a_driver_there_is_none(said: str, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", driver / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert gpus.visible_gpus() == []


def test_a_limit_is_of_one_gpu_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for machine in ("a", "b"):
        monkeypatch.setattr(gpus.socket, "gethostname", lambda machine=machine: machine)
        names |= {gpus.limit_name(gpu) for gpu in ("0", "1")}
    assert len(names) == 4 and "protofl-gpu-b-1" in names
