"""Processor classes: results have the same bytes within a class."""

from __future__ import annotations

import hashlib
import platform
from functools import cache

import numpy as np
import torch
from torch import Tensor

PRODUCTS = ((2, 128, 7), (16, 64, 10), (48, 640, 32), (128, 512, 256), (9, 33, 65))
"""Rows, inner dimension and columns of matrix products; libraries have different kernels for different sizes."""

CONVOLUTIONS = ((1, 8, 5), (3, 32, 3), (16, 4, 5), (32, 14, 3))
"""Channels, image size and kernel size."""

PORTABLE = {"2.15.0": "x86_64-AVX2-6714d658"}
"""By version of PyTorch: the class of all x86-64 processors with AVX2, with the settings of `flcore.core.portable`."""


@cache
def processor_class() -> str:
    """Return architecture, PyTorch's instruction set and a digest of computed values: ``x86_64-AVX2-148d6f64``.

    The digest takes less than 0.1 s, once in a process.
    """
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{_digest_of_kernels()}"


def is_portable() -> bool | None:
    """Return whether this process gives the bytes of every processor with AVX2; None for an unknown PyTorch."""
    known = PORTABLE.get(torch.__version__.partition("+")[0])
    return None if known is None else processor_class() == known


def _digest_of_kernels() -> str:
    """Hash products, convolutions with gradients, decompositions and elementary functions, on one thread."""
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    digest = hashlib.sha256()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def add(*values: Tensor) -> None:
        for value in values:
            digest.update(value.detach().contiguous().numpy().tobytes())

    torch.set_num_threads(1)
    try:
        for rows, inner, columns in PRODUCTS:
            left, right = drawn(rows, inner), drawn(inner, columns)
            add(torch.addmm(drawn(columns), left, right), torch.from_numpy(np.matmul(left.numpy(), right.numpy())))
        with torch.enable_grad():
            for channels, size, kernel in CONVOLUTIONS:
                image = drawn(16, channels, size, size).requires_grad_()
                weight = drawn(8, channels, kernel, kernel).requires_grad_()
                out = torch.nn.functional.conv2d(image, weight, padding=kernel // 2)
                out.log_softmax(1).square().sum().backward()  # type: ignore[no-untyped-call]
                assert image.grad is not None and weight.grad is not None
                add(out, image.grad, weight.grad)
        half = drawn(48, 48).double()
        square = half @ half.T
        add(torch.linalg.eigvalsh(square), torch.from_numpy(np.linalg.eigvalsh(square.numpy())))
        numbers = drawn(1000)
        add(numbers.exp(), numbers.abs().log(), numbers.tanh(), numbers.erf(), numbers.double().exp())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()[:8]
