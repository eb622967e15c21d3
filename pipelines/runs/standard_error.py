"""Lines on standard error, whose reader may have had enough, or whose disk is full: that is no reason to end a run."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def tell(text: str) -> None:
    """Write a line or more; from the moment nobody reads them, or they find no room, to nowhere."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        let_go(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Lead a stream that nobody reads to nowhere: Python would complain when it flushes what is left at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
