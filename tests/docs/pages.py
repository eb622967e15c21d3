"""Blocks of a page, and a shell that types them.

The kind of a block says what it is. ``sh`` is typed. ``console`` is what the last ``sh`` block printed, or commands
after ``$``, each with its output. ``python`` and ``yaml`` with a file's name in the first line (``# mine.py``) are
written to that file; other Python is run. Other kinds are only read. The comment ``<!-- not run: REASON -->`` before a
block, or below the title for a whole page, says why it is not typed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOW_TO, TUTORIAL = ROOT / "docs" / "how-to", ROOT / "docs" / "tutorial"
SECONDS = 1200

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>[^\n]+) -->\n(?P=indent))?"
    r"```(?P<kind>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_PAGE_REASON = re.compile(r"\A# [^\n]+\n\n<!-- not run: ([^\n]+) -->\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``reason`` is why it is not run."""

    kind: str
    text: str
    reason: str | None = None

    @property
    def file(self) -> str | None:
        """Name of the file that the block shows, from its first line."""
        named = re.match(r"# (\w+\.(?:py|yaml))\n", self.text)
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    whole = _PAGE_REASON.match(text)
    return [
        Block(
            found["kind"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["reason"] or (whole[1] if whole else None),
        )
        for found in _BLOCK.finditer(text)
    ]


def assert_printed(shown: str, printed: str) -> None:
    """Check that lines of a page were printed, in their order; ``...`` is any lines, ``…`` any text within one."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        patterns = [re.escape(line.rstrip()).replace("…", ".*") for line in part.splitlines() if line.strip()]
        for start in range(len(lines) - len(patterns) + 1):
            if all(re.fullmatch(*pair) for pair in zip(patterns, lines[start:], strict=False)):
                lines = lines[start + len(patterns) :]
                break
        else:
            raise AssertionError(f"the page shows\n{part}\nprinted was\n{printed[-6000:]}")


class Shell:
    """Types blocks into bash; folder and variables stay for the next block."""

    def __init__(self, folder: Path) -> None:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "PROTOFL_", "GIT_"))}
        names = {
            f"GIT_{role}_{kind}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for kind in ("NAME", "EMAIL")
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.folder = folder
        self.environment = {**outside, **names, "PATH": path, "COLUMNS": "160", "MPLBACKEND": "agg"}
        self._after = folder / ".environment"
        self.printed = ""

    def type(self, text: str, *, may_fail: bool = False) -> str:
        """Run commands; return what they print on both streams."""
        done = subprocess.run(
            ["bash", "-c", f"set -e\n{text}\nenv -0 > {self._after}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        self.printed = done.stdout
        if done.returncode == 0:
            pairs = self._after.read_text().split("\0")
            self.environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            self.folder = Path(self.environment["PWD"])
        assert done.returncode == 0 or may_fail, f"{text}\n{done.stdout[-6000:]}"
        return done.stdout

    def type_block(self, block: Block, replaced: Mapping[str, str]) -> None:
        """Type, write or compare one block of a page."""
        text = block.text
        for value, smaller in replaced.items():
            text = text.replace(value, smaller)
        if block.file is not None:
            (self.folder / block.file).write_text(text, encoding="utf-8")
        elif block.kind == "sh":
            self.type(text)
        elif block.kind == "python":
            (self.folder / ".block.py").write_text(text, encoding="utf-8")
            self.type("python .block.py")
        elif block.kind == "console":
            printed, *sessions = re.split(r"^\$ ", text, flags=re.MULTILINE)
            if printed:
                assert_printed(printed, self.printed)
            for command, shown in (session.split("\n", 1) for session in sessions):
                assert_printed(shown, self.type(command, may_fail=bool(shown)))
