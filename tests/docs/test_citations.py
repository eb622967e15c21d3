"""What the code cites stands in the project: every document, every section, every fact.

Code says "fedpg.md section 7c", "gfpl.md, facts 5 and 12", "baselines.md 15a", "section 21 of baselines.md",
"evaluation.md V4", or, in a file about one method, just "section 7m". A document has a place for each as a heading
("## 7. ...", "### 7.1 ...") or as a number in bold at the head of a paragraph ("**7c**", "**Fact 5.**", "**V4**").
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CITING = [
    path
    for folder, suffixes in (
        ("flcore", "py"),
        ("pipelines", "py"),
        ("benchmarks", "py"),
        ("tests", "py"),
        ("infra", "yaml"),
    )
    for path in sorted((ROOT / folder).rglob(f"*.{suffixes}"))
    if path.parent != Path(__file__).parent
]
WRITTEN_BY_COMMANDS = {"comparison.md", "sweep.md", "study.md", "table.md", "claims.md", "soak.md", "file.md"}

NUMBER = r"(?:V\d+|\d+(?:\.\d+)*)(?: \([a-z]\)| ?[a-z]\b(?!\.\w))?"
NUMBERS = rf"{NUMBER}(?:(?:, (?:step |fact )?| and | to |–|-| \+ ){NUMBER})*"
WORD = r"(?P<word>sections?|parts?|facts?)"
CITED = re.compile(rf"\b(?P<document>[A-Za-z]+\.md)(?:'s)?,? (?:{WORD} )?(?P<numbers>{NUMBERS})")
REVERSED = re.compile(rf"\b{WORD} (?P<numbers>{NUMBERS}) of (?P<document>[a-z]+\.md)")
BARE = re.compile(rf"(?<!\.md )(?<!\.md, )\b(?P<word>[Ss]ections?) (?P<numbers>{NUMBERS})(?! of [a-z]+\.md)")


def text_of(path: Path) -> str:
    """With every citation on one line."""
    return re.sub(r"\s*\n\s*(?:#\s*|\* )?", " ", path.read_text(encoding="utf-8"))


def expanded(word: str, numbers: str) -> Iterator[str]:
    """Places: "2.1", "7c", "fact 5", "V4"; "21 to 23" are three; what follows a section's comma may be a fact.

    >>> list(expanded("sections", "8, 21 to 23"))
    ['8', '21', '22', '23']
    """
    prefix = "fact " if word.startswith("fact") else ""
    tokens = re.findall(rf"{NUMBER}|to|–|-", numbers)
    for place, token in enumerate(tokens):
        if token in ("to", "–", "-"):
            for between in range(int(tokens[place - 1]) + 1, int(tokens[place + 1])):
                yield f"{prefix}{between}"
        else:
            yield prefix + re.sub(r"[ ()]", "", token)


def places_in(document: Path) -> set[str]:
    text = document.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", text, re.MULTILINE)
    parts = re.findall(r"^#+ .*\(part (\d+)\)", text, re.MULTILINE)
    bold = re.findall(r"\*\*(V\d+|\d+(?:\.\d+)*[a-z]?)\*\*", text)
    facts = [f"fact {number}" for number in re.findall(r"\*\*Fact (\d+)\.\*\*", text)]
    return {*headings, *parts, *bold, *facts}


def places() -> dict[str, set[str]]:
    """Places by a document's name; ``methods/fedpg.md`` and ``internals/fedpg.md`` are two halves of one document."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in ("methods", "explanation", "internals"):
        for path in sorted((DOCS / folder).glob("*.md")):
            found[path.name] |= places_in(path)
    return dict(found)


PLACES = places()


PAGES = {path.name.lower() for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]}


def stands_in(name: str, place: str) -> bool:
    """A plain number may be a section, or within one a step or a fact; a step of a numbered list counts by its list."""
    return place in PLACES[name] or f"fact {place}" in PLACES[name]


def missing_in(path: Path) -> list[str]:
    text = text_of(path)
    cited = {name.lower() for name in re.findall(r"\b([A-Za-z]+(?:-[A-Za-z]+)*\.md)\b", text)}
    ours = {name for name in cited if name in PLACES}
    missing = sorted(cited - WRITTEN_BY_COMMANDS - PAGES)
    for match in [*CITED.finditer(text), *REVERSED.finditer(text)]:
        name = match["document"].lower()
        if name in PLACES:
            wanted = expanded(match["word"] or "", match["numbers"])
            missing += [f"{name} {place}" for place in wanted if not stands_in(name, place)]
    for match in BARE.finditer(text) if ours else ():
        wanted = expanded("section", match["numbers"])
        missing += [f"section {place}" for place in wanted if not any(stands_in(name, place) for name in ours)]
    return missing


def test_what_is_cited_is_there() -> None:
    assert {path: missing for path in CITING if (missing := missing_in(path))} == {}


def test_the_parser_reads_all_ways_of_citing() -> None:
    assert list(expanded("sections", "8, 21 to 23")) == ["8", "21", "22", "23"]
    assert list(expanded("", "1-3")) == ["1", "2", "3"]
    assert list(expanded("facts", "5 and 12")) == ["fact 5", "fact 12"]
    assert list(expanded("section", "6 (a)")) == ["6a"]
    for text, document, numbers in (
        ("(fedpg.md section 7c)", "fedpg.md", "7c"),
        ("gfpl.md, facts 5 and 12.", "gfpl.md", "5 and 12"),
        ("evaluation.md V4; FedCSPC", "evaluation.md", "V4"),
        ("baselines.md 15a: (1,2)", "baselines.md", "15a"),
        ("fedcspc.md, sections 4.7 and 8, fact 11", "fedcspc.md", "4.7 and 8, fact 11"),
    ):
        found = CITED.search(text)
        assert found is not None
        assert (found["document"], found["numbers"]) == (document, numbers)
