"""What a run ran on: recorded beside it, and compared when two runs are compared."""

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
"""The project's folder, or where its packages are installed."""

LOCK = ROOT / "infra" / "requirements.lock"
"""The lock of all packages; not there where the code was installed by itself."""

_PACKAGES = ("prefect", "mlflow", "dvc", "optuna")


def environment(config: Config) -> dict[str, Any]:
    """Versions, class of processor, device, code and lock of this process, as JSON values.

    And by which parameters the run is compared, which only the code that made it can say.
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
    """What began a process, as MLflow says it: a name, and whether somebody typed it (LOCAL) or a schedule (JOB).

    Of the command only program and subcommand: an option may hold a password.

    Args:
        command: program and arguments. variables: of the environment.
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
    """The class of processor that a recorded environment says; of old ones the instruction set alone, or nothing."""
    return environment.get("processor") or environment.get("cpu_capability")


def git(*arguments: str) -> list[str]:
    """Return a command to git about the code."""
    # The code is run already: git need not refuse a checkout that is another user's, as in a container.
    return ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]


def git_commit() -> str | None:
    """The commit of the code, with ``-dirty`` for changes since; outside a checkout the one PROTOFL_COMMIT says, or None.

    The image of ``infra/Dockerfile`` has neither git nor a checkout, and says so which commit it was built from.
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
    """SHA-256 of :data:`LOCK` when this process first asked; None where there is none."""
    return hashlib.sha256(LOCK.read_bytes()).hexdigest() if LOCK.exists() else None
