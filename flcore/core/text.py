"""How a message quotes what somebody gave, and what it says of words that nobody knows.

Keys, values and names come from files and forms: whatever stands in them, a message stays a line that can be read.
"""

from __future__ import annotations

import difflib
import reprlib
import unicodedata
from collections.abc import Iterable
from typing import Any

_LINES, _LINE = 6, 2000
"""What a message may take, whatever is quoted in it; characters of a line."""

_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Overrides of the direction of writing, by which a text can be shown as another."""

_LONGEST_WORD = 100  # for which a similar one is looked for: that takes time with its length


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
    """Text with control characters and lone surrogates written out: it cannot steer a terminal, nor break a line."""
    return "".join(sign.encode("unicode_escape").decode() if is_control(sign) else sign for sign in text)


def printable(text: str) -> str:
    """Text as :func:`escaped` has it, with its line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(sign if sign in "\n\t" else escaped(sign) for sign in text)


def is_control(sign: str) -> bool:
    """Whether a character steers what shows it (controls, line breaks, direction overrides), or is a lone surrogate."""
    return unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") or sign in _DIRECTIONS


def fit_to_print(message: str) -> str:
    """A message with whatever is quoted in it: a few lines of bounded length, and no control characters."""
    lines = [escaped(line if len(line) <= _LINE else f"{line[: _LINE - 3]}...") for line in message.split("\n")]
    return "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "..."])


def unknown_key(path: str, key: object, known: Iterable[str]) -> str:
    """The message for a key nobody declared: names the nearest known key, or all of them."""
    names = sorted(known)
    near = nearest(key, names)
    hint = f"did you mean {near!r}? " if near else ""
    return f"{shorten(path)}: unknown key; {hint}allowed here: {', '.join(names) or 'nothing'}"


def nearest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that somebody probably meant; None where none is similar, or what they wrote is no word."""
    if not isinstance(word, str) or len(word) > _LONGEST_WORD:
        return None
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def to_yaml(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else shorten(value)
