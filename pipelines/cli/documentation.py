"""Reference pages generated from declarations: commands, parameters, methods; and the schema for editors.

``python -m pipelines.cli.documentation`` writes them; a test compares them with its output.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flcore.config.sections import PLAIN, SHARED
from flcore.core.params import declared
from flcore.core.text import to_yaml
from flcore.methods import METHODS
from pipelines.cli import registry
from pipelines.cli.commands import command_names, make_app
from pipelines.cli.headlines import headlines, names
from pipelines.cli.help import help_text
from pipelines.cli.options import OF_EVERY_COMMAND
from pipelines.papers.verdicts.claims_page import published_page
from pipelines.plan import schema
from pipelines.runs.layout import write_text

REFERENCE = Path("docs/reference")
CLAIMS = Path("docs/claims.md")

_WIDTH = 90  # what the site shows without scrolling
_WRITTEN = "<!-- Written from the declarations by `make docs`; do not edit. -->\n"
_OPTION = re.compile(r"^  --.*\n(?: {8,}\S.*\n)*", re.MULTILINE)
_OF_SEVERAL = 3  # commands with the same option: it is listed once for all
_SHARED_BY = 2  # methods with the same parameter, default and meaning: it is listed once


def pages() -> dict[Path, str]:
    """Return every generated file, relative to the project, with its content."""
    return {
        REFERENCE / "commands.md": commands_page(),
        REFERENCE / "parameters.md": parameters_page(),
        REFERENCE / "methods.md": methods_page(),
        CLAIMS: published_page(),
        schema.TARGET: schema.text(),
    }


# ----------------------------------------------------------------------------------------------------------- commands


def commands_page() -> str:
    """Return the page of all commands: their help texts, with options that several commands have printed once."""
    app = make_app(with_benchmarks=False)
    texts = {f"protofl {name}": f"{help_text(app, name.split(), _WIDTH)}\n" for name in command_names(app)}
    uses = Counter(_option(entry[0]) for text in texts.values() for entry in _OPTION.finditer(text))
    shared = [option for option, number in uses.items() if number >= _OF_SEVERAL]
    parts = [
        "# Commands\n",
        _WRITTEN,
        "Options go by their whole names.\n",
        _verbatim(help_text(app, [], _WIDTH).partition("\n\nbegin with:")[0]),
        "Exit codes: [errors](errors.md).\n",
        "## Options of several commands\n",
        "Every command has `--debug`, `--plugin` and `--help`; the usage says which of the others. An option listed\n"
        "with a command has the meaning given there.\n",
        _list(f"`{written}`: {_plain(meaning)}" for written, meaning in shared),
    ]
    for name, text in texts.items():
        special = _OPTION.sub(lambda entry: "" if _option(entry[0]) in shared else entry[0], text)
        special = re.sub(rf"\n(?:options|{OF_EVERY_COMMAND.name}):\n(?=\n|$)", "", special)
        parts.append(f"## {name}\n\n{_verbatim(special.rstrip())}")
    return "\n".join(parts)


def _option(entry: str) -> tuple[str, str]:
    """Return an option of a help text as typed, and its meaning."""
    written, meaning = re.split(r"\s{2,}", entry.strip(), maxsplit=1)
    return written, " ".join(meaning.split())


# --------------------------------------------------------------------------------------------------------- parameters


def parameters_page() -> str:
    """Return the page of all keys of a parameter file except the methods' own."""
    parts = [
        "# Parameters\n",
        _WRITTEN,
        "Keys of `params.yaml`. A missing key has its default; `--set KEY=VALUE` overrides. Contradicting values are\n"
        "refused. Where a section has a `name`, the chosen entry's keys are in the same section.\n"
        "Two keys are outside the sections: `seed` (default `0`), and `plugins`, a list of files with\n"
        "[your own](../how-to/plugins.md) methods, data sources, partitioners, models and client samplers, relative\n"
        "to the parameter file. `protofl schema` prints the JSON Schema for editors.\n",
    ]
    for section, common in {**SHARED, **PLAIN}.items():
        parts.append(f"## {section}\n")
        if common is not None:
            parts.append(_list(_parameters(section, common).values()))
        if section == "method":
            parts.append("`method.name` and the keys of each method: see [methods](methods.md).\n")
            continue
        first: dict[str, str] = {}
        for name, entry in schema.REGISTRIES.get(section, {}).items():
            parts.append(f"### {section}.name: {name}\n\n{_plain(entry.summary)}\n")
            lines = _parameters(section, entry)
            special = [line for line in lines.values() if line not in first]
            for earlier in dict.fromkeys(first[line] for line in lines.values() if line in first):
                same = ", ".join(f"`{section}.{key}`" for key, line in lines.items() if first.get(line) == earlier)
                special.append(f"{same}: as for {earlier}.")
            first = dict.fromkeys(lines.values(), name) | first
            if special:
                parts.append(_list(special))
    return "\n".join(parts)


def _parameters(section: str, cls: Any) -> dict[str, str]:
    """Return a line for each parameter of a class, by name."""
    return {parameter.name: _parameter(section, parameter.describe()) for parameter in declared(cls)}


def _parameter(section: str, entry: Mapping[str, Any]) -> str:
    """Return ``key: default``: meaning (type and range, as far as the default does not show them; search space)."""
    is_choice = entry["range"].startswith("one of") and "list" not in entry["type"]
    is_shown = is_choice or entry["type"] in ("bool", "float", "int", "str")
    facts = ["" if is_shown else entry["type"].removesuffix(" or null"), _plain(_short(entry["range"]))]
    if "search" in entry:
        facts.append("tuned: " + registry.searched(entry["search"]).replace("on a logarithmic scale", "log"))
    words = f"`{section}.{entry['name']}: {to_yaml(entry['default'])}`: {_plain(entry['meaning'])}".rstrip(".")
    return f"{words} ({'; '.join(fact for fact in facts if fact)}).".replace(" ()", "")


def _short(limits: str) -> str:
    """Return a range in fewer words: ``a|b`` for a choice, ``1 to 9`` for an interval with its ends."""
    if limits.startswith("one of ") and len(limits) < _WIDTH:
        return limits.removeprefix("one of ").replace(", ", "|")
    return re.sub(r"^>= (\S+) and <= (\S+)$", r"\1 to \2", limits)


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


# ------------------------------------------------------------------------------------------------------------ methods


def methods_page() -> str:
    """Return the page of all methods of the package: summary, source and parameters."""
    summaries = [(f"[`{e.name}`](#{e.name})", _plain(e.summary)) for e in headlines("methods")]
    parameters = {name: _parameters("method", METHODS[name]) for name in names("methods")}
    uses = Counter(line for lines in parameters.values() for line in lines.values())
    shared = [line for line, number in uses.items() if number >= _SHARED_BY]
    parts = [
        "# Methods\n",
        _WRITTEN,
        "What `method.name` and `compare.methods` choose from; `protofl show method NAME` prints the same. Equations\n"
        "and deviations from the paper are at the top of each file. Unless it says otherwise, a method answers with\n"
        "one global model and has the server step `aggregate`. A switch is a part that an ablation turns off.\n",
        _table(("method", "what it is"), summaries),
        "## Shared parameters\n\nSeveral methods have these; each method below names its own.\n",
        _list(shared),
    ]
    for name, lines in parameters.items():
        facts = ". ".join(_facts(registry.describe_one("method", name)))
        also = ", ".join(f"`{key}`" for key, line in lines.items() if line in shared)
        parts.append(f"## {name}\n\n{facts}.{f' Shared parameters: {also}.' * bool(also)}\n")
        if special := [line for line in lines.values() if line not in shared]:
            parts.append(_list(special))
    return "\n".join(parts)


def _facts(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the source of a method, and what differs from FedAvg."""
    method = METHODS[described["name"]]()
    yield f"{_plain(described['citation'])} (`{described['file']}`)"
    if method.data_scope == "union":
        yield "Trains at the server, on the data of all clients"
    elif method.trains == "all":
        yield "Trains every client in every round"
    if not method.has_global_model:
        vote = "; their majority vote is scored too" if method.has_vote else ""
        yield f"Each client answers with its own model{vote}"
    stages = [] if described["stages"] == ["aggregate"] else described["stages"]
    for fact, words in (("Server steps", stages), ("Switches", described["switches"])):
        if words:
            yield f"{fact}: {', '.join(f'`{word}`' for word in words)}"
    if method.required_config:
        needs = (f"`{key}` = {' or '.join(map(to_yaml, values))}" for key, values in method.required_config.items())
        yield f"Needs {', '.join(needs)}"


# ----------------------------------------------------------------------------------------------------------- Markdown


def _table(columns: tuple[str, ...], rows: list[Any]) -> str:
    lines = [columns, [":---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines) + "\n"


def _verbatim(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _plain(text: str) -> str:
    """Escape Markdown: angle brackets would be tags, asterisks emphasis."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def main() -> int:
    """Write all pages."""
    for path, content in pages().items():
        write_text(path, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
