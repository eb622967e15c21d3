"""The site: it builds without a warning and needs no network, its commands are commands, its names are names."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from cyclopts.exceptions import CycloptsError

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from pipelines.cli.commands import make_app
from pipelines.cli.usage import usage_error
from pipelines.plan.files import read_params
from pipelines.plan.params import for_entry, override

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "infra" / "README.md"]
OF_THE_SITE = [page for page in PAGES if page.is_relative_to(DOCS) and page.parent.name != "internals"]


def build(builder: str, target: Path) -> Path:
    """Build the site; a warning, such as of a link to nowhere, is an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, str(DOCS), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("html", tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build("dummy", tmp_path)  # all but writing HTML


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and images: links that a person follows may lead anywhere."""
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+rel="?stylesheet[^>]+//""")
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_every_page_is_reached_from_the_first(site: Path) -> None:
    menu = (site / "index.html").read_text(encoding="utf-8")
    for page in OF_THE_SITE:
        address = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert address == "index.html" or f'href="{address}"' in menu, address


def test_links_of_the_pages_outside_the_site_lead_somewhere() -> None:
    for page in {*PAGES} - {*OF_THE_SITE}:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_idioms_stay_few() -> None:
    """Idioms cost readers whose first language is another one; the same rule holds for ``flcore`` (test_words.py)."""
    idioms = re.compile(
        r"\b(who(ever|m)|whatever|nobody|(is|are|was|were|be) told|stands? (in|on|for|at|there)|beside|anew"
        r"|go(ne|es)? on with|carr(y|ies|ied) out|so (many|much)|lies? (in|at|below)|under way|of one's own)\b",
        re.IGNORECASE,
    )
    pages = [page for page in PAGES if page.parent.name != "internals"]
    found = [
        (page.name, line) for page in pages for line in page.read_text("utf-8").splitlines() if idioms.search(line)
    ]
    assert len(found) < 15, found


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``protofl`` line of a shell block, as (page, arguments)."""
    for page in PAGES:
        if page.parent.name == "reference":
            continue  # written from the declarations
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["protofl"]:
                    yield page.relative_to(ROOT).as_posix(), words[1:]


@pytest.mark.parametrize(("page", "arguments"), list(commands()), ids=lambda value: " ".join(value)[:60])
def test_commands_are_accepted(page: str, arguments: list[str]) -> None:
    try:
        _, bound, _ = make_app().parse_args(arguments)
    except CycloptsError as error:
        pytest.fail(f"{page}: {usage_error(error)}")
    given = bound.arguments
    values = given.get("values") or given.get("selection")
    assignments = given.get("assignments", getattr(values, "assignments", ()))
    if assignments and not getattr(values, "plugins", ()):  # plug-ins have their own keys
        named = ROOT / (getattr(values, "params", None) or "params.yaml")
        params = named if named.exists() else ROOT / "params.yaml"
        # Refused, it says which key and why.
        check(params, assignments, given.get("method"))


def check(params: Path, assignments: Sequence[str], method: str | None = None) -> None:
    """Refuse what a run of a parameter file would refuse."""
    named = [] if method is None else [f"method.name={method}"]
    Config.from_mapping(for_entry(override(read_params(params), [*named, *assignments]), method, None))


@pytest.mark.parametrize("assignment", ["local.alpha=1", "method.mu=1", "partition.lr=1"])
def test_a_key_of_another_section_or_method_would_be_found(assignment: str) -> None:
    with pytest.raises(ConfigError, match=assignment.partition("=")[0]):
        check(ROOT / "params.yaml", [assignment])


def test_figures_of_a_run_are_documented() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    tree = ast.parse((ROOT / "flcore" / "evaluation" / "summaries.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "summarise_run")
    (written,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    keys = [key.value for node in ast.walk(written) if isinstance(node, ast.Dict) for key in node.keys if key]
    assert len(keys) > 30
    assert not [key for key in keys if f"`{key}`" not in text]


def test_registered_names_are_in_the_contract() -> None:
    from flcore.data.partitioners import PARTITIONERS
    from flcore.data.sources import SOURCES
    from flcore.methods.registry import METHODS

    text = (DOCS / "internals" / "contract.md").read_text(encoding="utf-8")
    for registry in (METHODS, SOURCES, PARTITIONERS):
        assert not [name for name in registry if f"`{name}`" not in text]


def test_the_citation_file_says_what_the_package_says() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == "Apache-2.0"
    assert "protofl" in cited["title"]
