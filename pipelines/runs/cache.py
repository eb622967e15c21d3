"""The cache: prepared data, partitions and finished runs by content, shared by all commands typed in one folder.

Below ``.protofl/cache`` (or the folder that the environment variable PROTOFL_CACHE names)::

    prepared/<fingerprint>/      data as `flcore` writes them
    partitions/<fingerprint>/    partitions
    index/                       request to fingerprint; folders of finished runs; their time and memory

A request is everything that can change the result: the section of the configuration, the source code that computes it,
the packages that it uses, and the state of the files that are read. Deleting the cache costs time only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.io import disk
from flcore.config.schema import Config
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.core.errors import ConfigError, DataError
from flcore.io.files import check_path, given_path, make_durable, read_json, replace_file, write_json
from flcore.io.locks import run_lock, take_lock
from flcore.experiment.inputs import divide, read_source
from flcore.experiment.provenance import division_fingerprint, package_versions, preparation_fingerprint
from flcore.experiment.run_folder import RunFiles
from pipelines.runs.file_state import source_state, state_of
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import TRACKED
from pipelines.runs.ownership import Kind, may_be_replaced, remove_own

ENVIRONMENT_VARIABLE = "PROTOFL_CACHE"
DEFAULT_FOLDER = Path(".protofl") / "cache"
_DIGITS = 16  # digits of a fingerprint in names of folders
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_PACKAGES = ("torch", "torchvision", "pillow", "scikit-learn", "numpy")  # they decode images, resize and draw
_CURE = "delete it, nothing but time is lost"


@dataclass(frozen=True)
class Cost:
    """The cost of a run: seconds of training on one core, peak bytes of a process; None: unknown."""

    seconds: float | None = None
    peak: int | None = None


class Cache:
    """An index of earlier results and their folders."""

    def __init__(self, root: Path) -> None:
        """Use a folder, which is created with its first entry."""
        self.root = root

    @classmethod
    def here(cls) -> Cache:
        """Return the cache of the working directory or the environment variable; DataError: see check_path."""
        return cls(check_path(Path(os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_FOLDER).absolute()))

    # ---- data ----------------------------------------------------------------------------------------------------

    def prepared(self, config: Config, *, look: bool = False) -> Path:
        """Return the folder of a configuration's prepared data; prepare them if it is missing.

        With ``look`` also check every image, and prepare again if one is damaged; takes as long as reading them.

        Raises:
            DataError: the source's files are missing or damaged, or changed while they were read.
        """
        section = {key: value for key, value in config.to_mapping()["data"].items() if key not in _NOT_PREPARED}
        request = {
            "data": section,
            "files": source_state(config),
            "code": preparation_fingerprint(config),
            "packages": package_versions(_PACKAGES),
        }

        def make(folder: Path) -> str:
            fingerprint = read_source(config, folder).meta.fingerprint
            if source_state(config) != request["files"] and not config.data.download:
                raise DataError(f"{config.data.root}: files changed while they were read; start the command again")
            return fingerprint

        load = _looked_at if look else lambda folder: Dataset.load(folder).meta.fingerprint
        return self._made("prepared", request, make, load)

    def partition(self, config: Config, prepared: Path) -> Path:
        """Return the folder of a configuration's partition of prepared data; partition them if it is missing.

        Raises:
            DataError: the request cannot be met.
        """
        section = config.to_mapping()["partition"]
        request = {
            "partition": section | {"seed": config.partition_seed},
            "files": None if section.get("path") is None else state_of([given_path(section["path"])]),
            "data": Dataset.load(prepared).meta.fingerprint,
            "code": division_fingerprint(config),
            "packages": package_versions(_PACKAGES),
        }
        return self._made(
            "partitions",
            request,
            lambda folder: divide(config, prepared, folder).fingerprint,
            lambda folder: Partition.load(folder).fingerprint,
        )

    def _made(
        self,
        kind: str,
        request: Mapping[str, Any],
        make: Callable[[Path], str],
        load: Callable[[Path], str],
    ) -> Path:
        """Return the folder for a request, which has all inputs; make it if it is missing.

        ``make`` fills a folder; it and ``load`` return the fingerprint of the content. DataError: it is damaged.
        """
        name = _digest(request)
        entry = self.root / "index" / kind / f"{name}.json"
        with self._alone(entry):
            known = _read_or_empty(entry)
            found = known.get("fingerprint")
            if isinstance(found, str) and _FINGERPRINT.fullmatch(found) and _digest(known.get("request")) == name:
                place = self.root / kind / found[:_DIGITS]
                with suppress(DataError):  # damaged or deleted: made again
                    if load(place) == found:
                        return place
            unfinished = self.root / kind / f".{name[:_DIGITS]}"
            disk.remove_tree(unfinished)  # files of a killed process would become part of the data
            disk.make_folder(unfinished)
            fingerprint = make(unfinished)
            place = self.root / kind / fingerprint[:_DIGITS]
            with self._alone(entry.with_name(f"{fingerprint}.json")):  # another request may give the same content now
                try:
                    is_there = load(place) == fingerprint  # another process may be reading it
                except DataError:
                    is_there = False
                if is_there:
                    disk.remove_tree(unfinished)
                else:
                    disk.remove_tree(place)
                    disk.rename(unfinished, place)
            write_json(entry, {"fingerprint": fingerprint, "request": dict(request)})
        return place

    @contextmanager
    def _alone(self, entry: Path) -> Iterator[None]:
        """Let one process at a time answer a request, or publish a folder."""
        disk.make_folder(entry.parent)
        with disk.open_lock(entry.with_suffix(".lock")) as file:
            take_lock(file, wait=True)
            yield

    # ---- runs ----------------------------------------------------------------------------------------------------

    def note_run(self, directory: Path, config: Config) -> None:
        """Store the folder of a finished run, and its training time."""
        run = RunFolder(directory)
        entry = self.root / "index" / "runs" / f"{run.config_hash}.json"
        with self._alone(entry):
            known = _read_or_empty(entry)
            write_json(entry, known | {str(run.code): [str(directory.absolute()), _results(directory)]})
        self.note_seconds(config, sum(run.timing["seconds"].values()))

    def note_seconds(self, config: Config, seconds: float) -> None:
        """Store the training time of a run; with workers inside, multiplied by their number."""
        spent = seconds * max(config.engine.worker_count, 1)
        write_json(self._known("seconds", kind_of(config)), {"seconds": spent, "method": config.method.name})

    def note_peak(self, config: Config, peak: int) -> None:
        """Store the peak memory of a run's process, in bytes; skipped with workers inside, as it would lack theirs."""
        if config.engine.worker_count == 0:
            write_json(self._known("memory", kind_of(config)), {"peak": peak, "method": config.method.name})

    def finished_run(self, run_hash: str, code: str) -> Path | None:
        """Return a folder in which a run has finished under the same code; None if there is none now."""
        match _read_or_empty(self.root / "index" / "runs" / f"{run_hash}.json").get(code):
            case [str(folder), str(results)]:
                with suppress(DataError, OSError):  # damaged, or not readable: cannot be reused
                    # DVC may have checked out another revision there, with other results.
                    if has_finished(Path(folder), run_hash, code) and _results(Path(folder)) == results:
                        return Path(folder)
        return None

    def cost(self, kind: str) -> Cost:
        """Return the cost of earlier runs of the same kind, by :func:`kind_of`."""
        seconds = _read_or_empty(self._known("seconds", kind)).get("seconds")
        peak = _read_or_empty(self._known("memory", kind)).get("peak")
        return Cost(
            seconds=float(seconds) if isinstance(seconds, float | int) and 0 <= seconds < math.inf else None,
            peak=peak if type(peak) is int and peak >= 0 else None,
        )

    def _known(self, what: str, kind: str) -> Path:
        return self.root / "index" / what / f"{kind}.json"


def kind_of(config: Config) -> str:
    """Return a key that is equal for runs of equal time and memory: everything that can change a result except seeds.

    Whether steps are compiled is left out: a plan with ``auto`` does not know it yet.
    """
    identity = config.identity()
    identity["engine"] = {k: v for k, v in identity["engine"].items() if k not in ("stack", "compile")}
    identity["partition"] = {key: value for key, value in identity["partition"].items() if key != "seed"}
    return _digest(identity | {"seed": None})[:32]


def _looked_at(folder: Path) -> str:
    """Return the fingerprint of prepared data, by their content; DataError: they are damaged."""
    found = Dataset.load(folder)
    found.check_content(folder)
    return found.meta.fingerprint


_NOT_PREPARED = ("augmentation", "download")
"""Keys of the section ``data`` that do not change what is prepared."""


def has_finished(directory: Path, run_hash: str, code: str) -> bool:
    """Return whether this code finished a run of this hash in a folder; DataError: its results were changed later."""
    run = RunFolder(directory)
    if not (run.files.metrics.exists() and run.files.history.exists() and run.is_described):
        return False
    return (run.config_hash, run.code) == (run_hash, code) and run.is_finished


def _results(directory: Path) -> str:
    """Return a fingerprint of a finished run's results; a run with deleted or altered results is not shared."""
    files = RunFiles(directory)
    digests = []
    for path in (files.metrics, files.history, files.model, files.server, *files.records()):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests.append([path.relative_to(directory).as_posix(), digest])
    return _digest(digests)


def place(
    kind: Kind,
    source: Path,
    target: Path,
    add: Callable[[Path], object] = lambda folder: None,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Copy a folder's content into another one, with hard links for large files if possible.

    It appears at once: half a run would look complete.

    Args:
        kind: of both folders. source: remains unchanged. target: replaced if it exists.
        add: called with the copy before it appears; may change it.
        unless: called when the target is locked; if true, the target remains.

    Raises:
        ConfigError: the target has content that is not of this kind, or cannot be replaced.
        RunError: another process is using the target.
    """
    target = target.resolve()  # "." has no name, and a link cannot be replaced by a folder
    if not may_be_replaced(kind, target):
        raise ConfigError(f"{target}: holds other files, or is in use as it is; choose another --out")
    unfinished = target.with_name(f".{target.name}.unfinished")
    with run_lock(target):
        if unless():
            return
        disk.remove_tree(unfinished)
        _copy(source, unfinished)
        add(unfinished)
        make_durable(path for path in sorted(unfinished.rglob("*")) if path.is_file())
        remove_own(kind, target)
        disk.rename(unfinished, target)


def _copy(source: Path, target: Path) -> None:
    disk.make_folder(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy(path, target / path.name)
        elif path.name == TRACKED or not path.name.startswith("."):  # else locks and files of a killed process
            _link_or_copy(path, target / path.name)


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        with suppress(OSError):  # another disk, or one without links
            disk.link(source, target)
            return
    replace_file(target, lambda file: file.write(source.read_bytes()))


def _read_or_empty(path: Path) -> dict[str, Any]:
    """Return a file of the index; empty if it is missing or damaged."""
    try:
        return read_json(path, _CURE)
    except DataError:
        return {}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
