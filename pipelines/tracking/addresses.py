"""Addresses of servers and stores, fit to be printed."""

from __future__ import annotations


def without_password(address: str) -> str:
    """An address for a log: ``user:password@`` becomes ``***@``; others, and file paths, stay as they are."""
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}***@{host.rpartition('@')[2]}{slash}{path}" if separator and "@" in host else address
