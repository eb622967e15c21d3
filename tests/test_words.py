"""Names and words of the library: one meaning for a name, plain sentences in docstrings, comments and messages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import flcore

ROOT = Path(flcore.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ALLOWED = 30
IDIOMS = re.compile(
    r"\b(who(ever|se)?|whatever|nobody|(is|are|was|were|be) told|stands?|behind|besides?|anew|go(ne|es)? on"
    r"|carr(y|ies|ied) out|so (many|much)|th(ose|at) of|of (which|whom)|lies?|under way)\b"
    r'|("""|# )(What|Whether|Of|How|Where|Which) ',
    re.IGNORECASE,
)


def public_names(source: str) -> set[str]:
    """Names of a module's public functions and classes."""
    body = ast.parse(source).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def test_no_public_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path in FILES:
        for name in public_names(path.read_text()):
            places[name].append(path.relative_to(ROOT).as_posix())
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_idioms_stay_few() -> None:
    """Idioms cost readers whose first language is another one; the glossary of the design lists them."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if IDIOMS.search(line)
    ]
    assert len(found) < ALLOWED, "\n".join(found)


def test_an_idiom_is_seen() -> None:
    assert IDIOMS.search("whoever carries out a round may try it again")
    assert IDIOMS.search('    """Whether the run ended."""')
    assert not IDIOMS.search('    """Return the weights; a retried round resumes here."""')
