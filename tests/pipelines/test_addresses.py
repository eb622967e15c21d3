"""Whatever a password is made of, nothing that is said of its address, or of an error about it, has it."""

from __future__ import annotations

import json
import string
from pathlib import Path
from urllib.parse import quote, quote_plus, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.engine import create_engine, make_url
from sqlalchemy.exc import ArgumentError

from pipelines import addresses
from pipelines.addresses import has_secrets, redact, remember, secrets, sqlite_address, without_password

PASSWORDS = st.text(string.printable, min_size=4, max_size=24).filter(lambda text: len(text.strip()) >= 4)
"""Of every printable character, line breaks among them."""
WRITTEN = st.sampled_from([str, quote, quote_plus, lambda text: quote(text, safe="")])
"""As it is typed, or quoted as addresses want it."""


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_remembered", set())


def is_in(password: str, text: str) -> bool:
    """Whether text has a password; one that the rest of these addresses is made of would be in it by chance."""
    return password in text.replace("***", "")


def by_chance(password: str) -> bool:
    return any(password in known for known in ("postgresql+psycopg2://me:@host:5432/runs", "http://me:@host/api"))


@given(PASSWORDS, WRITTEN)
@example("se/cret", str)
@example("p@ss/word", str)
@example("pa?ss=word", str)
@example("two words", str)
@example("two\nlines", str)
def test_what_sqlalchemy_takes_for_the_password_is_not_shown(password: str, written: object) -> None:
    address = f"postgresql+psycopg2://me:{written(password)}@host:5432/runs"  # type: ignore[operator]
    if by_chance(password):
        return
    try:
        taken = str(make_url(address).password)
    except (ArgumentError, ValueError):
        taken = password  # of an address that is none, a person's password is no less secret
    for secret in {password, taken}:
        if len(secret) >= 4 and not by_chance(secret):
            assert not is_in(secret, without_password(address))
            addresses._remembered.clear()
            remember(address)
            said = f"could not open {address!r}: {secret!r}, {json.dumps(secret)}, {quote(secret)} or {secret}"
            assert not is_in(secret, redact(said))
    assert has_secrets(address)


@given(PASSWORDS, WRITTEN)
@example("se@cret", str)
def test_what_urllib_takes_for_the_password_is_not_shown(password: str, written: object) -> None:
    address = f"http://me:{written(password)}@host/api"  # type: ignore[operator]
    if by_chance(password):
        return
    try:
        taken = urlsplit(address).password or password
    except ValueError:
        taken = password
    for secret in {password, taken}:
        if len(secret) >= 4 and not by_chance(secret):
            assert not is_in(secret, without_password(address))
            addresses._remembered.clear()
            remember(address)
            assert not is_in(secret, redact(f"{address}: {secret}"))


@pytest.mark.parametrize(
    ("address", "secret"),
    [
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3Dsesame%3BServer%3Dh", "sesame"),
        ("mssql+pyodbc:///?odbc_connect=" + quote_plus("DRIVER={x};PWD={se=same};"), "se=same"),
        ("postgresql://host/runs?user=me&password=sesame", "sesame"),
        ("postgresql://host:5432/runs?password=ses@me.host", "me.host"),
        ("https://host/api?token=sesame", "sesame"),
        ("https://host/api?x-amz-signature=sesame&x=1", "sesame"),
        ("https://sesame@host/api", "sesame"),
        ("databricks://sesame@host", "sesame"),
        ("me:sesame@host/runs", "sesame"),
        ("postgresql://me:1234567@host", "1234567"),
    ],
)
def test_secrets_in_other_places(address: str, secret: str) -> None:
    assert secret not in without_password(address) and has_secrets(address)
    remember(address)
    if "://" in address and secret != "me.host":
        assert secret not in redact(f"no such place: {secret}") and secret not in redact(address)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:5000",
        "https://lab.example/api",
        "http://[::1]:4200/api",
        "sqlite:///mlruns/mlflow.db",
        "sqlite:////srv/me@work/größe #1/mlflow.db",
        "postgresql+psycopg2://host/runs",
        "databricks",
        "./mlruns",
    ],
)
def test_an_address_without_secrets_is_shown_as_it_is(address: str) -> None:
    assert without_password(address) == address and not has_secrets(address)


def test_an_option_that_is_no_secret_is_none() -> None:
    assert not has_secrets("postgresql://host/runs?sslmode=require")
    assert without_password("postgresql://host/runs?sslmode=require") == "postgresql://host/runs?***"


def test_host_and_path_are_shown_beside_a_password() -> None:
    assert (
        without_password("postgresql://me:a/b@host:5432/runs?sslmode=require") == "postgresql://***@host:5432/runs?***"
    )


def test_secrets_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:sesame-store@host")
    monkeypatch.setenv("PREFECT_API_KEY", "sesame-key")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Gate": "sesame-header"}')
    monkeypatch.setenv("PROTOFL_WEBHOOK", "https://host/hooks/sesame-hook")
    text = "sesame-store sesame-key sesame-header https://host/hooks/sesame-hook"
    assert redact(text) == "*** *** *** ***"


def test_a_password_is_no_part_of_a_longer_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of figures and sentences stay whole; quoted signs and written-out line breaks may stand before it."""
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "mean")
    assert redact('{"mean_local": 1, "mean": 2} meaning') == '{"mean_local": 1, "***": 2} meaning'
    assert redact(r"PWD%3Dmean a\nmean :mean@host") == r"PWD%3D*** a\n*** :***@host"


def test_an_address_with_one_slash_and_one_that_nobody_has_named_are_known() -> None:
    assert redact("http:/me:sesame77@h:1/db did not answer") == "http:/me:***@h:1/db did not answer"
    assert redact("at postgresql://me:se/cret@host/runs, late") == "at postgresql://me:***@host/runs, late"


def test_ordinary_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password of three letters is in half of all words."""
    remember("postgresql://me:run@host/x")
    assert redact("runs are in runs/") == "runs are in runs/"
    assert secrets("see https://docs.example/page and http://127.0.0.1:4200") == set()


@pytest.mark.parametrize("folder", ["plain", "qa?1", "per%20cent", "%41", "a#b", "größe", "two words", "a:b@c"])
def test_a_file_is_found_by_its_address_in_any_folder(folder: str, tmp_path: Path) -> None:
    home = tmp_path / folder
    home.mkdir()
    with create_engine(sqlite_address(home / "a.db")).connect() as connection:
        connection.exec_driver_sql("CREATE TABLE here (x)")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == [Path(folder), Path(folder) / "a.db"]
