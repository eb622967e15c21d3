"""Which server a command uses: read where Prefect reads it, asked for two or five seconds at most, without Prefect."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import prefect.client.orchestration  # noqa: F401 - seconds that no test measures
import pytest

from flcore.core.errors import ConfigError, RunError
from pipelines.orchestration import address
from pipelines.orchestration.background import Service, record, start, stop

TOKEN = "someone:secret"


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and home, and none of Prefect's variables."""
    for name in ("API_URL", "API_KEY", "API_AUTH_STRING", "CLIENT_CUSTOM_HEADERS", "PROFILE", "PROFILES_PATH", "HOME"):
        monkeypatch.delenv(f"PREFECT_{name}", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


class Answers(BaseHTTPRequestHandler):
    """What a Prefect server says that asks for a password, a redirect, and something else that listens."""

    def do_GET(self) -> None:
        expected = f"Basic {base64.b64encode(TOKEN.encode()).decode()}"
        if self.path == "/api/admin/version":
            known = self.headers.get("Authorization") == expected
            self._say(200 if known else 401, json.dumps("3.8.8"))
        elif self.path == "/open/admin/version":
            self._say(200, json.dumps("3.8.8"))
        elif self.path == "/page/admin/version":
            self._say(200, "<html>")
        elif self.path == "/slow/admin/version":
            time.sleep(4)
            self._say(200, json.dumps("3.8.8"))
        elif self.path == "/moved/admin/version":
            self.send_response(302)
            self.send_header("Location", "/open/admin/version")
            self.end_headers()
        else:
            self._say(404, "{}")

    def _say(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked has lost patience
            self.wfile.write(text.encode())

    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def closed() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/api"


def choose(wanted: bool | None) -> tuple[address.Address | None, str | None]:
    """The chosen server, and the warning."""
    lines: list[str] = []
    found = address.choose(wanted, lines.append)
    return found, next(iter(lines), None)


def started_by_up(url: str) -> None:
    record([Service("prefect", url, 1, 0.0, "log", 0)])


def test_where_nothing_is_configured_work_is_inline_and_a_server_that_must_be_there_has_a_cure() -> None:
    assert choose(None) == (None, None)
    with pytest.raises(ConfigError, match="protofl up"):
        choose(True)


def test_a_silent_server_is_one_line_for_auto_an_error_for_prefect_and_nothing_to_inline(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", closed.replace("//", "//me:hidden@"))
    found, warning = choose(None)
    assert found is None
    assert warning is not None and "\n" not in warning
    assert "refused" in warning and "the environment" in warning and "hidden" not in warning
    with pytest.raises(RunError) as error:  # exit code 4, as of `deploy` and `schedule`: the configuration is right
        choose(True)
    assert len(str(error.value).splitlines()) == 2 and "protofl up" in str(error.value)
    assert "hidden" not in str(error.value)
    assert choose(False) == (None, None)
    monkeypatch.delenv("PREFECT_API_URL")
    started_by_up(closed)
    _, warning = choose(None)
    assert warning is not None and "`protofl down` forgets it" in warning


def test_the_sources_are_read_in_prefects_order(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the last to the first: each new one wins over those before it."""

    def found() -> tuple[str, str]:
        configured = address.configured()
        assert configured is not None
        return configured.url, configured.source

    started_by_up("http://127.0.0.1:1/api")
    assert found()[0] == "http://127.0.0.1:1/api" and "protofl up" in found()[1]
    profiles = tmp_path / "home" / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text(
        'active = "lab"\n[profiles.lab]\nPREFECT_API_URL = "http://lab/api"\n'
        '[profiles.other]\nPREFECT_API_URL = "http://other/api"\n[profiles.none]\n'
    )
    assert found() == ("http://lab/api", "the profile lab")
    monkeypatch.setenv("PREFECT_PROFILE", "other")
    assert found() == ("http://other/api", "the profile other")
    monkeypatch.setenv("PREFECT_PROFILE", "none")
    assert "protofl up" in found()[1]
    elsewhere = tmp_path / "profiles.toml"
    elsewhere.write_text('[profiles.none]\nPREFECT_API_URL = "http://elsewhere/api"\n')
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(elsewhere))
    assert found() == ("http://elsewhere/api", "the profile none")
    Path("pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://pyproject/api"\n')
    assert found() == ("http://pyproject/api", "pyproject.toml")
    Path("prefect.toml").write_text('[api]\nurl = "http://toml/api/"\nauth_string = "a:b"\n')
    assert found() == ("http://toml/api", "prefect.toml")
    Path(".env").write_text("PREFECT_API_URL=http://dotenv/api\n")
    assert found() == ("http://dotenv/api", ".env")
    monkeypatch.setenv("PREFECT_API_URL", "http://environment/api")
    assert found() == ("http://environment/api", "the environment")
    configured = address.configured()
    assert configured is not None
    variables = address.connection_variables(configured)
    assert variables == {"PREFECT_API_URL": "http://environment/api", "PREFECT_API_AUTH_STRING": "a:b"}


@pytest.mark.slow
def test_prefect_reads_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prefect itself, in a process of its own, finds the address that was found here."""
    home = tmp_path / "prefect"
    home.mkdir()
    monkeypatch.setenv("PREFECT_HOME", str(home))
    (home / "profiles.toml").write_text('active = "lab"\n[profiles.lab]\nPREFECT_API_URL = "http://lab/api"\n')
    ask = "from prefect.settings import get_current_settings; print(get_current_settings().api.url)"
    for table, expected in (("", "http://lab/api"), ('[api]\nurl = "http://toml/api"\n', "http://toml/api")):
        Path("prefect.toml").write_text(table)
        configured = address.configured()
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
        assert configured is not None and done.stdout.strip() == configured.url == expected


def test_a_file_that_prefect_could_not_read_either_is_named() -> None:
    Path("prefect.toml").write_text("[api\n")
    with pytest.raises(ConfigError, match=r"prefect\.toml"):
        choose(None)
    assert choose(False)[0] is None


def test_credentials_are_sent_and_refused_ones_are_said(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}/api")
    _, warning = choose(None)
    assert warning is not None and "PREFECT_API_AUTH_STRING" in warning
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "someone:else")
    assert choose(None)[0] is None
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", TOKEN)
    monkeypatch.setenv("PREFECT_API_KEY", "is not sent beside it")
    assert choose(True)[0] is not None
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    monkeypatch.delenv("PREFECT_API_KEY")
    monkeypatch.setenv("PREFECT_API_URL", f"http://{TOKEN}@{host}/api")
    assert choose(None)[0] is not None


def test_headers_that_a_gateway_asks_for_are_sent(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They win over a key, whichever case their names have, as in Prefect's client."""
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}/api")
    monkeypatch.setenv("PREFECT_API_KEY", "is not what the gateway takes")
    login = f"Basic {base64.b64encode(TOKEN.encode()).decode()}"
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", json.dumps({"authorization": login}))
    assert choose(True)[0] is not None
    for wrong in ("authorization=x", '["authorization"]', '{"authorization": 1}'):
        monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", wrong)
        _, warning = choose(None)
        assert warning is not None and "custom_headers" in warning


@pytest.mark.parametrize("path", ["page", "moved", "nowhere"])
def test_whatever_else_answers_is_no_prefect_server(path: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}/{path}")
    found, warning = choose(None)
    assert found is None and warning is not None


@pytest.mark.slow
def test_two_seconds_are_waited_and_not_more(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}/slow")
    before = time.monotonic()
    _, warning = choose(None)
    assert warning is not None and "2 s" in warning
    assert time.monotonic() - before < 3.5  # the machine may be busy; the server takes four
    assert choose(True)[0] is not None  # which one asked for is worth waiting for


@pytest.mark.slow
def test_a_server_that_is_known_to_run_here_may_be_slow(host: str) -> None:
    """On a machine that trains it often is."""
    own = start("prefect", f"http://{host}/slow", [sys.executable, "-c", "import time; time.sleep(600)"], {})
    try:
        record([own])
        assert choose(None)[0] is not None
    finally:
        stop("prefect")
    _, warning = choose(None)
    assert warning is not None and "2 s" in warning


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://host/api", "http://no.such.host.invalid/api"])
def test_what_is_no_address_is_a_warning(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    found, warning = choose(None)
    assert found is None and warning is not None and "\n" not in warning


def test_prefect_reads_the_chosen_server_in_this_process(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_SERVER_ANALYTICS_ENABLED", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "put back when the test has ended")
        monkeypatch.delenv(name)
    started_by_up(f"http://{host}/open")
    found, _ = choose(None)
    assert found is not None
    found.set_variables()
    assert os.environ["PREFECT_API_URL"] == f"http://{host}/open"


def test_choosing_imports_neither_prefect_nor_torch() -> None:
    code = (
        "import sys; from pipelines.orchestration.address import choose; choose(None, print); "
        "print([name for name in ('prefect', 'torch', 'mlflow', 'pydantic', 'yaml', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
