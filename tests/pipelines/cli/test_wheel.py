"""``pip install protofl`` without extras: the wheel in an environment and a folder with nothing else in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flcore.core.errors import RunError
from pipelines.cli import app

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")
OF_MLOPS = ("prefect", "mlflow", "dvc", "optuna", "sqlalchemy")


def test_a_package_of_an_extra_is_named_with_its_cure() -> None:
    for name in ("optuna", "mlflow.tracking"):
        message, code = app._told(ModuleNotFoundError(f"No module named {name!r}", name=name))
        assert code == 2
        assert name.partition(".")[0] in message and "pip install 'protofl[mlops]'" in message
    assert app._told(ModuleNotFoundError("No module named 'other'", name="other"))[1] == app.FAULT
    assert app._told(RunError("x")) == ("x", 4)


def test_with_the_library_alone_the_command_names_what_to_install(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages: none of the command's packages is there, and cyclopts is imported first."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pipelines.cli", "list"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "protofl: the package cyclopts is not installed, only the library; pip install protofl\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the sources, with what it requires and no extra."""
    home = tmp_path_factory.mktemp("wheel")
    sources = home / "sources"
    for folder in ("flcore", "pipelines", "benchmarks", "infra"):
        shutil.copytree(ROOT / folder, sources / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    uv("build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(home), str(sources))
    uv("venv", "--python", sys.executable, str(home / "venv"))
    python = home / "venv" / "bin" / "python"
    lock = str(ROOT / "infra" / "requirements.lock")  # versions that are tested, and in uv's cache
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        tops = {name.partition("/")[0] for name in content.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flcore", "pipelines"}
    uv("pip", "install", "--python", str(python), "--constraint", lock, str(wheel))
    return python


def uv(*arguments: str) -> None:
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, check=False)
    if "Failed to fetch" in done.stderr:
        pytest.skip("the registry cannot be reached")
    assert done.returncode == 0, done.stderr


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "MLFLOW", "PYTHONPATH"))}
    return subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_it_runs_an_experiment_and_says_once_what_it_cannot_log(environment: Path, tmp_path: Path) -> None:
    protofl = environment.with_name("protofl")
    code = f"import importlib.util as u; print([n for n in {OF_MLOPS!r} if u.find_spec(n)])"
    assert run(tmp_path, environment, "-c", code).stdout == "[]\n"

    done = run(tmp_path, protofl, "run", "--set", "data.name=digits", "--set", "federation.rounds=3", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert {"metrics.json", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert done.stderr.count("protofl[mlops]") == 1

    code = "from flcore import run; print(run({'federation': {'rounds': 1}}, 'own')['rounds'])"
    done = run(tmp_path, environment, "-c", code)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.slow
def test_commands_that_need_more_say_so(environment: Path, tmp_path: Path) -> None:
    protofl = environment.with_name("protofl")
    for words in (
        ["up"],
        ["tune", "--method", "fedprox", "--trials", "2"],
        ["compare", "--methods", "fedavg,local", "--seeds", "0", "--tuned", "2"],
        ["run", "--set", "tracking.uri=sqlite:///runs.db"],
    ):
        done = run(tmp_path, protofl, *words)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].endswith("pip install 'protofl[mlops]'")
    for words in (["bench", "overhead"], ["bench"], ["bench", "gpu", "--help"]):
        done = run(tmp_path, protofl, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "source checkout" in done.stderr
    for words in (["list", "methods"], ["show", "method", "fedpa"], ["paper", "list"], ["doctor"]):
        assert run(tmp_path, protofl, *words).returncode == 0, words
