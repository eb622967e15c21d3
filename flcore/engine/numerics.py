"""Process-wide settings that a result's last bits depend on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ONE_RUN = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Allow one run at a time in this process; a second thread waits. Restore PyTorch's threads afterwards.

    Floating-point settings are process-wide, so runs must not overlap: the generator that initialises modules, MKL's
    threads, TF32. Parallel runs are separate processes.
    """
    with _ONE_RUN:
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def single_thread() -> None:
    """Set one intra-op thread in this process: faster for small models, and results do not depend on cores."""
    torch.set_num_threads(1)


def set_numerics(precision: str) -> None:
    """Allow TF32 if ``engine.precision`` is ``tf32``, and make GPU results deterministic.

    cuBLAS is deterministic with a fixed workspace, which it reads with its first handle.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
