"""Addresses of servers and stores, fit to be printed: without the password that one may hold."""

from __future__ import annotations

import re
from urllib.parse import unquote

_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/]*@")
_OPTION = re.compile(r"(?P<name>[?&;](?:password|passwd|pwd|token|sslpassword)=)[^&;\s'\"]*", re.IGNORECASE)


def without_password(text: str) -> str:
    """Text with every address in it fit to be printed: ``user:password@`` becomes ``***@``, ``password=...`` likewise.

    >>> without_password("postgresql://me:secret@host/runs?sslmode=require")
    'postgresql://***@host/runs?sslmode=require'
    """
    return _OPTION.sub(r"\g<name>***", _USER.sub(r"\g<scheme>***@", text))


def without_secrets(text: str, uri: str) -> str:
    """Text from elsewhere, such as a library's error, without what the address of a store keeps secret.

    Libraries repeat a password by itself, or as they understood it, and not only within an address.
    """
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_password(text)


def _secrets(uri: str) -> set[str]:
    user = uri.partition("://")[2].partition("/")[0].rpartition("@")[0]
    name, colon, password = user.partition(":")
    words = {password if colon else name, *(found.group().partition("=")[2] for found in _OPTION.finditer(uri))}
    return {form for word in words for form in (word, unquote(word)) if form}
