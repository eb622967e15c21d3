"""The Prefect server of a command: which one is configured, and whether it responds.

Prefect is imported only to ask a configured server: its import takes a second. So the places where Prefect finds the
address are read here, in its order; all other settings of the connection are left to Prefect.
"""

from __future__ import annotations

import os
import socket
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flcore.core.errors import ConfigError, RunError
from pipelines.addresses import redact, remember, without_password
from pipelines.orchestration.background import STATE, is_running, known_password, recorded
from pipelines.orchestration.serving import HOST

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_PATIENCE_SECONDS = 2.0  # the first request to a new server takes it most of a second
_LONG_PATIENCE_SECONDS = 5.0  # for a server that exists: a machine that trains may be slow to answer
_SECONDS_TO_ANSWER = 60.0
_OWN = f"{STATE}, protofl up"
_CONNECTION = ("PREFECT_API_", "PREFECT_CLIENT_")


@dataclass(frozen=True)
class Address:
    """A configured server: the URL of its API, and where it is configured, for messages."""

    url: str
    source: str

    @property
    def shown(self) -> str:
        """The address without its password."""
        return without_password(self.url)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of Prefect that name it, with the password of a server of ours."""
        password = known_password() if _is_own(self.url) else None
        return {"PREFECT_API_URL": self.url} | ({} if password is None else {"PREFECT_API_AUTH_STRING": password})

    def set_variables(self) -> None:
        """Set the variables that Prefect reads in this process."""
        os.environ |= self.variables
        os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        os.environ.setdefault("DO_NOT_TRACK", "true")


def choose(wanted: bool | None, say: Callable[[str], None]) -> Address | None:
    """Return the Prefect server of a command; None: it runs without one.

    Args:
        wanted: False: no server. None: the configured one if it responds, else a warning. True: it must respond.
        say: receives the warning.

    Raises:
        ConfigError: it must respond, and none is configured; or a settings file is invalid.
        RunError: it must respond, and does not.
    """
    if wanted is False:
        return None
    must = wanted is True
    address = configured()
    if address is None:
        if must:
            raise ConfigError("--prefect: no server is configured; start one with `protofl up`, or set PREFECT_API_URL")
        return None
    reason = problem_with(address, _LONG_PATIENCE_SECONDS if must or _runs_here(address) else _PATIENCE_SECONDS)
    if reason is None:
        return address
    silent = f"the Prefect server at {address.shown} (from {address.source}) cannot be used: {reason}"
    if must:
        instead = f"start it, or take its address out of {address.source} and start one with `protofl up`"
        hint = "`protofl up` starts it again; see `protofl status`" if address.source == _OWN else instead
        raise RunError(f"--prefect: {silent}\n{hint}")
    forget = "" if address.source != _OWN else " (`protofl up` starts it again, `protofl down` forgets it)"
    say(f"{silent}; going on without it{forget}")
    return None


def _runs_here(address: Address) -> bool:
    """Return whether ``protofl up`` started it and its process exists."""
    own = [service for service in recorded() if (service.name, service.url) == ("prefect", address.url)]
    return any(is_running(service) for service in own)


def _is_own(url: str) -> bool:
    """Return whether ``protofl up`` started the server here, under either name of this machine."""
    plain = url.rstrip("/").replace("//localhost:", f"//{HOST}:", 1)
    return any((service.name, service.url) == ("prefect", plain) for service in recorded())


def started_here(url: str) -> Address:
    """Return the server that ``protofl up`` started, regardless of other configuration."""
    return Address(url, _OWN)


# ---- the configured one ------------------------------------------------------------------------------------------


def configured() -> Address | None:
    """Return the server that Prefect would use, else the one that ``protofl up`` started here, else None."""
    url, source = next(((str(url), source) for source, url in _urls() if url), (None, _OWN))
    if url is None:
        url = next((service.url for service in recorded() if service.name == "prefect"), None)
        if url is None:
            return None
    remember(url)
    return Address(url.rstrip("/"), source)


def _urls() -> Iterator[tuple[str, Any]]:
    """Yield the places of Prefect's settings with the address there; the first one wins."""
    yield "the environment", os.environ.get("PREFECT_API_URL")
    dotenv = _dotenv()
    yield ".env", dotenv.get("PREFECT_API_URL")
    project, python_project = _toml(Path("prefect.toml")), _toml(Path("pyproject.toml"))
    tool = python_project.get("tool", {}).get("prefect", {})
    yield "prefect.toml", project.get("api", {}).get("url")
    yield "pyproject.toml", tool.get("api", {}).get("url")
    variables = (place.get("PREFECT_PROFILES_PATH") for place in (os.environ, dotenv))
    paths = (*variables, project.get("profiles_path"), tool.get("profiles_path"))
    home = os.environ.get("PREFECT_HOME") or Path.home() / ".prefect"
    name, profile = _profile(Path(next(filter(None, paths), Path(home) / "profiles.toml")))
    yield f"the profile {name}", profile.get("PREFECT_API_URL")


def _dotenv() -> Mapping[str, str | None]:
    if not Path(".env").is_file():
        return {}
    from dotenv import dotenv_values

    return dotenv_values(".env")


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error}); Prefect reads it too, correct it") from error


def _profile(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and settings of the active profile; empty if it is missing or the file is damaged."""
    try:
        known = _toml(path)
    except ConfigError:  # Prefect warns about it and continues
        known = {}
    name = os.environ.get("PREFECT_PROFILE") or known.get("active")
    return str(name), known.get("profiles", {}).get(name, {})


# ---- whether it responds -----------------------------------------------------------------------------------------


def problem_with(address: Address, patience_seconds: float) -> str | None:
    """Return why a server cannot be used; None if it responds as a Prefect server and accepts the credentials.

    The import of Prefect does not count. A thread asks, because looking up a name has no time limit.
    """
    refused = _refused_here(address.url)
    if refused is not None:
        return refused
    if (wrong := _import_prefect(address)) is not None:
        return wrong
    answers = [f"no answer within {patience_seconds:g} s"]
    asking = threading.Thread(target=lambda: answers.append(_ask(address, patience_seconds) or ""), daemon=True)
    asking.start()
    asking.join(patience_seconds)
    return answers[-1] or None


def _import_prefect(address: Address) -> str | None:
    """Import Prefect with the variables of a server, which it reads then; return what is wrong with its settings."""
    before = dict(os.environ)
    address.set_variables()
    try:
        import prefect.client.orchestration  # noqa: F401
    except ValueError as error:  # of pydantic
        return _brief(error)
    finally:
        for name in {*os.environ} - {*before}:
            del os.environ[name]
        os.environ |= before
    return None


def _refused_here(url: str) -> str | None:
    """Return why this machine refuses connections; Prefect's import would only delay the answer."""
    try:
        parts = urlsplit(url)
        if parts.hostname in (HOST, "localhost"):
            socket.create_connection((HOST, parts.port or 80), _PATIENCE_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return redact(str(error))
    return None


def _ask(address: Address, patience_seconds: float) -> str | None:
    """Ask for the version: unlike its health, a server tells it only to authorised clients."""
    import httpx
    from prefect.client.base import ServerType

    try:
        with _client(address, patience_seconds, retries=0) as client:
            is_cloud = client.server_type == ServerType.CLOUD
            version = client.request("GET", "/health" if is_cloud else "/admin/version").json()
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in (401, 403):
            return (
                "it refuses the credentials (PREFECT_API_KEY, PREFECT_API_AUTH_STRING, PREFECT_CLIENT_CUSTOM_HEADERS)"
            )
        return f"what answers there is no Prefect server (HTTP {code})"
    except httpx.TimeoutException:
        return f"no answer within {patience_seconds:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:  # ValueError: no JSON, or wrong settings
        return _brief(error)
    return None if is_cloud or isinstance(version, str) else "what answers there is no Prefect server"


def _brief(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):  # its text contains the value, which may be a secret
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return redact((str(error).splitlines() or [type(error).__name__])[0])


@contextmanager
def _client(address: Address, seconds: float, retries: int | None = None) -> Iterator[SyncPrefectClient]:
    from prefect.client.orchestration import get_client
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings

    updates: dict[Any, Any] = {PREFECT_API_URL: address.url}
    if (password := address.variables.get("PREFECT_API_AUTH_STRING")) is not None:
        updates[PREFECT_API_AUTH_STRING] = password
    if retries is not None:
        updates[PREFECT_CLIENT_MAX_RETRIES] = retries
    settings = Settings().copy_with_update(updates)
    # Credentials are for this server. A proxy does not lead to this machine.
    options = {"timeout": seconds, "follow_redirects": False, "trust_env": address.source != _OWN}
    with (
        SettingsContext(profile=get_settings_context().profile, settings=settings),
        get_client(sync_client=True, httpx_settings=options) as client,
    ):
        yield client


@contextmanager
def connected(address: Address) -> Iterator[SyncPrefectClient]:
    """Yield Prefect's client of a server; RunError if it does not respond or refuses a request."""
    import httpx

    try:
        with _client(address, _SECONDS_TO_ANSWER) as client:
            yield client
    except httpx.HTTPStatusError as error:
        reason = f"refused a request ({error.request.url.path}: HTTP {error.response.status_code})"
        raise RunError(f"the Prefect server at {address.shown} {reason}") from error
    except httpx.HTTPError as error:
        raise RunError(f"the Prefect server at {address.shown} does not answer ({redact(str(error))})") from error


def connection_variables(address: Address) -> dict[str, str]:
    """Return variables for a process that shall reach a server with the settings of this process."""
    from prefect.settings import Settings

    variables = Settings().to_environment_variables(exclude_unset=True)
    return {name: value for name, value in variables.items() if name.startswith(_CONNECTION)} | address.variables


def is_lost(error: BaseException | None) -> bool:
    """Return whether Prefect's client failed because a server does not respond: httpx's error, or one caused by it."""
    from httpx import HTTPError

    return error is not None and (isinstance(error, HTTPError) or is_lost(error.__cause__))
