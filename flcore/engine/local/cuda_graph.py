"""Steps on a GPU: recorded once per process as a CUDA graph, with fused kernels on request."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.engine.local.program import (
    Function,
    NotCompilableError,
    compiler_failed,
    default_folder,
    program_name,
    traced,
)
from flcore.io import disk
from flcore.io.files import write_json

logger = logging.getLogger(__name__)


class CudaGraphStep:
    """The kernels of a step as a CUDA graph, which launches without Python."""

    def __init__(self, function: Function, example: Sequence[Tensor], num_mutated: int) -> None:
        """Record on static tensors, which later inputs are copied to."""
        self._static = [tensor.clone() for tensor in example]
        self._moved = num_mutated
        self._carried: list[Tensor] | None = None
        self.terms: Sequence[str] = ()

        def step() -> list[Tensor]:
            terms, recorded = function(self._static)
            self.terms = tuple(terms)
            return [*terms.values(), *recorded]

        self._found, self._replay = capture(step)

    def run(self, carried: list[Tensor], step_inputs: Sequence[Tensor]) -> list[Tensor]:
        """Launch the graph without waiting."""
        if self._carried is not carried:
            torch._foreach_copy_(self._static[: len(carried)], carried)
            self._carried = carried
        torch._foreach_copy_(self._static[len(carried) :], list(step_inputs))
        self._replay()
        return [tensor.clone() for tensor in self._found]

    def finish(self) -> None:
        """Copy mutated values back."""
        if self._carried is not None:
            torch._foreach_copy_(self._carried[: self._moved], self._static[: self._moved])
            self._carried = None


def capture(step: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record ``step`` as a CUDA graph; return its static results and a function that launches it again."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries choose their kernels and workspaces before anything is recorded
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return found, graph.replay


class CudaGraphCompiler:
    """Makes :class:`CudaGraphStep` of PyTorch's kernels, or of fused ones that are compiled first.

    Fused kernels take a third of the time (an H100, 100 clients of fedgen_cnn: 0.53 ms a step instead of 1.54) and half
    a minute to compile; PyTorch caches them on the disk.
    """

    def __init__(self, folder: Path | None = None, *, fuse: bool = False) -> None:
        """Use fused kernels with ``fuse``, which needs Triton.

        Args:
            folder: of marks for steps that were fused before; None: :func:`default_folder`.
        """
        self._folder = folder or default_folder()
        self.fuse = fuse

    def make(
        self, function: Function, example: Sequence[Tensor], num_mutated: int, key: Mapping[str, Any]
    ) -> CudaGraphStep:
        """As :meth:`StepCompiler.make`.

        Raises:
            RunError: the compiler of fused kernels failed.
        """
        if self.fuse:
            function = self._fused(function, example, key)
        try:
            return CudaGraphStep(function, example, num_mutated)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a kernel that waits for the host
            raise NotCompilableError((str(error).strip().splitlines() or ["no reason given"])[0][:200]) from error

    def _fused(self, function: Function, example: Sequence[Tensor], key: Mapping[str, Any]) -> Function:
        """Fuse; warn if it takes half a minute. PyTorch loads cached kernels in a second."""
        before = self._folder / f"{program_name(example, key, torch.cuda.get_device_name())}.fused"
        if before.exists():
            return fused(function, example)
        logger.warning("engine.compile: fusing the kernels of a step, once on this machine (half a minute) ...")
        found = fused(function, example)
        disk.make_folder(self._folder)
        write_json(before, {})
        return found


def fused(function: Function, example: Sequence[Tensor]) -> Function:
    """Return the function compiled to fused kernels, in this process; none are chosen by measuring.

    Args:
        function: the step. example: its inputs; not changed.

    Raises:
        NotCompilableError: the function cannot be traced. RunError: the compiler failed.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    names: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        terms, recorded = function(tensors)
        names[:] = terms
        return (*terms.values(), *recorded)

    # All shapes are numbers; but without these two PyTorch's cache misses.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph, shapes = traced(flat, example, mode), [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    options = {"deterministic": True, "layout_optimization": False}
    try:
        with config.patch(options), tracing(TracingContext(mode)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to its own developers, and to take TF32
            code: Callable[..., Sequence[Tensor]] = compile_fx(graph, shapes)  # type: ignore[assignment]
            with torch.no_grad():
                code(*(tensor.clone() for tensor in example))  # the first call compiles the kernels
    except Exception as error:
        raise compiler_failed(error) from error

    def called(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        with torch.no_grad():
            found = code(*tensors)
        return dict(zip(names, found, strict=False)), list(found[len(names) :])

    return called


def has_triton() -> bool:
    """Return whether the compiler of GPU kernels is installed."""
    return importlib.util.find_spec("triton") is not None
