"""What the library says of errors is said to a caller in Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import flcore

_ADVICE = re.compile(r"(^|\s)--[a-z]{3,}|\bthe (prepare|partition|train) stage")


def test_no_message_advises_options_or_stages_of_a_command() -> None:
    """Every text in the library's code, docstrings aside."""
    found: list[str] = []
    for path in Path(flcore.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found += [
            f"{path.name}, line {text.lineno}" for text in texts if id(text) not in alone and _ADVICE.search(text.value)
        ]
    assert not found
