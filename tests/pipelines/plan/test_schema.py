"""The schema of parameter files: it refuses what the configuration refuses of a single key, and nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from flcore.config.schema import Config
from flcore.config.sections import DEFAULT_NAMES, PLAIN, SHARED
from flcore.core.errors import ConfigError
from flcore.core.params import Param, build, declared
from flcore.methods import METHODS
from pipelines.plan import schema as schemas

ROOT = Path(__file__).resolve().parents[3]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "infra" / "experiments").glob("*.yaml"))]
VALIDATOR = Draft7Validator(schemas.schema())


def is_accepted(raw: Any) -> bool:
    return bool(VALIDATOR.is_valid(raw))


def is_run(raw: Any) -> bool:
    try:
        Config.from_mapping(raw)
    except ConfigError:
        return False
    return True


def test_it_is_a_schema_and_the_file_of_the_documentation() -> None:
    Draft7Validator.check_schema(VALIDATOR.schema)
    assert (ROOT / schemas.TARGET).read_text(encoding="utf-8") == schemas.text(), "run `make docs`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_our_own_files_are_accepted(path: Path) -> None:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [error.message for error in VALIDATOR.iter_errors(raw)] == []
    assert raw.get("tracking", {}).get("enabled", True)  # who follows a page that names one finds the runs in MLflow


@pytest.mark.parametrize(
    "raw",
    [
        {"local": {"batchsize": 1}},
        {"locl": {}},
        {"seed": -1},
        {"seed": True},
        {"local": 3},
        {"local": {"lr": 0}},
        {"local": {"lr": "fast"}},
        {"local": {"epochs": 1.5}},
        {"local": {"epochs": True}},
        {"local": {"epochs": None}},
        {"engine": {"stack": "maybe"}},
        {"data": {"name": "mnst"}},
        {"data": {"channels": 2}},
        {"method": {"name": "fedpro"}},
        {"method": {"name": "fedprox", "mu": -1}},
        {"method": {"mu": 1}},
        {"method": {"name": "fedprox", "weight": 1}},
        {"partition": {"name": "iid", "alpha": 1}},
        {"evaluation": {"analyses": ["tsn"]}},
        {"compare": {"methods": ["fedpro"]}},
        {"compare": {"baseline": "fedpro"}},
        {"plugins": "mine.py"},
    ],
    ids=str,
)
def test_what_the_configuration_refuses_of_one_key_is_refused(raw: dict[str, Any]) -> None:
    assert not is_run(raw)
    assert not is_accepted(raw)


def test_sections_may_be_empty_and_plug_ins_bring_methods_of_any_name() -> None:
    assert is_accepted(None)
    assert is_accepted(dict.fromkeys((*SHARED, *PLAIN)))
    own = {"method": {"name": "mine", "x": 1}, "compare": {"methods": ["mine"], "settings": {"mine": {"method.x": 2}}}}
    assert is_accepted({"plugins": ["mine.py"], **own})
    assert not is_accepted({"plugins": [], **own})
    assert not is_accepted({"plugins": ["mine.py"], "method": {"name": "fedprox", "x": 1}})


# ------------------------------------------------------------------------------------------- every declared parameter


def declarations() -> Iterator[tuple[str, str | None, Param]]:
    """Section, entry of its registry (None: any) and parameter."""
    for section, common in {**SHARED, **PLAIN}.items():
        yield from ((section, None, parameter) for parameter in (declared(common) if common else ()))
        for name, entry in schemas.REGISTRIES.get(section, {}).items():
            yield from ((section, name, parameter) for parameter in declared(entry))


def candidates(parameter: Param) -> list[Any]:
    """Values of every kind, and those at, beside and beyond the bounds."""
    bounds = [b for b in (parameter.low, parameter.above, parameter.high, parameter.below) if b is not None]
    near = [bound + step for bound in bounds for step in (-1, -0.125, 0, 0.125, 1)]
    whole = [int(value) for value in near if value == int(value)]
    return [
        None,
        True,
        False,
        "nonsense",
        3,
        0.5,
        [],
        [0.5],
        [0.0, 0.5],
        ["nonsense"],
        {},
        *near,
        *whole,
        *(parameter.choices or ()),
        parameter.default,
    ]


@cache
def validator_of(section: str, entry: str | None) -> Draft7Validator:
    """Of a section by itself, which is quicker than of a whole file."""
    name = f"{section}.{entry or DEFAULT_NAMES[section]}" if section in DEFAULT_NAMES else section
    return Draft7Validator({"$ref": f"#/definitions/{name}", "definitions": VALIDATOR.schema["definitions"]})


def is_valid_value(section: str, entry: str | None, parameter: Param, value: Any) -> bool:
    """As the declaration alone has it: built by itself, so that no rule about several keys interferes."""
    cls: Any = schemas.REGISTRIES[section][entry] if entry else {**SHARED, **PLAIN}[section]
    try:
        build(cls, {parameter.name: value}, section)
    except ConfigError as error:
        return not str(error).startswith(f"{section}.{parameter.name} = ")
    return True


@pytest.mark.parametrize("section", [*SHARED, *PLAIN])
def test_types_ranges_and_choices_are_those_of_the_declarations(section: str) -> None:
    for where, entry, parameter in declarations():
        if where != section:
            continue
        for value in candidates(parameter):
            if isinstance(value, float) and value == int(value) and "float" not in parameter.type:
                continue  # 1.0 is a whole number to JSON Schema, and none to the configuration
            raw = {parameter.name: list(value) if isinstance(value, tuple) else value}
            wanted = is_valid_value(section, entry, parameter, raw[parameter.name])
            assert validator_of(section, entry).is_valid(raw) == wanted, f"{section}.{parameter.name} = {value!r}"


def test_the_form_of_prefect_offers_what_the_schema_knows_and_nothing_of_a_store() -> None:
    offered, known = schemas.form()["properties"], schemas.schema()["definitions"]
    assert offered.keys() == {"seed", *SHARED, *PLAIN} - {"tracking"}
    for section, entry in offered.items():
        closed = known[section] if section in PLAIN else known.get(f"{section}.{DEFAULT_NAMES.get(section)}", {})
        assert entry.get("properties", {}).keys() <= closed.get("properties", {}).keys()
    assert offered["federation"]["properties"]["rounds"] == known["federation"]["properties"]["rounds"]
    assert offered["method"]["properties"]["name"]["enum"] == list(METHODS)
    text = json.dumps(schemas.form())
    assert not any(f'"{word}"' in text for word in ("$ref", "if", "allOf"))
