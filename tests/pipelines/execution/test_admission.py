"""Which run begins next: by time, cores and memory. In MiB; a tenth is added to what is known of other seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
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


@pytest.mark.parametrize(
    ("cores", "seconds", "runs", "workers"),
    [
        (8, 30.0, 2, [4, 4]),
        (8, 30.0, 3, [2, 3, 3]),  # 8 // 3, then 6 // 2 and 3 // 1: what is left goes to the later ones
        (8, 30.0, 5, [0, 0, 2, 2, 2]),  # 8 // 5 and 7 // 4 are one, which is as good as none; 6 // 3, 4 // 2, 2 // 1
        (2, 30.0, 3, [0, 0]),  # no core is left for the third
        (2, 30.0, 2, [0, 0]),
        (8, 19.0, 2, [0, 0]),  # too short
        (8, None, 2, [0, 0]),  # who knows
        (64, 30.0, 1, [10]),  # clients
    ],
)
def test_workers_where_runs_are_fewer_than_cores(
    machine: Callable[..., None], cores: int, seconds: float | None, runs: int, workers: list[int]
) -> None:
    machine(cores)
    known = Known({"fedavg": Cost(seconds)})
    waiting = [run("fedavg", seed) for seed in range(runs)]
    found = list(islice(Admission(waiting, known, Holding()), len(workers)))  # type: ignore[arg-type]
    assert [one.config.engine.workers for one in found] == workers
    for one, asked in zip(found, waiting, strict=False):
        assert one.config.identity() == asked.config.identity()
        assert kind_of(one.config) == kind_of(asked.config)


@pytest.mark.parametrize("engine", [{"workers": 1}, {"name": "ray"}])
def test_what_has_its_own_way_to_be_carried_out_keeps_it(machine: Callable[..., None], engine: dict[str, Any]) -> None:
    machine(8)
    asked = run("fedavg", **engine)
    known = Known({})
    known.costs[kind_of(asked.config)] = Cost(100.0)
    [found] = Admission([asked], known, Holding())  # type: ignore[arg-type]
    assert found is asked


def test_workers_only_where_their_memory_is_there(machine: Callable[..., None]) -> None:
    """A run of 1100 with two workers is three processes: 3300."""
    for free, expected in ((3299, 0), (3301, 2)):
        machine(2, free)
        [found] = Admission([run("fedavg")], Known({"fedavg": Cost(30.0, 1000 * MIB)}), Holding())  # type: ignore[arg-type]
        assert found.config.engine.workers == expected


def test_no_more_processes_than_cores_or_runs(machine: Callable[..., None]) -> None:
    machine(2)
    assert most_at_once([config("fedavg", seed) for seed in range(3)]) == 2
    assert most_at_once([config("fedavg")]) == 1
