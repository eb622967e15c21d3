"""Registry entries with their parameters, as objects for programs and lines for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flcore.config.sections import EngineConfig
from flcore.core.errors import ConfigError
from flcore.core.params import declared
from flcore.core.text import to_yaml, unknown_key
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.sampling import SAMPLERS
from pipelines.cli.headlines import SHOWN, headlines

_REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "datasets": SOURCES,
    "partitioners": PARTITIONERS,
    "models": MODELS,
    "samplers": SAMPLERS,
}


def describe(kind: str) -> list[dict[str, Any]]:
    """Return every entry of one of :data:`pipelines.cli.headlines.KINDS` as JSON values: name, summary and parameters.

    Methods also have citation, switches, stages and search; entries with a file of their own have its path.
    """
    if kind == "methods":
        return [_method(cls) for cls in METHODS.values()]
    if kind in _REGISTRIES:
        return [_entry(cls) for cls in _REGISTRIES[kind].values()]
    parameters = _params(EngineConfig) if kind == "engines" else []
    return [{"name": h.name, "summary": h.summary, "parameters": parameters} for h in headlines(kind)]


def describe_one(kind: str, name: str) -> dict[str, Any]:
    """Return an entry, or a plug-in's, in the format of :func:`describe`.

    Raises:
        ConfigError: there is none of this name.
    """
    entries = {entry["name"]: entry for entry in describe(SHOWN[kind])}
    if name not in entries:
        raise ConfigError(unknown_key(name, name, entries).replace("key", kind, 1))
    return entries[name]


def _method(cls: Any) -> dict[str, Any]:
    params = declared(cls)
    return {
        **_entry(cls),
        "citation": cls.citation,
        "switches": [p.name for p in params if p.switch],
        "stages": list(cls().server_steps()),
        "search": {p.name: p.describe()["search"] for p in params if p.search is not None},
    }


def _entry(cls: Any) -> dict[str, Any]:
    """Return an entry; its file is relative for the package, absolute for a plug-in."""
    module = cls.__module__
    file = f"{module.replace('.', '/')}.py" if module.startswith("flcore.") else str(sys.modules[module].__file__)
    return {"name": cls.name, "summary": cls.summary, "file": file, "parameters": _params(cls)}


def _params(cls: Any) -> list[dict[str, Any]]:
    return [p.describe() for p in declared(cls)]


def lines(described: Mapping[str, Any]) -> list[str]:
    """Return the lines that describe an entry."""
    citation = f"  [{described['citation']}]" if "citation" in described else ""
    out = [f"{described['name']}: {described['summary']}{citation}"]
    if "file" in described:
        out.append(f"file: {described['file']}")
    if "stages" in described:
        out.append(f"server steps: {', '.join(described['stages']) or 'none'}")
        out.append(f"switches: {', '.join(described['switches']) or 'none'}")
    out.append("parameters:" if described["parameters"] else "parameters: none")
    for parameter in described["parameters"]:
        allowed = f", {parameter['range']}" if parameter["range"] else ""
        default = to_yaml(parameter["default"])
        facts = f"{parameter['type']}, default {default}{allowed}"
        out.append(f"    {parameter['name']} ({facts}): {parameter['meaning']}")
        if "search" in parameter:
            out.append(f"        searched: {searched(parameter['search'])}")
    return out


def searched(search: Mapping[str, Any]) -> str:
    """Return a parameter's search space, as :meth:`flcore.core.params.Param.describe` returns it, in words."""
    if "choices" in search:
        return ", ".join(to_yaml(choice) for choice in search["choices"])
    high = "what the data allow" if search["high"] is None else f"{search['high']:g}"
    return f"{search['low']:g} to {high}" + (", on a logarithmic scale" if search["log"] else "")
