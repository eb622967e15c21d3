"""Typed access to untrusted JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flcore.core.errors import DataError
from flcore.core.text import printable
from pipelines.proof.stored_zip import StoredZip

LARGEST = 2**63 - 1
MOST_JSON = 2**28  # bytes of a file that is read into memory as a whole
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Values:
    """Typed access to untrusted JSON; raises DataError for missing or mistyped keys."""

    where: str
    values: Mapping[str, Any]

    def inner(self, key: str) -> Values:
        found = self.values.get(key)
        if not isinstance(found, dict):
            raise DataError(f"{self.where}: {key}: expected an object")
        return Values(f"{self.where}: {key}", found)

    def text(self, key: str) -> str:
        found = self.values.get(key)
        if not isinstance(found, str):
            raise DataError(f"{self.where}: {key}: expected text")
        return found

    def optional_text(self, key: str) -> str | None:
        """Return text; None where there is none or null."""
        return None if self.values.get(key) is None else self.text(key)

    def number(self, key: str) -> float:
        """Return a finite number that arithmetic takes."""
        found = self.values.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < LARGEST:
            raise DataError(f"{self.where}: {key}: expected a number")
        return found

    def whole(self, key: str) -> int:
        """Return a whole number of at most 63 bits."""
        found = self.values.get(key)
        if type(found) is not int or abs(found) > LARGEST:
            raise DataError(f"{self.where}: {key}: expected a whole number")
        return found

    def truth(self, key: str) -> bool:
        found = self.values.get(key)
        if not isinstance(found, bool):
            raise DataError(f"{self.where}: {key}: expected true or false")
        return found

    def hash(self, key: str) -> str:
        found = self.values.get(key)
        if not isinstance(found, str) or not _HASH.fullmatch(found):
            raise DataError(f"{self.where}: {key}: expected a SHA-256 in 64 digits")
        return found

    def hashes(self, key: str) -> dict[str, str]:
        """Return an object whose values are SHA-256."""
        inner = self.inner(key)
        return {name: inner.hash(name) for name in inner.values}


def _printable(value: Any) -> Any:
    """JSON with all control characters in its texts written out: they end up on terminals, in tables and on pages."""
    if isinstance(value, dict):
        return {printable(key): _printable(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def read_json_object(file: StoredZip, name: str) -> dict[str, Any]:
    """Return a JSON object of an archive, control characters in its texts written out.

    Raises:
        DataError: the file is missing, too large, or no JSON object.
    """
    try:
        content = _printable(json.loads(file.read(name, MOST_JSON)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.path}: {name} is no JSON that can be read") from error
    if not isinstance(content, dict):
        raise DataError(f"{file.path}: {name}: expected a JSON object")
    return content
