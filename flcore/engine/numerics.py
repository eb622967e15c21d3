"""Process-wide settings that a result's last bits depend on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from flcore.core import portable
from flcore.core.cpu_class import is_portable, processor_class

logger = logging.getLogger(__name__)

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


@cache
def tell_of_other_kernels() -> None:
    """Warn once where portable numerics do not take effect."""
    if portable.wanted() == "native" or is_portable() is not False:
        return
    cause = (
        "torch or numpy was imported, or a variable set, before flcore could choose their kernels; import flcore first"
        if portable.has_avx2()
        else "this is no x86-64 processor with AVX2"
    )
    logger.warning("last bits may differ from those of other machines (class %s): %s", processor_class(), cause)
