"""The reference pages are what the declarations say, and say what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flcore.core.params import declared
from flcore.methods import METHODS
from pipelines.cli import documentation

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {path.as_posix(): content for path, content in documentation.pages().items()}


def test_every_page_is_up_to_date(pages: dict[str, str]) -> None:
    for path, content in pages.items():
        assert (ROOT / path).read_text(encoding="utf-8") == content, f"{path}: run `make docs`"


def test_parameters_have_their_range_and_methods_a_page(pages: dict[str, str]) -> None:
    parameters, methods = pages["docs/reference/parameters.md"], pages["docs/reference/methods.md"]
    assert "- `partition.num_clients: 10`: K, the number of clients (>= 1).\n" in parameters
    assert "### partition.name: dirichlet" in parameters
    assert "`plugins`" in parameters
    size = "- `data.size: null`: resize to this many pixels square; null keeps the stored size (int; 8 to 512).\n"
    assert size in parameters
    assert "- `method.mu: 0.01`: weight μ of the proximal term (>= 0; tuned: 0.001 to 1, log).\n" in methods
    assert "Each client answers with its own model; their majority vote is scored too." in methods
    shared = keys(methods.split("\n## Shared parameters\n")[1].split("\n## ")[0])
    for name, cls in METHODS.items():
        section = methods.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert cls.citation in section.replace("\\*", "*")
        also = re.findall(r"`(\w+)`", "".join(re.findall(r"Shared parameters: (.*)$", section, re.MULTILINE)))
        assert sorted([*keys(section), *also]) == sorted(parameter.name for parameter in declared(cls))
        assert {*also} <= {*shared}


def keys(section: str) -> list[str]:
    """Names of the parameters that are listed."""
    return re.findall(r"^- `method\.(\w+): ", section, re.MULTILINE)


def test_commands_stand_with_their_arguments_and_what_they_mean(pages: dict[str, str]) -> None:
    page = pages["docs/reference/commands.md"]
    assert "\n## protofl list\n\n```text\nusage: protofl list KIND [--params FILE] [--json]\n" in page
    assert "usage: protofl sweep [--params FILE] [--set KEY=VALUE]... [--vary KEY=A,B,...]..." in page
    assert "usage: protofl tune [--params FILE] [--set KEY=VALUE]... --method NAME [--trials N]" in page
    assert re.search(r"\n  --seed N +short for --set seed=N\n", page)
    assert page.count("--no-wait`: exit once results are on disk") == 1
    assert "\n  --no-wait " not in page


def test_nothing_is_taken_for_a_tag_or_breaks_a_table(pages: dict[str, str]) -> None:
    for path, content in pages.items():
        if not path.endswith(".md"):
            continue
        text = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", content, flags=re.DOTALL)
        assert not re.search(r"<\S", text), path
        for table in re.findall(r"(?:^\|.*\n)+", content, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table
