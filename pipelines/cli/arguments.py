"""The command line's parser: options by full names, values of a stated form, and one-line errors.

Plain `argparse`: typer, an available alternative, takes 80 ms of the 300 ms that ``protofl --help`` may take, prints
errors in frames of five lines, and would need as much code as this module for one line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from flcore.core.text import fit_to_print, nearest, shorten
from pipelines.addresses import redact

T = TypeVar("T")

USAGE = 2
"""Exit code of a wrong command line."""

# Missing options that users expect, and advice.
_INSTEAD = {
    "--resume": "leave it out: the same command goes on where it stopped",
    "--rounds": "write --set federation.rounds=N",
    "--verbose": "there is --debug, which shows where an error comes from",
}


class Parser(argparse.ArgumentParser):
    """Refuses abbreviations, suggests the nearest option for a wrong one, and prints every error in one line."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options first; argparse would report missing arguments instead."""
        args = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(args)
        self._refuse_twice(args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            hint = f"; did you mean --set {shorten(rest[0])}?" if "=" in rest[0] and "--set" in self._flags() else ""
            self.error(f"unexpected {shorten(' '.join(rest))}{hint}")
        return found, rest

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _refuse_unknown(self, args: Sequence[str]) -> None:
        has_commands = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        for token in args:
            if token == "--" or (has_commands and not token.startswith("-")):
                return  # the rest is no option, or is a command's
            flag = token.partition("=")[0]
            if re.match(r"--?[^\W\d]", flag) and flag not in self._flags():
                self.error(f"no option {shorten(flag)}{self._instead_of(token, has_commands)}")

    def _refuse_twice(self, args: Sequence[str]) -> None:
        """Refuse an option with two values; argparse would silently use the second."""
        options = args[: args.index("--")] if "--" in args else args
        for action in self._actions:
            if not isinstance(action, argparse._StoreAction) or not action.option_strings:
                continue
            given = [
                value if equals else "".join(options[place + 1 : place + 2])
                for place, (flag, equals, value) in enumerate(token.partition("=") for token in options)
                if flag in action.option_strings
            ]
            flag = action.option_strings[0]
            if len(given) > 1 and action.type in (names, whole_numbers):
                self.error(f"{flag} appears twice; write one list, {flag} A,B")
            if len(set(given)) > 1:
                self.error(f"{flag} is given twice with different values; remove one")

    def _instead_of(self, token: str, has_commands: bool) -> str:
        flag, flags = token.partition("=")[0], self._flags()
        near = nearest(flag, flags, cutoff=0.75)
        if flag in _INSTEAD:
            return f"; {_INSTEAD[flag]}"
        if "." in flag and "--set" in flags:
            return f"; did you mean --set {token.lstrip('-').partition('=')[0]}=VALUE?"
        if near:
            return f"; did you mean {near}?"
        return " here; options stand behind the command" if has_commands else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = nearest(value, choices)
            hint = f"did you mean {near!r}? " if near else ""
            raise argparse.ArgumentError(action, f"{shorten(str(value))!r}: {hint}choose from {', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error, and exit."""
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        message = re.sub(r"expected (one|at least one) argument$", "needs a value", message)
        message = re.sub(r"ignored explicit argument .*$", "takes no value", message)
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            message = f"{missing[1]} is missing"
        message = fit_to_print(redact(message))
        self.exit(USAGE, f"{self.prog}: {message}{'' if message.endswith('?') else ';'} see {self.prog} --help\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of epilogs, and adds the indentation of command names, which argparse ignores."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def whole_number(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are not below ``least``."""

    def read(text: str) -> int:
        try:
            number = _whole(text)
        except ValueError:
            number = least - 1
        if number < least:
            zeros = ", without leading zeros" if re.match(r"[-+]?0\d", text) else ""
            raise argparse.ArgumentTypeError(f"{shorten(text)!r}: expected a whole number >= {least}{zeros}")
        return number

    return read


def _whole(text: str) -> int:
    """Return a whole number in the syntax of YAML and JSON; Python also accepts 010 and 1_000."""
    if not re.fullmatch(r"\s*[-+]?(0|[1-9][0-9]*)\s*", text):
        raise ValueError("not a whole number in plain digits")
    return int(text)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def size(text: str) -> int:
    """Parse a number of bytes, 1 or more, with a decimal unit as in tables: ``50MB`` is 50,000,000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?b)?", text.strip().lower())
    count = round(Decimal(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r}: expected a size such as 800kB, 50MB or 1.5GB")
    return count


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        number = 0.0 if "_" in text else float(text)  # Python also accepts 1_000
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{shorten(text)!r}: expected a number > 0")
    return number


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse ``0,1,2`` without duplicates."""
    try:
        return _once(text, [_whole(part) for part in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)!r}: expected whole numbers separated by commas, such as 0,1,2"
        ) from error


def names(text: str) -> tuple[str, ...]:
    """Parse ``a,b,c`` without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(
            f"{shorten(text)!r}: expected names separated by commas, such as fedavg,fedproto"
        )
    return _once(text, parts)


def _once(text: str, values: Iterable[T]) -> tuple[T, ...]:
    found = tuple(values)
    for value in found:
        if found.count(value) > 1:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r}: {shorten(str(value))} appears twice; name each once")
    return found
