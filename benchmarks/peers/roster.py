"""Other simulators: their packages, their environments, and their processes.

Environments are created with uv from its configured registry, below the user's cache folder, and found again by a hash
of their packages. On a machine without a registry, the user can name an interpreter that has the packages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import ROOT, Bench, Execution, Timing, steady
from benchmarks.work import Work
from benchmarks.workload import write_inputs
from flcore.core.errors import ConfigError, RunError


@dataclass(frozen=True)
class Peer:
    """Another simulator.

    Attributes:
        module: in this folder; its ``simulate`` does the work.
        packages: pinned, the simulator first; none: our own environment.
        torch: whether it needs torch, in our own version. NumPy always comes in our own version.
        python: the required Python; default: ours.
        several: whether it trains ``Work.cores`` clients at once.
        cuda: whether it needs a CUDA device; the others see none.
        variables: environment variables of its process.
    """

    module: str
    packages: tuple[str, ...]
    torch: bool = True
    python: str | None = None
    several: bool = False
    cuda: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Packages to install, without local versions (+cu132), which a registry may not have."""
        names = ("torch", "numpy") if self.torch else ("numpy",)
        return (*self.packages, *(f"{name}=={version(name).split('+')[0]}" for name in names))


_PFL = ("pfl[pytorch]==0.6.0",)

PEERS: dict[str, Peer] = {
    "torch_cuda_graph": Peer("cuda_graph", (), cuda=True),
    "jax": Peer("jax_loop", ("jax==0.10.2", "jaxlib==0.10.2"), torch=False, variables={"JAX_PLATFORMS": "cpu"}),
    "jax_cuda": Peer(
        "jax_loop",
        ("jax[cuda12]==0.10.2", "jaxlib==0.10.2"),
        torch=False,
        cuda=True,
        variables={"JAX_PLATFORMS": "cuda"},
    ),
    "fedjax": Peer(
        "fedjax_simulation",
        # FedJAX calls functions that later versions of these lack.
        ("fedjax==0.0.17", "jax==0.4.35", "jaxlib==0.4.35", "dm-haiku==0.0.13", "optax==0.2.4"),
        torch=False,
        variables={"JAX_PLATFORMS": "cpu"},
    ),
    # 3.0 needs Python 3.14. BlazeFL imports tqdm without declaring it.
    "blazefl": Peer("blazefl_simulation", ("blazefl==2.0.3", "tqdm==4.67.1"), python="3.12", several=True),
    "pfl": Peer("pfl_simulation", _PFL, variables={"PFL_PYTORCH_DEVICE": "cpu"}),
    "pfl_cuda": Peer("pfl_simulation", _PFL, cuda=True, variables={"PFL_PYTORCH_DEVICE": "cuda"}),
    # 1.42.0 needs a newer list of certificates than some registries have.
    "flower": Peer("flower_simulation", ("flwr[simulation]==1.41.0", "ray==2.55.1"), several=True),
    "fluke": Peer("fluke_simulation", ("fluke-fl==0.8.1",)),
}


@dataclass(frozen=True)
class Done:
    """A finished process, the seconds of each round, and the digest of the final weights."""

    execution: Execution
    rounds: Sequence[float]
    digest: str

    def timings(self, work: Work, process: str, rounds: str) -> dict[str, Timing]:
        """Return the timings of the process and of its rounds by these names."""
        steps, peak = work.total_steps, self.execution.peak_mb
        return {
            rounds: Timing(steady(self.rounds), steps, peak),
            process: Timing(self.execution.seconds, steps, peak),
        }


def start(
    bench: Bench,
    case: str,
    module: str,
    work: Work,
    *,
    python: str = sys.executable,
    variables: Mapping[str, str] | None = None,
    inputs: str | None = None,
    with_library: bool = False,
) -> Done:
    """Call the ``simulate`` of a module in a process, which can import our packages if ``with_library``.

    Raises:
        RunError: it failed, or did not print its rounds.
    """
    scripts = ROOT if with_library else bench.folder / "scripts"
    if not scripts.exists():
        shutil.copytree(ROOT / "benchmarks", scripts / "benchmarks")
    if inputs is None:
        inputs = str(bench.folder / f"{work.model}-{work.clients}.npz")
        if not Path(inputs).exists():
            write_inputs(work, Path(inputs))
    # Not with -m: Ray's workers must find the module's functions under the module's own name.
    command = [python, "-c", "from benchmarks.work import main; main()", f"benchmarks.{module}"]
    places = {"PYTHONPATH": str(scripts), "FLWR_HOME": str(bench.folder / "flower")}
    done = bench.execute(
        case, [*command, json.dumps(dataclasses.asdict(work)), inputs], {**(variables or {}), **places}
    )
    try:
        printed = json.loads(done.output.strip().splitlines()[-1])
        rounds, digest = printed["rounds"], printed["digest"]
    except (ValueError, LookupError) as error:
        raise RunError(f"bench {bench.name}, {case}: it did not print its rounds") from error
    if len(rounds) != work.rounds:
        raise RunError(f"bench {bench.name}, {case}: {len(rounds)} rounds instead of {work.rounds}")
    return Done(done, rounds, digest)


class Peers:
    """The peers of a benchmark; a peer that cannot be installed, or fails, has the reason as its status."""

    def __init__(self, names: Sequence[str], bench: Bench, given: Path | None = None) -> None:
        """Create missing environments, which may take minutes; ``given`` is an interpreter with the packages.

        Raises:
            ConfigError: an unknown name.
        """
        self._bench, self._given = bench, given
        self._pythons: dict[str, str] = {}
        self.digests: dict[str, list[str]] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        for name in names:
            if name not in PEERS:
                raise ConfigError(f"bench {bench.name}: --only-peers {name}: expected some of {', '.join(PEERS)}")
        for name in names:
            self._prepare(name, PEERS[name])

    def _prepare(self, name: str, peer: Peer) -> None:
        wanted = [requirement.replace("==", " ") for requirement in peer.requirements]
        self._settings[name] = {"version": re.sub(r"\[.*?\]", "", wanted[0]), "requirements": wanted}
        if peer.cuda and not torch.cuda.is_available():
            self._settings[name]["status"] = "no CUDA device"
            return
        try:
            python = sys.executable
            if peer.packages:
                python = str(self._given.absolute()) if self._given else environment(name, self._bench)
                names = [re.split(r"[\[=]", requirement)[0] for requirement in peer.requirements]
                found = _run([python, "-c", _VERSIONS, *names], f"{python} lacks one of {', '.join(names)}").split()
                held = [f"{package} {number}" for package, number in zip(names, found, strict=True)]
                self._settings[name] |= {"version": held[0], "requirements": held}
            self._pythons[name] = python
            self._settings[name]["status"] = "measured"
        except RunError as error:
            self._bench.say(f"{name} is left out: {error}")
            self._settings[name]["status"] = f"cannot be installed: {error}"

    @property
    def measured(self) -> list[str]:
        """Peers without a failure so far."""
        return list(self._pythons)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return version, packages and status of each."""
        return self._settings

    def attempt(self, name: str, work: Work, process: str, rounds: str) -> Mapping[str, Timing]:
        """Run a peer; its timings have these names. A peer that fails is left out afterwards."""
        if name not in self._pythons:
            return {}
        peer = PEERS[name]
        variables = {**({} if peer.cuda else {"CUDA_VISIBLE_DEVICES": ""}), **peer.variables}
        python = self._pythons[name]
        try:
            done = start(self._bench, process, f"peers.{peer.module}", work, python=python, variables=variables)
        except RunError as error:
            self._bench.say(f"{name} is left out: {error}")
            self._settings[name]["status"] = f"failed: {' '.join(str(error).split())}"
            del self._pythons[name]
            return {}
        self.digests.setdefault(process, []).append(done.digest)
        return done.timings(work, process, rounds)


_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"


def environment_folder(peer: Peer) -> Path:
    """Return the folder of a peer's environment: below the cache folder, by a hash of its packages and our Python."""
    held = json.dumps([peer.requirements, peer.python, sys.version, sys.base_prefix])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "protofl" / f"bench-peers-{hashlib.sha256(held.encode()).hexdigest()[:12]}"


def environment(name: str, bench: Bench) -> str:
    """Return the interpreter of a peer's environment, creating the environment if missing.

    Raises:
        RunError: the packages cannot be installed, or there is no Python for them.
    """
    peer = PEERS[name]
    folder = environment_folder(peer)
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        bench.say(f"making an environment for {name} in {folder} (once; gigabytes where uv has no torch yet) ...")
        here = Path(sys.executable).with_name("uv")
        uv = str(here) if here.exists() else "uv"
        failed = "no such Python, or the package registry cannot be reached or lacks something"
        _run([uv, "venv", "--quiet", "--clear", "--python", _wanted_python(peer), str(folder)], failed)
        _run([uv, "pip", "install", "--quiet", "--python", str(python), *peer.requirements], failed)
        ready.touch()
    return str(python)


def _wanted_python(peer: Peer) -> str:
    """Return the Python for uv: ours, one of pyenv (uv does not follow its shims), or a version to find."""
    if peer.python is None:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return str(next(iter(sorted(pyenv.glob(f"versions/{peer.python}.*/bin/python"))), peer.python))


def _run(command: Sequence[str], failed: str) -> str:
    """Return the output of a command.

    Raises:
        RunError: it failed, with our message followed by its own.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise RunError(f"{failed}: {' '.join((done.stderr or done.stdout).split())[-400:]}")
    return done.stdout
