"""What there is: the registries as lines for people and objects for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.params import declared
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


def _method(cls: Any) -> dict[str, Any]:
    params = declared(cls)
    return {
        "name": cls.name,
        "summary": cls.summary,
        "citation": cls.citation,
        "parameters": [p.describe() for p in params],
        "switches": [p.name for p in params if p.switch],
        "stages": list(cls().stages()),
        "search": {p.name: p.describe()["search"] for p in params if p.search is not None},
    }


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


def _parameter_line(parameter: Mapping[str, Any]) -> str:
    default = parameter["default"]
    shown = "null" if default is None else default
    allowed = f", {parameter['range']}" if parameter["range"] else ""
    return f"{parameter['name']} ({parameter['type']}, default {shown}{allowed}): {parameter['meaning']}"
