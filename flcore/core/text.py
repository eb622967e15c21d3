"""Quote keys, values and names from files safely in messages, and suggest known words for unknown ones."""

from __future__ import annotations

import difflib
import reprlib
import unicodedata
from collections.abc import Iterable
from typing import Any

_LINES, _LINE = 6, 2000
"""Limits of a message: lines, and characters of a line."""

_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Overrides of the writing direction, which can disguise a text."""

_LONGEST_WORD = 100  # characters; the search for similar words takes time


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 80, 80
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 20

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write down numbers of more than 4,300 digits.
        return repr(x) if x.bit_length() <= 10_000 else f"a number of {x.bit_length()} bits"


def shorten(value: Any, most: int = 200) -> str:
    """Return a value for a message: one line, no control characters, shortened.

    Addresses are reduced to their scheme: they may hold a password.
    """
    text = value if isinstance(value, str) else _Shortened().repr(value)
    before, address, _ = text.partition("://")
    text = before + (f"{address}***" if address else "")
    return escaped(text if len(text) <= most else f"{text[: most - 3]}...")


def escaped(text: str) -> str:
    """Escape control characters and lone surrogates, so that a text cannot control a terminal or break a line."""
    return "".join(sign.encode("unicode_escape").decode() if is_control(sign) else sign for sign in text)


def printable(text: str) -> str:
    """Escape a text as :func:`escaped` does, except line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(sign if sign in "\n\t" else escaped(sign) for sign in text)


def is_control(sign: str) -> bool:
    """Return whether a character is a control, line break, direction override or lone surrogate."""
    return unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") or sign in _DIRECTIONS


def fit_to_print(message: str) -> str:
    """Limit a message to a few lines of bounded length, without control characters."""
    lines = [escaped(line if len(line) <= _LINE else f"{line[: _LINE - 3]}...") for line in message.split("\n")]
    return "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "..."])


def unknown_key(path: str, key: object, known: Iterable[str]) -> str:
    """Return the message for an unknown key, with the nearest known key and all allowed ones."""
    names = sorted(known)
    near = nearest(key, names)
    hint = f"did you mean {near!r}? " if near else ""
    return f"{shorten(path)}: unknown key; {hint}allowed here: {', '.join(names) or 'nothing'}"


def nearest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known word; None if none is similar or ``word`` is not text."""
    if not isinstance(word, str) or len(word) > _LONGEST_WORD:
        return None
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def to_yaml(value: Any) -> str:
    """Return a value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else shorten(value)


def first_line(docstring: str) -> str:
    """Return the first line for a listing: without full stop, and in lower case unless it starts with a name."""
    line = docstring.strip().partition("\n")[0].removesuffix(".")
    word = line.partition(" ")[0]
    return line[:1].lower() + line[1:] if word[1:] == word[1:].lower() else line
