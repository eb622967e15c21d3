"""Standard streams of a command, which may be closed, full, without a reader, or of another encoding than UTF-8.

Printed text may come from archives, folder names and libraries. Its control characters are escaped, so that none
reaches a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from flcore.core.errors import Cure
from flcore.core.text import printable
from pipelines.addresses import redact

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = "standard output"
"""Its name in errors, in place of a file's."""


class PrintedStream:
    """A text stream that escapes control characters except line breaks and tabs."""

    def __init__(self, stream: TextIO, name: str, clean: Callable[[str], str] = printable) -> None:
        """Write to ``stream`` what ``clean`` returns; ``name`` is the stream's name in errors."""
        self._clean = clean
        self.rich_proxied_file = stream  # rich writes here; its own control characters are wanted
        self._name = name

    def write(self, text: str) -> int:
        return self.write_drawn(self._clean(text))

    def write_drawn(self, text: str) -> int:
        """Write text unchanged, such as a table that :func:`console` has rendered."""
        try:
            return self.rich_proxied_file.write(text)
        except OSError as error:
            error.filename = error.filename or self._name
            raise

    def flush(self) -> None:
        try:
            self.rich_proxied_file.flush()
        except OSError as error:
            error.filename = error.filename or self._name
            raise

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Make standard streams safe to print to; restore them afterwards."""
    _open_closed()
    before = sys.stdout, sys.stderr
    sys.stdout = PrintedStream(_usable(sys.stdout, 1), STANDARD_OUTPUT)
    # Standard output has no addresses except printed ones; a password such as "runs" must not garble it.
    sys.stderr = PrintedStream(_usable(sys.stderr, 2), "standard error", lambda text: redact(printable(text)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Open standard streams that the caller has closed as the null device; later files would get their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def _usable(stream: TextIO | None, number: int) -> TextIO:
    """Return an open stream that escapes characters outside its encoding."""
    if stream is None:
        return open(number, "w", encoding="utf-8", closefd=False)
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream


def console(*, stderr: bool = False, **keywords: Any) -> Console:
    """Return a console of rich that escapes control characters of printed text, but not its own."""
    from rich.console import Console

    class PrintedConsole(Console):
        def render(self, *given: Any, **named: Any) -> Any:
            for part in super().render(*given, **named):
                yield part if part.control else part._replace(text=printable(part.text))

    # While progress bars run, rich wraps standard error, and unwraps one layer only.
    if stderr:
        keywords["file"] = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return PrintedConsole(**keywords)


def print_drawn(text: str) -> None:
    """Print text with the colours of :func:`console`."""
    if isinstance(sys.stdout, PrintedStream):
        sys.stdout.write_drawn(text)
    else:
        sys.stdout.write(text)


COMMANDS: Mapping[Cure, str] = {
    Cure.START_OVER: "it cannot be resumed: --restart throws it away and begins with the first round",
    Cure.TRAIN_AGAIN: "run it again with --restart, which throws its results away, or delete its folder",
    Cure.TRAIN_FIRST: "run the train stage first",
    Cure.OTHER_FOLDER: "choose another folder, or --restart, which trains it again",
    Cure.PREPARE: "run the prepare stage, or name another folder",
    Cure.PREPARE_AGAIN: "run the prepare stage again, or name another folder",
    Cure.DIVIDE: "run the partition stage, or name another folder",
    Cure.DIVIDE_AGAIN: "run the partition stage again, or name another folder",
    Cure.NAME_PLUGIN: "add it to plugins, or name it by --plugin",
}
"""Advice of the library for callers in Python → the same for a command line."""


def in_commands(text: str) -> str:
    """Return a message of the library with its advice in command-line terms."""
    for cure, command in COMMANDS.items():
        text = text.replace(cure, command)
    return text


def tell(text: str) -> None:
    """Print text to standard error without secrets; once it has no reader or no room, discard it."""
    try:
        print(redact(in_commands(text)), file=sys.stderr, flush=True)
    except OSError:
        let_go(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Redirect a stream without a reader to the null device; else Python's flush at exit prints an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
