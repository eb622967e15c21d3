"""Early refusal of mistyped keys and values, without importing torch.

:class:`~flcore.config.schema.Config` checks everything again, but imports torch, which takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import flcore
from flcore.config.imports import closure
from flcore.config.sections import DEFAULT_NAMES, PLAIN, SECTIONS, own_keys
from flcore.core.errors import ConfigError
from flcore.core.params import build
from flcore.core.text import nearest, shorten, to_yaml, unknown_key
from pipelines.cli.headlines import places

_ROOT = Path(flcore.__file__).parents[1]
_LISTED = {"data": "datasets", "partition": "partitioners", "model": "models", "method": "methods"}
_DECLARATION = re.compile(rb"^    (\w+)\s*:[^\n=]*=\s*(?:\(\s*)?param\(", re.MULTILINE)


def refuse_typos(raw: Mapping[str, Any]) -> None:
    """Refuse unknown sections, keys and names, and wrong values of sections without a ``name``.

    Args:
        raw: parameters, not yet validated. With plug-ins, names and keys of entries are not checked.

    Raises:
        ConfigError: with the configuration's own message; for an unknown key of an entry, without the valid ones.
    """
    for key in raw:
        if key not in SECTIONS:
            raise ConfigError(unknown_key(shorten(key), key, SECTIONS))
    for name, section in PLAIN.items():
        if isinstance(raw.get(name), Mapping):
            build(section, raw[name], name)
    for name in () if raw.get("plugins") else _LISTED:
        if isinstance(raw.get(name), Mapping):
            _check_entry(name, raw[name])
    compare = raw.get("compare")
    for kind in ("settings", "variants"):
        rows = compare.get(kind) if isinstance(compare, Mapping) else None
        for name, values in rows.items() if isinstance(rows, Mapping) else ():
            if isinstance(values, Mapping):
                refuse_typos(_sections({"plugins": raw.get("plugins"), "method.name": name, **values}))


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters from the dotted keys of a method's settings, or of a variant with its ``method``."""
    found: dict[str, Any] = {"plugins": values["plugins"]}
    named = {"method.name": values["method"]} if "method" in values else {}
    for key, value in {**values, **named}.items():
        section, _, rest = str(key).partition(".")
        if rest and "." not in rest:  # deeper keys are part of a value
            found.setdefault(section, {})[rest] = value
    return found


def _check_entry(section: str, values: Mapping[str, Any]) -> None:
    entries, chosen = places(_LISTED[section]), values.get("name", DEFAULT_NAMES[section])
    if not isinstance(chosen, str) or ":" in chosen:  # a user's class
        return
    if chosen not in entries:
        near = nearest(chosen, entries)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{section}.name = {to_yaml(chosen)}: must be one of {', '.join(entries)}{hint}")
    unknown = [key for key in values if key not in own_keys(section)]
    if not unknown:
        return
    room = ".".join(entries[chosen].split(".")[:2])  # such as flcore.methods
    everywhere = _declared(path.read_bytes() for path in _ROOT.joinpath(*room.split(".")).rglob("*.py"))
    for key in unknown:
        if key in everywhere:
            continue  # of this entry or another one
        near = nearest(key, own_keys(section) | declared_by(entries[chosen]))
        if near:
            raise ConfigError(f"{section}.{shorten(key)}: unknown key; did you mean {near!r}?")


def declared_by(place: str) -> set[str]:
    """Return the parameters that an entry's module, and the modules of its room that it imports, declare.

    Args:
        place: of the entry, as ``module:Class``.
    """
    module = place.partition(":")[0]
    room = ".".join(module.split(".")[:2])

    def source_of(name: str) -> bytes | None:
        path = _ROOT.joinpath(*name.split(".")).with_suffix(".py")
        return path.read_bytes() if name.startswith(f"{room}.") and path.is_file() else None

    return _declared(closure([module], source_of).values())


def _declared(sources: Iterable[bytes]) -> set[str]:
    return {name.decode() for source in sources for name in _DECLARATION.findall(source)}
