"""Which code names a run: what it uses, by content, and nothing else."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from flcore.config.imports import closure, imported_names
from flcore.config.schema import Config
from flcore.core import loaded_code
from flcore.core.loaded_code import PACKAGE_SOURCES, code_digest
from flcore.experiment.provenance import ROOT, code_fingerprint, code_modules, library_fingerprint, step_fingerprint
from flcore.methods import METHODS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, to be edited."""
    copy = tmp_path_factory.mktemp("library") / "flcore"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@contextmanager
def edited(path: Path, change: Callable[[str], str] = lambda text: text + "value = 1\n") -> Iterator[None]:
    """A file with another text for a while."""
    text = path.read_text()
    try:
        path.write_text(change(text))
        yield
    finally:
        path.write_text(text)


def config(name: str = "fedavg", **method: Any) -> Config:
    return Config.from_mapping({"method": {"name": name, **method}})


@pytest.mark.parametrize(
    ("method", "file", "changes"),
    [
        ({"name": "fedavg"}, "methods/fedpg.py", False),
        ({"name": "fedavg"}, "methods/registry.py", False),
        ({"name": "fedavg"}, "data/sources/mnist.py", False),
        ({"name": "fedavg"}, "data/partitioners/dirichlet.py", False),
        ({"name": "fedavg"}, "data/dividing.py", False),
        ({"name": "fedavg"}, "models/resnet.py", False),
        ({"name": "fedavg"}, "analyses/tsne.py", False),
        ({"name": "fedavg"}, "math/losses/basic.py", True),
        ({"name": "fedavg"}, "methods/api.py", True),
        ({"name": "fedavg"}, "engine/rounds.py", True),
        ({"name": "fedavg"}, "evaluation/scoring.py", True),
        ({"name": "fedavg"}, "evaluation/summaries.py", True),  # metrics.json
        ({"name": "fedavg"}, "engine/numerics.py", True),
        ({"name": "fedavg"}, "models/cnn.py", True),
        ({"name": "fedprox"}, "methods/fedavg.py", True),
        ({"name": "ccvr", "base": "fedprox"}, "methods/fedprox.py", True),
        ({"name": "ccvr", "base": "fedprox"}, "methods/fedpg.py", False),
        ({"name": "ccvr", "base": "fedpg"}, "methods/fedpg.py", True),
    ],
)
def test_an_edit_changes_the_runs_that_use_the_file(
    library: Path, method: dict[str, Any], file: str, changes: bool
) -> None:
    chosen = config(**method)
    before = code_fingerprint(chosen, library)
    with edited(library / file):
        assert (code_fingerprint(chosen, library) != before) == changes
    assert code_fingerprint(chosen, library) == before


def remarked(text: str) -> str:
    return text.replace("\n\n\n", "\n\n# a remark\n\n    # another one\n\n", 1) + "  # the last one\n"


def test_a_comment_changes_no_run(library: Path) -> None:
    before = code_fingerprint(config("fedprox"), library)
    with edited(library / "methods" / "fedprox.py", remarked):
        assert code_fingerprint(config("fedprox"), library) == before


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("a = 1\n", "# why\na = 1  # because\n\n\n", True),
        ("if a:\n    b = 1\n", "if a:  # so\n\n    # then\n    b = 1\n", True),
        ("if a:\n    b = 1\n", "if a:\n  b = 1\n", False),
        ("a = '  # no comment'\n", "a = ''\n", False),
        ('a = """\n# text\n\n"""\n', 'a = """\n"""\n', False),
        (r"a = '\'  # x'" + "\n", r"a = '\'  # y'" + "\n", False),
        ('a = """x""  # 1\n"""\n', 'a = """x""  # 2\n"""\n', False),
        ("a = 1\r\n", "a = 1\n", True),
    ],
)
def test_a_digest_of_code_leaves_out_comments_alone(one: str, other: str, equal: bool) -> None:
    assert (code_digest(one.encode()) == code_digest(other.encode())) == equal


def test_no_module_of_ours_loses_code_with_its_comments() -> None:
    """It compiles to the same code, lines aside, and the tokenizer finds no comment in what is left."""

    def compiled(code: CodeType) -> CodeType:
        consts = tuple(compiled(const) if isinstance(const, CodeType) else const for const in code.co_consts)
        return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=consts)

    for name, source in PACKAGE_SOURCES.items():
        left = loaded_code._PIECES.sub(lambda found: found[1] or found[0][:1].strip(b" "), b"\n" + source)
        assert compiled(compile(left, "", "exec")) == compiled(compile(source, "", "exec")), name
        tokens = tokenize.tokenize(io.BytesIO(left).readline)
        assert [token.string for token in tokens if token.type == tokenize.COMMENT] == [], name


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("engine/local/convolution.py", True),
        ("engine/local/program.py", True),
        ("engine/local/compiler.py", True),
        ("math/losses/basic.py", True),
        ("models/cnn.py", True),
        ("core/optim.py", True),
        ("engine/rounds.py", False),
        ("evaluation/scoring.py", False),
        ("methods/fedpg.py", False),
    ],
)
def test_a_compiled_step_is_made_anew_where_its_own_code_changes(library: Path, file: str, changes: bool) -> None:
    before = step_fingerprint(config(), library)
    with edited(library / file):
        assert (step_fingerprint(config(), library) != before) == changes


def test_the_whole_library_changes_with_every_file(library: Path) -> None:
    before = library_fingerprint(library)
    with edited(library / "data" / "sources" / "mnist.py"):
        assert library_fingerprint(library) != before


def test_methods_differ_and_stand_in_their_own_lists() -> None:
    assert code_fingerprint(config("fedavg")) != code_fingerprint(config("fedprox"))
    modules = code_modules(config("fedavg"))
    assert modules["flcore.methods.fedavg"] == code_digest((ROOT / "methods" / "fedavg.py").read_bytes())
    assert {name for name in METHODS if f"flcore.methods.{name}" in modules} == {"fedavg"}


def test_what_does_not_follow_from_values_does_not_count() -> None:
    assert code_fingerprint(Config.from_mapping({"seed": 3, "data": {"name": "mnist"}})) == code_fingerprint(Config())


def test_everything_that_a_run_loads_is_listed() -> None:
    """The engine and the method of a run in a process of its own: no module of theirs is missed."""
    mapping = config("fedproto").to_mapping()
    code = """
import json, sys
from flcore.config.schema import Config
from flcore.core import loaded_code
from flcore.core.loaded_code import PACKAGE_SOURCES, code_digest
from flcore.engine import client, rounds
from flcore.evaluation import scoring
Config.from_mapping(json.loads(sys.argv[1]))
print(*(name for name in sys.modules if name.split(".")[0] == "flcore"))
"""
    command = [sys.executable, "-c", code, json.dumps(mapping)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left_out = ("flcore.data.sources", "flcore.data.partitioners", "flcore.methods.registry")
    loaded = {name for name in done.stdout.split() if not name.startswith(left_out)}
    assert {"flcore.engine.rounds", "flcore.methods.fedproto"} <= loaded
    assert loaded <= code_modules(config("fedproto")).keys()


def test_a_plug_in_counts_with_what_it_imports(plugin: Path) -> None:
    modules = code_modules(Config.from_mapping({"plugins": [str(plugin)], "method": {"name": "mine"}}))
    assert modules["protofl_plugins.mine"] == hashlib.sha256(plugin.read_bytes()).hexdigest()
    assert "flcore.methods.fedprox" in modules


def test_a_plug_in_that_is_not_used_does_not_count(plugin: Path) -> None:
    assert code_modules(Config.from_mapping({"plugins": [str(plugin)]})) == code_modules(Config())


def test_imports_are_read_wherever_they_stand() -> None:
    source = b"""
import a.b, c as d
from e.f import g, h
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import types_only
else:
    import otherwise
def function():
    from inside import thing
    try:
        import tried
    except ImportError:
        import instead
"""
    always = {"a.b", "c", "e.f.g", "e.f.h", "typing.TYPE_CHECKING", "otherwise", "inside.thing", "tried", "instead"}
    assert imported_names(source) == always
    assert imported_names(source, for_types=True) == always | {"types_only"}


def test_a_closure_goes_through_packages_and_ends_where_it_may_not_follow() -> None:
    sources = {
        "p": b"", "p.a": b"from p.b import thing\nimport torch", "p.b": b"from p import a", "p.c": b"",
        "q": b"import p.c", "q.d": b"",
    }  # fmt: skip
    assert list(closure(["p.a"], sources.get)) == ["p", "p.a", "p.b"]
    assert list(closure(["q.d"], sources.get)) == ["p", "p.c", "q", "q.d"]
    assert list(closure(["p.a"], lambda name: None if name == "p.b" else sources.get(name))) == ["p", "p.a"]
