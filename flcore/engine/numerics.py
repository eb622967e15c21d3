"""Arithmetic of this process: what a result's last bits depend on, and no configuration says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ONE_RUN = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """One run at a time in this process: on another thread the next one waits at this block until the first has left.

    What last bits depend on belongs to a process, not to a thread: the generator from which modules are initialised,
    MKL's threads, TF32. Two runs at once would change it for each other. Little is lost, as each has one intra-op
    thread and Python's own work would not overlap in any case; several at once are several processes. Behind the block
    PyTorch has the threads that it had before.
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
    """TF32 where ``engine.precision`` is ``tf32``, and on a GPU the same bytes each time.

    cuBLAS is the same each time only with its workspace fixed, and reads that when its first handle is made.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
