"""Prepared data, partitions and finished runs, found by what they hold: shared by all commands typed in one folder.

Below ``.protofl/cache`` (or the folder that the environment variable PROTOFL_CACHE names)::

    prepared/<fingerprint>/      data as `flcore` writes them
    partitions/<fingerprint>/    partitions
    index/                       which request gave which of them; where runs have finished; their time and memory

A request is everything that can change the answer: the section of the configuration, the source code that carries it
out, the packages that it uses, and size, times and inodes of the files that are read. So nothing is prepared, divided or trained
twice, nothing is copied into a run's folder (:mod:`pipelines.runs.inputs` says where a run's data lie), and deleting
the cache costs time only.
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
from typing import Any, TypeVar

from flcore.io import disk
from flcore.config.schema import Config
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.core.errors import ConfigError, DataError
from flcore.io.files import check_path, given_path, make_durable, read_json, replace_file, write_json
from flcore.io.locks import run_lock, take_lock
from flcore.experiment.inputs import divide, read_source
from flcore.experiment.provenance import division_fingerprint, package_versions, preparation_fingerprint
from flcore.experiment.run_folder import RunFiles, check_seal, read_run_config
from pipelines.runs.file_state import source_state, state_of
from pipelines.runs.layout import TRACKED
from pipelines.runs.ownership import Kind, may_be_replaced, remove_own

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "PROTOFL_CACHE"
DEFAULT_FOLDER = Path(".protofl") / "cache"
_DIGITS = 16  # of a fingerprint, in names of folders
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_PACKAGES = ("torch", "torchvision", "pillow", "scikit-learn", "numpy")  # that decode images, resize and draw
_CURE = "delete it, nothing but time is lost"


@dataclass(frozen=True)
class Cost:
    """What a run took; None: nobody knows.

    Attributes:
        seconds: of training on one core: with workers inside, those of all of them.
        peak: bytes of memory of a process that trains inline.
    """

    seconds: float | None = None
    peak: int | None = None


class Cache:
    """What was made before, and where."""

    def __init__(self, root: Path) -> None:
        """Use a folder, which is made when something is put there."""
        self.root = root

    @classmethod
    def here(cls) -> Cache:
        """The cache of the working directory, or the one that the environment names; DataError: see check_path."""
        return cls(check_path(Path(os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_FOLDER).absolute()))

    # ---- data ----------------------------------------------------------------------------------------------------

    def prepared(self, config: Config, *, look: bool = False) -> Path:
        """The folder of the prepared data of a configuration; made if nobody has made it.

        Args:
            config: says which.
            look: at every image too, and make them again where one is damaged; it takes as long as to read them.

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

    def on_whole_data(self, config: Config, prepared: Path, work: Callable[[], T]) -> T:
        """Do what looks at every image; again where one of this cache was damaged, once they are made again.

        Args:
            config: of which the data are. prepared: where they lie. work: raises DataError where they are damaged.
        """
        try:
            return work()
        except DataError:
            if not self._mended(config, prepared):
                raise
            return work()

    def _mended(self, config: Config, prepared: Path) -> bool:
        """Make prepared data again if they lie here and are damaged; whether that was so."""
        if prepared.parent != self.root / "prepared":
            return False
        try:
            _looked_at(prepared)
        except DataError:
            return self.prepared(config, look=True) == prepared
        return False

    def partition(self, config: Config, prepared: Path) -> Path:
        """The folder of a configuration's partition of prepared data; made if nobody has made it.

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
            lambda folder: self.on_whole_data(config, prepared, lambda: divide(config, prepared, folder).fingerprint),
            lambda folder: Partition.load(folder).fingerprint,
        )

    def _made(
        self,
        kind: str,
        request: Mapping[str, Any],
        make: Callable[[Path], str],
        load: Callable[[Path], str],
    ) -> Path:
        """The folder that answers a request.

        Args:
            kind: of folder.
            request: what it is asked for.
            make: fills a folder and returns the fingerprint of what it holds.
            load: the fingerprint of what a folder holds; raises DataError where that is damaged.
        """
        name = _digest(request)
        entry = self.root / "index" / kind / f"{name}.json"
        with self._alone(entry):
            known = _read_or_empty(entry)
            found = known.get("fingerprint")
            if isinstance(found, str) and _FINGERPRINT.fullmatch(found) and _digest(known.get("request")) == name:
                place = self.root / kind / found[:_DIGITS]
                with suppress(DataError):  # damaged, or somebody has deleted it: made again
                    if load(place) == found:
                        return place
            unfinished = self.root / kind / f".{name[:_DIGITS]}"
            disk.remove_tree(unfinished)  # what a process that was killed has left would be part of the data
            disk.make_folder(unfinished)
            fingerprint = make(unfinished)
            place = self.root / kind / fingerprint[:_DIGITS]
            with self._alone(entry.with_name(f"{fingerprint}.json")):  # another request may give the same, just now
                try:
                    is_there = load(place) == fingerprint  # and somebody may be reading it
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
        """Let one process at a time answer a request, or put a folder where all look for what it holds."""
        disk.make_folder(entry.parent)
        with disk.open_lock(entry.with_suffix(".lock")) as file:
            take_lock(file, wait=True)
            yield

    # ---- runs ----------------------------------------------------------------------------------------------------

    def note_run(self, directory: Path, config: Config) -> None:
        """Remember where a run has finished, and how long its training took."""
        about = read_run_config(directory)
        entry = self.root / "index" / "runs" / f"{about['config_hash']}.json"
        with self._alone(entry):
            known = _read_or_empty(entry)
            write_json(entry, known | {about["code"]: [str(directory.absolute()), _results(directory)]})
        self.note_seconds(config, sum(read_json(RunFiles(directory).timing, _CURE)["seconds"].values()))

    def note_seconds(self, config: Config, seconds: float) -> None:
        """Remember how long the training of a run takes; with workers inside, they all take as long."""
        spent = seconds * max(config.engine.worker_count, 1)
        write_json(self._known("seconds", kind_of(config)), {"seconds": spent, "method": config.method.name})

    def note_peak(self, config: Config, peak: int) -> None:
        """Remember the bytes of memory that a run's process took at most; with workers inside, it is none of it all."""
        if config.engine.worker_count == 0:
            write_json(self._known("memory", kind_of(config)), {"peak": peak, "method": config.method.name})

    def finished_run(self, run_hash: str, code: str) -> Path | None:
        """The folder in which a run has finished under the same code; None if there is none any more."""
        match _read_or_empty(self.root / "index" / "runs" / f"{run_hash}.json").get(code):
            case [str(folder), str(results)]:
                with suppress(DataError, OSError):  # damaged, or in another's home: nothing to take from there
                    # Another revision may have been checked out there, of which DVC knows the results alone.
                    if has_finished(Path(folder), run_hash, code) and _results(Path(folder)) == results:
                        return Path(folder)
        return None

    def cost(self, kind: str) -> Cost:
        """What the same took before, by :func:`kind_of`."""
        seconds = _read_or_empty(self._known("seconds", kind)).get("seconds")
        peak = _read_or_empty(self._known("memory", kind)).get("peak")
        return Cost(
            seconds=float(seconds) if isinstance(seconds, float | int) and 0 <= seconds < math.inf else None,
            peak=peak if type(peak) is int and peak >= 0 else None,
        )

    def _known(self, what: str, kind: str) -> Path:
        return self.root / "index" / what / f"{kind}.json"


def kind_of(config: Config) -> str:
    """What all runs share that take as long and as much memory: everything that can change a result, but for seeds.

    A plan with ``auto`` does not know yet whether its steps are compiled, so that does not count.
    """
    identity = config.identity()
    identity["engine"] = {k: v for k, v in identity["engine"].items() if k not in ("stack", "compile")}
    identity["partition"] = {key: value for key, value in identity["partition"].items() if key != "seed"}
    return _digest(identity | {"seed": None})[:32]


def _looked_at(folder: Path) -> str:
    """The fingerprint of prepared data, by their content.

    Raises:
        DataError: they are damaged.
    """
    found = Dataset.load(folder)
    found.check_content(folder)
    return found.meta.fingerprint


_NOT_PREPARED = ("augmentation", "download")
"""Keys of the section ``data`` that do not change what is prepared."""


def has_finished(directory: Path, run_hash: str, code: str) -> bool:
    """Whether a folder holds a run of this hash that this code finished.

    Raises:
        DataError: it does, and its results have changed since.
    """
    files = RunFiles(directory)
    if not (files.metrics.exists() and files.history.exists() and files.config.exists()):
        return False
    about = read_run_config(directory)
    if (about.get("config_hash"), about.get("code")) != (run_hash, code):
        return False
    check_seal(directory)
    return True


def _results(directory: Path) -> str:
    """A fingerprint of what a finished run gave; whoever deletes or alters some of it has no whole run to share."""
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
    """Put what lies in one folder into another, sharing the large files' bytes on disk where that is possible.

    All of it appears at once: half a run would look like a whole one.

    Args:
        kind: of both folders.
        source: stays as it is; its files are never written to, only replaced.
        target: replaced if it is there.
        add: is called with the copy before it appears, and may change it.
        unless: is asked when nobody else can work in the target any more; where it says so, that stays as it is.

    Raises:
        ConfigError: something lies in the target that is not of this kind, or it cannot be replaced.
        RunError: another process is at work in the target.
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
        elif path.name == TRACKED or not path.name.startswith("."):  # else locks, and what a killed process has left
            _link_or_copy(path, target / path.name)


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        with suppress(OSError):  # another disk, or one without links
            disk.link(source, target)
            return
    replace_file(target, lambda file: file.write(source.read_bytes()))


def _read_or_empty(path: Path) -> dict[str, Any]:
    """A file of the index; one that is not there, or damaged, says nothing."""
    try:
        return read_json(path, _CURE)
    except DataError:
        return {}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
