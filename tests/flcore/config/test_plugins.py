"""Methods in files of one's own: what is registered, what is refused in which words, and what names a run."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flcore.config import plugins
from flcore.config.plugins import brought, keep, load
from flcore.config.schema import Config
from flcore.config.stored import resolve_paths
from flcore.core.errors import ConfigError
from flcore.core.params import declared
from flcore.methods import METHODS

METHOD = """
from dataclasses import dataclass
from typing import ClassVar

from flcore.methods.fedavg import FedAvg
from flcore.core.params import Search, param


@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "FedAvg by another name"
    citation: ClassVar[str] = "nobody, nowhere"

    weight: float = param(0.5, "of the term", low=0, search=Search(0.1, 1.0))
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes plug-ins."""

    def writer(source: str = METHOD, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return path

    return writer


def refusal(raw: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(raw) if isinstance(raw, Path) else Config.from_mapping(raw)  # type: ignore[arg-type]
    return str(caught.value)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_its_methods_are_registered_checked_and_built_like_any_other(write: Write) -> None:
    path = write()
    config = Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine", "weight": 2}})
    assert config.method.weight == 2.0  # type: ignore[attr-defined]
    assert list(METHODS)[-1] == "mine"
    assert [p.search is not None for p in declared(METHODS["mine"])] == [True]
    assert refusal({"plugins": [str(path)], "method": {"name": "mine", "weight": -1}}) == (
        "method.weight = -1: must be >= 0"
    )


def test_the_mapping_names_file_and_content_and_reads_back_to_an_equal_configuration(write: Write) -> None:
    path = write()
    config = Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine"}})
    mapping = json.loads(json.dumps(config.to_mapping()))
    assert mapping["plugins"] == [{"path": str(path), "sha256": digest(path)}]
    assert Config.from_mapping(mapping) == config


def test_a_fresh_process_loads_what_the_mapping_names(write: Write, unload_plugins: Callable[[], None]) -> None:
    mapping = Config.from_mapping({"plugins": [str(write())], "method": {"name": "mine"}}).to_mapping()
    unload_plugins()
    assert Config.from_mapping(json.loads(json.dumps(mapping))).method.weight == 0.5  # type: ignore[attr-defined]


def test_without_plug_ins_nothing_is_said_of_them() -> None:
    assert "plugins" not in Config().to_mapping()
    assert "plugins" not in Config().identity()
    assert Config.from_mapping({"plugins": []}) == Config.from_mapping({"plugins": None}) == Config()


def test_edited_between_two_uses_in_one_process_the_new_file_counts(write: Write) -> None:
    first = Config.from_mapping({"plugins": [str(write())], "method": {"name": "mine"}})
    second = Config.from_mapping({"plugins": [str(write(METHOD.replace("0.5", "0.25")))], "method": {"name": "mine"}})
    assert [config.method.weight for config in (first, second)] == [0.5, 0.25]  # type: ignore[attr-defined]
    renamed = write(METHOD.replace('"mine"', '"ours"'))
    load(renamed)
    assert "ours" in METHODS and "mine" not in METHODS


def test_names_with_an_underscore_are_helpers(write: Write) -> None:
    write_base = METHOD.replace("class Mine", "class _Base").replace("of the term", "of a term")
    load(write(write_base + METHOD.replace("Mine(FedAvg)", "Mine(_Base)")))
    assert METHODS["mine"].__name__ == "Mine"


def test_a_base_of_a_method_on_top_may_be_a_plug_in(write: Write) -> None:
    config = Config.from_mapping({"plugins": [str(write())], "method": {"name": "ccvr", "base": "mine"}})
    assert [method.name for method in config.methods] == ["ccvr", "mine"]
    assert "mine" in config.identity()["plugins"]


def test_a_run_is_named_by_the_content_of_what_it_uses_and_not_by_its_place(write: Write) -> None:
    path, copy = write(), write(name="elsewhere/mine.py")

    def name(plugin: Path, **method: str) -> str:
        return Config.from_mapping({"plugins": [str(plugin)], "method": method}).hash("data", "partition")

    before = name(path, name="mine")
    assert Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine"}}).identity()["plugins"] == {
        "mine": digest(path)
    }
    assert name(copy, name="mine") == before
    assert name(path, name="fedavg") == Config().hash("data", "partition")
    assert name(write(METHOD + "# a word more\n"), name="mine") != before


def test_a_plug_in_that_another_one_imports_counts_too(write: Write) -> None:
    helper = write(METHOD.replace('"mine"', '"helper"') + "\nWEIGHT = 0.5\n", name="helper.py")
    user = write(METHOD.replace("param(0.5", "param(WEIGHT").replace(
        "from flcore.core.params", "from protofl_plugins.helper import WEIGHT\nfrom flcore.core.params"
    ))  # fmt: skip
    config = Config.from_mapping({"plugins": [str(helper), str(user)], "method": {"name": "mine"}})
    assert config.identity()["plugins"] == {"helper": digest(helper), "mine": digest(user)}


def test_a_method_of_a_plug_in_that_is_not_named_is_refused(write: Write) -> None:
    path = write()
    load(path)
    assert refusal({"method": {"name": "mine"}}) == (f"plugins: {path} is needed and not named; add it to plugins")


def test_another_content_than_the_mapping_names_is_refused(write: Write, unload_plugins: Callable[[], None]) -> None:
    path = write()
    mapping = Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine"}}).to_mapping()
    before = digest(path)
    unload_plugins()  # as in a later process
    write(METHOD + "# edited\n")
    assert refusal(mapping) == (
        f"plug-in {path}: has another content than this configuration names (SHA-256 {digest(path)[:8]}..., "
        f"not {before[:8]}...); restore the file, or start a new run with it"
    )


def test_a_run_keeps_copies_that_outlive_the_files(write: Write, tmp_path: Path) -> None:
    path = write()
    config = Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine"}})
    (kept,) = keep(config.plugins, tmp_path / "run")
    path.unlink()
    assert kept.path == tmp_path / "run" / "plugins" / "mine.py"
    assert Config.from_mapping({"plugins": [kept.to_mapping()], "method": {"name": "mine"}}).hash("d", "p") == (
        config.hash("d", "p")
    )


def test_a_machine_without_the_file_gets_its_source(write: Write, tmp_path: Path) -> None:
    path = write()
    config = Config.from_mapping({"plugins": [str(path)], "method": {"name": "mine"}})
    path.unlink()
    raw = brought(config.to_mapping(), {"protofl_plugins.mine": METHOD.encode()}, tmp_path / "there")
    assert raw["plugins"][0]["path"] == str(tmp_path / "there" / "plugins" / "mine.py")
    assert Config.from_mapping(raw).identity() == config.identity()
    assert brought(Config().to_mapping(), {}, tmp_path) == Config().to_mapping()


def test_places_relative_to_a_folder(tmp_path: Path) -> None:
    raw = {"seed": 1, "plugins": ["a.py", "/b.py", {"path": "c.py", "sha256": "0"}]}
    places = [str(tmp_path / "a.py"), "/b.py", {"path": str(tmp_path / "c.py"), "sha256": "0"}]
    assert resolve_paths(raw, tmp_path) == {"seed": 1, "plugins": places}
    assert resolve_paths({"seed": 1}, tmp_path) == {"seed": 1}


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.py") == f"plug-in {tmp_path}/no.py: cannot be read (No such file or directory)"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ny = (", "mine.py:2: '(' was never closed"),
        ("x = 1\nimport nothing_of_this_name\n", "mine.py:2: ModuleNotFoundError: No module named 'nothing_of"),
        ("def f():\n    raise ValueError('no\\nluck')\nf()\n", "mine.py:2: ValueError: no luck"),
        ("import sys\nsys.exit(3)\n", "mine.py:2: SystemExit: 3"),
        ("x = 1\n", "mine.py: defines no public subclass of Method, Source, Partitioner, ModelSpec, Sampler"),
        ("from flcore.methods.fedavg import FedAvg\n", "mine.py: defines no public subclass of Method,"),
        (METHOD.replace("class Mine", "class _Mine"), "mine.py: defines no public subclass of Method,"),
        (METHOD.replace('"mine"', '"fedprox"'), "mine.py: Mine is called fedprox, and there is a method called so"),
        (METHOD.replace('"mine"', '"My Own"'), "mine.py: Mine is called 'My Own'; a name is made of a-z, 0-9 and _"),
        (METHOD + METHOD.replace("Mine", "Other"), "mine.py: Other is called mine, and there is a method called so"),
        (METHOD.replace('    name: ClassVar[str] = "mine"\n', ""), "mine.py: Mine has no name of its own; write name="),
        (METHOD.replace('"nobody, nowhere"', '""'), "mine.py: Mine has no citation of its own"),
        (METHOD.replace("@dataclass(frozen=True)", ""), "mine.py: Mine is no frozen dataclass"),
        (
            METHOD.replace('param(0.5, "of the term", low=0, search=Search(0.1, 1.0))', "0.5"),
            "mine.py: Mine declares weight without flcore.core.params.param, or means a ClassVar",
        ),
        (METHOD.replace("param(0.5", "param(-0.5"), "mine.py: Mine cannot be made with its own defaults: mine.weight"),
        (METHOD.replace("weight: float", "weight: Nothing"), "mine.py: Mine cannot be made with its own defaults: "),
        (
            METHOD.replace("(FedAvg)", "(Method)").replace(
                "from flcore.methods.fedavg import FedAvg", "from flcore.methods import Method"
            ),
            "mine.py: Mine does not define reply",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(write: Write, source: str, words: str) -> None:
    before = list(METHODS)
    path = write("from __future__ import annotations\n" * ("Nothing" in source) + source)
    message = refusal(path)
    assert message.startswith(f"plug-in {path.parent}/{words}")
    assert "\n" not in message
    assert list(METHODS) == before
    assert f"{plugins.PACKAGE}.mine" not in sys.modules


def test_a_file_that_no_longer_works_leaves_the_loaded_one(write: Write) -> None:
    load(write())
    refusal(write("x = ("))
    assert METHODS["mine"].name == "mine"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("mine.py", "plugins = mine.py: expected a list of files"),
        ([3], "plugins: 3: expected the path of a Python file"),
        ([{"path": "mine.py"}], "plugins: {'path': 'mine.py'}: expected the path of a Python file"),
    ],
)
def test_what_is_no_list_of_files(entries: object, words: str) -> None:
    assert refusal({"plugins": entries}) == words


def test_two_files_of_one_name(write: Write) -> None:
    first, second = write(), write(METHOD.replace('"mine"', '"ours"'), name="other/mine.py")
    assert refusal({"plugins": [str(first), str(second)]}) == (
        f"plugins: {first} and {second} have one name; rename one of them"
    )
    assert len(Config.from_mapping({"plugins": [str(first), str(first)]}).plugins) == 1


def test_two_plug_ins_with_one_method(write: Write) -> None:
    first, second = write(), write(name="second.py")
    assert refusal({"plugins": [str(first), str(second)]}).endswith(
        "Mine is called mine, and there is a method called so already; choose another name"
    )


NEEDS = 'required_config: ClassVar[dict[str, tuple[float, ...]]] = {"local.momentum": (0.0, 0.9)}'
NEEDY = METHOD.replace("    weight: float", f"    {NEEDS}\n    weight: float")


@pytest.mark.parametrize("method", [{"name": "mine"}, {"name": "ccvr", "base": "mine"}])
def test_values_of_other_sections_that_a_method_cannot_work_with_are_refused(
    write: Write, method: dict[str, str]
) -> None:
    raw = {"plugins": [str(write(NEEDY))], "method": method}
    assert Config.from_mapping({**raw, "local": {"momentum": 0.9}}).local.momentum == 0.9
    assert refusal({**raw, "local": {"momentum": 0.5}}) == (
        f"local.momentum = 0.5: {method['name']} works with 0.0 or 0.9 alone"
    )


def test_a_need_of_a_key_that_there_is_not(write: Write) -> None:
    path = write(NEEDY.replace("local.momentum", "local.momentun"))
    assert refusal({"plugins": [str(path)], "method": {"name": "mine"}}) == (
        "method.name = mine: it needs local.momentun, and there is no such key"
    )
