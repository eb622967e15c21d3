"""A finished run, its archive, and a way to carry archives out without a follower's process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flcore import run
from flcore.config.schema import Config
from flcore.io.files import sealed, unsealed
from pipelines.execution.operation import Operation
from pipelines.execution.progress import Watcher
from pipelines.execution.steps import InlineSteps
from pipelines.proof import reproduce
from pipelines.proof.archive import archive
from pipelines.proof.contents import PROOF
from pipelines.proof.stored_zip import read_zip, write_zip
from pipelines.runs import provenance
from pipelines.runs.cache import ENVIRONMENT_VARIABLE
from pipelines.runs.layout import RunFiles, read_json, write_json
from tests.following import NoFollower

SMALL: dict[str, Any] = {
    "data": {"limit_per_class": 20, "root": "images"},  # which digits do not need
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "method": {"name": "fedproto"},
    "federation": {"rounds": 1},
    "local": {"lr": 0.05},
}


@contextmanager
def _plainly(raw: Mapping[str, Any]) -> Iterator[tuple[Operation, Config]]:
    yield Operation(InlineSteps(), Watcher(), NoFollower()), Config.from_mapping(raw)  # type: ignore[arg-type]


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Carry archives out in this process, in a folder and with a cache of its own."""
    monkeypatch.setattr(reproduce, "operation", _plainly)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as ``protofl run`` leaves it, but for figures and page: it knows its lock and commit."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(SMALL, folder)
    config = RunFiles(folder).config
    header = unsealed(read_json(config))
    assert header is not None
    header["environment"] = provenance.environment(Config.from_mapping(SMALL))
    write_json(config, sealed(header))
    return folder


@pytest.fixture(scope="session")
def archived(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its archive."""
    path = tmp_path_factory.mktemp("archived") / "first.zip"
    archive(finished, path, licence="CC-BY-4.0")
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


Change = Callable[[dict[str, bytes]], object]


@pytest.fixture
def forged(archived: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """An archive whose files were changed by somebody who also mended every hash of a file in it."""

    def forge(change: Change) -> Path:
        whole = read_zip(archived)
        contents = {name: whole.read(name) for name in whole.namelist()}
        change(contents)
        if b'"files"' in contents.get(PROOF, b""):
            proof = json.loads(contents[PROOF])
            proof["files"] = {name: _digest(content) for name, content in contents.items() if name != PROOF}
            for name, said in proof["runs"].items():
                results = said.get("results", {})
                for result, known in results.items():
                    if isinstance(known, str) and f"runs/{name}/{result}" in contents:
                        results[result] = _digest(contents[f"runs/{name}/{result}"])
            contents[PROOF] = json.dumps(proof).encode()
        write_zip(tmp_path / "forged.zip", contents)
        return tmp_path / "forged.zip"

    return forge
