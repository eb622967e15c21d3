"""Whether a Prefect server is there for a command: which one is configured, and whether it answers. Without Prefect.

Importing Prefect takes a second, and a command that needs no server should not pay for it. So what Prefect reads is
read here in its own order: the environment, ``.env``, ``prefect.toml``, ``pyproject.toml``, the active profile; and
last, what ``protofl up`` has started in this folder.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from flcore.core.errors import ConfigError
from pipelines.addresses import redact, remember, without_password
from pipelines.orchestration.background import STATE, is_running, known_password, recorded
from pipelines.orchestration.serving import HOST

_PATIENCE_SECONDS = 2.0  # the first question to a server that was just started takes it most of a second
_LONG_PATIENCE_SECONDS = 5.0  # for one that is there: on a machine that trains it may be slow to answer
_OWN = f"{STATE}, protofl up"
_CLOUD = "https://api.prefect.cloud/"
_HEADERS = "PREFECT_CLIENT_CUSTOM_HEADERS"
_NOT_OURS = {"user-agent", "prefect-csrf-token", "prefect-csrf-client"}  # which Prefect's client leaves out of those


@dataclass(frozen=True)
class Address:
    """A configured server.

    Attributes:
        url: of its API.
        source: where it is configured, in words.
        settings: what else is configured about the connection, by the names of Prefect's variables.
    """

    url: str
    source: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The address, fit to be printed."""
        return without_password(self.url)


@dataclass(frozen=True)
class Choice:
    """Whether a command runs as a flow.

    Attributes:
        address: of the Prefect server; None: none is used.
        warning: a line that a person should read: a server that is configured and of no use.
    """

    address: Address | None = None
    warning: str | None = None

    @property
    def uses_prefect(self) -> bool:
        """Whether work is carried out as flows."""
        return self.address is not None

    def apply(self) -> None:
        """Set what Prefect needs in this process; before Prefect is imported. The rest it reads as it always does."""
        if self.address is not None:
            os.environ["PREFECT_API_URL"] = self.address.url
            if _is_own(self.address.url):
                os.environ |= _own_password()
            os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
            os.environ.setdefault("DO_NOT_TRACK", "true")


def choose(wanted: bool | None) -> Choice:
    """Choose; a server that is configured gets two seconds to answer, or five where it must or is known to run here.

    Args:
        wanted: False: no server, and none is asked. None: the configured server if it answers; if it does not, a
            warning. True: it must.

    Raises:
        ConfigError: it must, and there is none or it does not answer; or a file of settings cannot be read.
    """
    if wanted is False:
        return Choice()
    must = wanted is True
    address = configured()
    if address is None:
        if must:
            raise ConfigError("--prefect: no server is configured; start one with `protofl up`, or set PREFECT_API_URL")
        return Choice()
    reason = problem_with(address, _LONG_PATIENCE_SECONDS if must or _runs_here(address) else _PATIENCE_SECONDS)
    if reason is None:
        return Choice(address)
    silent = f"the Prefect server at {address.shown} (from {address.source}) cannot be used: {reason}"
    if must:
        raise ConfigError(f"--prefect: {silent}\n{_cure(address)}")
    forget = "" if address.source != _OWN else " (`protofl up` starts it again, `protofl down` forgets it)"
    return Choice(warning=f"{silent}; going on without it{forget}")


def _runs_here(address: Address) -> bool:
    """Whether ``protofl up`` has started it and its process is there."""
    own = [service for service in recorded() if (service.name, service.url) == ("prefect", address.url)]
    return any(is_running(service) for service in own)


def started_here(url: str) -> Address:
    """Return the server started by ``protofl up``, with its password, regardless of other configuration."""
    return Address(url, _OWN, _own_password())


def configured() -> Address | None:
    """The server that Prefect would use, else the one that ``protofl up`` has started here; None: neither.

    Raises:
        ConfigError: ``prefect.toml``, ``pyproject.toml`` or what is said of headers is not valid.
    """
    layers = list(_layers())
    url, source = _value(layers, "PREFECT_API_URL")
    if not url:
        own = next((service for service in recorded() if service.name == "prefect"), None)
        if own is None:
            return None  # before anything is refused that nobody would use
        url, source = own.url, _OWN
    names = ("KEY", "AUTH_STRING", "SSL_CERT_FILE", "TLS_INSECURE_SKIP_VERIFY")
    found = {name: _value(layers, name)[0] for name in (*(f"PREFECT_API_{name}" for name in names), _HEADERS)}
    settings = {name: text for name, text in found.items() if text}
    remember(url)
    if _is_own(url):
        settings |= _own_password()
    if _HEADERS in settings and not _are_headers(settings[_HEADERS]):
        raise ConfigError(
            f'{_HEADERS} in {_value(layers, _HEADERS)[1]}: not a JSON object of texts; {{"Name": "value"}}'
        )
    return Address(url.rstrip("/"), source, settings)


def _is_own(url: str) -> bool:
    """Whether an address is that of the server that ``protofl up`` has started here, by either name of the machine."""
    plain = url.rstrip("/").replace("//localhost:", f"//{HOST}:", 1)
    return any((service.name, service.url) == ("prefect", plain) for service in recorded())


def _own_password() -> dict[str, str]:
    found = known_password()
    return {} if found is None else {"PREFECT_API_AUTH_STRING": found}


def problem_with(address: Address, patience_seconds: float) -> str | None:
    """Why a server is of no use; None if it answers as a Prefect server does, and takes our word for who we are.

    Args:
        address: of the server.
        patience_seconds: for all of it: looking its name up has no limit of its own, so a thread does it.
    """
    found: list[str | None] = [_late(patience_seconds)]

    def ask() -> None:
        found[0] = _ask(address, patience_seconds)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_seconds)
    return found[0]


def is_lost(error: BaseException | None) -> bool:
    """Whether an error of Prefect's client is about a server that does not answer, or not as it should.

    It raises httpx's errors when it has tried for half a minute, and its own, caused by these, where it greets one.
    """
    from httpx import HTTPError  # which Prefect has loaded, and nobody else needs

    return error is not None and (isinstance(error, HTTPError) or is_lost(error.__cause__))


# ---- what is configured ------------------------------------------------------------------------------------------


def _layers() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where settings come from, and those settings; what comes first wins."""
    yield "the environment", os.environ
    dotenv = _dotenv()
    yield ".env", dotenv
    project, python_project = _toml(Path("prefect.toml")), _toml(Path("pyproject.toml"))
    tool = python_project.get("tool", {}).get("prefect", {})
    yield "prefect.toml", _flat(project)
    yield "pyproject.toml", _flat(tool)
    places = (os.environ, dotenv, _flat(project), _flat(tool))
    path = next((place["PREFECT_PROFILES_PATH"] for place in places if place.get("PREFECT_PROFILES_PATH")), None)
    home = os.environ.get("PREFECT_HOME") or Path.home() / ".prefect"
    name, profile = _profile(Path(path) if path else Path(home) / "profiles.toml")
    yield f"the profile {name}", profile


def _value(layers: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> tuple[str | None, str]:
    """A setting and where it is from: each is looked for by itself."""
    return next(((str(layer[name]), source) for source, layer in layers if name in layer), (None, ""))


def _dotenv() -> dict[str, str]:
    if not Path(".env").is_file():
        return {}
    from dotenv import dotenv_values

    return {name: value for name, value in dotenv_values(".env").items() if value is not None}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error}); mend it, Prefect reads it too") from error


def _flat(table: Mapping[str, Any], prefix: str = "PREFECT") -> dict[str, Any]:
    """Nested settings by the names of their variables: ``{"api": {"url": ...}}`` as ``PREFECT_API_URL``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}_{key.upper()}"
        if name == _HEADERS:  # a table of its own, or its text; in a profile Prefect takes the text alone
            found[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            found |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def _are_headers(text: str) -> bool:
    try:
        headers = json.loads(text)
    except ValueError:
        return False
    return isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())


def _profile(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the active profile; no such file or profile, or a broken file, is an empty one."""
    try:
        known = _toml(path)
    except ConfigError:  # Prefect says so itself, and goes on
        known = {}
    name = os.environ.get("PREFECT_PROFILE") or known.get("active")
    return str(name), known.get("profiles", {}).get(name, {})


# ---- whether it answers ------------------------------------------------------------------------------------------


def opened(address: Address, path: str, patience_seconds: float, *, method: str = "GET", body: Any = None) -> Any:
    """Ask a server with the credentials, and the trust in certificates, that are configured.

    Args:
        address: of the server. path: below it.
        patience_seconds: for the connection and for each piece of the answer.
        method: of the request. body: a JSON value that it carries; None: nothing.

    Returns:
        The answer, to be read and closed; urllib's errors where there is none.
    """
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *asked: Any) -> None:
            """Credentials are for the server that was configured."""

    url, login = _without_login(address.url)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(url + path, data, headers | _credentials(address, login), method=method)
    handlers: list[Any] = [NoRedirects, urllib.request.HTTPSHandler(context=_tls(address))]
    if address.source == _OWN:  # on loopback, where no proxy leads
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(request, timeout=patience_seconds)


def _ask(address: Address, patience_seconds: float) -> str | None:
    """Ask for the version: unlike its health, a server tells it only to those whom it knows."""
    import http.client
    import urllib.error

    is_cloud = address.url.startswith(_CLOUD)
    try:
        with opened(address, "/health" if is_cloud else "/admin/version", patience_seconds) as answer:
            said = json.loads(answer.read(1000))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return f"it refuses who asks (PREFECT_API_KEY, PREFECT_API_AUTH_STRING, {_HEADERS})"
        return f"what answers there is no Prefect server (HTTP {error.code})"
    # Refused and timed out are OSErrors, no address at all or no JSON a ValueError, no HTTP server an HTTPException.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return _late(patience_seconds)
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        return redact(text)
    return None if is_cloud or isinstance(said, str) else "what answers there is no Prefect server"


def _late(seconds: float) -> str:
    return f"no answer within {seconds:g} s"


def _without_login(url: str) -> tuple[str, str | None]:
    """An address, and ``user:password`` that was in it."""
    parts = urlsplit(url)
    login, found, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host)), unquote(login) if found else None


def _credentials(address: Address, login: str | None) -> dict[str, str]:
    """As Prefect's client sends them: a user and a password win over a key, and headers that are named over both."""
    login = address.settings.get("PREFECT_API_AUTH_STRING") or login
    key = address.settings.get("PREFECT_API_KEY")
    sent = {}
    if login:
        sent["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    elif key:
        sent["Authorization"] = f"Bearer {key}"
    headers = json.loads(address.settings.get(_HEADERS, "{}"))
    return sent | {name.capitalize(): text for name, text in headers.items() if name.lower() not in _NOT_OURS}


def _tls(address: Address) -> Any:
    """How certificates are checked; None where the address needs none."""
    if not address.url.startswith("https:"):
        return None
    import ssl

    if address.settings.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower() in ("1", "true", "yes", "on"):
        return ssl._create_unverified_context()
    return ssl.create_default_context(cafile=address.settings.get("PREFECT_API_SSL_CERT_FILE"))


def _cure(address: Address) -> str:
    if address.source == _OWN:
        return "`protofl up` starts it again; see `protofl status`"
    return f"start it, or take its address out of {address.source} and start one with `protofl up`"
