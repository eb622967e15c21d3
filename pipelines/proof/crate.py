"""An archive's description of itself: RO-Crate 1.2 metadata for catalogues, and a README for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcore.version import VERSION
from pipelines.runs.provenance import processor_of

SPECIFICATION = "https://w3id.org/ro/crate/1.2"
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://esciencelab.org.uk/federated-learning-ro-crate-profile/federated-learning-profile.html": (
        "Federated Learning RO-Crate Profile",
        "0.1",
    ),
}
"""Address → name and version. The second, a draft without a permanent address, requires the first."""
_TYPES = {
    **{"json": "application/json", "jsonl": "application/jsonl", "toml": "application/toml", "csv": "text/csv"},
    **{"md": "text/markdown", "tex": "application/x-tex", "py": "text/x-python"},
    "safetensors": "application/octet-stream",
}
_MEANINGS = {
    "config.json": "resolved configuration, identity, code hash and environment of a run",
    "metrics.json": "final scores and costs",
    "history.jsonl": "a record per evaluated round",
    "curves.csv": "the history as a table",
    "model.safetensors": "the global model; without tensors where the method has none",
    "manifest.json": "how the data were divided among clients, with sizes and class counts",
    "indices.safetensors": "the indices of each client's samples",
    "comparison.md": "the table of the comparison",
    "requirements.lock": "every package with version and hash",
}
_NOT_STATED = "not stated"
_README = """\
# {name}

{what} of federated learning, made by protofl {version}{commit}. Anybody can repeat it and check that the same comes
out, to the byte.

## Repeat it

You need Linux, Python 3.11 or 3.12 and make. The code and the exact versions of all packages are in here; with this
file as `archive.zip`:

```sh
unzip archive.zip -d archive && cd archive/code && make .venv/.ready
.venv/bin/protofl reproduce ../../archive.zip --check{options}
```

The second command trains every run again and compares each file of results with its hash in `proof.json`. It exits with
0 if all are the same, with 4 and the names of those that differ if not, and with 3 if this archive is damaged.

## What else you need

The images are not in here. `data/` has the data's names, fingerprints, names of classes and names of files left out:

{data}

{files}

## When bytes may differ

It was made on a processor of the class {processor} ({made_with}). On another class the last bits of sums differ; the
command then says so and compares accuracies and byte counts instead.

{plugins}## Contents

| file | contents |
| :--- | :--- |
| `proof.json` | SHA-256 of every file in here and of every result |
| `ro-crate-metadata.json` | the same for catalogues (RO-Crate 1.2) |
| `runs/` | per run its configuration, scores, history and model |
| `partitions/`, `data/` | which client has which samples; what the data are |
{comparison}{code}
Licence of the results: {licence}. protofl is under Apache-2.0.
"""
_PLUGINS = (
    "A method in here is not part of protofl: its file is in `runs/*/plugins/`. Read it before you allow it to run "
    "with `--trust-plugins`.\n\n"
)


@dataclass(frozen=True)
class ArchiveSummary:
    """The content of README and metadata.

    Attributes:
        name: of the whole. runs: names of its runs.
        sources: name and licence of the required data.
        environment: of the first run, as far as it is known.
        commit: of the code. lock: SHA-256 of the lock of its packages.
        day: on which the last run ended, as 2026-11-30.
        licence: SPDX identifier of the results' licence; None: not stated.
        needs_root: the user provides the data's files. has_plugins: it contains methods from outside the package.
        is_comparison: of several runs, with their table.
    """

    name: str
    runs: Sequence[str]
    sources: Sequence[tuple[str, str]]
    environment: Mapping[str, Any]
    commit: str | None
    lock: str | None
    day: str
    licence: str | None
    needs_root: bool
    has_plugins: bool
    is_comparison: bool
    has_global_model: bool

    @property
    def what(self) -> str:
        return f"A comparison of {len(self.runs)} runs" if self.is_comparison else "A run"

    @property
    def options(self) -> str:
        """Options that ``protofl reproduce`` needs, each after a space."""
        return " --set data.root=FOLDER" * self.needs_root + " --trust-plugins" * self.has_plugins


def metadata(about: ArchiveSummary, hashes: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of ``ro-crate-metadata.json``.

    Args:
        about: the archive.
        hashes: SHA-256 by name, of all files except the proof, which contains this file's hash. sizes: their bytes.
    """
    names = [name for name in sorted(hashes) if not name.startswith("code/")]
    configuration = {name for name in names if name.endswith("/config.json") or "/plugins/" in name}
    inputs = [name for name in names if name.startswith(("partitions/", "data/")) or name in configuration]
    results = [name for name in names if name.startswith(("runs/", "comparison/")) and name not in inputs]
    profiles = _PROFILES if about.has_global_model else {}
    licence = None if about.licence is None else f"https://spdx.org/licenses/{about.licence}"

    def entity(at: str, kind: str | list[str], /, **values: Any) -> dict[str, Any]:
        return {"@id": at, "@type": kind, **values}

    def references(*names: str) -> list[dict[str, str]]:
        return [{"@id": name} for name in names]

    graph = [
        entity("ro-crate-metadata.json", "CreativeWork", about={"@id": "./"}, conformsTo={"@id": SPECIFICATION}),
        entity(
            "./",
            "Dataset",
            name=f"protofl: {about.name}",
            description=f"{about.what} of prototype-based federated learning, with everything but the data that is "
            "needed to repeat it to the byte: protofl reproduce --check runs it and compares.",
            datePublished=about.day,
            license=_NOT_STATED if licence is None else {"@id": licence},  # the property is required; a text may be it
            hasPart=references(*names, "proof.json", *(["code/"] if about.lock else [])),
            mentions={"@id": "#run"},
            **({"conformsTo": references(*profiles)} if profiles else {}),
        ),
        *(
            entity(at, ["CreativeWork", "Profile"], name=name, version=version)
            for at, (name, version) in profiles.items()
        ),
        entity(
            "#protofl",
            "SoftwareApplication",
            name="protofl",
            version=VERSION if about.commit is None else f"{VERSION}, commit {about.commit}",
            softwareRequirements={"@id": "code/infra/requirements.lock"} if about.lock else "torch",
            license="https://spdx.org/licenses/Apache-2.0",
        ),
        entity(
            "#run",
            "CreateAction",
            name=about.what,
            instrument={"@id": "#protofl"},
            object=references(*inputs),
            result=references(*results),
            endTime=about.day,
        ),
        entity("proof.json", "File", name="hashes of every file and result", encodingFormat="application/json"),
    ]
    if licence is not None:
        description = f"The licence {about.licence} of the SPDX list; the data have licences of their own."
        graph.append(entity(licence, "CreativeWork", name=about.licence, description=description))
    if about.lock:
        part = {"@id": "code/infra/requirements.lock"}
        graph.append(entity("code/", "Dataset", name="protofl, with the lock of its packages", hasPart=part))
        names.append("code/infra/requirements.lock")
    for name in names:
        base = name.rpartition("/")[2]
        meaning = f": {_MEANINGS[base]}" if base in _MEANINGS else ""
        kind = _TYPES.get(base.rpartition(".")[2], "text/plain")
        details = {"contentSize": str(sizes[name]), "encodingFormat": kind, "sha256": hashes[name]}
        graph.append(entity(name, "File", name=f"{name}{meaning}", **details))
    return {"@context": f"{SPECIFICATION}/context", "@graph": graph}


def readme(about: ArchiveSummary) -> str:
    """Return ``README.md``. It omits the archive's name, so the same folder gives the same bytes."""
    versions = {"Python": about.environment.get("python", "unknown"), **(about.environment.get("versions") or {})}
    return _README.format(
        name=about.name,
        what=about.what,
        version=VERSION,
        commit="" if about.commit is None else f" (commit {about.commit})",
        options=about.options,
        data="\n".join(f"- {name}; licence: {licence}" for name, licence in about.sources),
        files="FOLDER contains their files; `docs/explanation/data.md` of protofl describes the layout."
        if about.needs_root
        else "They come with the packages: there is nothing to download.",
        processor=processor_of(about.environment) or "unknown",
        made_with=", ".join(f"{key} {versions[key]}" for key in ("Python", "torch", "numpy") if versions.get(key)),
        plugins=_PLUGINS * about.has_plugins,
        comparison="| `comparison/` | the tables of the comparison |\n" * about.is_comparison,
        code="| `code/` | protofl, and `infra/requirements.lock`, its packages |\n" * bool(about.lock),
        licence=about.licence or _NOT_STATED,
    )
