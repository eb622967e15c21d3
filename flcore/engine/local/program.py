"""Steps as programs: machine code on a CPU (`compiler.py`), on a GPU kernels recorded as one (`cuda_graph.py`)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flcore.core.errors import RunError
from flcore.core.host import user_cache

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

Function = Callable[[Sequence[Tensor]], tuple[dict[str, Tensor], list[Tensor]]]
"""Tensors in, loss terms by name and recorded features out; some of the tensors are updated in place."""


class NotCompilableError(Exception):
    """A step that cannot be a program; names the reason."""


class Program(Protocol):
    """A compiled step for contiguous tensors of fixed shapes."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the loss terms."""

    def run(self, carried: list[Tensor], step_inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the loss terms in order, then recorded features if any.

        Args:
            carried: constants and tensors updated in place; the same list for all steps of a phase.
            step_inputs: of this step.
        """

    def finish(self) -> None:
        """Write updated values back to their tensors after the last step of a phase."""


class StepCompiler(Protocol):
    """Makes programs."""

    def make(self, function: Function, example: Sequence[Tensor], num_mutated: int, key: Mapping[str, Any]) -> Program:
        """Make a program for tensors like ``example``.

        Args:
            function: the step. example: its inputs; not changed.
            num_mutated: number of inputs, the first ones, that the step updates in place.
            key: everything else that the function depends on, as JSON values.

        Raises:
            NotCompilableError: the function cannot be one.
        """


def default_folder() -> Path:
    """Return the folder of this machine's programs.

    Raises:
        ConfigError: as :func:`flcore.core.host.user_cache`.
    """
    return user_cache() / "steps"


def program_name(example: Sequence[Tensor], key: Mapping[str, Any], machine: str) -> str:
    """Return a hash of everything that a program depends on."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in example]
    content = {"facts": key, "tensors": shapes, "torch": torch.__version__, "processor": machine}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def traced(
    function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> torch.fx.GraphModule:
    """Return the graph of a function of tensors, traced in ``mode`` or a new one.

    Raises:
        NotCompilableError: it reads a tensor's values, or cannot be traced.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.hub import tqdm  # type: ignore[attr-defined]  # or its stand-in

    # Tracing makes hidden bars with a lock for several processes, which a killed worker would leak with a warning.
    if hasattr(tqdm, "set_lock"):
        tqdm.set_lock(threading.RLock())
    with mode or FakeTensorMode() as shapeless:
        shapes = [shapeless.from_tensor(tensor, static_shapes=True) for tensor in example]
        try:
            return make_fx(function)(*shapes)
        except Exception as error:  # a loss without a graph
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NotCompilableError(first[:200]) from error


def compiler_failed(error: Exception) -> RunError:
    """Return the message for people."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RunError(
        f"engine.compile: the compiler failed ({first[:200]}); use engine.compile=none, or mend what it says"
    )
