"""JSON Schema of a parameter file, for editors and for Prefect's parameter form; generated from the declarations.

It knows every key, type, range, choice and meaning, and the keys of each ``name``. Everything that it refuses is
invalid, but only the configuration checks rules about several keys, and the settings of a comparison's methods.

Draft 7, the newest one that YAML plug-ins of editors support completely. In a file with plug-ins, methods of any name
and keys are accepted; ``protofl schema --plugin FILE.py`` writes a schema with the entries of the plug-in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from flcore.config.sections import DEFAULT_NAMES, PLAIN, SHARED
from flcore.core.params import validator
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS

TARGET = Path("docs/params.schema.json")

Schema = dict[str, Any]

REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "data": SOURCES,
    "partition": PARTITIONERS,
    "model": MODELS,
    "method": METHODS,
}
"""Section with a ``name`` → its registry."""

_LISTED = {"data": "datasets", "partition": "partitioners", "model": "models", "method": "methods"}


def schema() -> Schema:
    """Return the schema of ``params.yaml``, with the methods that are registered now."""
    definitions: Schema = {}
    for section, cls in PLAIN.items():
        definitions[section] = _closed(f"section {section}", _properties(cls))
    for section, registry in REGISTRIES.items():
        common = SHARED[section]
        shared = _properties(common) if common else {}
        definitions[section] = _by_name(section, registry)
        for name, entry in registry.items():
            properties = {"name": {"const": name}, **shared, **_properties(entry)}
            definitions[f"{section}.{name}"] = _closed(entry.summary, properties)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "parameters of protofl",
        "type": ["object", "null"],
        "properties": {
            "seed": {"type": "integer", "minimum": 0, "default": 0, "description": "seed of the run"},
            "plugins": {
                "description": "Python files with methods, data sources, ... of one's own, relative to this file",
                "anyOf": [{"type": "array", "items": {"type": ["string", "object"]}}, {"type": "null"}],
            },
            **{section: {"$ref": f"#/definitions/{section}"} for section in (*SHARED, *PLAIN)},
        },
        "additionalProperties": False,
        "if": {"properties": {"plugins": {"type": "array", "minItems": 1}}, "required": ["plugins"]},
        "else": {"properties": _registered_alone()},
        "definitions": definitions,
    }


def text() -> str:
    """Return the schema as the text of its file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def form() -> Schema:
    """Return the schema of Prefect's parameter form: names, and the keys that all entries of a section have.

    The form supports neither conditions nor references; it accepts keys of one method or partitioner, but does not show
    them. ``tracking`` is left out, because Prefect stores the values.
    """
    sections = {section: _properties(cls) for section, cls in PLAIN.items() if section != "tracking"}
    for section, registry in REGISTRIES.items():
        common = SHARED[section]
        name = {"type": "string", "enum": list(registry), "default": DEFAULT_NAMES[section]}
        sections[section] = {"name": name, **(_properties(common) if common else {})}
    seed = {"type": "integer", "minimum": 0, "default": 0, "description": "seed of the run"}
    return {
        "type": "object",
        "title": "configuration",
        "properties": {
            "seed": seed,
            **{
                section: {"type": "object", "title": section, "properties": keys}
                for section, keys in sorted(sections.items())
            },
        },
    }


def _properties(cls: Any) -> Schema:
    properties: Schema = validator(cls).json_schema(schema_generator=_WithoutTitles)["properties"]
    return properties


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out titles, which would repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _closed(description: str, properties: Schema) -> Schema:
    return {
        "description": description,
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _by_name(section: str, registry: Mapping[str, Any]) -> Schema:
    """Return a section with keys that depend on its ``name``; without a name, on the default."""
    default = DEFAULT_NAMES[section]
    name: Schema = {"type": "string", "default": default, "description": f"see `protofl list {_LISTED[section]}`"}
    chosen = [({"properties": {"name": {"const": entry}}, "required": ["name"]}, entry) for entry in registry]
    return {
        "type": ["object", "null"],
        "properties": {"name": name},
        "allOf": [
            {"if": condition, "then": {"$ref": f"#/definitions/{section}.{entry}"}}
            for condition, entry in [*chosen, ({"not": {"required": ["name"]}}, default)]
        ],
    }


def _registered_alone() -> Schema:
    """Return the rules for files without plug-ins: registered names, or importable classes as ``module:Class``."""
    names = {"enum": list(METHODS)}
    compare = {"methods": {"items": names}, "baseline": names}
    importable = {"type": "string", "pattern": ":"}
    chosen: Schema = {
        section: {"properties": {"name": {"anyOf": [{"enum": list(registry)}, importable]}}}
        for section, registry in REGISTRIES.items()
    }
    return {**chosen, "compare": {"properties": compare}}
