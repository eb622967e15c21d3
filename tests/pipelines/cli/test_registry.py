"""``protofl list`` and ``show``: every entry of a registry, described completely, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flcore.config.analyses import SUMMARIES
from flcore.config.schema import Config
from flcore.core.params import build, declared
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES
from flcore.methods import METHODS
from flcore.models import MODELS
from flcore.sampling import SAMPLERS
from pipelines.cli import registry
from pipelines.cli.app import main
from pipelines.cli.headlines import KINDS, headlines, names

REGISTRIES: dict[str, Any] = {
    "methods": METHODS,
    "datasets": SOURCES,
    "partitioners": PARTITIONERS,
    "models": MODELS,
    "samplers": SAMPLERS,
}
SECTIONS = {"methods": "method", "datasets": "data", "partitioners": "partition", "models": "model"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints; on standard error where it is refused."""
    assert main(words) == code
    captured = capsys.readouterr()
    assert (captured.out if code else captured.err) == ""
    return captured.err if code else captured.out


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_listed_a_line_each_and_as_json_in_the_same_words(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines are read from the sources, so that no method is imported; the objects from what importing gives."""
    wanted = list(REGISTRIES.get(kind, SUMMARIES if kind == "analyses" else ("local", "ray")))
    entries = json.loads(said(capsys, "list", kind, "--json"))
    assert [entry["name"] for entry in entries] == [entry.name for entry in headlines(kind)] == names(kind) == wanted
    for entry, line in zip(entries, said(capsys, "list", kind).splitlines(), strict=True):
        citation = f"  [{entry['citation']}]" if "citation" in entry else ""
        assert line == f"{entry['name']:20s} {entry['summary']}{citation}"
        assert {"name", "summary", "parameters"} <= entry.keys()


@pytest.mark.parametrize("kind", REGISTRIES)
def test_an_entry_says_what_it_takes_and_its_defaults_can_be_configured(kind: str) -> None:
    for entry in registry.describe(kind):
        name = entry["name"]
        assert entry["summary"].strip(), name
        assert [p["name"] for p in entry["parameters"]] == [p.name for p in declared(REGISTRIES[kind][name])]
        assert all(p["type"] and p["meaning"].strip() for p in entry["parameters"]), name
        defaults = {p["name"]: p["default"] for p in entry["parameters"]}
        if kind == "samplers":
            assert asdict(build(SAMPLERS[name], defaults, name)) == defaults
        else:
            config = Config.from_mapping({SECTIONS[kind]: {"name": name, **defaults}}).to_mapping()[SECTIONS[kind]]
            assert {key: config[key] for key in defaults} == defaults


def test_a_method_has_a_source_and_search_ranges_within_what_is_allowed() -> None:
    """Both ends of every search range, or each choice, make a method."""
    for entry in registry.describe("methods"):
        name = entry["name"]
        parameters = {p.name: p for p in declared(METHODS[name])}
        assert entry["citation"].strip()
        assert entry["file"] == f"flcore/methods/{name}.py"
        assert entry["stages"] == list(METHODS[name]().server_steps())
        assert set(entry["search"]) == {key for key, parameter in parameters.items() if parameter.search is not None}
        for key, search in entry["search"].items():
            declaration = parameters[key].search
            assert declaration is not None
            in_numbers = declaration.in_numbers(10, 100)
            assert in_numbers is not None
            assert in_numbers.when is None or in_numbers.when(METHODS[name]()) in (True, False)
            for value in search.get("choices") or (in_numbers.low, in_numbers.high):
                given = int(value) if parameters[key].type.startswith("int") and value is not None else value
                config = Config.from_mapping({"method": {"name": name, key: given}})
                assert getattr(config.method, key) == value


def test_one_entry_is_shown_with_every_parameter_and_what_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "show", "method", "fedprox").splitlines() == [
        "fedprox: FedAvg with a proximal term that keeps clients near the global weights  [Li et al., MLSys 2020]",
        "file: flcore/methods/fedprox.py",
        "server steps: aggregate",
        "switches: none",
        "parameters:",
        "    mu (float, default 0.01, >= 0): weight μ of the proximal term",
        "        searched: 0.001 to 1, on a logarithmic scale",
    ]
    assert said(capsys, "show", "method", "local").endswith("parameters: none\n")
    gfpl = said(capsys, "show", "method", "gfpl").splitlines()
    assert "    use_dcs (bool, default true): the second head: projection, frame and dot regression" in gfpl
    assert (
        "    proto_clip (float or null, default null, > 0): largest norm of what prototypes are made of; null: any"
        in (gfpl)
    )
    meaning = "local: worker processes, 0 trains in the main process; ray: actors, 0 is 1; null: one per physical core"
    meaning += ", of a local run where it saves time"
    shown = said(capsys, "show", "engine", "local").splitlines()
    assert f"    workers (int or null, default null, >= 0 and <= 1024): {meaning}" in shown
    alpha = json.loads(said(capsys, "show", "partitioner", "dirichlet", "--json"))["parameters"][0]
    assert (alpha["name"], alpha["type"], alpha["range"]) == ("alpha", "float", "> 0")


def test_what_is_not_there_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, "show", "method", "fedprx", code=2)
    assert error.startswith("protofl: fedprx: unknown method; did you mean 'fedprox'?")
    assert said(capsys, "show", "model", "resnet1", code=2).startswith("protofl: resnet1: unknown model; did you mean")


# ---------------------------------------------------------------------------------------------------------- plug-ins


def test_methods_of_plug_ins_are_listed_and_shown(
    plugin: Path, unload_plugins: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "\nmine                 FedProx by another name  [nobody]\n"
    assert line not in said(capsys, "list", "methods")
    assert line in said(capsys, "list", "methods", "--plugin", str(plugin))
    shown = json.loads(said(capsys, "show", "method", "mine", "--json", "--plugin", "own/mine.py"))
    assert (shown["file"], shown["stages"]) == (str(plugin), ["aggregate"])
    assert [parameter["name"] for parameter in shown["parameters"]] == ["mu"]
    schema = json.loads(said(capsys, "schema", "--plugin", "own/mine.py"))
    assert schema["definitions"]["method.mine"]["description"] == "FedProx by another name"
    unload_plugins()
    Path("own/given.yaml").write_text("plugins: [mine.py]\n")
    assert line in said(capsys, "list", "methods", "--params", "own/given.yaml")
    assert said(capsys, "show", "method", "mine", "--params", "own/given.yaml").startswith("mine: FedProx by another")
