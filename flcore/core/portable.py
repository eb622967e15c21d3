"""The same bytes on every x86-64 processor with AVX2: settings of the numerical libraries, and square roots.

PyTorch, oneDNN, MKL and OpenBLAS choose kernels by processor, and kernels differ in their last bits.
:data:`SETTINGS` have each of them use the kernels that all processors with AVX2 have. The libraries read them once:
PyTorch at its first operation, NumPy's when it is imported. So `flcore` sets them before it imports either. This module
does not import them.

MKL's kernels for AVX2 are for Intel's processors alone; what it calls COMPATIBLE gives the same bytes on others. Its
vector square root is the only function in use that does not: :func:`square_root` replaces it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "PROTOFL_NUMERICS"
"""The environment variable that says ``native`` for the machine's own kernels; ``portable`` is the default."""

SETTINGS: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
}
"""Environment variables by name."""


def has_avx2() -> bool:
    """Return whether this is an x86-64 processor with AVX2 and fused multiply-adds."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return sys.platform != "linux"
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return {"avx2", "fma"} <= set(flags)


def wanted() -> str:
    """Return how this process computes if the settings take effect: ``portable`` or ``native``."""
    return "native" if os.environ.get(VARIABLE) == "native" else "portable"


def choose_kernels() -> None:
    """Set the environment variables of this process and its children, unless native kernels are wanted.

    A variable that is set already stays: :func:`flcore.core.cpu_class.processor_class` tells what follows from it.
    """
    if wanted() == "portable" and has_avx2():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)


def check(numerics: str) -> None:
    """Check that this process computes as ``engine.numerics`` says.

    Raises:
        ConfigError: it was started for the other way.
    """
    if numerics != wanted():
        cure = f"set {VARIABLE}=native before Python starts" if numerics == "native" else f"unset {VARIABLE}"
        raise ConfigError(f"engine.numerics = {numerics}: this process was started for {wanted()} numerics; {cure}")


def environment(numerics: str) -> dict[str, str]:
    """Return the environment for a process that computes as ``numerics`` says, ``portable`` or ``native``."""
    plain = {name: value for name, value in os.environ.items() if SETTINGS.get(name) != value}
    return {**plain, VARIABLE: numerics}


def square_root(values: Tensor) -> Tensor:
    """Return the square root with the same bits on all processors; of negative values NaN.

    Of float32 the root in float64, rounded, is the correctly rounded one: an error in the last bit of float64 cannot
    reach the middle between two values of float32, from which a root of 24 bits stays 2^-50 away. Of float64 it is
    x · (1/√x) with an error of at most two units in the last place.
    """
    import torch

    if values.dtype != torch.float64:
        return values.double().sqrt().to(values.dtype)
    usual = (values > 0) & (values < torch.inf)
    return torch.where(usual, values * torch.where(usual, values, 1.0).rsqrt(), values.sqrt())
