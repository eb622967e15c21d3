"""The peers' environments: which packages, where they are kept, and how they are made when asked for.

They are made with uv (the one of this environment, one on the PATH, or one fetched with pip) from whatever registry
uv is configured for, below the user's cache folder, and found again by a hash of what they hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from flcore.errors import RunError


@dataclass(frozen=True)
class Peer:
    """Another simulator.

    Attributes:
        module: whose ``main`` does the work there.
        packages: what to install, pinned; torch and numpy come in our own versions.
        overrides: requirements that replace what the packages ask for.
    """

    module: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()

    @property
    def requirements(self) -> tuple[str, ...]:
        """Everything that is installed by name."""
        # Without the local part (+cu132): a registry that has our build finds it, others take theirs.
        own = (f"{name}=={version(name).split('+')[0]}" for name in ("torch", "numpy"))
        return (*self.packages, *own)


PEERS: dict[str, Peer] = {
    "flower": Peer(
        "pipelines.bench.peers.flower_simulation",
        ("flwr[simulation]==1.42.0", "ray==2.55.1"),
        # 1.42.0 asks for a newer list of certificates than some registries have; a simulation opens no such connection.
        ("certifi>=2024",),
    ),
    "pfl": Peer("pipelines.bench.peers.pfl_simulation", ("pfl[pytorch]==0.6.0",)),
}


def peer_python(name: str, say: Callable[[str], None]) -> str:
    """The interpreter of a peer's environment, which is made if it is not there.

    Args:
        name: one of :data:`PEERS`.
        say: told of what takes time.

    Raises:
        RunError: the packages could not be installed.
    """
    folder = environment_folder(PEERS[name])
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return str(python)
    say(f"making an environment for {name} in {folder} (once; some gigabytes where torch is not in uv's cache) ...")
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted attempt has left
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(name, [sys.executable, "-m", "venv", "--without-pip", str(folder)])
    (folder / "overrides.txt").write_text("".join(f"{line}\n" for line in PEERS[name].overrides))
    install = [_uv(name, folder, say), "pip", "install", "--quiet", "--python", str(python)]
    _run(name, [*install, "--override", str(folder / "overrides.txt"), *PEERS[name].requirements])
    ready.touch()
    return str(python)


def copy_scripts(folder: Path) -> Path:
    """The modules that run in the peers' environments, alone: beside them, our own packages could shadow theirs."""
    package = Path(__file__).resolve().parents[2]
    wanted = [package / "__init__.py", *(package / "bench" / name for name in ("__init__.py", "workload.py"))]
    for path in (*wanted, *(package / "bench" / "peers").glob("*.py")):
        target = folder / path.relative_to(package.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def environment_folder(peer: Peer) -> Path:
    """Where a peer's environment lies: below the cache folder, by a hash of what it holds and of the interpreter."""
    held = json.dumps([peer.requirements, peer.overrides, platform.python_version(), sys.base_prefix])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "protofl" / f"bench-peers-{hashlib.sha256(held.encode()).hexdigest()[:12]}"


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
        raise RunError(
            f"bench --peers: no environment for {name}: the package registry cannot be reached or lacks something; "
            f"leave --peers out, or try again where it can be reached. {said[:400]}"
        )
