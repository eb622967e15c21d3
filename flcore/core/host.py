"""Identify this machine and its processes, for folders that several machines share."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


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
