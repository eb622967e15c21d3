"""Check the origin of requests to a loopback server.

A browser sends requests of any web page, also to servers of this machine. So a request is refused if its ``Host`` is
not a name of this machine (DNS rebinding to 127.0.0.1), or if its ``Origin`` is not the server's own address. Programs
other than browsers send no ``Origin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
"""Names of this machine in an address."""


def refusal(hosts: Iterable[str], origins: Iterable[str], *, any_host: bool = False) -> str | None:
    """Return why a request is refused; None if it is not.

    Args:
        hosts: values of its header ``Host``.
        origins: values of its header ``Origin``; none from programs other than browsers.
        any_host: accept every ``Host``, for a server with other names; the origin must have that name.
    """
    named = [_place(f"//{host}") for host in hosts]
    if len(named) != 1 or named[0] is None or not (any_host or named[0][0] in LOOPBACK):
        return "this server answers to the names of this machine alone (127.0.0.1, localhost)"
    name, port = named[0]
    for origin in origins:
        place = _place(origin)
        own_name = place is not None and (place[0] == name or {place[0], name} <= LOOPBACK)
        if place is None or not own_name or place[1] != port:
            return "this server takes requests from its own pages and from programs, not from other web pages"
    return None


def _place(address: str) -> tuple[str, int | None] | None:
    """Return name and port of an address such as ``http://localhost:4200``; None if it is invalid."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.path or parts.query or parts.username is not None:
        return None
    return parts.hostname, port


class Checked:
    """An ASGI application that checks requests and web sockets first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            problem = refusal(headers.getlist("host"), headers.getlist("origin"))
            if problem is not None:
                await PlainTextResponse(problem + "\n", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def checked_wsgi(app: Callable[..., Iterable[bytes]], *, any_host: bool = False) -> Callable[..., Iterable[bytes]]:
    """Wrap a WSGI application with the check of :func:`refusal`."""

    def answer(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        found = [[environ[name]] if name in environ else [] for name in ("HTTP_HOST", "HTTP_ORIGIN")]
        problem = refusal(*found, any_host=any_host)
        if problem is None:
            return app(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [f"{problem}\n".encode()]

    return answer
