"""The doctor's lines: of this machine, and of configurations, servers and folders that are missing something."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipelines.cli import doctor
from pipelines.cli.app import main
from pipelines.cli.doctor import locked_versions
from pipelines.runs import provenance


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {"/health": b"OK", "/api/admin/version": b'"3.8.8"'}
        self.send_response(200 if self.path in answers else 404)
        self.end_headers()
        self.wfile.write(answers.get(self.path, b""))

    def log_message(self, *arguments: object) -> None:
        """Keep the tests' output clean."""


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that answers questions about its health."""
    http_server = HTTPServer(("127.0.0.1", 0), _Healthy)
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http_server.server_port}"
    http_server.shutdown()
    http_server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def bare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Works in an empty folder outside every repository, with no server configured."""
    here = tmp_path / "parent" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    return here


def about(part: str) -> str:
    """The lines about one part."""
    config, parameters = doctor._read_params()
    lines = {
        "packages": doctor._packages,
        "compiler": doctor._compiler,
        "git": doctor._git_and_dvc,
        "dvc": doctor._git_and_dvc,
        "parameters": lambda: [parameters],
        "data": lambda: doctor._data(config),
        "Prefect": doctor._prefect,
        "MLflow": lambda: doctor._mlflow(config),
    }[part]()
    return "\n".join(line for line in lines if line[5:].startswith(part))


def test_every_part_is_mentioned_and_every_miss_says_what_to_do(
    bare_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert main(["doctor"]) == 0
    assert time.monotonic() - start < 6
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:5] in ("ok   ", "note ", "miss ") for line in lines)
    machine = ["Python", "packages", "cores", "device", "compiler", "memory", "disk", "git", "dvc"]
    for part in [*machine, "parameters", "data", "Prefect", "MLflow"]:
        assert any(line[5:].startswith(part) for line in lines), part
    assert any("`dvc init`" in line for line in lines)
    assert not [line for line in lines if line.startswith("miss")]
    assert list(bare_folder.iterdir()) == []


def test_a_miss_says_what_to_do_and_is_an_exit_code_of_its_own(
    bare_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script can ask: 3 where something is asked for that cannot be had here."""
    (bare_folder / "params.yaml").write_text("data: {name: mnist}\n")
    assert main(["doctor"]) == 3
    misses = [line for line in capsys.readouterr().out.splitlines() if line.startswith("miss")]
    assert len(misses) == 1 and "data.root" in misses[0]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_a_repository_is_recognised(bare_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the code, whose commit runs record, wherever the command is typed."""
    for module in (doctor, provenance):
        monkeypatch.setattr(module, "ROOT", bare_folder)
    monkeypatch.delenv("PROTOFL_COMMIT", raising=False)
    assert "note git: no commit of the code" in about("git")
    monkeypatch.setenv("PROTOFL_COMMIT", "c0ffee")
    assert about("git") == "ok   git: runs record the commit that PROTOFL_COMMIT says, c0ffee"
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for arguments in (["init", "-q", "-b", "trunk"], [*identity, "commit", "-q", "--allow-empty", "-m", "empty"]):
        subprocess.run(["git", *arguments], check=True, capture_output=True)
    (bare_folder / "elsewhere").mkdir()
    monkeypatch.chdir(bare_folder / "elsewhere")
    assert about("git") == "ok   git: the code is on trunk, nothing changed"
    monkeypatch.chdir(bare_folder)
    (bare_folder / ".dvc").mkdir()
    assert "miss dvc: a repository without stages" in about("dvc")
    (bare_folder / "dvc.yaml").write_text("stages: {}\n")
    assert "nothing reproduced yet" in about("dvc")
    assert about("git") == "ok   git: the code is on trunk, 1 changed files"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("method: {name: fedprox}", "ok   parameters: params.yaml is valid (fedprox on digits/dirichlet, 30 rounds)"),
        ("local: {lr: -1}", "miss parameters: params.yaml is not valid: local.lr = -1"),
        ("local: [", "miss parameters: params.yaml is not valid: params.yaml: not valid YAML"),
    ],
)
def test_params_are_checked(bare_folder: Path, text: str, line: str) -> None:
    (bare_folder / "params.yaml").write_text(text)
    assert about("parameters").startswith(line)


def test_data_are_looked_for_where_they_usually_are(bare_folder: Path) -> None:
    (bare_folder / "params.yaml").write_text("data: {name: mnist}\n")
    assert "miss data: mnist, but data.root is not set: set data.root to the folder that holds MNIST/raw/" in about(
        "data"
    )
    (bare_folder.parent / "data" / "MNIST" / "raw").mkdir(parents=True)
    (bare_folder.parent / "data" / "pets.zip").touch()
    assert about("data").splitlines() == [
        "miss data: mnist, but data.root is not set: set data.root=../data",
        "note data: mnist found in ../data; use with --set data.root=../data",
        "note data: an archive in ../data/pets.zip; use with --set data.name=imagefolder "
        "--set data.root=../data/pets.zip",
    ]
    (bare_folder / "params.yaml").write_text("data: {name: mnist, root: ../data}\n")
    assert about("data").startswith("ok   data: mnist below data.root = ../data")
    (bare_folder / "params.yaml").write_text("data: {name: mnist, root: nowhere}\n")
    assert "data.root = nowhere does not exist: set data.root=../data" in about("data")


def test_servers_that_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{server}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert about("Prefect") == f"ok   Prefect: server answers at {server}/api (from the environment)"
    assert about("MLflow") == f"ok   MLflow: server answers at {server}"


@pytest.mark.parametrize("address", ["http://somebody:secret@127.0.0.1:9", "http://127.0.0.1:9", "nonsense"])
def test_a_prefect_server_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", address)
    line = about("Prefect")
    assert line.startswith("miss Prefect: the server at ")
    assert line.endswith(
        "runs continue without it: start one with `protofl up`, or take its address out of the environment"
    )
    assert "secret" not in line


def test_a_prefect_server_in_a_file_and_none(bare_folder: Path) -> None:
    assert about("Prefect") == "ok   Prefect: no server configured, and none is needed; `protofl up` starts one"
    (bare_folder / "prefect.toml").write_text("[api]\nurl = 'http://127.0.0.1:9/api'\n")
    assert about("Prefect").startswith("miss Prefect: the server at http://127.0.0.1:9/api (from prefect.toml) cannot")
    (bare_folder / "prefect.toml").write_text("[api")
    assert about("Prefect").startswith("miss Prefect: prefect.toml: not valid TOML")


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such++")
    assert about("compiler") == (
        "note compiler: no C++ compiler (no-such++) on this machine, which runs of 10,000 client steps or more "
        "need; install one, name it in CXX, or set engine.compile=none"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) on this machine")
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ('exec g++ "$@"', r"ok   compiler: \S+, for engine\.compile"),
        ('exec g++ -static-libstdc++ "$@"', r"note compiler: engine\.compile: \S+ puts a C\+\+ library of its own .*"),
    ],
)
def test_what_a_compiler_makes_is_looked_at(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{does}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert re.fullmatch(said, about("compiler"))


def test_mlflow_stores(bare_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert about("MLflow").startswith("ok   MLflow: no runs yet")
    (bare_folder / "mlruns").mkdir()
    (bare_folder / "mlruns" / "mlflow.db").touch()
    assert "look with `mlflow ui --workers 1 --backend-store-uri sqlite:///mlruns/mlflow.db`" in about("MLflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:secret@127.0.0.1:9")
    assert about("MLflow").startswith("miss MLflow: no answer from http://***@127.0.0.1:9")
    (bare_folder / "params.yaml").write_text("tracking: {enabled: false}\n")
    assert about("MLflow") == "note MLflow: switched off (tracking.enabled)"


def test_packages_are_compared_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "requirements.lock"
    monkeypatch.setattr(doctor, "LOCK", lock)
    assert about("packages").startswith("note packages: no checkout with infra/requirements.lock")
    lock.write_text("numpy==0.1 \\\n    --hash=sha256:00\nno-such-package==1.0\n")
    line = about("packages")
    assert line.startswith("miss packages: not as locked (numpy ")
    assert "locked 0.1; no-such-package missing, locked 1.0" in line
    assert line.endswith(f"`rm -f .venv/.ready && make .venv/.ready` in {doctor.ROOT}")
    makefile = (doctor.ROOT / "Makefile").read_text()  # which puts protofl back; the lock alone uninstalls it
    assert "READY := $(VENV)/.ready" in makefile and "--editable ." in makefile.partition("\n$(READY):")[2]


def test_a_lock_is_read_for_this_machine() -> None:
    """Hashes, comments, options and pins of other platforms are left out; local versions are cut."""
    text = (
        "# comment\n--no-index\n"
        "torch==2.15.0+cu130 ; sys_platform == 'linux' or sys_platform == 'darwin' \\\n    --hash=sha256:00\n"
        "colorama==0.4.6 ; sys_platform == 'plan9'\n"
    )
    assert list(locked_versions(text)) == [("torch", "2.15.0")]
