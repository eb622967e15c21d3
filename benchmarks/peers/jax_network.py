"""The network and the step of ``workload`` in JAX, written by hand; for environments that have JAX and no torch.

Initial weights and images come from a file that the benchmark writes (`workload.write_inputs`), the same for all peers.

Convolutions are products of patches and weights: on a CPU, with a vmap over clients, XLA makes grouped convolutions of
``lax.conv_general_dilated``, and these took 2.5 times as long.

JAX_PLATFORMS selects the CPU or ``cuda``. On a CPU there is one thread: XLA's pool has one thread per core that the
process may use, and a flag switches Eigen's off, so the process is bound to one core before JAX is imported (on Linux;
elsewhere only the flag applies).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from benchmarks.work import Work

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu" and sys.platform == "linux":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]

__all__ = ["Array", "Tree", "jax", "jnp", "loss", "network", "read_inputs", "step"]

Array = Any
Tree = dict[str, Array]

MOMENTUM, EPSILON = 0.1, 1e-5
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def read_inputs(path: str) -> tuple[Tree, Tree, np.ndarray, np.ndarray]:
    """Return parameters and statistics by PyTorch's names, images float32 [K, n, 1, 28, 28] and labels int32 [K, n]."""
    with np.load(path) as stored:
        content = {name: stored[name] for name in stored.files}
    images, labels = content.pop("images"), content.pop("labels").astype(np.int32)
    statistics = {name: value.astype(np.float32) for name, value in content.items() if name.endswith(STATISTICS)}
    parameters = {name: value for name, value in content.items() if name not in statistics}
    return parameters, statistics, images, labels


def step(parameters: Tree, statistics: Tree, images: Array, labels: Array, work: Work) -> tuple[Tree, Tree]:
    """Return the parameters and statistics after one step of SGD on images [B, 1, 28, 28] and labels [B]."""
    gradient, after = jax.grad(loss, has_aux=True)(parameters, statistics, images, labels)
    return {name: value - work.lr * gradient[name] for name, value in parameters.items()}, after


def loss(parameters: Tree, statistics: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
    """Return the mean cross-entropy of a batch in training mode, and the statistics after it."""
    answers, after = network(parameters, statistics, images)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(answers), labels[:, None], axis=1)
    return -chosen.mean(), after


def network(parameters: Tree, statistics: Tree, images: Array) -> tuple[Array, Tree]:
    """Return logits [B, 10] in training mode, and BatchNorm's statistics after it; names are as in ``make_model``."""
    after: Tree = {}
    hidden = images
    for convolution, norm in (("0", "1"), ("3", "4")):
        hidden = _convolution(hidden, parameters[f"{convolution}.weight"], parameters[f"{convolution}.bias"])
        hidden = jax.nn.relu(_batch_norm(hidden, norm, parameters, statistics, after))
    hidden = hidden.reshape(len(images), -1)
    for linear in ("7", "8"):
        hidden = hidden @ parameters[f"{linear}.weight"].T + parameters[f"{linear}.bias"]
    return hidden, after


def _convolution(images: Array, weight: Array, bias: Array) -> Array:
    """Convolve 3×3 with stride 2 and padding 1: [B, C, H, W] to [B, O, H/2, W/2]."""
    batch, channels, height, width = images.shape
    padded = jnp.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    shifted = [padded[:, :, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    patches = jnp.stack(shifted, axis=2).reshape(batch, channels * 9, -1)
    answers = (weight.reshape(len(weight), -1) @ patches).reshape(batch, -1, height // 2, width // 2)
    return answers + bias[:, None, None]


def _batch_norm(images: Array, place: str, parameters: Tree, statistics: Tree, after: Tree) -> Array:
    mean, variance = images.mean((0, 2, 3)), images.var((0, 2, 3))
    count = images.size // images.shape[1]
    seen = {"running_mean": mean, "running_var": variance * count / (count - 1)}  # unbiased variance, as in PyTorch
    for name, value in seen.items():
        after[f"{place}.{name}"] = (1 - MOMENTUM) * statistics[f"{place}.{name}"] + MOMENTUM * value
    after[f"{place}.num_batches_tracked"] = statistics[f"{place}.num_batches_tracked"] + 1
    scale = parameters[f"{place}.weight"] * jax.lax.rsqrt(variance + EPSILON)
    return (images - mean[:, None, None]) * scale[:, None, None] + parameters[f"{place}.bias"][:, None, None]
