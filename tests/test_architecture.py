"""Rooms of `flcore` and `pipelines`: which file may import which, read from the sources, and how long a file may be.

Imports for types alone count as well: a file that cannot be read without another one does not stand below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest

import flcore
import pipelines
from flcore.config.imports import imported_names

LONGEST = 362  # lines


@dataclass(frozen=True)
class House:
    """A package.

    Attributes:
        root: its folder.
        rooms: from the ground up: a file imports from its own room and from lower ones.
        long: files beyond the limit, with theirs.
    """

    root: Path
    rooms: tuple[tuple[str, ...], ...]
    long: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.root.name

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """Module → modules of the house that it imports, without the house's name; packages by their ``__init__``."""
        modules = {self.module_of(path): path for path in sorted(self.root.rglob("*.py"))}
        found = {}
        for module, path in modules.items():
            names = [name.split(".") for name in imported_names(path.read_bytes(), for_types=True)]
            ours = [parts[1:] for parts in names if parts[0] == self.name]
            # What is imported is a module, or stands in the one that is named before the last dot.
            whole = [".".join(parts) if ".".join(parts) in modules else ".".join(parts[:-1]) for parts in ours]
            found[module] = {name or "__init__" for name in whole} - {module}
        return found

    def module_of(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def room_of(self, module: str) -> int:
        top = module.split(".")[0]
        return next(floor for floor, room in enumerate(self.rooms) if top in room)


LIBRARY = House(
    Path(flcore.__file__).parent,
    rooms=(
        # Knows nothing of federated learning.
        ("version", "core"),
        # What is written to disk and what travels.
        ("io",),
        # Pure functions of tensors.
        ("math",),
        # The one place where clients' answers become one.
        ("aggregation",),
        # Networks, images and their division among clients; who of these is asked in a round.
        ("models", "data", "sampling"),
        # One paper each. They see neither the engine nor a configuration.
        ("methods",),
        # Every value of a run, checked. It knows the registries of the rooms below.
        ("config",),
        # What follows from a configuration and files alone.
        ("experiment",),
        # How a state is scored. The engine scores while it trains, never the other way round.
        ("evaluation",),
        # How rounds run.
        ("engine",),
        # From a configuration to a finished folder.
        ("running",),
        # What anybody may ask of a method of theirs.
        ("testing",),
        # Figures of the papers.
        ("analyses",),
        ("__init__",),
    ),
    # A method of five parts, each part with its switches and each parameter with its condition.
    long={"methods/fedcspc.py": 575},
)
PIPELINES = House(
    Path(pipelines.__file__).parent,
    rooms=(
        # Values and folders: what a person types, and what a run leaves.
        ("plan", "runs", "same_origin", "addresses"),
        # What only reads run folders: MLflow's side of them, and what people look at.
        ("tracking", "reporting"),
        # One run and many, carried out by whoever is handed in.
        ("execution",),
        # A search is many runs, each proposed by what the earlier ones gave.
        ("tuning",),
        # The five papers' tables: comparisons with figures to be set beside them.
        ("papers",),
        # Who carries out: plain calls or Prefect, the follower's process, servers.
        ("orchestration",),
        # What DVC calls, what others can check: users of all of it.
        ("stages", "proof"),
        ("cli", "__init__"),
    ),
)
HOUSES = (LIBRARY, PIPELINES)


@pytest.fixture(params=HOUSES, ids=[house.name for house in HOUSES])
def house(request: pytest.FixtureRequest) -> House:
    return request.param


def test_every_file_has_a_room_and_every_room_a_file(house: House) -> None:
    tops = {module.split(".")[0] for module in house.arrows}
    named = [name for room in house.rooms for name in room]
    assert len(named) == len(set(named))
    assert set(named) == tops


def test_arrows_are_seen() -> None:
    """The graph is no empty one: some arrows that everybody can check."""
    assert "methods.fedavg" in LIBRARY.arrows["methods.fedprox"]
    assert "core.registry" in LIBRARY.arrows["models"]
    assert "engine.rounds" in LIBRARY.arrows["running"]
    assert "data.dataset" in LIBRARY.arrows["experiment.inputs"] and "data" not in LIBRARY.arrows["experiment.inputs"]
    assert "execution.run_pool" in PIPELINES.arrows["execution.bodies"]


def test_no_arrow_leads_upwards(house: House) -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in house.arrows.items()
        for other in sorted(others)
        if house.room_of(other) > house.room_of(module)
    ]
    assert upwards == []


def test_no_files_in_a_circle(house: House) -> None:
    assert circle(house.arrows) is None


def circle(graph: dict[str, set[str]]) -> str | None:
    """One circle, in words; None where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> str | None:
        if module in path:
            return " → ".join([*path[path.index(module) :], module])
        if module in done:
            return None
        for other in sorted(graph[module]):
            found = walk(other, [*path, module])
            if found is not None:
                return found
        done.add(module)
        return None

    return next((found for module in sorted(graph) if (found := walk(module, []))), None)


def test_a_circle_would_be_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == "b → c → b"


def test_folders_in_one_room_do_not_import_each_other_both_ways(house: House) -> None:
    pairs = {(m.split(".")[0], o.split(".")[0]) for m, others in house.arrows.items() for o in others}
    assert [pair for pair in pairs if pair[0] < pair[1] and pair[::-1] in pairs] == []


def test_files_stay_short_enough_to_be_read(house: House) -> None:
    lengths = {
        path.relative_to(house.root).as_posix(): len(path.read_text().splitlines()) for path in house.root.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > house.long.get(name, LONGEST)} == {}
    assert all(lengths[name] > LONGEST for name in house.long), "no longer an exception"


def test_rooms_are_told_from_the_ground_up(house: House) -> None:
    """Each room but the first has an arrow into the one below it or a lower one: none floats."""
    for lower, upper in pairwise(range(len(house.rooms))):
        floors = {house.room_of(o) for m, others in house.arrows.items() if house.room_of(m) == upper for o in others}
        assert min(floors) <= lower


# ---- what nobody may do ------------------------------------------------------------------------------------------

UNPICKLES = {"pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
FORBIDDEN = {
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "eval", "exec"),
}
EXCEPTIONS = {
    # A person's own methods, in a file that they name.
    ("flcore/config/plugins.py", "exec"),
    # The official files of CIFAR, which torchvision unpickles once their published check sums are right.
    ("flcore/data/sources/cifar.py", "torchvision.datasets"),
    # Fetches files in IDX, which are read here.
    ("flcore/data/sources/mnist.py", "torchvision.datasets"),
}


def dangers(source: bytes) -> Iterator[str]:
    """What in a source reads pickles, runs text as code, or hands a command to a shell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in UNPICKLES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from sorted(names & FORBIDDEN)
            if node.module.partition(".")[0] in UNPICKLES:
                yield node.module
            if "torchvision.datasets" in {*names, node.module}:
                yield "torchvision.datasets"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN:
                yield name
            for keyword in node.keywords:
                is_on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                is_shell = keyword.arg == "shell" and name.startswith(("subprocess.", "Popen"))
                if is_on and (is_shell or keyword.arg == "allow_pickle"):
                    yield f"{name}({keyword.arg}=...)"


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell() -> None:
    found = {
        (path.relative_to(house.root.parent).as_posix(), danger)
        for house in HOUSES
        for path in house.root.rglob("*.py")
        for danger in dangers(path.read_bytes())
    }
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from joblib import load", "import torch\ntorch.load(path)", "import yaml\nyaml.load(text)"),
        *(
            "import numpy as np\nnp.load(path, allow_pickle=True)",
            "from os import system",
            "import os\nos.system(text)",
        ),
        *("import subprocess\nsubprocess.run(text, shell=True)", "eval(text)", "from torchvision import datasets"),
    ],
)
def test_each_of_these_would_be_seen(source: str) -> None:
    assert list(dangers(source.encode()))
    harmless = (
        "model.eval()\nnp.load(path, allow_pickle=False)\nsubprocess.run(words, shell=False)\nyaml.safe_load(text)"
    )
    assert list(dangers(harmless.encode())) == []


# ---- the disk ----------------------------------------------------------------------------------------------------

CHANGES = {
    "write_text", "write_bytes", "unlink", "rmdir", "mkdir", "makedirs", "touch", "symlink_to", "hardlink_to", "rmtree",
    "copyfile", "copytree", "copy2", "fsync", "truncate", "mkstemp", "mkdtemp", "TemporaryDirectory",
    "NamedTemporaryFile", "save_file",
}  # fmt: skip
"""Names of functions that change what is on a disk, whoever has them."""
BY_OWNER = {"os": {"link", "symlink", "remove", "replace", "open"}, "shutil": {"move"}}
"""Those that mean so only there."""
TO_A_BUFFER = {"np": {"save", "savez"}, "torch": {"save"}}
"""Those that may be given a buffer, which is called ``content``."""
OURS = {"write_text"}
"""Those that are called so here and go through :mod:`flcore.io.disk`."""
PAST_THE_DISK = {
    "flcore.engine.local.compiler": "a few lines that the compiler is tried with",
    "flcore.engine.pool.ray": "the folder of a worker on another node, which lives no longer than the worker",
    "flcore.testing": "runs of a moment, in a folder that is thrown away",
    "flcore.testing.trial": "who holds what in them",
    "pipelines.execution.follower": "a log",
    "pipelines.orchestration.background": "logs of servers",
    "pipelines.runs.memory": "a question to the kernel",
    "pipelines.tracking.model": "a folder from which MLflow copies a model",
    "pipelines.proof.stored_zip": "entries of a file that replaces another in one step",
    "pipelines.proof.golden": "runs of a moment, in a folder that is thrown away",
    "pipelines.runs.standard_error": "output that nobody reads any more",
}
"""Who changes something by other means, and what; nothing of it is a result."""


def past_the_disk(source: str) -> list[str]:
    """Calls in a source that change what is on a disk, as written there, but for those of :mod:`flcore.io.disk`."""
    return [ast.unparse(call) for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call) and changes(call)]


def changes(call: ast.Call) -> bool:
    """Whether a call changes what is on a disk, as far as names tell."""
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    owned = owner.id if isinstance(owner, ast.Name) else ""
    if owned in ("disk", "self", "cls") or isinstance(owner, ast.Constant) or (owner is None and named in OURS):
        return False
    if named in TO_A_BUFFER.get(owned, ()):
        return ast.unparse(call.args[0]) != "content"
    if named in BY_OWNER.get(owned, ()):
        return True
    if named == "to_csv":
        return bool(call.args)
    if named in ("replace", "rename"):  # a path takes one argument, a text two, dataclasses and tables names
        return owner is not None and len(call.args) == 1 and not call.keywords
    if named == "open":
        modes = [
            *call.args[0 if owner is not None else 1 :],
            *(word.value for word in call.keywords if word.arg == "mode"),
        ]
        return any(isinstance(mode, ast.Constant) and is_for_writing(str(mode.value)) for mode in modes)
    return named in CHANGES


def is_for_writing(mode: str) -> bool:
    """Whether a text is a mode in which a file is opened to be written."""
    return set(mode) <= set("rwaxbt+") and bool(set(mode) & set("wax+"))


def test_changes_of_the_disk_are_seen() -> None:
    """Each way to change a file, and what only looks like one."""
    seen = ["path.write_text(x)", "open(x, 'w')", "path.open('ab')", "path.open(mode='x')", "os.replace(a, b)",
            "one.replace(other)", "shutil.rmtree(x)", "(a / b).unlink()", "np.savez(path, x=1)", "mkdtemp()",
            "table.to_csv(path)", "os.remove(x)", "Path(x).mkdir()"]  # fmt: skip
    assert [past_the_disk(text) for text in seen] == [[text.replace('"', "'")] for text in seen]
    unseen = ["path.open()", "path.open('rb')", "zip.open('name')", "text.replace('a', 'b')", "replace(run, label='a')",
              "dataclasses.replace(a, b=1)", "disk.rename(a, b)", "METHODS.remove(a)", "np.savez(content, x=1)",
              "table.to_csv(index=False)", "' '.replace(a)", "division.save(directory)"]  # fmt: skip
    assert [past_the_disk(text) for text in unseen] == [[] for _ in unseen]


def test_what_changes_on_the_disk_goes_through_one_file(house: House) -> None:
    """Else `tests/crash` does not count it, and nobody knows what a kill there leaves."""
    found: dict[str, list[str]] = {}
    for path in sorted(house.root.rglob("*.py")):
        module = f"{house.name}.{house.module_of(path)}"
        if module != "flcore.io.disk":
            found[module] = past_the_disk(path.read_text())
    assert {module: calls for module, calls in found.items() if calls and module not in PAST_THE_DISK} == {}
    ours = {module for module in PAST_THE_DISK if module.startswith(f"{house.name}.")}
    assert {module for module in ours if not found[module]} == set(), "no longer an exception"
