"""``protofl archive``: a finished run, or a comparison with its runs, as one file from which anyone can repeat it.

It contains everything except the data, for which it has name, source and fingerprint. The same folder gives the same
bytes (:mod:`pipelines.proof.stored_zip`), so its SHA-256 can be published as proof.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from flcore.core.text import shorten
from flcore.experiment.provenance import code_fingerprint, code_modules
from flcore.experiment.run_folder import stored_config
from flcore.io.files import json_text, read_json
from pipelines.proof.contents import (
    FINGERPRINT_DIGITS,
    FORMAT,
    METADATA,
    PROOF,
    README,
    SHOWN,
    VERSION,
    ArchivedClaim,
    read_archive,
    without_places,
)
from pipelines.proof.crate import ArchiveSummary, metadata, readme
from pipelines.proof.results import COMPARED, digest_of, digests, result_files
from pipelines.proof.stored_zip import Content, refused_names, write_zip
from pipelines.runs.folder import RunFolder
from pipelines.runs.provenance import LOCK, ROOT, git_commit, lock_hash

_CURE = "carry it out again"
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*\+?")
_PACKAGED = ("pyproject.toml", "Makefile", "README.md", "LICENSE")


@dataclass(frozen=True)
class _Run:
    """A finished run to archive."""

    folder: RunFolder
    name: str
    config: Config
    files: Mapping[str, Path]


@dataclass(frozen=True)
class _Compared:
    """A comparison to archive: its folder, its ``comparison.json``, and its runs."""

    directory: Path
    document: Mapping[str, Any]
    runs: Sequence[RunFolder]


def archive(directory: Path, out: Path, *, licence: str | None = None, replace: bool = True) -> tuple[str, str]:
    """Write the archive of a run or comparison.

    Args:
        directory: of a finished run; of a comparison, with its ``runs/``; or DVC's ``artifacts``.
        out: the file.
        licence: SPDX identifier of the licence for the results; None: not stated.
        replace: also replace an archive of something else; other files are never replaced.

    Returns:
        The SHA-256 of the file, and the options with which ``protofl reproduce`` repeats it.

    Raises:
        DataError: ``directory`` is none of these, has not finished, is damaged, or is from other code or packages.
        ConfigError: it is too large for a plain zip file, ``licence`` is invalid, or ``out`` must not be replaced.
    """
    if licence is not None and not _SPDX.fullmatch(licence):
        raise ConfigError(
            f"--licence {shorten(licence)}: no identifier of https://spdx.org/licenses, such as CC-BY-4.0"
        )
    existing = _existing_proof(out)
    compared = _comparison_in(directory)
    runs = [_run(folder) for folder in ([RunFolder(directory)] if compared is None else compared.runs)]
    contents: dict[str, Content] = dict(_code())
    proof_of_runs = {run.name: _add_run(run, contents) for run in runs}
    comparison = None if compared is None else _add_comparison(compared, runs, contents)
    about = ArchiveSummary(
        name=runs[0].name if compared is None else _named(compared.document),
        runs=[run.name for run in runs],
        sources=sorted(
            {
                (run.config.source.name, read_json(run.folder.inputs.prepared / "meta.json", _CURE)["licence"])
                for run in runs
            }
        ),
        environment=runs[0].folder.environment,
        commit=git_commit(),
        lock=lock_hash(),
        day=max(map(_last_day, runs)),
        licence=licence,
        needs_root=any(run.config.source.places(Path()) and run.config.data.root is not None for run in runs),
        has_plugins=any(run.config.plugins for run in runs),
        is_comparison=compared is not None,
        has_global_model=compared is None and _has_global_model(runs[0]),
    )
    contents[README] = readme(about).encode()
    hashes = {name: _digest(content) for name, content in contents.items()}
    sizes = {name: _size(content) for name, content in contents.items()}
    contents[METADATA] = _json(metadata(about, hashes, sizes))
    hashes[METADATA] = _digest(contents[METADATA])
    contents[PROOF] = _json(
        {
            "format": FORMAT,
            "version": VERSION,
            "code": {"commit": about.commit, "lock": about.lock},
            "runs": proof_of_runs,
            "comparison": comparison,
            "files": hashes,
        }
    )
    if not replace and existing not in (None, contents[PROOF]):
        raise ConfigError(f"{out}: holds an archive of something else; name another file with --out")
    write_zip(out, contents)
    return digest_of(out), about.options


def _existing_proof(out: Path) -> bytes | None:
    """Return ``proof.json`` of the archive to replace; None if there is no file."""
    if not out.exists():
        return None
    try:
        return read_archive(out).read(PROOF)
    except (DataError, OSError):
        raise ConfigError(
            f"{out}: is there and is no whole archive of protofl; name another file with --out, or delete it"
        ) from None


# ---- what is archived --------------------------------------------------------------------------------------------


def _comparison_in(directory: Path) -> _Compared | None:
    """Return the comparison in a folder or its subfolder ``comparison``; None if the folder is a run."""
    if RunFolder(directory).is_described:
        return None
    folder = next(
        (candidate for candidate in (directory, directory / "comparison") if (candidate / "comparison.json").is_file()),
        None,
    )
    if folder is None:
        raise DataError(
            f"{directory}: no run (config.json) and no comparison (comparison.json) there; name the folder that "
            "protofl run or compare wrote, or artifacts"
        )
    document = read_json(folder / "comparison.json", _CURE)
    folders = [RunFolder(path) for path in sorted((directory / "runs").glob("*"))]
    by_hash = {run.config_hash: run for run in folders if run.is_described}
    missing = [row for row in document["runs"] if row["config_hash"] not in by_hash]
    if missing:
        raise DataError(
            f"{directory}: the run {missing[0]['method']} seed {missing[0]['seed']} of the comparison is not in "
            f"{directory / 'runs'} any more; compare again"
        )
    return _Compared(folder, document, list(dict.fromkeys(by_hash[row["config_hash"]] for row in document["runs"])))


def _run(run: RunFolder) -> _Run:
    config, made_by = stored_config(run.directory), run.environment
    if not run.is_finished:
        raise DataError(f"{run.directory}: has not finished; repeat the command that began it")
    version = made_by.get("code_version")
    other = [
        what
        for what, is_same in (
            ("code", run.code == code_fingerprint(config)),
            ("packages (infra/requirements.lock)", made_by.get("lock_hash") in (None, lock_hash())),
        )
        if not is_same
    ]
    if other:
        cure = f"archive it with the code of commit {version}, or " if version else ""
        raise DataError(f"{run.directory}: was made by other {' and '.join(other)} than what is here; {cure}{_CURE}")
    name = f"{config.method.name}-s{config.seed}-{run.config_hash[:8]}"
    return _Run(run, name, config, result_files(run.directory))


def _has_global_model(run: _Run) -> bool:
    return run.config.method.data_scope == "client" and run.folder.metrics.get("top1_global") is not None


def _add_run(run: _Run, contents: dict[str, Content]) -> dict[str, Any]:
    """Add a run, its partition and its data's description to the contents; return its entry in the proof."""
    inputs = run.folder.inputs
    meta = read_json(inputs.prepared / "meta.json", _CURE)
    data, partition = (
        read_json(path, _CURE)["fingerprint"]
        for path in (inputs.prepared / "meta.json", inputs.partition / "manifest.json")
    )
    contents[f"data/{data[:FINGERPRINT_DIGITS]}.json"] = _json(meta)
    for name in ("manifest.json", "indices.safetensors"):
        contents[f"partitions/{partition[:FINGERPRINT_DIGITS]}/{name}"] = inputs.partition / name
    folder = f"runs/{run.name}"
    stored = without_places(run.folder.config)
    contents[f"{folder}/config.json"] = _json({**run.folder.header, "config": stored})
    for entry in stored.get("plugins", ()):
        contents[f"{folder}/{entry['path']}"] = run.folder.directory / entry["path"]
    for name in SHOWN:
        if name in run.files:
            contents[f"{folder}/{name}"] = run.files[name]
    return {"data": data, "partition": partition, "modules": code_modules(run.config), "results": digests(run.files)}


def _add_comparison(compared: _Compared, runs: Sequence[_Run], contents: dict[str, Content]) -> dict[str, Any]:
    document = compared.document
    names = {run.folder.config_hash: run.name for run in runs}
    files = {name: path for name in COMPARED if (path := compared.directory / name).is_file()}
    for name, path in files.items():
        contents[f"comparison/{name}"] = path
    return {
        "baseline": document["baseline"],
        "target_fraction": document["target_fraction"],
        "rows": [[names[row["config_hash"]], row["method"], row.get("division")] for row in document["runs"]],
        "budget": document.get("budget"),
        "tuning": document["tuning"],
        "claims": {
            claim["name"]: {key: claim[key] for key in ArchivedClaim.model_fields}
            for claim in document.get("claims", [])
        },
        "failed": document["failed"],
        "results": digests(files),
    }


def _named(document: Mapping[str, Any]) -> str:
    """Return a comparison's name, independent of its folder."""
    return f"comparison of {len(document['methods'])} methods on {document['dataset']}"


def _code() -> dict[str, Path]:
    """Return the code and its package lock, enough to recreate the environment; empty outside a checkout.

    Raises:
        DataError: a file's name cannot be archived.
    """
    paths = [ROOT / name for name in _PACKAGED] + [LOCK]
    if not all(path.is_file() for path in paths):  # the image of infra/Dockerfile has only the lock
        return {}
    for package in ("flcore", "pipelines"):
        paths += [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    named = {f"code/{path.relative_to(ROOT).as_posix()}": path for path in paths}
    # Hidden files come from editors and file managers. Any other file may be read by the code, so leaving it out would
    # change the code.
    named = {name: path for name, path in named.items() if "/." not in name}
    if refused := refused_names(sorted(named)):
        raise DataError(f"{named[refused[0]]}: has a name that not every system can unpack; rename it, or move it away")
    return named


def _last_day(run: _Run) -> str:
    """Return the day (UTC) on which a run ended; for a run from DVC without that time, the day of its files here."""
    ended = run.folder.timing.get("ended_ms")
    seconds = run.folder.files.history.stat().st_mtime if ended is None else ended / 1000
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


# ---- bytes -------------------------------------------------------------------------------------------------------


def _json(content: Mapping[str, Any]) -> bytes:
    return (json_text(content, indent=2, ensure_ascii=False) + "\n").encode()


def _digest(content: Content) -> str:
    return digest_of(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _size(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)
