"""GPUs as servers, workers and flows see them: which there are, who is bound to which, and the names of their limits.

Without torch and Prefect, which a command that starts servers does without.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from flcore.config.sections import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] | None = None, driver: Path = _DRIVER) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES calls them; of a process without that variable, all.

    Args:
        environment: of the process; None: this one's.
        driver: where NVIDIA's driver has a folder for each GPU.
    """
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    said = (os.environ if environment is None else environment).get(VISIBLE)
    if said is None or not count:
        return [str(number) for number in range(count)]
    names: list[str] = []
    for name in (part.strip() for part in said.split(",")):
        if name in ("", "-1"):  # CUDA reads no further either
            break
        names.append(name)
    return names


def limit_name(gpu: str, machine: str | None = None) -> str:
    """What the limit of flows on a GPU is called in Prefect.

    Args:
        gpu: as CUDA_VISIBLE_DEVICES calls it.
        machine: that has it; None: this one.
    """
    return f"protofl-gpu-{machine or socket.gethostname()}-{gpu}"


def worker_devices(engine: EngineConfig, gpus: Sequence[str]) -> list[str]:
    """Where each worker of a run trains, in the order of their numbers; nothing where there are none but the CPU.

    Args:
        engine: of the run. With Ray it is Ray that binds an actor to a share of a GPU.
        gpus: that the run's process may use.
    """
    if engine.name == "ray":
        share = f"{engine.gpus_per_worker:g} of a GPU" if engine.gpus_per_worker else "CPU"
        return [f"{share}, by Ray"] * engine.worker_count
    if engine.device == "cpu":
        return ["CPU"] * (engine.workers or 0)
    places = (place % len(gpus) if gpus else None for place in range(max(engine.workers or 0, 1)))
    return ["no GPU is there" if place is None else f"cuda:{place} (GPU {gpus[place]})" for place in places]
