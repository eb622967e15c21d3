"""Memory of runs, in bytes: estimates from a configuration, measured peaks, and free memory.

An estimate is for one process that trains inline; ``process`` bytes are its size before training::

    process + 200 MiB                         interpreter, torch, this library; libraries that training loads
    + 1.5 x (  stored images                  mapped files, touched bit by bit
             + 2 x 4 x pixels x n             n images of the largest client, or of a stack of such clients
             + 4 x P x (4 + 3 x K)            P weights: model, gradients, momentum, a sum; for each of a round's
                                              K clients a message, its state, and a copy in transit
             + 4 x A x (3 x b + e))           A activations of one image; b images in a training batch (forward,
                                              backward, temporary), e in one of evaluation
    + engine.stack_memory_mb                  if clients are trained stacked
    + 600 MiB                                 if the model is compiled

It overestimates on purpose; the measured peak of a finished run replaces it.
"""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from flcore.config.schema import Config
from flcore.engine.client_data import CACHE_BYTES
from flcore.experiment.experiment import Experiment
from pipelines.runs.inputs import Inputs

_MIB = 2**20
_BESIDES = 200 * _MIB
_COMPILER = 600 * _MIB
_MARGIN = 1.5


# ---- before a run ------------------------------------------------------------------------------------------------


def estimate(config: Config, inputs: Inputs, process: int) -> int:
    """Return the estimated peak memory of a process that trains a run inline, by the formula above.

    Raises:
        DataError: data are missing or damaged. ConfigError: the model cannot read them.
    """
    experiment = Experiment.open(config, inputs.prepared, inputs.partition)
    config = experiment.config
    module = experiment.new_module()
    made: list[int] = []
    hooks = [
        part.register_forward_hook(lambda part, given, answer: made.append(_numbers(answer)))
        for part in module.modules()
        if not list(part.children())
    ]
    shape = experiment.dataset.meta.shape
    # If a model fails on a black image, the run itself reports the error.
    with torch.no_grad(), suppress(Exception):
        module.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    images = sum(file.stat().st_size for file in inputs.prepared.glob("*.safetensors"))
    samples = max(len(indices) for indices in experiment.trainers.values())
    if experiment.stacked:
        samples *= config.engine.stack_size or 8
    weights = sum(tensor.numel() for tensor in module.state_dict().values())
    federation = config.federation
    cohort = math.ceil(config.partition.num_clients * min(federation.participation * federation.oversampling, 1.0))
    batches = 3 * config.local.batch_size + config.evaluation.batch_size
    grows = (
        images
        + 2 * min(4 * math.prod(shape) * samples, CACHE_BYTES)
        + 4 * weights * (4 + 3 * cohort)
        + 4 * (math.prod(shape) + sum(made)) * batches
    )
    stack = config.engine.stack_memory_mb * _MIB if experiment.stacked else 0
    return int(process + _BESIDES + _MARGIN * grows + stack + (_COMPILER if experiment.compiled else 0))


def _numbers(answer: object) -> int:
    """Return the count of numbers in a tensor, or in nested tuples of tensors."""
    if isinstance(answer, tuple | list):
        return sum(map(_numbers, answer))
    return int(getattr(answer, "numel", int)())


def free_memory() -> float:
    """Return the bytes that are free without swapping, by machine and container."""
    return min(float(psutil.virtual_memory().available), _free_in(Path("/sys/fs/cgroup")))


def _free_in(group: Path) -> float:
    """Return the free memory of a control group, as containers have one; its file cache counts as free."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # missing, or "max"
        return float("inf")
    return float(limit - used + _fields(group / "memory.stat").get("inactive_file", 0))


# ---- while and after it ------------------------------------------------------------------------------------------


def reset_peak() -> None:
    """Free unused memory and start a new measurement of :func:`peak`, if the system allows it."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only GNU's C library has it
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the peak memory of this process since :func:`reset_peak`, else since its start."""
    told = _fields(Path("/proc/self/status")).get("VmHWM:")
    if told is not None:
        return told * 1024
    # Bytes on macOS, kilobytes elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident(process: int) -> int:
    """Return the memory of a process and its descendants; 0 if it has ended."""
    held = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                held += each.memory_info().rss
    return held


def _fields(path: Path) -> dict[str, int]:
    """Return the lines of a file that are a name and a number; none without such a file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
