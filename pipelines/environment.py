"""What a run ran on: recorded beside it, and compared when two runs are compared."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flcore.config import Config
from flcore.engine.pool.workers import worker_count
from flcore.engine.rounds import code_fingerprint

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "safetensors", "prefect", "mlflow", "dvc", "optuna")


def environment(config: Config) -> dict[str, Any]:
    """Versions, CPU class, device, code and lock of this process, as JSON values."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": _device(config),
        "engine": config.engine.name,
        "workers": worker_count(config.engine),
        "code_hash": code_fingerprint(),
        "code_version": _git_commit(),
        "lock_hash": _lock_hash(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(config: Config) -> str:
    return torch.cuda.get_device_name() if config.engine.device == "cuda" else "cpu"


def _git_commit() -> str | None:
    """The commit of the code, with ``-dirty`` for changes since; None outside a checkout."""
    try:
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _lock_hash() -> str | None:
    lock = _ROOT / "infra" / "requirements.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None
