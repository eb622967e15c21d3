"""GPUs of this machine and the names of their limits, without torch and Prefect: a command starts servers without."""

from __future__ import annotations

import os
import socket
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; without that variable, all."""
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    said = os.environ.get(VISIBLE)
    if said is None or not count:
        return [str(number) for number in range(count)]
    names = [part.strip() for part in said.split(",")]
    return list(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA reads no further either


def limit_name(gpu: str) -> str:
    """Return the name in Prefect of the limit of flows on a GPU of this machine."""
    return f"protofl-gpu-{socket.gethostname()}-{gpu}"
