"""The class of this processor: what last bits depend on."""

from __future__ import annotations

import hashlib
import platform
from functools import cache

import torch

PRODUCTS = ((2, 128, 7), (16, 64, 10), (48, 640, 32), (128, 512, 256), (9, 33, 65))
"""Rows, inner dimension and columns of matrix products, small to large: MKL has other kernels for each."""

CONVOLUTIONS = ((1, 8, 5), (3, 32, 3), (16, 4, 5), (32, 14, 3))
"""Channels, size of the images and of the kernel."""


@cache
def processor_class() -> str:
    """The architecture, the instructions that PyTorch uses, and a digest of what they give: ``x86_64-AVX512-148d6f64``.

    Two processors with the same instructions may give different bits: MKL and oneDNN choose kernels and block sizes by
    model and caches, too. Names of models would be too fine a class and say nothing of kernels, so they are asked. It
    takes less than a tenth of a second, once in a process.
    """
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{_digest_of_kernels()}"


def _digest_of_kernels() -> str:
    """Of products, convolutions with their gradients, a decomposition and elementary functions, on one thread."""
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    told = hashlib.sha256()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    torch.set_num_threads(1)
    try:
        for rows, inner, columns in PRODUCTS:
            told.update(torch.addmm(drawn(columns), drawn(rows, inner), drawn(inner, columns)).numpy().tobytes())
        with torch.enable_grad():
            for channels, size, kernel in CONVOLUTIONS:
                image = drawn(16, channels, size, size).requires_grad_()
                weight = drawn(8, channels, kernel, kernel).requires_grad_()
                out = torch.nn.functional.conv2d(image, weight, padding=kernel // 2)
                out.log_softmax(1).square().sum().backward()  # type: ignore[no-untyped-call]
                for each in (out.detach(), image.grad, weight.grad):
                    assert each is not None
                    told.update(each.numpy().tobytes())
        square = drawn(48, 48).double()
        told.update(torch.linalg.eigvalsh(square @ square.T).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return told.hexdigest()[:8]
