"""The number of workers and their devices."""

from __future__ import annotations

import os
from pathlib import Path

from flcore.config.sections import EngineConfig


def worker_count(engine: EngineConfig) -> int:
    """Return ``engine.workers``, one per physical core if it is null, and at least one with Ray.

    0 means no pool: training in the main process.
    """
    count = physical_cores() if engine.workers is None else engine.workers
    return max(count, 1) if engine.name == "ray" else count


def device_of(place: int, devices: int) -> int | None:
    """Return the CUDA device of a worker; workers beyond the number of devices share them.

    Args:
        place: of the worker in its pool, from 0.
        devices: how many there are; with 0 the answer is None.
    """
    return place % devices if devices else None


def physical_cores() -> int:
    """Physical cores that this process may use; logical ones where the machine does not say."""
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
