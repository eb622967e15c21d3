"""Processor classes: last bits of results are equal within a class."""

from __future__ import annotations

import hashlib
import platform
from functools import cache

import torch

PRODUCTS = ((2, 128, 7), (16, 64, 10), (48, 640, 32), (128, 512, 256), (9, 33, 65))
"""Rows, inner dimension and columns of matrix products; MKL has different kernels for different sizes."""

CONVOLUTIONS = ((1, 8, 5), (3, 32, 3), (16, 4, 5), (32, 14, 3))
"""Channels, image size and kernel size."""


@cache
def processor_class() -> str:
    """Return architecture, PyTorch's instruction set and a digest of computed values: ``x86_64-AVX512-148d6f64``.

    Processors with the same instructions may give different bits: MKL and oneDNN also choose kernels by model and
    caches. The digest takes less than 0.1 s, once in a process.
    """
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{_digest_of_kernels()}"


def _digest_of_kernels() -> str:
    """Hash products, convolutions with gradients, a decomposition and elementary functions, on one thread."""
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    digest = hashlib.sha256()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    torch.set_num_threads(1)
    try:
        for rows, inner, columns in PRODUCTS:
            digest.update(torch.addmm(drawn(columns), drawn(rows, inner), drawn(inner, columns)).numpy().tobytes())
        with torch.enable_grad():
            for channels, size, kernel in CONVOLUTIONS:
                image = drawn(16, channels, size, size).requires_grad_()
                weight = drawn(8, channels, kernel, kernel).requires_grad_()
                out = torch.nn.functional.conv2d(image, weight, padding=kernel // 2)
                out.log_softmax(1).square().sum().backward()  # type: ignore[no-untyped-call]
                for each in (out.detach(), image.grad, weight.grad):
                    assert each is not None
                    digest.update(each.numpy().tobytes())
        square = drawn(48, 48).double()
        digest.update(torch.linalg.eigvalsh(square @ square.T).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()[:8]
