"""What a command prints: on streams that may be closed, full, without a reader, or of another encoding than UTF-8.

Text comes from outside, too: archives, names of folders, libraries. Whatever control characters are in it, they are
written out, so that none of them reaches a terminal.
"""

from __future__ import annotations

import codecs
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
"""What an error says of it in place of a file's name."""


class PrintedStream:
    """A text stream that writes control characters out, but for line breaks and tabs."""

    def __init__(self, stream: TextIO, name: str, clean: Callable[[str], str] = printable) -> None:
        """Write to ``stream`` what ``clean`` returns; ``name`` is what an error says of the stream."""
        self._clean = clean
        self.rich_proxied_file = stream  # what rich writes to: its own control characters are meant
        self._name = name

    def write(self, text: str) -> int:
        """Write text without control characters."""
        return self.write_drawn(self._clean(text))

    def write_drawn(self, text: str) -> int:
        """Write text as it is, such as a table that :func:`console` has drawn."""
        try:
            return self.rich_proxied_file.write(text)
        except OSError as error:
            error.filename = error.filename or self._name
            raise

    def flush(self) -> None:
        """Write out what is buffered."""
        try:
            self.rich_proxied_file.flush()
        except OSError as error:
            error.filename = error.filename or self._name
            raise

    def writelines(self, lines: Iterator[str]) -> None:
        """Write lines without control characters."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Answer everything else as the stream does."""
        return getattr(self.rich_proxied_file, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Let a command print anything to its standard streams; afterwards they are what they were."""
    _open_closed()
    before = sys.stdout, sys.stderr
    sys.stdout = PrintedStream(_usable(sys.stdout, 1), STANDARD_OUTPUT)
    # Results on standard output have no addresses but printed ones; a password such as "runs" must not garble them.
    sys.stderr = PrintedStream(_usable(sys.stderr, 2), "standard error", lambda text: redact(printable(text)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Lead standard streams that whoever called has closed to nowhere: files opened later would take their places."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one


def _usable(stream: TextIO | None, number: int) -> TextIO:
    """A stream that is there, and writes out what its encoding lacks."""
    if stream is None:
        return open(number, "w", encoding="utf-8", closefd=False)
    if hasattr(stream, "reconfigure"):
        codecs.register_error("protofl", _in_plain_letters)
        stream.reconfigure(errors="protofl")
    return stream


# What tables are made of, for terminals and logs that have ASCII or Latin-1 alone; other signs are written out.
_PLAIN = {"−": "-", "–": "-", "—": "-", "±": "+-", "×": "x", "→": "->", "≈": "~", "…": "...", "Δ": "delta", "\u202f": " "}
_PLAIN |= dict.fromkeys("─━╌╍┄┅", "-") | dict.fromkeys("│┃", "|")


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign) or ("+" if "─" <= sign <= "╿" else _written_out(sign)) for sign in signs), error.end


def _written_out(sign: str) -> str:
    return sign.encode("ascii", "backslashreplace").decode()


def console(*, stderr: bool = False, **keywords: Any) -> Console:
    """A console of rich that writes out the control characters of what it is given; its own are meant."""
    from rich.console import Console

    class PrintedConsole(Console):
        def render(self, *given: Any, **named: Any) -> Any:
            for part in super().render(*given, **named):
                yield part if part.control else part._replace(text=printable(part.text))

    # While bars move, rich puts a stream of its own before standard error, and looks behind that one alone.
    if stderr:
        keywords["file"] = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return PrintedConsole(**keywords)


def print_drawn(text: str) -> None:
    """Print text with the colours that :func:`console` has given it."""
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
"""What the library advises a caller in Python, as a command line does it."""


def in_commands(text: str) -> str:
    """Return a message of the library with its advice for people who type commands."""
    for cure, command in COMMANDS.items():
        text = text.replace(cure, command)
    return text


def tell(text: str) -> None:
    """Write a line or more, without secrets; from the moment nobody reads them, or they find no room, to nowhere."""
    try:
        print(redact(in_commands(text)), file=sys.stderr, flush=True)
    except OSError:
        let_go(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Lead a stream that nobody reads to nowhere: Python would complain when it flushes what is left at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
