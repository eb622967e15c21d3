"""Rooms of `flcore` and `pipelines`: which file may import which, read from the sources, and how long a file may be.

Imports for types alone count as well: a file that cannot be read without another one does not stand below it.
"""

from __future__ import annotations

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
