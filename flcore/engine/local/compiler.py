"""Steps on a CPU: machine code, compiled once per machine and kept on disk.

A step is traced to a graph of tensor operations (`torch.fx`), compiled by PyTorch's ahead-of-time compiler, and loaded
from then on without the compiler: importing that alone takes longer than many runs. A program's name is a hash of all
that it was made from; there is no other way for one to be out of date. Machine code is named for its
graph (:func:`graph_hash`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flcore.core import portable
from flcore.core.errors import RunError
from flcore.core.host import CACHE_VARIABLE
from flcore.engine.local.program import (
    Function,
    NotCompilableError,
    Program,
    compiler_failed,
    program_name,
    traced,
)
from flcore.io import disk
from flcore.io.files import read_json, replace_file, write_json
from flcore.io.locks import take_lock

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 200
"""Largest number of programs on disk, of about 2 MB each; the least recently loaded are deleted."""


@dataclass(frozen=True)
class CompiledProgram:
    """A shared library, loaded."""

    terms: Sequence[str]
    runner: Any

    def run(self, carried: list[Tensor], step_inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run in this thread."""
        return list(self.runner.run([*carried, *step_inputs]))

    def finish(self) -> None:
        """Do nothing: tensors are updated in place."""


_NAMESPACES = ("aten", "prims")
"""Namespaces of operations that PyTorch's version fixes; a plug-in's may change under its name."""


def graph_hash(graph: torch.fx.GraphModule, example: Sequence[Tensor], made_with: Mapping[str, Any]) -> str | None:
    """Return a hash of a traced step: equal steps are compiled once.

    Two values of a hyper-parameter that no loss reads give one graph, and so does code before and after an edit that no
    step notices. Compiling takes a minute, tracing some seconds.

    Args:
        graph: as traced. example: its inputs; their values do not enter the hash.
        made_with: everything else that a program depends on, as JSON values.

    Returns:
        24 hexadecimal digits; None if the graph's text does not determine what it does.
    """

    def layout(tensor: Tensor) -> list[Any]:
        return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), str(tensor.device)]

    constants = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph, node.target, None)
            if type(value) is not Tensor or value.device.type != "cpu":
                return None
            content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            constants.append([node.target, layout(value), hashlib.sha256(content).hexdigest()])
        elif node.op == "call_function":
            if node.target is not operator.getitem and getattr(node.target, "namespace", None) not in _NAMESPACES:
                return None
        elif node.op not in ("placeholder", "output"):
            return None
    content_of = {
        "code": graph.code,  # numbers are written with all digits
        "constants": constants,
        "tensors": [layout(tensor) for tensor in example],
        "made_with": made_with,
    }
    return hashlib.sha256(json.dumps(content_of, sort_keys=True).encode()).hexdigest()[:24]


class Compiler:
    """Makes :class:`CompiledProgram`, or finds them in a folder that all processes of a machine share.

    A description (``.json``) is named for what it is compiled from, a library (``.so``) for the graph; steps with
    equal graphs share one.
    """

    def __init__(self, folder: Path) -> None:
        """Keep descriptions and libraries in ``folder``."""
        self.folder = folder

    def make(self, function: Function, example: Sequence[Tensor], num_mutated: int, key: Mapping[str, Any]) -> Program:
        """As :meth:`StepCompiler.make`; wait for another process that makes the same program."""
        path = self.path(example, key)
        known = self._known(path)
        if known is None:
            disk.make_folder(self.folder)
            with disk.open_lock(_lock_of(path)) as file:
                take_lock(file, wait=True)
                known = self._known(path) or self._make(function, example, path, key)
        if known.get("refused") is not None:
            raise NotCompilableError(known["refused"])
        library = self.folder / known["library"]
        for used in (path, library):
            with suppress(FileNotFoundError):  # just deleted by another process
                os.utime(used)
        return CompiledProgram(tuple(known["terms"]), _loaded(library))

    def path(self, example: Sequence[Tensor], key: Mapping[str, Any]) -> Path:
        """Return the file that describes the program."""
        return self.folder / f"{program_name(example, key, _processor())}.json"

    def _known(self, path: Path) -> dict[str, Any] | None:
        """Return a description, if it exists with its library."""
        if not path.exists():
            return None
        known = read_json(path, "delete it, and it is compiled again")
        is_whole = known.get("refused") is not None or (self.folder / known["library"]).exists()
        return known if is_whole else None

    def _make(
        self, function: Function, example: Sequence[Tensor], path: Path, key: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Trace, compile if the graph has no library, and write the description."""
        names: list[str] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            terms, recorded = function(tensors)
            names[:] = terms
            return (*terms.values(), *recorded)

        known: dict[str, Any]
        try:
            graph = traced(flat, example)
        except NotCompilableError as error:
            known = {"refused": str(error)}
        else:
            options = _options(graph)
            made_with = {"options": options, "torch": torch.__version__, "processor": _processor()}
            library = self.folder / f"{graph_hash(graph, example, made_with) or path.stem}.so"
            known = {"terms": names, "library": library.name}
            self._compile(graph, example, options, library, key.get("method", {}).get("name", "a method"))
        write_json(path, known, durable=True)
        self._forget_oldest()
        return known

    def _compile(
        self, graph: torch.fx.GraphModule, example: Sequence[Tensor], options: dict[str, Any], library: Path, name: str
    ) -> None:
        """Make a graph's library if it is missing."""
        if library.exists():
            return
        with disk.open_lock(_lock_of(library)) as file:
            take_lock(file, wait=True)
            if library.exists():
                return
            logger.warning("engine.compile: compiling a step of %s, once on this machine (a minute) ...", name)
            made = _machine_code(graph, example, options)
            replace_file(library, lambda file: file.write(made.read_bytes()), durable=True)

    def _forget_oldest(self) -> None:
        """Delete all but :data:`MAX_PROGRAMS`; loaded libraries stay usable in their processes."""
        for pattern in ("*.json", "*.so"):
            for path in sorted(self.folder.glob(pattern), key=_last_used)[:-MAX_PROGRAMS]:
                for left in (path, _lock_of(path)):
                    disk.remove(left, missing_ok=True)


def _lock_of(path: Path) -> Path:
    """Return the lock for writing a description or a library."""
    return path.with_name(f"{path.name}.lock")


def compiler_name() -> str:
    """Return the C++ compiler that PyTorch calls: ``CXX``, else g++, or clang++ on a Mac."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def compiler_missing() -> str | None:
    """Return why nothing can be compiled on this machine; None if it can."""
    if shutil.which(compiler_name()) is None:
        return f"no C++ compiler ({compiler_name()}) on this machine"
    return None


def check_compiler(name: str) -> None:
    """Compile a few lines before spending a minute on a step.

    Loading machine code with a C++ library of its own ends the process: locales and exceptions of two such libraries do
    not mix (seen with a g++ 13 that linked libstdc++.a).

    Raises:
        RunError: the compiler fails, or makes such code.
    """
    cure = "name another compiler in CXX, or use engine.compile=none"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "few.cpp", Path(folder) / "few.so"
        source.write_text('#include <stdexcept>\nvoid fail() { throw std::runtime_error(""); }\n')
        try:
            made = subprocess.run(
                [name, "-shared", "-fPIC", source, "-o", library], capture_output=True, text=True, check=False
            )
            if made.returncode:
                raise OSError(next(iter(made.stderr.strip().splitlines()), f"exit code {made.returncode}"))
            shares = sys.platform != "linux" or b"libstdc++.so" in library.read_bytes()
        except OSError as error:
            raise RunError(f"engine.compile: {name} fails ({str(error)[:200]}); mend that, {cure}") from error
    if not shares:
        raise RunError(
            f"engine.compile: {name} puts a C++ library of its own into what it makes, which PyTorch cannot load "
            f"with its own (is libstdc++.so missing, or -static-libstdc++ set?); {cure}"
        )


def _options(graph: torch.fx.GraphModule) -> dict[str, Any]:
    """Return the options of PyTorch's compiler for a graph."""
    return {
        "cpp.threads": 1,
        "compile_threads": 1,  # or it keeps processes of its own
        # Instructions of every processor with AVX2: the same machine code on all of them.
        **({"cpp.march": "x86-64-v3", "cpp.simdlen": 256} if _is_portable() else {}),
        # Convolutions would be turned to channels-last, and every pass over a handful of channels be strided: 2 to 4
        # times as long as the same pass over rows.
        "layout_optimization": False,
        # Values with several readers are computed once: recomputed in every column of a convolution, a maximum of
        # four values takes longer than all products together.
        "realize_reads_threshold": 1,
        "realize_opcount_threshold": 5,
        # By its rules of thumb it leaves passes that read every second pixel scalar; a pooling takes a seventh of the
        # time as vectors, and whole steps with one 15 to 30 % less. The columns of a convolution take longer, so that
        # a step with strides instead of pooling would lose 40 %.
        "cpp.enable_tiling_heuristics": not any(_pools(node) for node in graph.graph.nodes),
    }


def _machine_code(graph: torch.fx.GraphModule, example: Sequence[Tensor], options: dict[str, Any]) -> Path:
    """A shared library of the graph.

    Raises:
        RunError: the compiler failed.
    """
    check_compiler(compiler_name())
    # It looks for CUDA's compiler, and says at length that it is not there.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import torch._inductor
    from torch._inductor import config

    try:
        with config.patch(options):
            return Path(str(torch._inductor.aot_compile(graph, tuple(example))))
    except Exception as error:
        raise compiler_failed(error) from error


def _pools(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.max_pool2d_with_indices.default


def _loaded(library: Path) -> Any:
    try:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise RunError(
            f"{library}: cannot be loaded ({first[:200]}); delete it, or name a folder from which programs may be "
            f"run in {CACHE_VARIABLE}"
        ) from error


def _last_used(path: Path) -> float:
    """Return seconds since 1970; 0 if another process has deleted it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_portable() -> bool:
    return portable.wanted() == "portable" and portable.has_avx2()


@cache
def _processor() -> str:
    """Return the target of machine code: that of all processors with AVX2, or a hash of this one's instructions."""
    if _is_portable():
        return "x86-64-v3"
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return capability
    flags = sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    return f"{capability} {hashlib.sha256(''.join(flags).encode()).hexdigest()[:16]}"
