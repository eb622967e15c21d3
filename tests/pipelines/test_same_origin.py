"""Who may ask a server on loopback: its own pages and programs, but no other web page."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipelines.same_origin import Checked, checked_wsgi

FOREIGN = (
    "http://evil.example",
    "http://evil.example:4200",
    "null",
    "",
    "http://127.0.0.1:3000",
    "http://localhost",
    "http://127.0.0.1.evil.example:4200",
    "http://evil.example@127.0.0.1:4200",
    "http://127.0.0.1:4200, http://evil.example",
    "http://[::1",
)
OWN = (None, "http://127.0.0.1:4200", "http://localhost:4200")
FOREIGN_HOSTS = ("evil.example", "evil.example:4200", "127.0.0.1.evil.example:4200", "", "192.168.0.7:4200")


def status(method: str = "GET", kind: str = "http", **headers: str | None) -> int:
    """The status with which an ASGI application behind the check answers; of a web socket, 101 where it is opened."""
    said: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.request"}

    async def send(message: Any) -> None:
        said.append(message)

    sent = {"host": "127.0.0.1:4200", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items() if value is not None]
    scope = {
        "type": kind,
        "method": method,
        "path": "/",
        "headers": pairs,
        "extensions": {"websocket.http.response": {}},
    }
    asyncio.run(Checked(application)(scope, receive, send))  # type: ignore[arg-type]
    return int(said[0].get("status", 101))


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_another_web_page_is_refused_whatever_it_sends(method: str, kind: str | None) -> None:
    assert {origin: status(method, content_type=kind, origin=origin) for origin in FOREIGN} == dict.fromkeys(
        FOREIGN, 403
    )
    assert {origin: status(method, content_type=kind, origin=origin) for origin in OWN} == dict.fromkeys(OWN, 200)


def test_a_name_that_is_not_this_machines_is_refused() -> None:
    """A page may have its own name lead to 127.0.0.1: its requests have no foreign origin then."""
    for host in FOREIGN_HOSTS:
        assert status(host=host, origin=f"http://{host}") == status(host=host) == 403, host
    assert status(host=None) == 403
    for host in ("127.0.0.1:4200", "localhost:4200", "[::1]:4200", "localhost"):
        assert status(host=host) == 200, host


def test_web_sockets_too() -> None:
    assert status(kind="websocket", origin="http://127.0.0.1:4200") == status(kind="websocket") == 101
    assert status(kind="websocket", origin=FOREIGN[0]) == status(kind="websocket", host=FOREIGN_HOSTS[0]) == 403


def asked(any_host: bool, **given: str) -> str:
    """The status with which a WSGI application behind the check answers."""
    said: list[str] = []

    def application(environ: dict[str, Any], start: Any) -> list[bytes]:
        start("200 OK", [])
        return [b"done"]

    environ = {f"HTTP_{name.upper()}": value for name, value in given.items()}
    checked_wsgi(application, any_host=any_host)(environ, lambda status, _: said.append(status))
    return said[0]


def test_wsgi_applications_are_checked_likewise() -> None:
    own = "127.0.0.1:8080"
    assert asked(False, host=own) == asked(False, host=own, origin=f"http://{own}") == "200 OK"
    assert {asked(False, host=own, origin=origin) for origin in FOREIGN} == {"403 Forbidden"}
    assert {asked(False, host=host) for host in FOREIGN_HOSTS} == {"403 Forbidden"}
    assert asked(False) == "403 Forbidden"


def test_a_server_for_others_has_other_names_and_still_takes_nothing_from_other_pages() -> None:
    for origin in ("https://lab.example", "http://lab.example"):
        assert asked(True, host="lab.example", origin=origin) == "200 OK"
    assert asked(True, host="lab.example") == "200 OK"
    assert asked(True, host="lab.example", origin="http://evil.example") == "403 Forbidden"
