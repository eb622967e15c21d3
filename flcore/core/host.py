"""This machine: its identity, its processes, and the user's cache folder on it.

``python -m`` and ``python -c`` search the working folder first. A file ``random.py`` in it, or a folder ``flcore``,
would be imported in place of the library of that name, and code in a downloaded folder would run. :func:`python` and
:func:`safe_environment` start processes that ignore the working folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from flcore.core.errors import ConfigError

CACHE_VARIABLE = "XDG_CACHE_HOME"
"""The environment variable that names the user's cache folder; without it ``.cache`` at home."""


@cache
def host_id() -> str:
    """Return eight digits for this machine since it was started, and for the container if this is one.

    Process ids can be compared where it is the same.
    """
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def is_alive(process: int, began: str | None = None) -> bool:
    """Return whether a process of this machine is alive.

    Args:
        process: its id. began: as :func:`began_at` gave it; None for any process that has this id now.
    """
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return began is None or began_at(process) in (began, None)


def began_at(process: int) -> str | None:
    """Return when a process of this machine began, in the kernel's ticks; None if the system does not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # the 22nd field; the name in brackets may hold anything


def physical_cores() -> int:
    """Return the number of physical cores that this process may use; of logical ones if the system does not say."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package, core = ((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
        except OSError:
            return len(usable)
        cores.add((package, core))
    return len(cores)


def python(*arguments: str) -> list[str]:
    """Return the command of a Python process of this environment that ignores the working folder."""
    return [sys.executable, "-P", *arguments]


def safe_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment, changed, for Python processes that ignore the working folder."""
    return {**os.environ, **(changes or {}), "PYTHONSAFEPATH": "1"}


def user_cache() -> Path:
    """Return ``protofl`` in the user's cache folder.

    Raises:
        ConfigError: the variable is unset and the user has no home folder.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder) / "protofl"
    try:
        return Path.home() / ".cache" / "protofl"
    except RuntimeError as error:
        raise ConfigError(f"no home folder to keep caches in; name a folder in {CACHE_VARIABLE}") from error
