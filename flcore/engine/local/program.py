"""Steps as programs: compiled once per machine and kept on disk (on a GPU: `recorded.py`).

On a CPU a step is traced to a graph of tensor operations (`torch.fx`), compiled to machine code by PyTorch's
ahead-of-time compiler, and loaded from then on without the compiler: importing that alone takes longer than many runs.
A program's name is a hash of all that it was made from; there is no other way for one to be out of date.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flcore import disk
from flcore.errors import RunError
from flcore.files import read_json, replace_file, write_json
from flcore.locks import take_lock
from flcore.user_cache import VARIABLE, user_cache

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

logger = logging.getLogger(__name__)

MOST_KEPT = 200
"""Programs on disk, of about 2 MB each; above that those go that were not loaded for longest."""

Function = Callable[[Sequence[Tensor]], tuple[dict[str, Tensor], list[Tensor]]]
"""Tensors in, loss terms by name and noted features out; some of the tensors are moved in place."""


class NotCompilableError(Exception):
    """A step that cannot be a program; says why."""


class NotThereError(Exception):
    """A program that would have to be compiled, where nobody wants to wait for that."""


class Program(Protocol):
    """A step that is ready to be carried out again and again, with tensors of the same shapes, contiguous."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the loss terms."""

    def run(self, fixed: list[Tensor], moment: Sequence[Tensor]) -> list[Tensor]:
        """The loss terms in order, then noted features if any.

        Args:
            fixed: what is the same, or moves in place, from step to step; the same list for all steps of a phase.
            moment: what is the step's own.
        """

    def finish(self) -> None:
        """After the last step of a phase: whatever moved is where it was given."""


class Maker(Protocol):
    """Makes programs."""

    def make(self, function: Function, example: Sequence[Tensor], moved: int, facts: Mapping[str, Any]) -> Program:
        """A program for tensors like those of ``example``.

        Args:
            function: the step. example: what it is called with; not changed.
            moved: how many of them, the first ones, the step moves.
            facts: all that the function depends on besides, as JSON values.

        Raises:
            NotCompilableError: the function cannot be one.
        """


# ---- as it is ----------------------------------------------------------------------------------------------------


@dataclass
class Direct:
    """The function itself, called: for tests of what programs are made from."""

    function: Function
    terms: Sequence[str] = ()

    def run(self, fixed: list[Tensor], moment: Sequence[Tensor]) -> list[Tensor]:
        """Call it."""
        terms, noted = self.function([*fixed, *moment])
        self.terms = tuple(terms)
        return [*terms.values(), *noted]

    def finish(self) -> None:
        """Nothing: all moved in place."""


class DirectMaker:
    """Makes :class:`Direct` programs."""

    def make(self, function: Function, example: Sequence[Tensor], moved: int, facts: Mapping[str, Any]) -> Direct:
        """The function."""
        return Direct(function)


# ---- on a CPU: machine code --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledProgram:
    """A shared library, loaded."""

    terms: Sequence[str]
    runner: Any

    def run(self, fixed: list[Tensor], moment: Sequence[Tensor]) -> list[Tensor]:
        """Carry it out in this thread."""
        return list(self.runner.run([*fixed, *moment]))

    def finish(self) -> None:
        """Nothing: all moved in place."""


class Compiler:
    """Makes :class:`CompiledProgram`, or finds them in a folder that all processes of a machine share."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter, *, new: bool = True) -> None:
        """Keep programs in ``folder``; ``new``: compile those that are not there, instead of raising NotThereError."""
        self.folder, self._clock, self._new = folder, clock, new

    def make(self, function: Function, example: Sequence[Tensor], moved: int, facts: Mapping[str, Any]) -> Program:
        """As :meth:`Maker.make`; while another process makes the same program, wait for that."""
        path = self.path(example, facts)
        if not path.exists() and not self._new:
            raise NotThereError
        if not path.exists():
            disk.make_folder(self.folder)
            with disk.open_lock(path.with_suffix(".lock")) as file:
                take_lock(file, wait=True)
                if not path.exists():
                    name = facts.get("method", {}).get("name", "a method")
                    logger.warning("engine.compile: compiling a step of %s, once on this machine (a minute) ...", name)
                    self._compile(function, example, path)
        known = read_json(path, "delete it, and it is compiled again")
        if known.get("refused") is not None:
            raise NotCompilableError(known["refused"])
        with suppress(FileNotFoundError):  # forgotten just now by another process
            os.utime(path)
        return CompiledProgram(tuple(known["terms"]), _loaded(path.with_suffix(".so")))

    def path(self, example: Sequence[Tensor], facts: Mapping[str, Any]) -> Path:
        """Where the program is described, once it is there."""
        return self.folder / f"{program_name(example, facts, _processor())}.json"

    def _compile(self, function: Function, example: Sequence[Tensor], path: Path) -> None:
        begin = self._clock()
        names: list[str] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            terms, noted = function(tensors)
            names[:] = terms
            return (*terms.values(), *noted)

        try:
            library = _machine_code(flat, example)
        except NotCompilableError as error:
            write_json(path, {"refused": str(error)}, durable=True)
            return
        replace_file(path.with_suffix(".so"), lambda file: file.write(library.read_bytes()), durable=True)
        write_json(path, {"terms": names, "seconds": self._clock() - begin}, durable=True)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep :data:`MOST_KEPT`; one that a process has loaded goes on working there."""
        found = sorted(self.folder.glob("*.json"), key=_last_used)
        for path in found[:-MOST_KEPT]:
            for suffix in (".json", ".so", ".lock"):
                disk.remove(path.with_suffix(suffix), missing_ok=True)


def program_name(example: Sequence[Tensor], facts: Mapping[str, Any], machine: str) -> str:
    """A word for all that a program is made from, and for what it is made."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in example]
    content = {"facts": facts, "tensors": shapes, "torch": torch.__version__, "processor": machine}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def compiler_name() -> str:
    """The C++ compiler that PyTorch will call: ``CXX``, else g++, or clang++ on a Mac."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def compiler_missing() -> str | None:
    """Why nothing can be compiled on this machine; None where it can."""
    if shutil.which(compiler_name()) is None:
        return f"no C++ compiler ({compiler_name()}) on this machine"
    return None


def default_folder() -> Path:
    """Where this machine's programs are kept.

    Raises:
        ConfigError: as :func:`flcore.user_cache.user_cache`.
    """
    return user_cache() / "steps"


def _machine_code(function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor]) -> Path:
    """A shared library of the function.

    Raises:
        NotCompilableError: the function asks for a tensor's values, or does what cannot be traced.
        RunError: the compiler failed.
    """
    # It looks for CUDA's compiler, and says at length that it is not there.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import torch._inductor
    from torch._inductor import config
    from torch.hub import tqdm  # type: ignore[attr-defined]  # where it is not installed, something of the same name

    # Tracing makes bars that nobody sees, with a lock for several processes: one that is ended from outside, as idle
    # workers are, would leave it behind, and Python would warn of that when the command ends.
    if hasattr(tqdm, "set_lock"):
        tqdm.set_lock(threading.RLock())
    graph = traced(function, example)
    options = {
        "cpp.threads": 1,
        "compile_threads": 1,  # or it keeps processes of its own
        # Convolutions would be turned to channels-last, and every pass over a handful of channels be strided: 2 to 4
        # times as long as the same pass over rows.
        "layout_optimization": False,
        # What several places read is written down once: recomputed in every column of a convolution, a maximum of four
        # values takes longer than all products together.
        "realize_reads_threshold": 1,
        "realize_opcount_threshold": 5,
        # By its rules of thumb it leaves passes that read every second pixel scalar; a pooling takes a seventh of the
        # time as vectors, and whole steps with one 15 to 30 % less. The columns of a convolution take longer, so that
        # a step with strides instead of pooling would lose 40 %.
        "cpp.enable_tiling_heuristics": not any(_pools(node) for node in graph.graph.nodes),
    }
    try:
        with config.patch(options):
            return Path(str(torch._inductor.aot_compile(graph, tuple(example))))
    except Exception as error:
        raise compiler_failed(error) from error


def traced(
    function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> torch.fx.GraphModule:
    """The graph of a function of tensors; in a ``mode`` that is given, or one of its own.

    Raises:
        NotCompilableError: it asks for a tensor's values, or does what cannot be traced.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode or FakeTensorMode() as shapeless:
        shapes = [shapeless.from_tensor(tensor, static_shapes=True) for tensor in example]
        try:
            return make_fx(function)(*shapes)
        except Exception as error:  # whatever a loss does that has no graph
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NotCompilableError(first[:200]) from error


def compiler_failed(error: Exception) -> RunError:
    """What a person is told of it."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RunError(
        f"engine.compile: the compiler failed ({first[:200]}); use engine.compile=none, or mend what it says"
    )


def _pools(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.max_pool2d_with_indices.default


def _loaded(library: Path) -> Any:
    try:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise RunError(
            f"{library}: cannot be loaded ({first[:200]}); delete it with the .json beside it, or name a folder from "
            f"which programs may be run in {VARIABLE}"
        ) from error


def _last_used(path: Path) -> float:
    """In seconds since 1970; 0 where another process has forgotten it since the folder was listed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def _processor() -> str:
    """What machine code is made for: the instructions of this processor, and the compiler's name for it."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return capability
    told = sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    return f"{capability} {hashlib.sha256(''.join(told).encode()).hexdigest()[:16]}"
