"""The peers' environments: which packages, where they are kept, and how they are made when asked for.

They are made with uv (the one of this environment, one on the PATH, or one fetched with pip) from whatever registry
uv is configured for, below the user's cache folder, and found again by a hash of what they hold. On a machine that
reaches no registry, an interpreter that is there already can be named in their place; what it holds is then told.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from flcore.core.errors import RunError


@dataclass(frozen=True)
class Peer:
    """Another simulator.

    Attributes:
        module: whose ``main`` does the work there.
        packages: what to install, pinned, itself first; numpy comes in our own version. Empty: our own environment.
        overrides: requirements that replace what the packages ask for.
        torch: whether it needs torch, which comes in our own version.
        python: the Python that it needs, such as ``3.12``, where ours is older; None: ours will do.
        several: whether it can train several clients at once here, as ``Work.cores`` says.
        cuda: whether it needs a CUDA device; who does not is shown none.
        variables: of its process.
    """

    module: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    torch: bool = True
    python: str | None = None
    several: bool = False
    cuda: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process; pfl, for one, would take a device that it sees."""
        return {**({} if self.cuda else {"CUDA_VISIBLE_DEVICES": ""}), **self.variables}

    @property
    def version(self) -> str:
        """What is measured: a package and its version."""
        name, _, number = (self.packages or (f"torch=={version('torch')}",))[0].partition("==")
        return f"{name.partition('[')[0]} {number}"

    @property
    def requirements(self) -> tuple[str, ...]:
        """Everything that is installed by name."""
        # Without the local part (+cu132): a registry that has our build finds it, others take theirs.
        names = ("torch", "numpy") if self.torch else ("numpy",)
        return (*self.packages, *(f"{name}=={version(name).split('+')[0]}" for name in names))


class NoEnvironmentError(RunError):
    """A peer's environment cannot be made.

    Attributes:
        reason: why, in one line, without the peer's name.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"bench --peers: no environment for {name}: {reason}")
        self.reason = reason


_JAX_ON_CPU = {"JAX_PLATFORMS": "cpu"}

PEERS: dict[str, Peer] = {
    "torch_cuda_graph": Peer("benchmarks.peers.cuda_graph", (), cuda=True),
    "jax": Peer("benchmarks.peers.jax_loop", ("jax==0.10.2", "jaxlib==0.10.2"), torch=False, variables=_JAX_ON_CPU),
    "jax_cuda": Peer(
        "benchmarks.peers.jax_loop",
        ("jax[cuda12]==0.10.2", "jaxlib==0.10.2"),
        torch=False,
        cuda=True,
        variables={"JAX_PLATFORMS": "cuda"},
    ),
    "fedjax": Peer(
        "benchmarks.peers.fedjax_simulation",
        # It calls what later ones of these lack.
        ("fedjax==0.0.17", "jax==0.4.35", "jaxlib==0.4.35", "dm-haiku==0.0.13", "optax==0.2.4"),
        torch=False,
        variables=_JAX_ON_CPU,
    ),
    # 3.0 needs Python 3.14. It imports tqdm and does not ask for it.
    "blazefl": Peer(
        "benchmarks.peers.blazefl_simulation", ("blazefl==2.0.3", "tqdm==4.67.1"), python="3.12", several=True
    ),
    "pfl": Peer("benchmarks.peers.pfl_simulation", ("pfl[pytorch]==0.6.0",), variables={"PFL_PYTORCH_DEVICE": "cpu"}),
    "pfl_cuda": Peer(
        "benchmarks.peers.pfl_simulation",
        ("pfl[pytorch]==0.6.0",),
        cuda=True,
        variables={"PFL_PYTORCH_DEVICE": "cuda"},
    ),
    # 1.42.0 asks for a newer list of certificates than some registries have.
    "flower": Peer("benchmarks.peers.flower_simulation", ("flwr[simulation]==1.41.0", "ray==2.55.1"), several=True),
    "fluke": Peer("benchmarks.peers.fluke_simulation", ("fluke-fl==0.8.1",)),
}


def held_versions(name: str, python: str) -> list[str]:
    """What another interpreter has of a peer's packages, as ``jax 0.11.2``, the peer itself first.

    Args:
        name: one of :data:`PEERS`, which needs packages. python: the interpreter.

    Raises:
        NoEnvironmentError: it lacks one of them, or does not run.
    """
    peer = PEERS[name]
    wanted = [re.split(r"[\[=]", requirement)[0] for requirement in peer.requirements]
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
    try:
        done = subprocess.run([python, "-c", code, *wanted], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoEnvironmentError(name, f"--peer-python {python}: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NoEnvironmentError(name, f"--peer-python {python}: it needs {', '.join(wanted)} there: {said}")
    return [f"{package} {held}" for package, held in zip(wanted, done.stdout.split(), strict=True)]


def peer_python(name: str, say: Callable[[str], None]) -> str:
    """The interpreter of a peer's environment, which is made if it is not there; our own for one that needs no other.

    Args:
        name: one of :data:`PEERS`.
        say: told of what takes time.

    Raises:
        NoEnvironmentError: the packages could not be installed, or there is no Python that they can run with.
    """
    peer = PEERS[name]
    if not peer.packages:
        return sys.executable
    folder = environment_folder(peer)
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return str(python)
    base = _interpreter(name, peer.python)
    say(f"making an environment for {name} in {folder} (once; some gigabytes where torch is not in uv's cache) ...")
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted attempt has left
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(name, [base, "-m", "venv", "--without-pip", str(folder)])
    (folder / "overrides.txt").write_text("".join(f"{line}\n" for line in peer.overrides))
    install = [_uv(name, folder, say), "pip", "install", "--quiet", "--python", str(python)]
    _run(name, [*install, "--override", str(folder / "overrides.txt"), *peer.requirements])
    ready.touch()
    return str(python)


_MODULES = ("__init__.py", "work.py", "workload.py")


def copy_scripts(folder: Path) -> Path:
    """The modules that run in the peers' environments, alone: beside them, our own packages could shadow theirs."""
    package = Path(__file__).resolve().parents[1]
    for path in (*(package / name for name in _MODULES), *(package / "peers").glob("*.py")):
        target = folder / path.relative_to(package.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def environment_folder(peer: Peer) -> Path:
    """Where a peer's environment lies: below the cache folder, by a hash of what it holds and of the interpreter."""
    held = json.dumps([peer.requirements, peer.overrides, peer.python, platform.python_version(), sys.base_prefix])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "protofl" / f"bench-peers-{hashlib.sha256(held.encode()).hexdigest()[:12]}"


def _interpreter(name: str, wanted: str | None) -> str:
    """A Python of this version, ours if it will do: on the PATH, or where pyenv keeps them."""
    if wanted is None or platform.python_version().startswith(f"{wanted}."):
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = [str(path) for path in sorted(root.glob(f"versions/{wanted}.*/bin/python"))]
    for found in filter(None, (shutil.which(f"python{wanted}"), *kept)):
        # pyenv puts commands on the PATH that only say that the version is not the chosen one.
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    raise NoEnvironmentError(
        name, f"it needs Python {wanted}, of which there is none on the PATH or where pyenv keeps them"
    )


def _uv(name: str, folder: Path, say: Callable[[str], None]) -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        say("fetching uv ...")
        _run(name, [str(folder / "bin" / "python"), "-m", "ensurepip", "--default-pip"])
        _run(name, [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv>=0.8"])
        found = str(folder / "bin" / "uv")
    return found


def _run(name: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise NoEnvironmentError(name, f"the package registry cannot be reached or lacks something: {said[:400]}")
