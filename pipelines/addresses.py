"""Make addresses of servers and stores printable, and remove their secrets from any text.

Parsers disagree on which part of an address is its password: SQLAlchemy takes everything up to the first ``@``,
including ``/`` and ``?``, urllib the text before the last ``@`` of the host. So only parts that cannot belong to a
password are shown.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote, unquote_plus

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]*)(?::\d+)?(?:/[^@?#&;=]*)?")
_SECRET_NAME = r"pass|pwd|token|key|secret|auth|cred|odbc|signature|(?<![A-Za-z])sig(?![A-Za-z])"
_OPTION = re.compile(rf"(?P<name>[\w.-]*(?:{_SECRET_NAME})[\w.-]*)=(?P<value>[^&]*)", re.IGNORECASE)
_MISTYPED = re.compile(r"[A-Za-z][\w+.-]*:/(?!/)[^\s:@/]*:(?P<password>\S*)@")
"""An address with one slash: no library opens it, but each repeats it in its error."""
_VARIABLES = (
    *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_CLIENT_CUSTOM_HEADERS"),
    *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD"),
    "PROTOFL_WEBHOOK",
)
"""Variables with entirely secret values."""
_SHORTEST = 4
"""Minimum characters of a secret: shorter ones are part of ordinary words."""

_remembered: set[str] = set()


def without_password(address: str) -> str:
    """Return a printable address: its scheme, host, port and path, and ``***`` for the rest.

    >>> without_password("postgresql://me:se/cret@host:5432/runs?sslmode=require")
    'postgresql://***@host:5432/runs?***'
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return address if re.fullmatch(r"[\w./ ~:-]*", address) else "***"
    scheme, rest = found["scheme"], found["rest"]
    if rest.startswith("/"):  # a path alone: no host, so no password
        path, asked, _ = rest.partition("?")
        return f"{scheme}://{path}{'?***' if asked else ''}"
    login, at, place = rest.rpartition("@")
    place, asked, _ = place.partition("?")
    if not _PLACE.fullmatch(place) or (at and "?" in login):
        return f"{scheme}://***"
    return f"{scheme}://{'***@' if at else ''}{place}{'?***' if asked else ''}"


def secrets(text: str) -> set[str]:
    """Return possible secrets of an address, or of text with one, in every form in which a library repeats them."""
    found: set[str] = set()
    for rest in text.split("://")[1:]:
        if not rest.startswith("/"):
            for at in {rest.find("@"), rest.rfind("@")} - {-1}:
                name, colon, password = rest[:at].partition(":")
                if "/" not in name:
                    found.add(password if colon else name)
        for option in _OPTION.finditer(rest):
            found.add(option["value"])
            for part in unquote_plus(option["value"]).split(";"):  # ODBC has a list of its own in one option
                found |= {part.partition("=")[2].strip("{} ")} if _OPTION.match(part) else set()
    found |= {login["password"] for login in _MISTYPED.finditer(text)}
    return _forms(found)


def _forms(words: set[str]) -> set[str]:
    plain = {form for word in words for form in (word, unquote(word), unquote_plus(word))}
    plain |= {piece for word in plain for piece in word.split()}
    plain |= {re.sub(r"[\t\r\n]", "", word) for word in plain}  # which urllib drops
    written = {repr(word)[1:-1] for word in plain} | {json.dumps(word)[1:-1] for word in plain}
    quoted = {form for word in plain for form in (quote(word), quote(word, safe=""), quote_plus(word))}
    return {form for form in plain | written | quoted if len(form) >= _SHORTEST}


def has_secrets(address: str) -> bool:
    """Return whether an address has a login, or an option that may be one."""
    place = address.partition("?")[0]
    return bool(secrets(address)) or without_password(place) != place


def remember(text: str) -> None:
    """Redact the secrets of an address, or of text that may contain one, from now on."""
    _remembered.update(secrets(text))


def redact(text: str) -> str:
    """Return text without known secrets: of remembered addresses, the text itself, and this process's environment.

    The last gate before text is printed, logged or sent; to show an address, use :func:`without_password`.
    """
    known = _remembered.union(*map(secrets, text.split()))
    for name, value in os.environ.items():
        if name in _VARIABLES:
            known |= _forms({value, *re.findall(r'"([^"]*)"\s*[,}]', value)})
        elif "://" in value:
            known |= secrets(value)
    if not known:
        return text
    return re.sub("|".join(map(_whole, sorted(known, key=len, reverse=True))), "***", text)


def _whole(secret: str) -> str:
    """Return a pattern for a secret that is not part of a longer word: ``mean`` does not match ``mean_local``.

    It may follow a quoted character or an escaped line break, which end in a word character.
    """
    before = r"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))" if re.match(r"\w", secret) else ""
    return before + re.escape(secret) + (r"(?!\w)" if re.search(r"\w\Z", secret) else "")


def sqlite_address(path: Path, driver: str = "sqlite") -> str:
    """Return the address of a SQLite file.

    SQLAlchemy treats text after ``?`` as options and cannot quote it, so a path with ``?`` becomes a URI of SQLite,
    which can.
    """
    absolute = str(path.absolute())
    if "?" not in absolute:
        return f"{driver}:///{absolute}"
    return f"{driver}:///file:{quote(absolute)}?uri=true"


def folder_address(path: Path) -> str:
    """Return the address of a folder: its absolute path, or a quoted URI if it has special characters."""
    return path.absolute().as_uri() if set("%?#") & set(str(path.absolute())) else str(path.absolute())
