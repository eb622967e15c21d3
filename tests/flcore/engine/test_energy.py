"""Energy by phase: counters that wrap, power integrated by trapezoids, laps."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from flcore.engine.energy import PackageCounters, PowerIntegral, machine_meter, no_meter
from flcore.engine.rounds import Laps


def package(root: Path, number: int, microjoules: int, largest: int = 10_000_000, name: str = "package") -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}-{number}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder


def test_packages_are_summed_from_the_first_reading_on(tmp_path: Path) -> None:
    package(tmp_path, 0, 1_000_000)
    package(tmp_path, 1, 4_000_000)
    package(tmp_path, 2, 9_000_000, name="core")  # a part of a package, counted there already
    counters = PackageCounters(tmp_path)
    assert counters() == 0.0
    package(tmp_path, 0, 1_500_000)
    package(tmp_path, 1, 6_000_000)
    package(tmp_path, 2, 9_900_000, name="core")
    assert counters() == 2.5  # 0.5 J + 2 J


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    package(tmp_path, 0, 9_000_000)
    counters = PackageCounters(tmp_path)
    counters()
    package(tmp_path, 0, 500_000)  # 9 J to the range of 10 J, then 0.5 J
    assert counters() == 1.5


def test_no_counter_is_no_figure_rather_than_zero(tmp_path: Path) -> None:
    assert PackageCounters(tmp_path)() is None
    (package(tmp_path, 0, 1) / "energy_uj").unlink()  # as when only root may read it
    assert PackageCounters(tmp_path)() is None
    assert no_meter() is None


def test_power_is_integrated_by_trapezoids() -> None:
    times, powers = iter([0.0, 2.0, 6.0]), iter([100.0, 200.0, 0.0])
    meter = PowerIntegral(lambda: next(powers), lambda: next(times), period=1e6)
    assert meter() == 300.0  # 2 s at 150 W on average
    assert meter() == 700.0  # and 4 s at 100 W


def test_a_meter_that_nobody_holds_leaves_no_thread() -> None:
    """Of five, each is sampled; when they are gone, their threads end with the sample that they wait for."""

    def sampling() -> int:
        return sum(thread.name == "power" for thread in threading.enumerate())

    before, samples = sampling(), [0] * 5

    def watts(number: int) -> float:
        samples[number] += 1
        return 1.0

    meters = [PowerIntegral(partial(watts, number), period=0.005) for number in range(5)]
    assert sampling() == before + 5
    deadline = time.monotonic() + 30
    while min(samples) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert min(samples) >= 3
    meters.clear()
    while sampling() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sampling() == before


def test_laps_divide_seconds_and_joules() -> None:
    """The second meter has no counter: it adds up nothing."""
    times, energies = iter([0.0, 1.0, 4.0, 4.5]), iter([0.0, 10.0, 40.0, 41.0])
    laps = Laps({"seconds": lambda: next(times), "joules": lambda: next(energies), "none": no_meter})
    for name in ("train-clients", "train-generator", "train-clients"):
        laps.lap(name)
    assert laps.totals == {
        "seconds": {"train-clients": 1.5, "train-generator": 3.0},
        "joules": {"train-clients": 11.0, "train-generator": 30.0},
        "none": {},
    }


def test_a_cpu_without_counters_has_no_meter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flcore.engine.energy.Path", lambda path: tmp_path)
    assert machine_meter("cpu") is no_meter
