"""The contents of an archive, and its reader, which checks an untrusted archive completely before use.

::

    ro-crate-metadata.json          for catalogues: describes each file (https://w3id.org/ro/crate/1.2)
    README.md                       for people
    proof.json                      for `protofl reproduce`: hashes of every file here and of every result
    code/                           the code, with the lock of its packages
    data/<fingerprint>.json         the data's description (meta.json); never an image
    partitions/<fingerprint>/       manifest.json, indices.safetensors
    runs/<run>/                     config.json, metrics.json, history.jsonl, curves.csv, model.safetensors, plugins/
    comparison/                     tables of a comparison as files
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flcore.config.sections import CompareConfig
from flcore.core.errors import ConfigError, DataError
from flcore.core.params import build
from flcore.core.text import printable, shorten
from pipelines.proof.stored_zip import read_zip
from pipelines.runs.metrics import check_direction

FORMAT = "protofl archive"
VERSION = 1
PROOF, METADATA, README = "proof.json", "ro-crate-metadata.json", "README.md"
SHOWN = ("metrics.json", "history.jsonl", "curves.csv", "model.safetensors")
"""Results of a run that its archive contains; other results, the states of clients and server, are only hashed."""

FINGERPRINT_DIGITS = 16  # digits of a fingerprint in names
_MAX_JSON = 2**28  # bytes of a file that is read into memory as a whole
_LARGEST = 2**63 - 1
_MACHINE_KEYS: Mapping[str, frozenset[str]] = {
    "data": frozenset({"root", "download"}),
    "partition": frozenset({"path"}),
    "engine": frozenset({"name", "workers", "ray_address", "gpus_per_worker"}),
}
"""Keys for folders and workers of one machine; none of them changes a result."""

_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PLUGIN = re.compile(r"plugins/[A-Za-z_][A-Za-z0-9_.]*\.py")

Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)]
Whole = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Number = Whole | Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST, allow_inf_nan=False)]
Object = dict[str, Any]


class _Checked(BaseModel):
    """Part of an archive's JSON: exact types; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Header(_Checked):
    """The used part of a run's ``config.json``; ``config`` has no ``tracking`` and no machine-specific keys."""

    config: Object
    identity: Object
    code: Sha
    config_hash: Sha
    environment: Object
    earlier_environments: list[Object] = []


class _Proof(_Checked):
    """A run's entry in ``proof.json``: fingerprints, and hashes of source modules and of results."""

    data: Sha
    partition: Sha
    modules: dict[str, Sha]
    results: dict[str, Sha]


@dataclass(frozen=True)
class ArchivedRun:
    """A run in an archive: the name of its folder, its ``config.json``, and its entry in ``proof.json``."""

    name: str
    header: _Header
    proof: _Proof
    plugins: Sequence[str]

    @property
    def folder(self) -> str:
        """The folder of the run in the archive."""
        return f"runs/{self.name}"

    @property
    def partition_folder(self) -> str:
        """The folder of the run's partition in the archive."""
        return f"partitions/{self.proof.partition[:FINGERPRINT_DIGITS]}"


class ArchivedClaim(_Checked):
    """A claim of a comparison, as in the section ``compare``."""

    better: str
    than: str
    metric: str
    by: Number
    says: str


class _Tuned(_Checked):
    """The result of a study, with the keys of :class:`~pipelines.reporting.comparison.Tuned`."""

    method: str
    trials: Whole
    failed: Whole
    metric: str
    given: Number | None = None
    best: Number | None = None
    values: Object
    error: str | None = None


class ArchivedComparison(_Checked):
    """The comparison of an archive's runs; ``rows`` have run, name of its row, and partition seed or None."""

    baseline: str
    target_fraction: Number
    rows: Annotated[list[Annotated[tuple[str, str, Whole | None], Field(strict=False)]], Field(min_length=1)]
    budget: str | None = None
    tuning: list[_Tuned]
    failed: dict[str, str]
    results: dict[str, Sha]
    claims: dict[str, ArchivedClaim] = {}

    @property
    def section(self) -> Object:
        """The section ``compare`` of a parameter file that makes the same tables."""
        return {
            "baseline": self.baseline.removesuffix(" (tuned)") if self.tuning else self.baseline,
            "target_fraction": self.target_fraction,
            "claims": {name: claim.model_dump() for name, claim in self.claims.items()},
        }


class _Code(_Checked):
    """The commit of the code's repository and the SHA-256 of the lock of its packages, where known."""

    commit: str | None = None
    lock: str | None = None


def _plain_names(runs: dict[str, _Proof]) -> dict[str, _Proof]:
    if not all(map(_RUN.fullmatch, runs)):
        raise ValueError("names of runs must be plain")
    return runs


class _Document(_Checked):
    """The file ``proof.json``."""

    format: Literal["protofl archive"]
    version: Whole
    code: _Code
    runs: Annotated[dict[str, _Proof], Field(min_length=1), AfterValidator(_plain_names)]
    comparison: ArchivedComparison | None = None
    files: dict[str, Sha]


@dataclass(frozen=True)
class Archive:
    """A checked archive; ``comparison`` is None for the archive of one run."""

    file: zipfile.ZipFile
    runs: Sequence[ArchivedRun]
    comparison: ArchivedComparison | None

    def read(self, name: str) -> bytes:
        """Return a file of the archive."""
        return _read(self.file, name)

    def json(self, name: str) -> Object:
        """Return a JSON object of the archive."""
        return _read_json(self.file, name)


def without_places(config: Mapping[str, Any]) -> Object:
    """Return a nested configuration without folders, downloads, clusters and tracking."""
    return {
        section: {key: value for key, value in values.items() if key not in _MACHINE_KEYS.get(section, ())}
        if isinstance(values, Mapping)
        else values
        for section, values in config.items()
        if section != "tracking"
    }


def read_archive(path: Path) -> Archive:
    """Read an archive and check all of it: each file's hash, each value that is used, and the comparison.

    Raises:
        DataError: something is damaged, missing or unexpected; names the file.
    """
    file = read_zip(path)
    raw = _read_json(file, PROOF)
    if raw.get("format") != FORMAT or (type(raw.get("version")) is int and raw["version"] != VERSION):
        raise DataError(f"{path}: {PROOF} is of another version of archives; use the protofl that wrote it")
    document = _validated(_Document, raw, f"{path}: {PROOF}")
    _check_hashes(file, document.files)
    archive = Archive(file, [_run(file, *item) for item in document.runs.items()], document.comparison)
    required = [name for run in archive.runs for name in _required(run)]
    required += [f"comparison/{name}" for name in (archive.comparison.results if archive.comparison else ())]
    present = set(file.namelist())
    missing = next((name for name in required if name not in present), None)
    if missing is not None:
        raise DataError(f"{path}: {PROOF} names {missing}, which is not there")
    if archive.comparison is not None:
        _check_comparison(archive.comparison, archive.runs, f"{path}: {PROOF}: comparison")
    return archive


def _required(run: ArchivedRun) -> list[str]:
    names = [*(name for name in run.proof.results if name in SHOWN), *run.plugins]
    partition = ("manifest.json", "indices.safetensors")
    return [f"{run.folder}/{name}" for name in names] + [f"{run.partition_folder}/{name}" for name in partition]


def _check_hashes(file: zipfile.ZipFile, hashes: Mapping[str, str]) -> None:
    named, present = {*hashes, PROOF}, set(file.namelist())
    if named != present:
        name = min(named ^ present)
        raise DataError(f"{file.filename}: {name} is {'missing' if name in named else 'named nowhere in ' + PROOF}")
    for name, expected in hashes.items():
        with file.open(name) as entry:
            digest = hashlib.file_digest(entry, "sha256").hexdigest()  # type: ignore[arg-type]
        if digest != expected:
            raise DataError(
                f"{file.filename}: {name} was changed, its SHA-256 is not that of {PROOF}; get the archive again"
            )


def _run(file: zipfile.ZipFile, name: str, proof: _Proof) -> ArchivedRun:
    where = f"{file.filename}: runs/{name}/config.json"
    header = _validated(_Header, _read_json(file, f"runs/{name}/config.json"), where)
    listed = header.config.get("plugins") or []
    plugins = (
        [entry.get("path") if isinstance(entry, dict) else None for entry in listed]
        if isinstance(listed, list)
        else [None]
    )
    if not all(isinstance(path, str) and _PLUGIN.fullmatch(path) for path in plugins):
        raise DataError(f"{where}: plugins: expected files such as plugins/mine.py with their SHA-256")
    if "metrics.json" not in proof.results:
        raise DataError(f"{file.filename}: {PROOF}: runs: {name}: results: has no metrics.json, which every run has")
    return ArchivedRun(name, header, proof, [str(path) for path in plugins])


def _check_comparison(comparison: ArchivedComparison, runs: Sequence[ArchivedRun], where: str) -> None:
    """Refuse before training what the comparison would refuse after it."""
    by_name = {run.name: run for run in runs}
    seen: set[tuple[str, int | None, str]] = set()
    partitions: dict[tuple[int | None, str], str] = {}
    for name, row, draw in comparison.rows:
        if name not in by_name:
            raise DataError(f"{where}: rows: {shorten(name)} is no run of this archive")
        run = by_name[name]
        pair = (draw, json.dumps(run.header.config.get("seed")))
        if (row, *pair) in seen:
            raise DataError(f"{where}: rows: {shorten(row)} appears twice with seed {shorten(pair[1])}")
        seen.add((row, *pair))
        if run.proof.data != by_name[comparison.rows[0][0]].proof.data:
            raise DataError(f"{where}: rows: {name} has other data than {comparison.rows[0][0]}")
        method = run.header.config.get("method")
        if isinstance(method, Mapping) and method.get("name") == "central":  # has no partition
            continue
        if partitions.setdefault(pair, run.proof.partition) != run.proof.partition:
            raise DataError(f"{where}: rows: {name} has another partition than other runs of its seed")
    try:
        build(CompareConfig, comparison.section, "compare")
        for name, claim in comparison.claims.items():
            if claim.metric:
                check_direction(claim.metric, f"compare.claims.{name}: metric")
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error


# ---- untrusted JSON ----------------------------------------------------------------------------------------------


_Model = TypeVar("_Model", bound=_Checked)


def _validated(model: type[_Model], values: Object, where: str) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        location = ": ".join(shorten(str(part), 60) for part in first["loc"])
        raise DataError(f"{where}: {location}: {shorten(first['msg'])}") from error


def _printable(value: Any) -> Any:
    """Escape control characters in all strings of a JSON value: they reach terminals, tables and pages."""
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _read(file: zipfile.ZipFile, name: str) -> bytes:
    if name not in file.namelist():
        raise DataError(f"{file.filename}: has no {name}; it is no archive of protofl, or of another version")
    if (size := file.getinfo(name).file_size) > _MAX_JSON:
        raise DataError(f"{file.filename}: {name} has {size} bytes, more than {_MAX_JSON}; nothing of it was read")
    return file.read(name)


def _read_json(file: zipfile.ZipFile, name: str) -> Object:
    try:
        content = _printable(json.loads(_read(file, name)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.filename}: {name} is no JSON that can be read") from error
    if not isinstance(content, dict):
        raise DataError(f"{file.filename}: {name}: expected a JSON object")
    return content
