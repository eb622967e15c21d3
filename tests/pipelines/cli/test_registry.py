"""``protofl list``: every registry entry, described completely, for people and for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from flcore.config import Config
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.params import declared
from flcore.sections import EngineConfig
from pipelines.cli import registry as listing
from pipelines.cli.app import main

REGISTRIES: dict[str, Any] = {"methods": METHODS, "datasets": SOURCES, "partitioners": PARTITIONERS, "models": MODELS}
SECTIONS = {"methods": "method", "datasets": "data", "partitioners": "partition", "models": "model"}
ENTRIES = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry]


def entry_of(kind: str, name: str) -> dict[str, Any]:
    return next(entry for entry in listing.describe(kind) if entry["name"] == name)


def listed(kind: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the command prints with ``--json``, which must be nothing else."""
    assert main(["list", kind, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.parametrize("kind", listing.KINDS)
def test_json_has_every_entry_once_and_survives_a_round_trip(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    entries = listed(kind, capsys)
    names = [entry["name"] for entry in entries]
    assert names == list(REGISTRIES.get(kind, {"local": EngineConfig, "ray": EngineConfig}))
    assert entries == json.loads(json.dumps(listing.describe(kind)))


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_an_entry_says_what_it_is_and_what_it_takes(kind: str, name: str) -> None:
    entry = entry_of(kind, name)
    assert entry["summary"].strip()
    assert "\n" not in entry["summary"]
    assert [p["name"] for p in entry["parameters"]] == [p.name for p in declared(REGISTRIES[kind][name])]
    for parameter in entry["parameters"]:
        assert {"name", "type", "default", "range", "meaning"} <= parameter.keys()
        assert parameter["type"]
        assert parameter["meaning"].strip(), parameter["name"]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_a_listed_default_can_be_configured(kind: str, name: str) -> None:
    """What the list says is accepted as it stands."""
    defaults = {p["name"]: p["default"] for p in entry_of(kind, name)["parameters"]}
    config = Config.from_mapping({SECTIONS[kind]: {"name": name, **defaults}}).to_mapping()[SECTIONS[kind]]
    assert {key: config[key] for key in defaults} == defaults


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_where_it_is_from_its_stages_its_switches_and_what_can_be_tuned(name: str) -> None:
    entry, parameters = entry_of("methods", name), {p.name: p for p in declared(METHODS[name])}
    assert entry["citation"].strip()
    assert entry["stages"] == list(METHODS[name]().stages())
    assert entry["switches"] == [key for key, parameter in parameters.items() if parameter.switch]
    assert set(entry["search"]) == {key for key, parameter in parameters.items() if parameter.search is not None}


@pytest.mark.parametrize("name", METHODS)
def test_a_search_range_lies_within_what_is_allowed(name: str) -> None:
    """Both ends of every search range, or each choice, make a method."""
    for key, search in entry_of("methods", name)["search"].items():
        for value in search.get("choices") or (search["low"], search["high"]):
            is_whole = next(p for p in declared(METHODS[name]) if p.name == key).type.startswith("int")
            config = Config.from_mapping({"method": {"name": name, key: int(value) if is_whole else value}})
            assert getattr(config.method, key) == value


@pytest.mark.parametrize("kind", listing.KINDS)
def test_people_see_a_line_per_entry_and_per_parameter(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = listing.describe(kind)
    assert len(lines) == len(entries) + sum(len(entry["parameters"]) for entry in entries)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [entry["name"] for entry in entries]


def test_a_parameters_line_says_type_default_range_and_meaning() -> None:
    assert "    mu (float, default 0.01, >= 0): weight μ of the proximal term" in listing.lines("methods")
    meaning = "local: worker processes, 0 trains in the main process; ray: actors, 0 is 1; null: one per physical core"
    assert f"    workers (int or null, default 0, >= 0 and <= 1024): {meaning}" in listing.lines("engines")


def test_one_method_is_shown_with_what_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "method", "fedprox"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fedprox: FedAvg with a proximal term that keeps clients near the global weights  [Li et al., MLSys 2020]",
        "file: flcore/methods/fedprox.py",
        "server stages: aggregate",
        "switches: none",
        "parameters:",
        "    mu (float, default 0.01, >= 0): weight μ of the proximal term",
        "        searched: 0.001 to 1, on a logarithmic scale",
    ]
    assert listing.method_lines(listing.describe_method("local"))[-1] == "parameters: none"


def test_an_unknown_kind_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["list", "planets"])
    assert caught.value.code == 2
    assert "invalid choice: 'planets'" in capsys.readouterr().err
