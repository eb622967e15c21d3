"""What is printed: no control character of others reaches a terminal, and no encoding or closed stream ends a command."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from flcore.core.text import is_control

from pipelines.cli.app import main
from pipelines.execution.progress import Bars
from pipelines.runs.standard_error import console, print_drawn, safe_streams, tell

NASTY = "a\x1b[2Jb\rc\x9bd\u202ee\x07\x00"
WRITTEN = r"a\x1b[2Jb\rc\x9bd\u202ee\x07\x00"


@contextmanager
def streams() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Standard output and error in memory, as a command has them."""
    before, own = (sys.stdout, sys.stderr), (io.StringIO(), io.StringIO())
    sys.stdout, sys.stderr = own
    try:
        with safe_streams():
            yield own
        assert (sys.stdout, sys.stderr) == own  # given back
    finally:
        sys.stdout, sys.stderr = before


def test_control_characters_are_written_out() -> None:
    with streams() as (out, error):
        print(f"{NASTY}\tx\ny")
        sys.stdout.writelines([NASTY, "\n"])
        tell(NASTY)
        logging.lastResort.handle(logging.makeLogRecord({"msg": NASTY, "levelno": logging.ERROR}))
    assert out.getvalue() == f"{WRITTEN}\tx\ny\n{WRITTEN}\n"
    assert error.getvalue().splitlines()[0] == WRITTEN
    assert error.getvalue().count(WRITTEN) == 2
    assert "\x1b" not in error.getvalue()


def test_a_table_keeps_its_own_colours_and_no_others() -> None:
    drawn = io.StringIO()
    table = Table(title=NASTY)
    table.add_column(NASTY)
    table.add_row(Text(NASTY, style="bold"))
    console(file=drawn, force_terminal=True, width=80, color_system="standard").print(table)
    with streams() as (out, _):
        print_drawn(drawn.getvalue())
    shown = out.getvalue()
    assert set(re.findall(r"\x1b.{3}", shown)) <= {"\x1b[1m", "\x1b[0m", "\x1b[3m"}  # bold, plain, italic
    assert shown.count(r"a\x1b[2J") == 3
    assert "\x9b" not in shown and "\u202e" not in shown


def test_bars_move_the_cursor_and_labels_do_not() -> None:
    with streams() as (_, error):
        bars = Bars(console(stderr=True, force_terminal=True, width=200))
        bars.run(NASTY, rounds=3, done=0)
        bars.say(NASTY)
        print(NASTY, file=sys.stderr)  # which rich prints above the bars
        bars.close()
    shown = error.getvalue()
    assert "\x1b[?25l" in shown  # the cursor is hidden
    assert r"a\x1b[2Jb" in shown and "\x1b[2J" not in shown and "\x9b" not in shown


@given(st.text())
def test_whatever_is_printed_is_printable_in_any_encoding(text: str) -> None:
    for encoding in ("ascii", "latin-1", "utf-8"):
        written = io.BytesIO()
        before, sys.stdout = sys.stdout, io.TextIOWrapper(written, encoding=encoding)
        try:
            with safe_streams():
                print(text, flush=True)
            shown = written.getvalue().decode(encoding)
        finally:
            sys.stdout.detach()
            sys.stdout = before
        assert not any(is_control(sign) for sign in shown if sign not in "\n\t")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_not_there_is_no_fault(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, name, None)
    monkeypatch.chdir(tmp_path)
    assert main(["list", "methods"]) == 0
    assert main(["run", "--set", "federation.raunds=1"]) == 2
    assert getattr(sys, name) is None
