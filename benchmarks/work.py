"""How much work ``overhead`` does, and what a process that has done it prints. Also loaded where there is no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, SHAPE, MEAN, STD = 10, (1, 28, 28), 0.5, 0.3

SHAPES: Mapping[str, tuple[int, int, int]] = {"fedgen_cnn": SHAPE, "pfl_cnn": (3, 32, 32)}
"""By network that is written down for the peers too, the shape of its images."""


@dataclass(frozen=True)
class Work:
    """How much: ``cohort`` of ``clients`` clients a round, each ``steps`` steps of ``batch_size`` of its samples.

    ``cores`` is how many clients may train at once, by those that can train several; ``model`` one of :data:`SHAPES`.
    """

    clients: int = 20
    samples: int = 640
    cohort: int = 10
    steps: int = 20
    batch_size: int = 32
    lr: float = 0.05
    rounds: int = 50
    cores: int = 2
    model: str = "fedgen_cnn"

    @property
    def total_steps(self) -> int:
        """Mini-batches of the whole run."""
        return self.rounds * self.cohort * self.steps


def digest(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of tensors in the order of their names, each as little-endian float32 in row-major order.

    Args:
        tensors: by name; arrays of numpy or JAX, or torch's on a CPU.
    """
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(np.ascontiguousarray(np.asarray(tensors[name]), dtype="<f4").tobytes())
    return content.hexdigest()


def report(seconds: Sequence[float], weights: Mapping[str, Any]) -> None:
    """Print what the benchmark reads: seconds of each round, and the digest of the final weights (last line, JSON)."""
    print(json.dumps({"rounds": list(seconds), "digest": digest(weights)}), flush=True)
