"""What stands in an archive, and reading one that somebody else has written: all of it is checked before any is used.

::

    ro-crate-metadata.json          for catalogues: what each file is (https://w3id.org/ro/crate/1.2)
    README.md                       for people
    proof.json                      for `protofl reproduce`: hashes of every file here and of every result
    code/                           the code, with the lock of its packages
    data/<fingerprint>.json         of the data: their name, source, licence, shape and fingerprint; never an image
    partitions/<fingerprint>/       manifest.json, indices.safetensors
    runs/<run>/                     config.json, metrics.json, history.jsonl, curves.csv, model.safetensors, plugins/
    comparison/                     of a comparison, its tables as files
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from pipelines.proof.stored_zip import StoredZip, read_zip
from pipelines.proof.values import LARGEST, MOST_JSON, Values, read_json_object

FORMAT = "protofl archive"
VERSION = 1
PROOF, METADATA, README = "proof.json", "ro-crate-metadata.json", "README.md"
SHOWN = ("metrics.json", "history.jsonl", "curves.csv", "model.safetensors")
"""Results of a run that lie in its archive; of the others, what clients and server held, it has the hashes."""

_PLACES: Mapping[str, frozenset[str]] = {
    "data": frozenset({"root", "download"}),
    "partition": frozenset({"path"}),
    "engine": frozenset({"name", "workers", "ray_address", "gpus_per_worker"}),
}
"""Keys that say where things lie, and who computes; none of them changes a result."""

CLAIMED = ("better", "than", "metric", "by", "says")
"""What an archive says of a claim of its comparison."""
FINGERPRINT_DIGITS = 16  # of a fingerprint, in names
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PLUGIN = re.compile(r"plugins/[A-Za-z_][A-Za-z0-9_.]*\.py")


@dataclass(frozen=True)
class ArchivedRun:
    """A run in an archive.

    Attributes:
        name: of its folder there.
        config: resolved, without ``tracking`` and without places on the machine that made it.
        identity: what of it can change a result.
        code: SHA-256 of the sources that it uses. modules: of each of them.
        data, partition: fingerprints.
        environment: versions, class of processor and device that it was made with, as far as they are known.
        earlier_environments: those in which it was begun, where it went on in another one.
        decision: whether clients were trained in stacks, by compiled steps, and by fused ones; None where nobody has
            said. An archive from before ``fuse`` has the first two.
        plugins: files of its method from outside the package, by path in the archive's folder of the run.
        results: SHA-256 by name of each file that it gave.
    """

    name: str
    config: Mapping[str, Any]
    identity: Mapping[str, Any]
    code: str
    modules: Mapping[str, str]
    data: str
    partition: str
    environment: Mapping[str, Any]
    earlier_environments: Sequence[Mapping[str, Any]]
    decision: Mapping[str, bool] | None
    plugins: Sequence[str]
    results: Mapping[str, str]

    @property
    def folder(self) -> str:
        """Where it stands in the archive."""
        return f"runs/{self.name}"

    @property
    def partition_folder(self) -> str:
        """Where its partition stands in the archive."""
        return f"partitions/{self.partition[:FINGERPRINT_DIGITS]}"


@dataclass(frozen=True)
class ArchivedComparison:
    """How the runs of an archive were set against each other.

    Attributes:
        baseline, target_fraction: as in the section ``compare``.
        rows: of each run, by its folder, what its method is called in the table, in the order of the table, and the
            seed of its division where each seed was run with several.
        budget: in a sentence, what every run might spend; None where that is a number of rounds.
        tuning: what studies found before. failed: why other runs have no result.
        results: SHA-256 by name of each file of the comparison.
        claims: as in the section ``compare``, each with all of :data:`CLAIMED`.
    """

    baseline: str
    target_fraction: float
    rows: Sequence[tuple[str, str, int | None]]
    budget: str | None
    tuning: Sequence[Mapping[str, Any]]
    failed: Mapping[str, str]
    results: Mapping[str, str]
    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Archive:
    """An archive that was read and found whole.

    Attributes:
        file: where its files are read from.
        commit: of the code's repository; None where it was not known. lock: SHA-256 of the lock of its packages.
        runs: in order. comparison: of them; None where it is the archive of one run.
    """

    file: StoredZip
    commit: str | None
    lock: str | None
    runs: Sequence[ArchivedRun]
    comparison: ArchivedComparison | None

    def read(self, name: str) -> bytes:
        """A file of the archive.

        Raises:
            DataError: there is none of this name, or it is too large to be read as a whole.
        """
        return self.file.read(name, MOST_JSON)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the archive.

        Raises:
            DataError: it is none.
        """
        return read_json_object(self.file, name)


def without_places(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, nested, without what it says of the machine that made it.

    What somebody else has written there is not gone to either: no folder, no download, no cluster.
    """
    return {
        section: {key: value for key, value in values.items() if key not in _PLACES.get(section, ())}
        if isinstance(values, Mapping)
        else values
        for section, values in config.items()
        if section != "tracking"
    }


def read_archive(path: Path) -> Archive:
    """Read an archive and check all of it: every byte against its hash, and that it says what one must say.

    Raises:
        DataError: something is damaged, missing or not what is expected; names the file.
    """
    file = read_zip(path)
    proof = Values(f"{path}: {PROOF}", read_json_object(file, PROOF))
    if (proof.text("format"), proof.whole("version")) != (FORMAT, VERSION):
        raise DataError(f"{path}: {PROOF} is of another version of archives; use the protofl that wrote it")
    _check_hashes(file, proof.hashes("files"))
    runs = proof.inner("runs")
    names = list(runs.values)
    if not names or not all(_RUN.fullmatch(name) for name in names):
        raise DataError(f"{path}: {PROOF}: runs: expected one or more, by plain names")
    compared = proof.inner("comparison") if proof.values.get("comparison") is not None else None
    code = proof.inner("code")
    archive = Archive(
        file,
        code.optional_text("commit"),
        code.optional_text("lock"),
        [_run(file, name, runs.inner(name)) for name in names],
        None if compared is None else _comparison(compared, names),
    )
    wanted = [f"{run.folder}/{name}" for run in archive.runs for name in run.results if name in SHOWN]
    wanted += [f"{run.folder}/{plugin}" for run in archive.runs for plugin in run.plugins]
    wanted += [
        f"{run.partition_folder}/{name}" for run in archive.runs for name in ("manifest.json", "indices.safetensors")
    ]
    wanted += [f"comparison/{name}" for name in (archive.comparison.results if archive.comparison else ())]
    missing = next((name for name in wanted if name not in file.entries), None)
    if missing is not None:
        raise DataError(f"{path}: {PROOF} names {missing}, which is not there")
    return archive


def _check_hashes(file: StoredZip, hashes: Mapping[str, str]) -> None:
    named, there = set(hashes) | {PROOF}, set(file.entries)
    if named != there:
        other = sorted(named ^ there)[0]
        raise DataError(f"{file.path}: {other} is {'missing' if other in named else 'named nowhere in ' + PROOF}")
    for name, expected in hashes.items():
        digest = hashlib.sha256()
        for piece in file.chunks(name):
            digest.update(piece)
        if digest.hexdigest() != expected:
            raise DataError(
                f"{file.path}: {name} was changed, its SHA-256 is not that of {PROOF}; get the archive again"
            )


def _run(file: StoredZip, name: str, said: Values) -> ArchivedRun:
    where = f"runs/{name}/config.json"
    header = Values(f"{file.path}: {where}", read_json_object(file, where))
    config = header.inner("config")
    plugins = []
    listed = config.values.get("plugins") or []
    for entry in listed if isinstance(listed, list) else [None]:
        place = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(place, str) or not _PLUGIN.fullmatch(place):
            raise DataError(f"{header.where}: plugins: expected files such as plugins/mine.py with their SHA-256")
        plugins.append(place)
    earlier = header.values.get("earlier_environments", [])
    if not isinstance(earlier, list) or not all(isinstance(entry, dict) for entry in earlier):
        raise DataError(f"{header.where}: earlier_environments: expected a list of objects")
    decision = header.inner("decision") if header.values.get("decision") is not None else None
    header.hash("config_hash")  # nobody reads it, but every run has one
    results = said.hashes("results")
    if "metrics.json" not in results:
        raise DataError(f"{said.where}: results: has no metrics.json, which every run has")
    decided = ("stack", "compile", "fuse") if decision and "fuse" in decision.values else ("stack", "compile")
    return ArchivedRun(
        name=name,
        config=config.values,
        identity=header.inner("identity").values,
        code=header.hash("code"),
        modules=said.hashes("modules"),
        data=said.hash("data"),
        partition=said.hash("partition"),
        environment=header.inner("environment").values,
        earlier_environments=earlier,
        decision=None if decision is None else {key: decision.truth(key) for key in decided},
        plugins=plugins,
        results=results,
    )


def _comparison(said: Values, runs: Sequence[str]) -> ArchivedComparison:
    rows = said.values.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 3 and row[0] in runs and isinstance(row[1], str)
        and (row[2] is None or (type(row[2]) is int and abs(row[2]) <= LARGEST))
        for row in rows
    ):  # fmt: skip
        raise DataError(f"{said.where}: rows: expected a run, what its method is called, and a seed or null, for each")
    tuning = said.values.get("tuning")
    if not isinstance(tuning, list) or not all(isinstance(entry, dict) for entry in tuning):
        raise DataError(f"{said.where}: tuning: expected a list of objects")
    failed = said.inner("failed")
    return ArchivedComparison(
        baseline=said.text("baseline"),
        target_fraction=said.number("target_fraction"),
        rows=[(run, row, draw) for run, row, draw in rows],
        budget=said.optional_text("budget"),
        tuning=[_tuned(Values(f"{said.where}: tuning", entry)) for entry in tuning],
        failed={label: failed.text(label) for label in failed.values},
        results=said.hashes("results"),
        claims=_claims(said.inner("claims")) if "claims" in said.values else {},
    )


def _claims(said: Values) -> dict[str, Mapping[str, Any]]:
    found = {name: said.inner(name) for name in said.values}
    return {
        name: {**{key: own.text(key) for key in CLAIMED if key != "by"}, "by": own.number("by")}
        for name, own in found.items()
    }


def _tuned(said: Values) -> Mapping[str, Any]:
    """What a study found, with the keys and types of :class:`~pipelines.reporting.comparison.Tuned`."""
    figures = {key: said.number(key) for key in ("given", "best") if said.values.get(key) is not None}
    return {
        **{key: said.text(key) for key in ("method", "metric")},
        **{key: said.whole(key) for key in ("trials", "failed")},
        **{"given": None, "best": None, **figures},
        "values": said.inner("values").values,
        "error": said.optional_text("error"),
    }
