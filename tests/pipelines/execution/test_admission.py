"""Which run begins next: by time, cores and memory. In MiB; a tenth is added to what is known of other seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from pipelines.execution import admission
from pipelines.execution.admission import Admission, most_at_once
from pipelines.execution.one_run import PlacedRun
from pipelines.runs.cache import Cost, kind_of
from pipelines.runs.inputs import Inputs

MIB = 2**20


class Known:
    """A cache that knows what runs of some methods took."""

    def __init__(self, costs: Mapping[str, Cost]) -> None:
        self.costs = {kind_of(config(method)): cost for method, cost in costs.items()}

    def cost(self, kind: str) -> Cost:
        return self.costs.get(kind, Cost())


class Holding:
    """A pool whose processes hold what a test says."""

    def __init__(self) -> None:
        self.by: dict[str, int] = {}
        self.idle = 0

    def held_by(self, label: str) -> int:
        return self.by.get(label, 0)

    def held_idle(self) -> int:
        return self.idle


def config(method: str, seed: int = 0, **engine: Any) -> Config:
    return Config.from_mapping({"method": {"name": method}, "seed": seed, "engine": {"workers": 0, **engine}})


def run(method: str, seed: int = 0, **engine: Any) -> PlacedRun:
    nowhere = Path("nowhere")
    return PlacedRun(config(method, seed, **engine), Inputs(nowhere, nowhere), nowhere, "", "", f"{method} {seed}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with so many cores and so much memory free."""

    def become(cores: int, mebibytes: float = 1e6) -> None:
        monkeypatch.setattr(admission, "physical_cores", lambda: cores)
        monkeypatch.setattr(admission.memory, "free_memory", lambda: mebibytes * MIB)
        monkeypatch.setattr(admission.memory, "estimate", lambda config, inputs, process: 1000 * MIB)

    return become


def begun(order: Iterator[PlacedRun], number: int) -> list[str]:
    return [next(order).label for _ in range(number)]


def test_one_of_each_unknown_kind_then_the_longest(machine: Callable[..., None]) -> None:
    """local takes 5 s and fedavg 9 s; of fedprox nobody knows until its first run has ended, after 7 s."""
    machine(8)
    known = Known({"local": Cost(5.0), "fedavg": Cost(9.0)})
    runs = [run("local"), run("fedavg"), run("fedprox"), run("fedprox", 1), run("fedper")]
    found = Admission(runs, known, Holding())  # type: ignore[arg-type]
    order = iter(found)
    assert begun(order, 2) == ["fedprox 0", "fedper 0"]
    known.costs[kind_of(config("fedprox"))] = Cost(7.0)
    found.ended(runs[2])
    assert begun(order, 3) == ["fedavg 0", "fedprox 1", "local 0"]
    assert next(order, None) is None


def test_cores_are_shared_by_runs_with_workers(machine: Callable[..., None]) -> None:
    """8 cores: three of four runs with three workers would take nine; 2 + 3 + 3 are 8."""
    machine(8)
    runs = [run("fedavg", 0, workers=3), run("fedavg", 1, workers=3), run("fedavg", 2, workers=3), run("local")]
    known = Known({"fedavg": Cost(9.0), "local": Cost(5.0)})
    order = iter(Admission(runs, known, Holding()))  # type: ignore[arg-type]
    assert begun(order, 3) == ["fedavg 0", "fedavg 1", "local 0"]
    assert begun(iter(Admission([run("fedavg", workers=16)], known, Holding())), 1) == ["fedavg 0"]  # type: ignore[arg-type]


def test_the_longest_that_fits_begins(machine: Callable[..., None]) -> None:
    """5000 free. fedavg may take 3300, fedprox 2200, local 1100.

    fedavg leaves 1700, enough for local alone, which leaves 600. Once fedavg holds 3000, 2000 are free, of which it may
    still claim 300 and local 1100: 600 as before. When it has ended, and its idle process keeps 400, fedprox fits.
    """
    machine(8, 5000)
    known = Known({"fedavg": Cost(9.0, 3000 * MIB), "fedprox": Cost(8.0, 2000 * MIB), "local": Cost(7.0, 1000 * MIB)})
    runs, held = [run("fedavg"), run("fedprox"), run("local")], Holding()
    found = Admission(runs, known, held)  # type: ignore[arg-type]
    order = iter(found)
    assert begun(order, 2) == ["fedavg 0", "local 0"]
    held.by = {"fedavg 0": 3000 * MIB}
    machine(8, 2000)
    asked = threading.Event()
    later: list[str] = []

    def ask() -> None:
        later.append(next(order).label)
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    assert not asked.wait(0.3)
    # 2900 are free, 400 are the idle process's own, 1100 are still local's: 2200, to the last byte what fedprox needs.
    machine(8, 2900)
    held.by, held.idle = {}, 400 * MIB
    found.ended(runs[0])
    assert asked.wait(10)
    assert later == ["fedprox 0"]


def test_where_nothing_fits_the_smallest_is_tried_alone(machine: Callable[..., None]) -> None:
    """100 free; fedavg may take 3300, local 1100, and of what is not known 1000 are estimated."""
    machine(8, 100)
    known = Known({"fedavg": Cost(9.0, 3000 * MIB), "local": Cost(7.0, 1000 * MIB)})
    runs = [run("fedavg"), run("local"), run("fedprox")]
    found = Admission(runs, known, Holding())  # type: ignore[arg-type]
    order = iter(found)
    for expected in ("fedprox 0", "local 0", "fedavg 0"):
        [label] = begun(order, 1)
        assert label == expected
        found.ended(next(run for run in runs if run.label == label))


def test_no_more_processes_than_cores_or_runs(machine: Callable[..., None]) -> None:
    machine(2)
    assert most_at_once([config("fedavg", seed) for seed in range(3)]) == 2
    assert most_at_once([config("fedavg")]) == 1
