"""What an archive says of itself: RO-Crate 1.2 metadata for catalogues, and a page in plain words for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcore.version import VERSION
from pipelines.runs.provenance import processor_of

SPECIFICATION = "https://w3id.org/ro/crate/1.2"
_SOFTWARE = "#protofl"
_ACTION = "#carried-out"
_TYPES = {
    "json": "application/json",
    "jsonl": "application/jsonl",
    "csv": "text/csv",
    "md": "text/markdown",
    "tex": "application/x-tex",
    "py": "text/x-python",
    "toml": "application/toml",
    "safetensors": "application/octet-stream",
}
_MEANS = {
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


@dataclass(frozen=True)
class Described:
    """What is said of an archive beside its files.

    Attributes:
        name: of the whole. runs: names of its runs.
        sources: name and licence of the data that are needed.
        environment: of the first run, as far as it is known.
        commit: of the code. lock: SHA-256 of the lock of its packages.
        day: on which the last run ended, as 2026-11-30.
        licence: SPDX identifier under which it is handed on.
        needs_root: the data are files that the user brings. has_plugins: methods from outside the package are among it.
        is_comparison: of several runs, with their table.
    """

    name: str
    runs: Sequence[str]
    sources: Sequence[tuple[str, str]]
    environment: Mapping[str, Any]
    commit: str | None
    lock: str | None
    day: str
    licence: str
    needs_root: bool
    has_plugins: bool
    is_comparison: bool

    @property
    def processor(self) -> str:
        """Its class: :func:`flcore.core.cpu_class.processor_class`."""
        return processor_of(self.environment) or "unknown"


def metadata(about: Described, hashes: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The content of ``ro-crate-metadata.json``.

    Args:
        about: the archive.
        hashes: SHA-256 by name of all other files but the proof, which names this one's. sizes: their bytes.
    """
    names = [name for name in sorted(hashes) if not name.startswith("code/")]
    results = [name for name in names if name.startswith(("runs/", "comparison/"))]
    inputs = [name for name in names if name.startswith(("partitions/", "data/"))]
    licence = f"https://spdx.org/licenses/{about.licence}"
    graph: list[dict[str, Any]] = [
        {
            "@id": "ro-crate-metadata.json",
            "@type": "CreativeWork",
            "about": {"@id": "./"},
            "conformsTo": {"@id": SPECIFICATION},
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": f"protofl: {about.name}",
            "description": f"{_what(about)} of prototype-based federated learning, with everything but the data that "
            "somebody else needs to repeat it to the byte: protofl reproduce --check carries it out and compares.",
            "datePublished": about.day,
            "license": {"@id": licence},
            "hasPart": [{"@id": name} for name in (*names, "proof.json", *(["code/"] if about.lock else []))],
            "mentions": {"@id": _ACTION},
        },
        {
            "@id": licence,
            "@type": "CreativeWork",
            "name": about.licence,
            "description": f"The licence {about.licence} of the SPDX list; the data have licences of their own.",
        },
        {
            "@id": _SOFTWARE,
            "@type": "SoftwareApplication",
            "name": "protofl",
            "softwareVersion": VERSION if about.commit is None else f"{VERSION}, commit {about.commit}",
            "softwareRequirements": {"@id": "code/infra/requirements.lock"} if about.lock else "torch",
            "license": "https://spdx.org/licenses/Apache-2.0",
        },
        {
            "@id": _ACTION,
            "@type": "CreateAction",
            "name": f"{_what(about)} carried out",
            "instrument": {"@id": _SOFTWARE},
            "object": [{"@id": name} for name in inputs],
            "result": [{"@id": name} for name in results],
            "endTime": about.day,
        },
        {
            "@id": "proof.json",
            "@type": "File",
            "name": "hashes of every file and every result",
            "encodingFormat": "application/json",
        },
    ]
    if about.lock:
        graph.append({"@id": "code/", "@type": "Dataset", "name": "protofl, with the lock of its packages"})
        names.append("code/infra/requirements.lock")
    graph += [_file(name, hashes[name], sizes[name]) for name in names]
    return {"@context": f"{SPECIFICATION}/context", "@graph": graph}


def _file(name: str, digest: str, size: int) -> dict[str, Any]:
    base = name.rpartition("/")[2]
    means = f": {_MEANS[base]}" if base in _MEANS else ""
    return {
        "@id": name,
        "@type": "File",
        "name": f"{name}{means}",
        "contentSize": str(size),
        "encodingFormat": _TYPES.get(base.rpartition(".")[2], "text/plain"),
        "sha256": digest,
    }


def _what(about: Described) -> str:
    return f"A comparison of {len(about.runs)} runs" if about.is_comparison else "A run"


def readme(about: Described) -> str:
    """The content of ``README.md``. What the file is called is not in it: the same folder is to give the same bytes."""
    extra = " --set data.root=FOLDER" if about.needs_root else ""
    extra += " --trust-plugins" if about.has_plugins else ""
    commit = "" if about.commit is None else f" (commit {about.commit})"
    versions = about.environment.get("versions") or {}
    made_with = ", ".join(
        [f"Python {about.environment.get('python', 'unknown')}"]
        + [f"{name} {versions[name]}" for name in ("torch", "numpy") if versions.get(name)]
    )
    data = "\n".join(f"- {name}; licence: {licence}" for name, licence in about.sources)
    lines = [
        f"# {about.name}",
        "",
        f"{_what(about)} of federated learning, made by protofl {VERSION}{commit} and written down so that anybody can "
        "repeat it and see whether the same comes out, to the byte.",
        "",
        "## Repeat it",
        "",
        "You need Linux, Python 3.11 or 3.12 and make. The code and the exact versions of all packages are in here; "
        "with this file as `archive.zip`:",
        "",
        "```sh",
        "unzip archive.zip -d archive && cd archive/code && make .venv/.ready",
        f".venv/bin/protofl reproduce ../../archive.zip --check{extra}",
        "```",
        "",
        "The second command trains every run anew and compares each file of results with its hash in `proof.json`. It "
        "ends with 0 if all are the same, with 4 and the names of those that differ if not, and with 3 if this archive "
        "has been damaged or changed.",
        "",
        "## What you need beside it",
        "",
        f"The data are not in here, only what they are called and their fingerprints:\n\n{data}",
        "",
        *(["FOLDER is where you have put their files; `docs/explanation/data.md` of protofl says in which layout.", ""]
          if about.needs_root else ["They come with the packages: nothing is to be fetched.", ""]),
        "## When the bytes may differ",
        "",
        f"It was made on a processor of the class {about.processor} ({made_with}). On another class last bits of sums "
        "differ; the command then says so and compares accuracies and counted bytes instead.",
        "",
        *(["A method in here is not part of protofl: its file lies in `runs/*/plugins/`. Read it before you allow it "
           "to run with `--trust-plugins`.", ""] if about.has_plugins else []),
        "## What is in here",
        "",
        "| file | what |",
        "| :--- | :--- |",
        "| `proof.json` | SHA-256 of every file in here, and of every file that the runs gave |",
        "| `ro-crate-metadata.json` | the same for catalogues (RO-Crate 1.2) |",
        "| `runs/` | per run its configuration, scores, history and model |",
        "| `partitions/`, `data/` | which client holds which samples; what the data are |",
        *(["| `comparison/` | the tables of the comparison |"] if about.is_comparison else []),
        *(["| `code/` | protofl, and `infra/requirements.lock`, its packages |"] if about.lock else []),
        "",
        f"Results are handed on under {about.licence}; protofl is under Apache-2.0.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
