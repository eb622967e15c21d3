"""Help texts in plain letters, from the functions' signatures and docstrings; also the reference page is made of them.

Cyclopts would print them with rich, whose import takes a third of the time that ``protofl --help`` may take.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from cyclopts import App, Argument, Group
from cyclopts.command_spec import CommandSpec

from pipelines.cli.options import DEFAULTS, OF_EVERY_COMMAND

_EPILOG = """\
begin with:
  protofl run            run params.yaml, or the defaults
  protofl list methods   list the methods; 'show method NAME' prints parameters

exit codes:
  0 done   1 a fault of protofl   2 bad configuration or usage, before data are read
  3 data missing or damaged   4 a run failed   130 interrupted; resumes"""
_WIDEST, _COLUMN = 120, 30
_POSITIONAL = "arguments"


class Row(NamedTuple):
    """A line of a table: its title, the argument or command as typed, what it means, and its part of the usage."""

    table: str
    written: str
    meaning: str
    usage: str = ""


def help_text(app: App, tokens: str | Iterable[str] | None, width: int | None = None) -> str:
    """Return the help text of the command that the words name; ``width`` is by default the terminal's."""
    width = width or min(shutil.get_terminal_size().columns, _WIDEST)
    chain, apps, _ = app.parse_commands(tokens)
    command = apps[-1]
    summary, epilog = _docstring(command.help)
    commands = [*_commands(command)]
    rows = [*commands, *(_arguments(command) if command.default_command else ())]
    column = min(max(len(row.written) for row in rows) + 4, _COLUMN)
    usage = [" ".join(["usage: protofl", *chain])]
    for word in [row.usage for row in rows if row.usage] or ["COMMAND [OPTION]..."] * bool(commands):
        if len(usage[-1]) + 1 + len(word) > width:
            usage.append("   ")
        usage[-1] += f" {word}"
    parts = ["\n".join(usage), textwrap.fill(summary, width)]
    for table in dict.fromkeys(row.table for row in rows):
        lines = _lines([row for row in rows if row.table == table], column, width)
        parts.append("\n".join([f"{table}:", *lines]))
    return "\n\n".join([*parts, *filter(None, [epilog if chain else _EPILOG])])


def _lines(rows: Iterable[Row], column: int, width: int) -> Iterator[str]:
    for row in rows:
        start = f"  {row.written}"
        if len(start) + 2 > column:
            yield start
            start = ""
        first, *others = textwrap.wrap(row.meaning, max(width - column, 20)) or [""]
        yield start.ljust(column) + first
        yield from (" " * column + line for line in others)


def _docstring(text: str) -> tuple[str, str]:
    """Return the summary of a docstring, and its text without the sections of arguments."""
    summary, _, rest = inspect.cleandoc(text).partition("\n\n")
    return " ".join(summary.split()), re.split(r"^(?:Args|Raises|Returns):\n", rest, maxsplit=1, flags=re.M)[0].strip()


def _commands(app: App) -> Iterator[Row]:
    """Yield the commands of a command; their functions are imported, and no app is made."""
    for name, child in app._commands.items():
        if name.startswith("-"):
            continue
        text: Any = child.help
        if isinstance(child, CommandSpec) and text is None:
            module, _, attribute = child.import_path.partition(":")
            function = getattr(import_module(module), attribute)
            text = function.help if isinstance(function, App) else function.__doc__
        group = next(iter(child.group), "") if isinstance(child.group, tuple) else child.group
        yield Row(str(group) if app.name == ("protofl",) else "commands", name, _docstring(text)[0])


def _arguments(command: App) -> list[Row]:
    """Return the arguments of a command: its positional ones, its options, and those of every command."""
    collection = command.assemble_argument_collection(default_parameter=DEFAULTS, parse_docstring=True)
    rows = [_argument(argument) for argument in collection if argument.show]
    rows.append(Row(OF_EVERY_COMMAND.name, "--help", "show this text"))
    return sorted(rows, key=lambda row: (row.table == OF_EVERY_COMMAND.name) - (row.table == _POSITIONAL))


def _argument(argument: Argument) -> Row:
    is_positional = argument.is_positional_only() or argument.is_var_positional()
    choices = argument.get_choices() or ()
    value = argument.parameter.metavar or "|".join(choices) or argument.name.strip("-").upper()
    words = ["" if is_positional else "|".join(argument.names), "" if argument.resolved_hint is bool else value]
    written = " ".join(filter(None, words)) + (" ..." if argument.is_var_positional() else "")
    _, takes_several = argument.token_count()
    is_repeatable = takes_several and argument.parameter.n_tokens is None and not is_positional
    declared: Any = argument.parameter.group or ()
    groups = [group.name for group in declared if isinstance(group, Group) and group.show]
    table = next((name for name in groups if name[:1].islower()), _POSITIONAL if is_positional else "options")
    usage = (written if argument.required else f"[{written}]") + ("..." if is_repeatable else "")
    meaning = " ".join((argument.parameter.help or ", ".join(choices)).split())
    default = argument.field_info.default
    if default not in (None, False, (), argument.field_info.empty) and "(default:" not in meaning:
        values = default if isinstance(default, tuple) else (default,)
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        meaning += f" (default: {','.join(shown)})"
    return Row(table, written, meaning, "" if table == OF_EVERY_COMMAND.name else usage)
