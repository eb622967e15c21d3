"""Arithmetic of this process: what a result's last bits depend on, and no configuration says."""

from __future__ import annotations

import os

import torch


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
