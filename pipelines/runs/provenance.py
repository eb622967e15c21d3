"""What a run ran on: recorded beside it, and compared when two runs are compared."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from flcore import training
from flcore.config import Config

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("prefect", "mlflow", "dvc", "optuna")


def environment(config: Config) -> dict[str, Any]:
    """Versions, CPU class, device, code and lock of this process, as JSON values."""
    known = training.environment(config)
    return known | {
        "versions": known["versions"] | training.package_versions(_PACKAGES),
        "code_version": _git_commit(),
        "lock_hash": _lock_hash(),
    }


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
