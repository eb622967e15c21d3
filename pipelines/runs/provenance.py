"""The environment of a run: recorded with it, and compared when two runs are compared."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.experiment.provenance import package_versions
from flcore.running import describe_environment
from pipelines.runs.compared import compared_by

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder, or the folder in which its packages are installed."""

LOCK = ROOT / "infra" / "requirements.lock"
"""The lock of all packages; missing if only the code was installed."""

_PACKAGES = ("prefect", "mlflow", "dvc", "optuna")


def environment(config: Config) -> dict[str, Any]:
    """Return versions, class of processor, device, code and lock of this process, as JSON values.

    With the parameters by which the run is compared, which only the code that made it knows.
    """
    known = describe_environment(config)
    return known | {
        "versions": known["versions"] | package_versions(_PACKAGES),
        "code_version": git_commit(),
        "lock_hash": lock_hash(),
        "source": source(sys.argv, os.environ),
        "compared_by": compared_by(config),
    }


def source(command: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the start of a process in MLflow's terms: a name, and its type, LOCAL (typed) or JOB (scheduled).

    Only program and subcommand of the command: an option may hold a password.
    """
    program = Path(command[0] if command else "")
    name = "protofl" if program.parts[-3:] == ("pipelines", "cli", "__main__.py") else program.name
    words = list(takewhile(re.compile(r"[a-z]+").fullmatch, command[1:3])) if name == "protofl" else []
    began_by_worker = "PREFECT__FLOW_RUN_ID" in variables
    return {
        "name": "prefect deployment" if began_by_worker else " ".join([name or "python", *words]),
        "type": "JOB" if began_by_worker else "LOCAL",
    }


def processor_of(environment: Mapping[str, Any]) -> str | None:
    """Return the class of processor in a recorded environment; only the instruction set in old ones, or None."""
    return environment.get("processor") or environment.get("cpu_capability")


def git(*arguments: str) -> list[str]:
    """Return a git command for the code's folder, which may be another user's, as in a container."""
    return ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]


def git_commit() -> str | None:
    """Return the commit of the code, with ``-dirty`` after changes; else the one in PROTOFL_COMMIT, or None.

    The image of ``infra/Dockerfile`` has neither git nor a checkout; the variable names the commit of its build.
    """
    said = os.environ.get("PROTOFL_COMMIT") or None
    try:
        command = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return said
    return done.stdout.strip() or said


@cache
def lock_hash() -> str | None:
    """Return the SHA-256 of :data:`LOCK` at the first call in this process; None if it is missing."""
    return hashlib.sha256(LOCK.read_bytes()).hexdigest() if LOCK.exists() else None
