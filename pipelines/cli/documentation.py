"""``docs/PARAMETERS.md``: every parameter with type, default, range and meaning, as the code declares it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flcore import sections
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.params import declared

TARGET = Path("docs/PARAMETERS.md")

_SECTIONS: tuple[tuple[str, type | None, Mapping[str, Any]], ...] = (
    ("data", sections.DataConfig, SOURCES),
    ("partition", sections.PartitionConfig, PARTITIONERS),
    ("model", sections.ModelConfig, MODELS),
    ("method", None, METHODS),
    ("federation", sections.FederationConfig, {}),
    ("local", sections.LocalConfig, {}),
    ("engine", sections.EngineConfig, {}),
    ("evaluation", sections.EvaluationConfig, {}),
    ("tracking", sections.TrackingConfig, {}),
    ("compare", sections.CompareConfig, {}),
)


def text() -> str:
    """The whole page."""
    parts = [
        "# Parameters\n\n"
        "Written by `make docs` from the declarations in `flcore/`; do not edit. `seed` stands by itself, and so does\n"
        "`plugins`, a list of files with methods of one's own (`protofl new method`), relative to the parameter file;\n"
        "every other key stands in a section. Where a section has a `name`, the chosen entry's keys stand beside it.\n"
    ]
    for section, common, registry in _SECTIONS:
        parts.append(f"## {section}\n")
        if common is not None:
            parts.append(_table(section, common))
        for name, entry in registry.items():
            parts.append(f"### `{section}.name: {name}`\n\n{entry.summary}\n")
            if declared(entry):
                parts.append(_table(section, entry))
    return "\n".join(parts)


def _table(section: str, cls: type) -> str:
    rows = ["| key | type | default | allowed | meaning |", "| :--- | :--- | :--- | :--- | :--- |"]
    for parameter in declared(cls):
        entry = parameter.describe()
        cells = (
            f"`{section}.{entry['name']}`",
            entry["type"],
            f"`{_show(entry['default'])}`",
            entry["range"],
            entry["meaning"],
        )
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def main() -> int:
    """Write the page."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
