"""What there is: the registries as lines for people and objects for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.errors import ConfigError
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.params import declared, unknown_key
from flcore.sections import EngineConfig

KINDS = ("methods", "datasets", "partitioners", "models", "engines")

_ENGINES = {
    "local": "in the main process (workers: 0), or in a pool of processes on this machine",
    "ray": "in Ray actors with their share of CPUs and GPUs, on this machine or on a cluster (protofl[ray])",
}


def describe(kind: str) -> list[dict[str, Any]]:
    """A registry as JSON values: name, summary, parameters; for methods also citation, switches, stages and search."""
    if kind == "methods":
        return [_method(cls) for cls in METHODS.values()]
    if kind == "engines":
        return [{"name": n, "summary": s, "parameters": _params(EngineConfig)} for n, s in _ENGINES.items()]
    registries: dict[str, Mapping[str, Any]] = {"datasets": SOURCES, "partitioners": PARTITIONERS, "models": MODELS}
    registry = registries[kind]
    return [{"name": name, "summary": cls.summary, "parameters": _params(cls)} for name, cls in registry.items()]


def describe_method(name: str) -> dict[str, Any]:
    """A method, a plug-in's too, as :func:`describe` has it.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in METHODS:
        raise ConfigError(f"{unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
    return _method(METHODS[name])


def _method(cls: Any) -> dict[str, Any]:
    params = declared(cls)
    return {
        "name": cls.name,
        "summary": cls.summary,
        "citation": cls.citation,
        "file": _file_of(cls),
        "parameters": [p.describe() for p in params],
        "switches": [p.name for p in params if p.switch],
        "stages": list(cls().stages()),
        "search": {p.name: p.describe()["search"] for p in params if p.search is not None},
    }


def _file_of(cls: type) -> str:
    """Where a method is written: within the package relative to it, a plug-in's whole path."""
    if cls.__module__.startswith("flcore."):
        return f"{cls.__module__.replace('.', '/')}.py"
    return str(sys.modules[cls.__module__].__file__)


def _params(cls: Any) -> list[dict[str, Any]]:
    return [p.describe() for p in declared(cls)]


def lines(kind: str) -> list[str]:
    """One line per entry, then one per parameter."""
    out = []
    for entry in describe(kind):
        citation = f"  [{entry['citation']}]" if "citation" in entry else ""
        out.append(f"{entry['name']:20s} {entry['summary']}{citation}")
        out += [f"    {_parameter_line(p)}" for p in entry["parameters"]]
    return out


def method_lines(described: Mapping[str, Any]) -> list[str]:
    """A method for people."""
    out = [
        f"{described['name']}: {described['summary']}  [{described['citation']}]",
        f"file: {described['file']}",
        f"server stages: {', '.join(described['stages']) or 'none'}",
        f"switches: {', '.join(described['switches']) or 'none'}",
        f"parameters: {'' if described['parameters'] else 'none'}".rstrip(),
    ]
    for parameter in described["parameters"]:
        out.append(f"    {_parameter_line(parameter)}")
        if "search" in parameter:
            out.append(f"        searched: {_search(parameter['search'])}")
    return out


def _search(search: Mapping[str, Any]) -> str:
    if "choices" in search:
        return ", ".join("null" if choice is None else str(choice) for choice in search["choices"])
    return f"{search['low']:g} to {search['high']:g}" + (", on a logarithmic scale" if search["log"] else "")


def _parameter_line(parameter: Mapping[str, Any]) -> str:
    default = parameter["default"]
    shown = "null" if default is None else default
    allowed = f", {parameter['range']}" if parameter["range"] else ""
    return f"{parameter['name']} ({parameter['type']}, default {shown}{allowed}): {parameter['meaning']}"
