"""Parameters by which a run is compared with others; the rest is only in its ``config.json``.

A parameter counts that identifies the run or sets its amount of work (seed, names, :data:`ALWAYS`), that tuning explores
or an ablation switches off, or that does not have its default value. So every run of a sweep has the swept column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flcore.config.stored import without_removed
from flcore.core.params import declared
from flcore.config.sections import PLAIN, SHARED

if TYPE_CHECKING:
    from flcore.config.schema import Config

ALWAYS = frozenset(
    {
        "partition.num_clients",
        *(f"partition.{key}" for key in ("alpha", "classes", "share", "shards", "ways", "shots")),
        "federation.rounds",
        "federation.participation",
        *(f"local.{key}" for key in ("epochs", "steps", "batch_size", "optimizer", "lr")),
    }
)
"""Dotted keys that count even with their default value."""


_NOTHING_SPECIAL = {"engine.stack": "false", "engine.compile": "none"}
"""Key → value that counts as little as the default ``auto``, which chooses it for most runs."""


def compared_by(config: Config) -> list[str]:
    """Return the dotted keys of a run's identity that count, in order."""
    chosen = {"data": config.source, "partition": config.partitioner, "model": config.model_spec}
    declarations = {section: [type(entry), SHARED[section]] for section, entry in chosen.items()}
    declarations |= {"method": [type(config.method)], **{section: [cls] for section, cls in PLAIN.items()}}
    known = {
        f"{section}.{parameter.name}": parameter
        for section, classes in declarations.items()
        for cls in classes
        if cls is not None
        for parameter in declared(cls)
    }

    def counts(key: str, text: str) -> bool:
        parameter = known.get(key)
        if key in ALWAYS or parameter is None:  # seed, names, plug-ins, nested keys of a parameter
            return True
        if parameter.search is not None or parameter.switch:
            return True
        return text not in (_text(parameter.default), _NOTHING_SPECIAL.get(key))

    return [key for key, text in flatten(without_removed(config.identity())).items() if counts(key, text)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as text: keys joined by dots, lists as JSON, strings unchanged.

    >>> flatten({"partition": {"alpha": 0.1, "sizes": [1, 2]}, "seed": 3})
    {'partition.alpha': '0.1', 'partition.sizes': '[1, 2]', 'seed': '3'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = _text(value)
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
