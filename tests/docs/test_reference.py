"""Pages of environment variables and of errors: what they name is in the code, and what the code reads is on them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flcore.core import portable

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
VARIABLES = (REFERENCE / "environment.md").read_text(encoding="utf-8")
ERRORS = (REFERENCE / "errors.md").read_text(encoding="utf-8")
SOURCES = [path for folder in ("flcore", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))]
OTHERS = [ROOT / "Makefile", *(path for path in sorted((ROOT / "infra").rglob("*")) if path.is_file())]
OF_TESTS = {"PROTOFL_DATA", "PROTOFL_PAPERS"}


def texts_of(node: ast.AST) -> Iterator[str]:
    """Yield a node's string literals; a formatted value is an ellipsis."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_variables_of_the_code_are_the_variables_of_the_page() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*SOURCES, *OTHERS])
    assert {*re.findall(r"PROTOFL_[A-Z_]+", code)} | OF_TESTS == {*re.findall(r"`(PROTOFL_[A-Z_]+)`", VARIABLES)}


def test_numerics_have_their_values() -> None:
    for name, value in portable.SETTINGS.items():
        assert f"| `{name}` | `{value}` |" in VARIABLES


def test_variables_of_make_are_read_by_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for row in VARIABLES.split("## make\n")[1].splitlines()[3:]:
        for name in re.findall(r"`([A-Z]+)`", row):
            assert f"$({name})" in makefile, name


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return [text for path in SOURCES for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))]


def test_quoted_messages_are_in_the_code(messages: list[str]) -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", ERRORS, re.MULTILINE)
    assert len(quoted) > 30
    assert [words for words in quoted if not any(words in text for text in messages)] == []
