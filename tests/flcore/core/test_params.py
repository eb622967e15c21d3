"""Declared parameters: what is accepted, what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from flcore.core.errors import ConfigError, ProtoflError
from flcore.core.params import Search, build, declared, param


@dataclass(frozen=True)
class Options:
    count: int = param(3, "how many", low=1, high=9)
    rate: float = param(0.5, "how much", above=0, below=1, search=Search(1e-3, 0.5, log=True))
    limit: int | None = param(None, "at most; null: no limit", low=2)
    enabled: bool = param(True, "whether", switch=True)
    mode: Literal["fast", "exact"] = param("fast", "how", search=Search(choices=("fast", "exact")))
    channels: Literal[1, 3] | None = param(None, "grey or colour")
    name: str = param("x", "what it is called")
    seeds: tuple[int, ...] = param((0, 1), "seeds", low=0)
    table: Mapping[str, Any] = param({}, "anything")
    hidden: int = 7

    def __post_init__(self) -> None:
        if self.count == 9 and not self.enabled:
            raise ValueError("count = 9 needs enabled = true")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rate", "1e-3", 0.001),  # YAML 1.1 reads 1e-3 as text
        ("rate", "2.5E-1", 0.25),
        ("limit", None, None),
        ("limit", 2, 2),
        ("channels", 3, 3),
        ("channels", None, None),
        ("mode", "exact", "exact"),
        ("seeds", [4, 5], (4, 5)),
        ("seeds", [], ()),
        ("table", {"a": 1}, {"a": 1}),
        ("count", 1, 1),
        ("count", 9, 9),
    ],
)
def test_accepted(key: str, value: Any, expected: Any) -> None:
    found = getattr(build(Options, {key: value}, "options"), key)
    assert found == expected
    assert type(found) is type(expected)


def test_a_whole_number_is_a_float_where_floats_are_meant() -> None:
    @dataclass(frozen=True)
    class Wide:
        lr: float = param(0.1, "learning rate")

    lr = build(Wide, {"lr": 1}, "local").lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("count", True, "options.count = true: expected a whole number >= 1 and <= 9"),
        ("count", "3", 'options.count = "3": is text in quotes'),
        ("count", "0.1", "options.count = 0.1: expected"),
        ("count", 3.0, "options.count = 3.0: expected"),
        ("count", None, "options.count = null: expected"),
        ("count", 0, "options.count = 0: must be >= 1 and <= 9"),
        ("count", 10, "options.count = 10: must be >= 1 and <= 9"),
        ("rate", True, "options.rate = true: expected a number > 0 and < 1"),
        ("rate", "half", "options.rate = half: expected a number > 0 and < 1"),
        ("rate", [0.1], "options.rate = [0.1]: expected"),
        ("rate", 0, "options.rate = 0: must be > 0 and < 1"),
        ("rate", 1, "options.rate = 1: must be > 0 and < 1"),
        ("rate", float("nan"), "options.rate = nan: must be > 0 and < 1"),
        ("rate", float("inf"), "options.rate = inf: must be > 0 and < 1"),
        ("rate", "nan", "options.rate = nan: expected"),
        ("limit", 1, "options.limit = 1: must be >= 2"),
        ("limit", "none", "options.limit = none: expected a whole number >= 2"),
        ("limit", False, "options.limit = false: expected"),
        ("enabled", 1, "options.enabled = 1: expected bool"),
        ("enabled", "true", 'options.enabled = "true": is text in quotes'),
        ("mode", "slow", "options.mode = slow: expected one of fast, exact"),
        ("mode", None, "options.mode = null: expected one of fast, exact"),
        ("channels", 2, "options.channels = 2: expected one of 1, 3, null"),
        ("channels", True, "options.channels = true: expected one of 1, 3, null"),
        ("channels", 1.0, "options.channels = 1.0: expected one of 1, 3, null"),
        ("name", 5, "options.name = 5: expected str"),
        ("seeds", 3, "options.seeds = 3: expected"),
        ("seeds", "01", "options.seeds = 01: expected"),
        ("seeds", [0, "1"], "options.seeds = [0, '1']: expected"),
        ("seeds", [0, -1], "options.seeds = -1: must be >= 0"),
        ("table", [1], "options.table = [1]: expected mapping"),
        ("cuont", 3, "options.cuont: unknown key; did you mean 'count'? allowed here: channels, count,"),
        ("zzz", 3, "options.zzz: unknown key; allowed here: channels, count, enabled,"),
        ("hidden", 3, "options.hidden: unknown key"),  # a field that was not declared cannot be set
    ],
)
def test_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(Options, {key: value}, "options")
    assert str(refusal.value).startswith(words)
    assert isinstance(refusal.value, ProtoflError)


def test_a_declaration_is_made_once_and_its_default_is_a_copy() -> None:
    table = next(parameter.default for parameter in declared(Options) if parameter.name == "table")
    assert declared(Options) is declared(Options)
    table["x"] = 1
    assert build(Options, {}, "options").table == Options().table == {}
    del table["x"]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_unlimited_float_must_still_be_finite(value: Any) -> None:
    @dataclass(frozen=True)
    class Free:
        x: float = param(0.0, "anything")

    with pytest.raises(ConfigError, match=r"free\.x = -?(inf|nan): must be finite"):
        build(Free, {"x": value}, "free")


@pytest.mark.parametrize("key", ["count", "rate"])
def test_a_number_beyond_all_floats_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"options.{key} = 1"):
        build(Options, {key: 10**400}, "options")


def test_a_rule_between_fields_names_the_section() -> None:
    with pytest.raises(ConfigError, match=r"^options: count = 9 needs enabled = true$"):
        build(Options, {"count": 9, "enabled": False}, "options")


@pytest.mark.parametrize(
    ("name", "kind", "allowed"),
    [
        ("count", "int", ">= 1 and <= 9"),
        ("rate", "float", "> 0 and < 1"),
        ("limit", "int or null", ">= 2"),
        ("enabled", "bool", ""),
        ("mode", "str", "one of fast, exact"),
        ("channels", "int or null", "one of 1, 3, null"),
        ("seeds", "list of int", ">= 0"),
        ("table", "mapping", ""),
    ],
)
def test_listing(name: str, kind: str, allowed: str) -> None:
    entry = {p.name: p for p in declared(Options)}[name].describe()
    assert (entry["type"], entry["range"]) == (kind, allowed)
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry or name in ("mode",)  # JSON has lists for tuples


@pytest.mark.parametrize("arguments", [{}, {"low": 1.0}, {"low": 1.0, "high": 2.0, "choices": (1,)}])
def test_a_search_range_is_an_interval_or_a_list(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either low and high, or choices"):
        Search(**arguments)


def half(classes: int | None, rounds: int) -> int:
    return 5 if classes is None else classes // 2


def no_fewer(classes: int | None, rounds: int) -> int:
    return classes or 0


@pytest.mark.parametrize(
    ("search", "classes", "found"),
    [
        (Search(2, half), 10, Search(2, 5)),
        (Search(2, half), 47, Search(2, 23)),  # 23.5 rounded down
        (Search(2, half), None, Search(2, 5)),
        (Search(2, half), 3, None),  # 1 is below 2
        (Search(choices=(50, 80, 128), least=no_fewer), 62, Search(choices=(80, 128))),
        (Search(choices=(50, 80, 128), least=no_fewer), None, Search(choices=(50, 80, 128))),
        (Search(choices=(50, 80, 128), least=no_fewer), 172, None),
        (Search(0.1, 1, log=True), 10, Search(0.1, 1, log=True)),
    ],
)
def test_bounds_follow_the_number_of_classes(search: Search, classes: int | None, found: Search | None) -> None:
    assert search.in_numbers(classes, 100) == found


def test_rounds_to_wait_for_are_fewer_than_the_run_has() -> None:
    """Of four rounds three have passed before the last; a run of one round has nothing to wait for."""
    search = Search(1, lambda classes, rounds: min(50, rounds - 1), log=True)
    assert search.in_numbers(10, 200) == Search(1, 50, log=True)
    assert search.in_numbers(10, 4) == Search(1, 3, log=True)
    assert search.in_numbers(10, 1) is None


def test_a_bound_that_depends_on_the_data_is_described_as_null() -> None:
    ranged = Search(2, half, when=lambda section: section.use)
    assert ranged.describe() == {"low": 2, "high": None, "log": False}
    assert Search(choices=(50, 80), least=no_fewer).describe() == {"choices": (50, 80), "log": False}
