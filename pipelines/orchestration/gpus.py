"""GPUs of this machine and the names of their limits, without torch and Prefect: a command starts servers without."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] | None = None, driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; without that variable, all.

    ``driver`` has a folder for each GPU.
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
    """Return the name in Prefect of the limit of flows on a GPU; ``machine`` None is this one."""
    return f"protofl-gpu-{machine or socket.gethostname()}-{gpu}"
