"""From ``params.yaml`` and ``--set`` to the parameters of a run, not yet validated; mostly without torch.

The command line overrides ``compare.settings``, which override the rest of the file. A method's ``compare.settings``
apply whether it runs alone or in a comparison: the same file and the same method are the same run.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flcore.config.sections import DEFAULT_NAMES, SECTIONS, own_keys
from flcore.core.errors import ConfigError
from flcore.core.text import shorten, unknown_key
from pipelines.plan import yaml_text

Given = tuple[str, tuple[str, ...], Any]
"""An option as typed, the parts of the key that it sets, and the value."""

OWN_MODELS: Mapping[str, str] = {"protolda": "patch_dictionary", "protolda_blocks": "patch_dictionary"}
"""Methods that work with one model only; repeated from their ``needs``, as reading those imports torch."""


def override(raw: Mapping[str, Any], assignments: Iterable[str], options: Sequence[Given] = ()) -> dict[str, Any]:
    """Apply ``KEY=VALUE`` assignments with dotted keys; values are read as YAML.

    A key that is set here is dropped from ``compare.settings``, so that it applies to every method.

    ``options`` are others that set keys and are applied elsewhere; an assignment must not contradict one.

    Raises:
        ConfigError: an assignment has no ``=``, a key does not exist, or two options contradict each other.
    """
    pairs = [_split(assignment) for assignment in assignments]
    given = [(f"--set {shorten(key)}", tuple(key.split(".")), value) for key, value in pairs]
    _refuse_conflicts([*given, *options])
    result = _assigned(raw, pairs, "--set ")
    compare = result.get("compare")
    settings = compare.get("settings") if isinstance(compare, dict) else None
    for own in settings.values() if isinstance(settings, dict) else ():
        for key in list(own) if isinstance(own, dict) else ():
            if any(str(key) == given or str(key).startswith(f"{given}.") for given, _ in pairs):
                del own[key]
    return result


def _refuse_conflicts(given: Sequence[Given]) -> None:
    """Refuse two options if one would silently replace the other; equal values are allowed."""
    for (words, key, value), (later_words, later_key, later_value) in itertools.combinations(given, 2):
        common = min(len(key), len(later_key))
        if key[:common] != later_key[:common]:
            continue
        first, second = _at(value, later_key[common:]), _at(later_value, key[common:])
        # A later section replaces its keys that were set before; a later key is added to an earlier section.
        is_lost = second is _ABSENT or (first is not _ABSENT and repr(first) != repr(second))
        if is_lost and words == later_words:
            raise ConfigError(f"{words} is given twice, with different values; leave one of them out")
        if is_lost:
            raise ConfigError(f"{words} and {later_words} contradict each other; leave one of them out")


_ABSENT = object()


def _at(value: Any, key: Sequence[str]) -> Any:
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def with_values(raw: Mapping[str, Any], values: Mapping[str, Any], origin: str = "") -> dict[str, Any]:
    """Return parameters with other values, by dotted key.

    Another ``name`` in a section (another method, partitioner, ...) drops the keys of the section's earlier choice,
    which would be errors. Values given for such keys here remain, in any order. So do keys that the earlier choice
    lacks: they are for the new one, or are mistakes that are reported later.

    Raises:
        ConfigError: a key does not exist; the message names it with the prefix ``origin``.
    """
    return _assigned(raw, list(values.items()), origin)


def _assigned(raw: Mapping[str, Any], pairs: Sequence[tuple[str, Any]], origin: str) -> dict[str, Any]:
    result = copy.deepcopy(dict(raw))
    for key, value in pairs:
        section, _, rest = key.partition(".")
        current = result.get(section)
        if section not in DEFAULT_NAMES or rest != "name" or not isinstance(current, dict):
            continue
        if current.get("name", DEFAULT_NAMES[section]) != value:
            result[section] = _without_the_choices(section, current)
    for key, value in pairs:
        section = key.partition(".")[0]
        if section not in SECTIONS:
            raise ConfigError(f"{origin}{shorten(key)}: {unknown_key(section, section, SECTIONS)}")
        _assign(result, key.split("."), value, origin)
    return result


def _without_the_choices(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without the parameters of its named entry; for an unknown name, the whole section."""
    kept = {key: value for key, value in values.items() if key in own_keys(section)}
    if len(kept) == len(values):
        return kept
    from flcore.config.schema import REGISTRIES
    from flcore.core.params import declared

    chosen, registry = values.get("name", DEFAULT_NAMES[section]), REGISTRIES[section]
    if not isinstance(chosen, str) or chosen not in registry:
        return kept
    meant = {param.name for param in declared(registry[chosen])}
    return {key: value for key, value in values.items() if key in kept or key not in meant}


def _split(assignment: str, option: str = "--set") -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{option} {shorten(assignment)}: expected KEY=VALUE, such as --set local.lr=0.05")
    try:
        return key.strip(), yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {shorten(assignment)}: the value is not valid YAML: {error}") from error


def _assign(mapping: dict[str, Any], keys: list[str], value: Any, origin: str) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        inner = mapping.setdefault(key, {})
        if inner is None:
            inner = mapping[key] = {}
        if not isinstance(inner, dict):
            place = shorten(".".join(keys[:depth]))
            raise ConfigError(f"{origin}{shorten('.'.join(keys))}: {place} is a value, not a section")
        mapping = inner
    mapping[keys[-1]] = value


def for_entry(
    raw: Mapping[str, Any], entry: str | None, seed: int | None, partition_seed: int | None = None
) -> dict[str, Any]:
    """Return the parameters of one run: its method with its ``compare.settings``, and its seed.

    ``model.name`` of the file is for every method. A method that works with another model only brings that one
    (:func:`own_model`), unless its settings or its variant name a model.

    Args:
        raw: parameters from a file, overridden.
        entry: a method, or one of ``compare.variants``, which override all else; None: the configured method.
        seed: None: the configured one. partition_seed: likewise.

    Raises:
        ConfigError: ``compare.settings`` of the method, or the variant's, are not a mapping from dotted keys to values.
    """
    variant = None if entry is None else _of_comparison(raw, "variants").get(entry)
    method = variant.get("method") if isinstance(variant, Mapping) else entry
    result = with_values(raw, {} if method is None else {"method.name": method})
    name = _method_named(result.get("method"))
    if (brought := own_model(result, name)) is not None:
        result = with_values(result, {"model.name": brought})
    if name is not None:
        place = f"compare.settings.{name}"
        result = with_values(result, _values_of(_of_comparison(raw, "settings").get(name), place), f"{place}: ")
    if isinstance(variant, Mapping):
        place = f"compare.variants.{entry}"
        own = {key: value for key, value in variant.items() if key != "method"}
        result = with_values(result, _values_of(own, place), f"{place}: ")
    if partition_seed is not None:
        result = with_values(result, {"partition.seed": partition_seed})
    return result if seed is None else {**result, "seed": seed}


def own_model(raw: Mapping[str, Any], method: str | None) -> str | None:
    """Return the only model that a method works with, if the parameters name another one; else None."""
    section = raw.get("model")
    named = section.get("name") if isinstance(section, Mapping) else None
    own = OWN_MODELS.get(method) if isinstance(method, str) else None
    return None if named is None or named == own else own


def brought_models(raw: Mapping[str, Any], rows: Iterable[str | None], assignments: Iterable[str] = ()) -> list[str]:
    """Return a line for each model that methods bring in place of the configured one.

    ``rows`` are methods and variants; None is the configured method.

    Raises:
        ConfigError: an assignment sets ``model.name``, and a method cannot work with it.
    """
    by_model: dict[str, list[str]] = {}
    said = {key for key, _ in map(_split, assignments)} & {"model", "model.name"}
    for row in rows:
        variant = _of_comparison(raw, "variants").get(row) if row else None
        own = variant if isinstance(variant, Mapping) else {}
        name = own.get("method", row) if row else _method_named(raw.get("method"))
        brought = own_model(raw, name)
        settings = _of_comparison(raw, "settings").get(str(name))
        if brought is None or "model.name" in own or (isinstance(settings, Mapping) and "model.name" in settings):
            continue
        if said:
            model = shorten(raw["model"]["name"])
            raise ConfigError(f"--set model.name={model}: {name} works with {brought} alone; leave it out")
        by_model.setdefault(brought, []).append(str(row or name))
    return [
        f"{', '.join(dict.fromkeys(rows))}: with a model of its own, {model}, not model.name = {raw['model']['name']}"
        for model, rows in by_model.items()
    ]


def compared_rows(raw: Mapping[str, Any], methods: Sequence[str] | None) -> list[str]:
    """Return the rows of a comparison: the named methods, else ``compare.methods``, and all variants."""
    compare = raw.get("compare")
    listed = methods or (compare.get("methods") if isinstance(compare, Mapping) else None)
    named = [str(name) for name in listed] if isinstance(listed, list | tuple) else []
    return list(dict.fromkeys([*named, *map(str, _of_comparison(raw, "variants"))]))


def with_variants(raw: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return parameters with additional variants, such as ``slow=fedavg,local.lr=0.001``; values are read as YAML.

    Raises:
        ConfigError: a text has no name and method, or an assignment no value.
    """
    variants = {**_of_comparison(raw, "variants"), **{name: value for _, (*_, name), value in variants_of(texts)}}
    compare = raw.get("compare")
    own = dict(compare) if isinstance(compare, Mapping) else {}
    return {**raw, "compare": {**own, "variants": variants}} if texts else dict(raw)


def variants_of(texts: Sequence[str]) -> list[Given]:
    """Return the variants of ``--variant``, as options that set keys; ConfigError: a key has two values in one."""
    found: list[Given] = []
    for text in texts:
        name, equals, rest = text.partition("=")
        method, *assignments = re.split(r",(?=[\w.]+=)", rest)
        if not (name and equals and method) or "=" in method:
            raise ConfigError(
                f"--variant {shorten(text)}: expected NAME=METHOD,KEY=VALUE,... such as slow=fedavg,local.lr=0.001"
            )
        pairs = [_split(assignment, "--variant") for assignment in assignments]
        _refuse_conflicts([(f"--variant {shorten(name)}: {shorten(key)}", (key,), value) for key, value in pairs])
        found.append((f"--variant {shorten(name)}", ("compare", "variants", name), {"method": method, **dict(pairs)}))
    return found


def _method_named(section: Any) -> str | None:
    """Return the method of a section; None for an invalid one, which the configuration refuses later."""
    if section is None:
        return DEFAULT_NAMES["method"]
    name = section.get("name", DEFAULT_NAMES["method"]) if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


def _of_comparison(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping in ``compare``; empty for an invalid one, which the configuration refuses later."""
    compare = raw.get("compare")
    found = compare.get(key) if isinstance(compare, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _values_of(own: Any, place: str) -> Mapping[str, Any]:
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{place} = {shorten(own)}: expected dotted keys with values, such as local.lr: 0.05")
    for key, value in own.items():
        if str(key).partition(".")[0] == "tracking":
            raise ConfigError(f"{place}: tracking holds for all runs; put it into its own section")
        if key in ("method.name", "seed"):
            raise ConfigError(f"{place}: {key} is said by the entry itself; leave it out")
        if not isinstance(key, str) or "." not in key:
            raise ConfigError(
                f"{place}: {shorten(key)} = {shorten(value)}: expected dotted keys with values, such as local.lr: 0.05"
            )
    return own


def without_tracking(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without ``tracking``: a store's address may hold a password."""
    return {section: values for section, values in raw.items() if section != "tracking"}
