"""The work of a case, and the process that does it and prints its result. Peers without torch import this too."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, SHAPE, MEAN, STD = 10, (1, 28, 28), 0.5, 0.3

SHAPES: Mapping[str, tuple[int, int, int]] = {"fedgen_cnn": SHAPE, "pfl_cnn": (3, 32, 32)}
"""Image shapes of the networks that `workload` defines for the peers."""


@dataclass(frozen=True)
class Work:
    """A cohort of clients per round, each with ``steps`` steps of SGD; ``cores`` clients may train at once."""

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
    """Return the SHA-256 of tensors in the order of their names, each as little-endian float32 in row-major order.

    Args:
        tensors: by name; arrays of NumPy or JAX, or tensors of torch on a CPU.
    """
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(np.ascontiguousarray(np.asarray(tensors[name]), dtype="<f4").tobytes())
    return content.hexdigest()


def main() -> None:
    """Call a module's ``simulate(work, inputs)``; print the seconds of each round and the digest of the final weights.

    The command line has the module's name, the work as JSON and the path of its inputs (`workload.write_inputs`).
    """
    module, work, inputs = sys.argv[1:]
    seconds, weights = importlib.import_module(module).simulate(Work(**json.loads(work)), inputs)
    print(json.dumps({"rounds": list(seconds), "digest": digest(weights)}), flush=True)
