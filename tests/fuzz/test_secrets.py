"""A run and a study with a secret in every place that may hold one: no file that they leave has any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flcore.core.errors import ConfigError
from pipelines import addresses
from pipelines.cli import doctor
from pipelines.cli.app import main
from pipelines.tuning.storage import open_storage

IN_THE_STORE, IN_THE_SERVER, IN_THE_KEY, IN_A_HEADER, IN_THE_STUDY, IN_THE_ENVIRONMENT = SECRETS = tuple(
    f"sesame-{place}" for place in ("store", "server", "key", "header", "study", "environment")
)
TINY = ("data.limit_per_class=4", "partition.num_clients=2", "federation.rounds=1", "partition.validation=0.3")


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command with secrets: in the store's address, the server's, their keys, and variables that are nobody's."""
    # A closed port: whether a server answers is not what this is about.
    secrets = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'store.db'}?password={IN_THE_STORE}",
        "PREFECT_API_URL": f"http://me:{IN_THE_SERVER}@127.0.0.1:9/api",
        "PREFECT_API_KEY": IN_THE_KEY,
        "PREFECT_CLIENT_CUSTOM_HEADERS": f'{{"X-Gate": "{IN_A_HEADER}"}}',
        "AWS_SECRET_ACCESS_KEY": IN_THE_ENVIRONMENT,
    }
    values = [f"--set={value}" for value in TINY]
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *words, *values],
        cwd=folder,
        env={**os.environ, **secrets, "HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def with_a_secret(folder: Path) -> list[str]:
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        found += [f"{path.relative_to(folder)}: {secret}" for secret in SECRETS if secret.encode() in content]
    return found


@pytest.mark.slow
def test_no_secret_is_in_any_file_or_message(tmp_path: Path) -> None:
    store = f"tracking.uri=sqlite:///{tmp_path / 'other.db'}?password={IN_THE_STORE}"
    run = typed(tmp_path, "run", "--out", "run", f"--set={store}")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "other.db").exists()
    study = typed(
        tmp_path,
        "tune",
        "--method=fedprox",
        "--trials=1",
        "--out=study",
        f"--storage=nosuch://me:{IN_THE_STUDY}@host/x",
    )
    assert study.returncode == 2, study.stderr
    assert "--storage nosuch://***@host/x: cannot be opened" in study.stderr
    said = run.stdout + run.stderr + study.stdout + study.stderr
    assert [secret for secret in SECRETS if secret in said] == []
    assert with_a_secret(tmp_path) == []


def test_a_secret_in_a_file_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.log").write_bytes(b"\x00" + IN_THE_KEY.encode())
    assert with_a_secret(tmp_path) == [f"deep/a.log: {IN_THE_KEY}"]


PASSWORDS = ("se/same", "se: same\nx")
# These begin to load MLflow beside before they look at what they were given.
REFUSED_LATE = (
    ("compare", "--methods={address}"),
    ("compare", "--variant=mine=fedavg,tracking.uri={address}"),
    ("sweep", "--vary=tracking.uri={address}", "--metric=mean_local"),
    ("tune", "--method=fedavg", "--trials=1", "--storage={address}", "--debug"),
)
REFUSED = (
    ("run", "--set=tracking.uri=[{address}]"),
    ("run", "--set=tracking={address}"),
    ("run", "--set=tracking.uri: {address}"),
    ("run", "--set={address}"),
    ("run", "--set=tracking.nosuch={address}"),
    ("run", "--set=method.name={address}"),
    ("run", "--params={address}"),
    ("run", "--set=data.root='{address}", "--debug"),
    ("{address}",),
    ("run", "--nosuch={address}"),
    ("show", "method", "{address}"),
    ("track", "nowhere", "--uri={address}"),
)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(addresses, "_remembered", set())
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, id=" ".join(words)) for words in REFUSED),
        *(pytest.param(words, id=" ".join(words), marks=pytest.mark.slow) for words in REFUSED_LATE),
    ],
)
def test_a_refusal_repeats_no_password(words: tuple[str, ...], alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for password in PASSWORDS:
        address = f"postgresql+nosuch://me:{password}@host/runs"
        try:
            code = main([word.format(address=address) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = "".join(capsys.readouterr())
        pieces = {password, repr(password)[1:-1], "same"}
        assert code in (2, 3) and [piece for piece in pieces if piece in said] == [], said


@pytest.mark.parametrize(
    "text",
    [
        "tracking: {{uri: '{address}'\n",
        "tracking:\n  uri: {address}: x\n",
        "tracking:\n  uri: [{address}]\n",
        "tracking: {address}\n",
        "tracking:\n  uri: {address}\n uri: x\n",
        "'{address}'\n",
        "tracking: {{uri: *{address}}}\n",
    ],
)
def test_a_broken_file_repeats_no_password(text: str, alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for password in PASSWORDS:
        (alone / "params.yaml").write_text(text.format(address=f"postgresql+nosuch://me:{password}@host/runs"))
        assert main(["run", "--no-wait", "--debug"]) == 2
        said = "".join((*capsys.readouterr(), *doctor._read_params()[1:]))
        assert "same" not in said, said


def test_a_storage_that_cannot_be_opened_repeats_no_password(alone: Path) -> None:
    for password in PASSWORDS:
        with pytest.raises(ConfigError) as refused:
            open_storage(f"postgresql+nosuch://me:{password}@host/runs")
        assert "same" not in str(refused.value) and "--storage" in str(refused.value)
