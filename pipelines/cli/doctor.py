"""``protofl doctor``: examines this machine, and advises on missing requirements.

Every line begins with ``ok``, ``note`` (works, but worth knowing) or ``miss`` (a requirement is missing; the line ends
with advice). Nothing is changed, and a server is waited for at most two seconds.
"""

from __future__ import annotations

import http.client
import os
import platform
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.requirements import Requirement

from flcore.config.schema import Config
from flcore.core import portable
from flcore.core.cpu_class import is_portable, processor_class
from flcore.core.errors import MLOPS, ConfigError, RunError
from flcore.engine.local.compiler import check_compiler, compiler_missing, compiler_name
from flcore.io.files import given_path
from pipelines.orchestration.address import configured, problem_with
from pipelines.plan.files import DEFAULT_FILE, read_params
from pipelines.plan.params import for_entry
from pipelines.runs.memory import free_memory
from pipelines.runs.provenance import LOCK, ROOT, git, git_commit
from pipelines.stages.parameters import problem
from pipelines.tracking.store import resolve_uri, sqlite_file, ui_command

_PATIENCE_SECONDS = 2.0
_MISS = "miss "
_LITTLE_MEMORY = 2 * 2**30
_LITTLE_DISK = 2**30
# Usual folders of images, relative to the project; and the layout of each dataset.
_USUAL_ROOTS = ("data", "../data", "../shared/data")
_LAYOUTS = {
    "mnist": "MNIST/raw",
    "fashionmnist": "FashionMNIST/raw",
    "emnist": "EMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "tinyimagenet": "tiny-imagenet-200",
    "femnist": "femnist",
    "celeba": "celeba",
    "vireofood172": "ready_chinese_food",
}


def examine() -> list[str]:
    """Return lines about the machine, the working directory and the configuration."""
    config, about_params = _read_params()
    python = _ok(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    about_machine = [python, *_packages(), *_cores(), *_device(), *_compiler(), *_memory(), *_disk(), *_git_and_dvc()]
    return [*about_machine, about_params, *_data(config), *_prefect(), *_mlflow(config)]


def _ok(text: str) -> str:
    return f"ok   {text}"


def _note(text: str) -> str:
    return f"note {text}"


def _miss(text: str, cure: str) -> str:
    return f"{_MISS}{text}: {cure}"


def is_missing(line: str) -> bool:
    """Return whether a line reports a missing requirement."""
    return line.startswith(_MISS)


def _read_params() -> tuple[Config, str]:
    """Return the configuration of ``params.yaml``, or the defaults if it is invalid, with a line about it."""
    if not DEFAULT_FILE.exists():
        return Config(), _note(f"parameters: no {DEFAULT_FILE} here; defaults are used unless --params names a file")
    try:
        config = Config.from_mapping(for_entry(read_params(None), None, None))
    except ConfigError as error:
        return Config(), _miss(f"parameters: {DEFAULT_FILE} is not valid", " ".join(str(error).splitlines()))
    what = f"{config.method.name} on {config.source.name}/{config.partitioner.name}, {config.federation.rounds} rounds"
    return config, _ok(f"parameters: {DEFAULT_FILE} is valid ({what})")


def _packages() -> Iterator[str]:
    if not (LOCK.exists() and (ROOT / "Makefile").exists()):  # the image of infra/Dockerfile lacks packages of tests
        yield _note("packages: no checkout with infra/requirements.lock, so versions are not checked")
        return
    wanted = list(locked_versions(LOCK.read_text()))
    differing = [
        f"{name} {_installed(name) or 'missing'}, locked {locked}"
        for name, locked in wanted
        if _installed(name) != locked
    ]
    if not differing:
        yield _ok(f"packages: all {len(wanted)} as locked in infra/requirements.lock")
        return
    shown = "; ".join(differing[:3]) + (f"; {len(differing) - 3} more" if len(differing) > 3 else "")
    # Not only `uv pip sync`: protofl is not in the lock, and would be uninstalled.
    again = "install them with `rm -f .venv/.ready && make .venv/.ready`"
    yield _miss(f"packages: not as locked ({shown})", again if Path.cwd() == ROOT else f"{again} in {ROOT}")


def locked_versions(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and version of every package that a lock file, with hashes on own lines, pins for this machine."""
    for line in text.splitlines():
        if line[:1].isalnum():
            requirement = Requirement(line.removesuffix("\\").strip())
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement.name, _public(str(requirement.specifier).removeprefix("=="))


def _installed(package: str) -> str | None:
    try:
        return _public(version(package))
    except PackageNotFoundError:
        return None


def _public(full_version: str) -> str:
    """Return a version without its local part (``+cu130``), which only its package index knows."""
    return full_version.partition("+")[0]


def _cores() -> Iterator[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield _ok(
        f"cores: {cores} for this process, so engine.workers up to {cores} makes sense; "
        f"class of processor {processor_class()}"
    )
    if portable.wanted() == "portable" and is_portable() is False:
        yield _note("numerics: results differ in last bits from those of other x86-64 processors with AVX2")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != "1":
        yield _note(f"threads: OMP_NUM_THREADS is {threads or 'not set'}; 1 keeps libraries from starting others")


def _device() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield _note("device: no CUDA device; everything runs on the CPU (engine.device: cpu)")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield _ok(f"device: {about.name}, {about.total_memory / 2**30:.0f} GiB; use it with --set engine.device=cuda")


def _compiler() -> Iterator[str]:
    missing, name = compiler_missing(), compiler_name()
    if missing:
        yield _note(
            f"compiler: {missing}, which runs of 10,000 client steps or more need; install one, name it in CXX, or set "
            "engine.compile=none"
        )
        return
    try:
        check_compiler(name)
    except RunError as error:
        yield _note(f"compiler: {error}")
    else:
        yield _ok(f"compiler: {name}, for engine.compile")


def _memory() -> Iterator[str]:
    available = free_memory()
    if available == float("inf"):
        yield _note("memory: this system does not say how much is free")
    elif available < _LITTLE_MEMORY:
        yield _miss(
            f"memory: {_gib(available)} free", "close other programs, or keep engine.workers small (about 0.5 GiB each)"
        )
    else:
        yield _ok(f"memory: {_gib(available)} free; a worker process needs about 0.5 GiB and its data")


def _disk() -> Iterator[str]:
    if not os.access(Path.cwd(), os.W_OK):
        yield _miss("disk: this folder cannot be written, and caches and logs go below it", "change to another one")
        return
    free = shutil.disk_usage(Path.cwd()).free
    if free < _LITTLE_DISK:
        yield _miss(f"disk: {_gib(free)} free here", "delete old runs/ and artifacts/, or name another disk with --out")
    else:
        yield _ok(f"disk: {_gib(free)} free here")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _git_and_dvc() -> Iterator[str]:
    commit, branch = git_commit(), _git("rev-parse", "--abbrev-ref", "HEAD")
    if commit is None:
        why = "no commit of the code" if shutil.which("git") else "not installed"
        yield _note(f"git: {why}; runs do not record one, and `dvc exp` does not work")
    elif branch is None:
        yield _ok(f"git: runs record the commit that PROTOFL_COMMIT says, {commit}")
    else:
        changed = len((_git("status", "--porcelain") or "").splitlines())
        yield _ok(f"git: the code is on {branch}, " + (f"{changed} changed files" if changed else "nothing changed"))
    home = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / ".dvc").is_dir()), None)
    if home is None:
        yield _note("dvc: no repository here, and `dvc repro` needs one: change to the project, or run `dvc init`")
    elif not (home / "dvc.yaml").exists():
        yield _miss("dvc: a repository without stages", "get dvc.yaml from the project")
    else:
        refused = None
        with suppress(ConfigError):  # reported with the parameters
            refused = problem(home, read_params(home / DEFAULT_FILE))
        if refused is not None:
            yield _miss("dvc: `dvc repro` and `make run` do not work", refused)
            return
        state = "with dvc.lock" if (home / "dvc.lock").exists() else "nothing reproduced yet; `dvc repro` does it"
        yield _ok(f"dvc: repository with stages, {state}")


def _git(*arguments: str) -> str | None:
    """Return the output of git about the code; None if it fails or is not installed."""
    try:
        done = subprocess.run(git(*arguments), capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _data(config: Config) -> Iterator[str]:
    name, root = config.source.name, config.data.root
    listed = {place: [n for n, layout in _LAYOUTS.items() if Path(place, layout).is_dir()] for place in _USUAL_ROOTS}
    found = {place: datasets for place, datasets in listed.items() if datasets}
    if name == "digits":
        yield _ok("data: digits come with scikit-learn")
    elif root is not None and given_path(root).exists():
        yield _ok(f"data: {name} below data.root = {root}")
    elif config.data.download:
        yield _note(f"data: {name} is fetched at the first run (data.download)")
    else:
        where = "data.root is not set" if root is None else f"data.root = {root} does not exist"
        places = [place for place, datasets in found.items() if name in datasets]
        files = f"{_LAYOUTS[name]}/" if name in _LAYOUTS else "its files"
        cure = f"set data.root={places[0]}" if places else f"set data.root to the folder that holds {files}"
        yield _miss(f"data: {name}, but {where}", cure)
    for place, datasets in found.items():
        yield _note(f"data: {', '.join(datasets)} found in {place}; use with --set data.root={place}")
    for archive in [path for place in _USUAL_ROOTS for path in sorted(Path(place).glob("*.zip"))]:
        yield _note(f"data: an archive in {archive}; use with --set data.name=imagefolder --set data.root={archive}")


def _prefect() -> Iterator[str]:
    try:
        address = configured()
    except ConfigError as error:
        yield _miss("Prefect", str(error))
        return
    if address is None:
        yield _ok("Prefect: no server configured, and none is needed; `protofl up` starts one")
        return
    where = f"{address.shown} (from {address.source})"
    problem = problem_with(address, _PATIENCE_SECONDS)
    if problem is None:
        yield _ok(f"Prefect: server answers at {where}")
    else:
        yield _miss(
            f"Prefect: the server at {where} cannot be used: {problem}; runs continue without it",
            f"start one with `protofl up`, or take its address out of {address.source}",
        )


def _mlflow(config: Config) -> Iterator[str]:
    if not config.tracking.enabled:
        yield _note("MLflow: switched off (tracking.enabled)")
        return
    if find_spec("mlflow") is None:
        yield _note(f"MLflow: not installed, so runs are not logged; pip install {MLOPS}")
        return
    uri, look = resolve_uri(config.tracking.uri), ui_command(config.tracking.uri)
    if uri.startswith(("http://", "https://")):
        problem = _problem_with(f"{uri.rstrip('/')}/health")
        if problem is None:
            yield _ok(f"MLflow: server answers at {look}")
        else:
            yield _miss(
                f"MLflow: no answer from {look} ({problem}); runs continue without it",
                "start it, or unset tracking.uri and MLFLOW_TRACKING_URI; log runs later with `protofl track DIR`",
            )
        return
    database = sqlite_file(uri)
    if database is None:
        yield _note("MLflow: a store of its own kind, not checked")
    elif not database.exists():
        yield _ok("MLflow: no runs yet; the first one makes its store, no server needed")
    elif os.access(database, os.W_OK):
        yield _ok(f"MLflow: store found; look with `{look}`")
    else:
        yield _miss("MLflow: the store cannot be written", "name another with tracking.uri or MLFLOW_TRACKING_URI")


def _problem_with(address: str) -> str | None:
    """Return the reason why a server does not answer in time; None if it does."""
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE_SECONDS):
            return None
    # Refused and timed out are OSErrors, a wrong address a ValueError, no HTTP server an HTTPException.
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error))
