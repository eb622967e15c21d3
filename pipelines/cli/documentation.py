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

_WIDTH = 100
_WRITTEN = "<!-- Written from the declarations by `make docs`; do not edit. -->\n"
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
    """Return the page of all commands: their help texts, with the options of every command once."""
    app = make_app(with_benchmarks=False)
    texts = {f"protofl {name}": help_text(app, name.split(), _WIDTH) for name in command_names(app)}
    common = re.compile(rf"\n\n{OF_EVERY_COMMAND.name}:(?:\n  .*)+")
    of_every_command = common.findall(texts["protofl run"])[0].strip()
    intro = f"{help_text(app, [], _WIDTH)}\n\noptions {of_every_command}"
    return "\n".join(
        ["# Commands\n", _WRITTEN, "Options go by their whole names.\n", _verbatim(intro)]
        + [f"## {name}\n\n{_verbatim(common.sub('', text))}" for name, text in texts.items()]
    )


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
        for name, entry in schema.REGISTRIES.get(section, {}).items():
            parts.append(f"### {section}.name: {name}\n\n{_plain(entry.summary)}\n")
            if declared(entry):
                parts.append(_list(_parameters(section, entry).values()))
    return "\n".join(parts)


def _parameters(section: str, cls: Any) -> dict[str, str]:
    """Return a line for each parameter of a class, by name."""
    return {parameter.name: _parameter(section, parameter.describe()) for parameter in declared(cls)}


def _parameter(section: str, entry: Mapping[str, Any]) -> str:
    is_choice = entry["range"].startswith("one of") and "list" not in entry["type"]
    facts = [f"Default `{to_yaml(entry['default'])}`", "" if is_choice else entry["type"], _plain(entry["range"])]
    if "search" in entry:
        facts.append("tuned: " + registry.searched(entry["search"]).replace(", on a logarithmic scale", " (log)"))
    words = f"`{section}.{entry['name']}`: {_plain(entry['meaning'])}".rstrip(".")
    return f"{words}. {'; '.join(fact for fact in facts if fact)}."


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
        "and deviations from the paper are at the top of each file. A switch is a part that an ablation turns off.\n",
        _table(("method", "what it is"), summaries),
        "## Shared parameters\n\nSeveral methods have these; each method below names its own.\n",
        _list(shared),
    ]
    for name, lines in parameters.items():
        also = [f"`{key}`" for key, line in lines.items() if line in shared]
        facts = [*_facts(registry.describe_one("method", name)), *([f"shared: {', '.join(also)}"] if also else [])]
        special = [line for line in lines.values() if line not in shared]
        parts += [f"## {name}\n", _list(facts), *(["Parameters:\n", _list(special)] if special else [])]
    return "\n".join(parts)


def _facts(described: Mapping[str, Any]) -> Iterator[str]:
    method = METHODS[described["name"]]()
    yield f"source: {_plain(described['citation'])} (`{described['file']}`)"
    if method.data_scope == "union":
        yield "trains: at the server, on the data of all clients"
    elif method.trains == "all":
        yield "trains: every client in every round"
    vote = "; their majority vote is scored too" if method.has_vote else ""
    yield f"answers: {'one global model' if method.has_global_model else f'each client with its own model{vote}'}"
    for fact, words in (("server steps", described["stages"]), ("switches", described["switches"])):
        if words:
            yield f"{fact}: {', '.join(f'`{word}`' for word in words)}"
    if method.required_config:
        needs = (f"`{key}` = {' or '.join(map(to_yaml, values))}" for key, values in method.required_config.items())
        yield f"needs: {', '.join(needs)}"


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
