"""Meters of energy (evaluation.md section 4): counters of the processor packages, or the GPU's power.

Nothing is estimated from a processor's rating. A meter measures the whole processor or GPU: figures are meaningful on
an otherwise idle machine.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

Meter = Callable[[], float | None]
"""Cumulative joules; None without a counter."""


def no_meter() -> None:
    """Return None: there is no counter."""


def machine_meter(device: str) -> Meter:
    """Return a meter of the GPU for runs on one, else of the processor packages, else :func:`no_meter`."""
    if device == "cuda":
        return _gpu_meter()
    counters = PackageCounters(Path("/sys/class/powercap"))
    return counters if counters() is not None else no_meter


class PackageCounters:
    """Sum of the packages' counters (Linux powercap, RAPL), which count microjoules and wrap."""

    def __init__(self, root: Path) -> None:
        self._packages = [
            folder for folder in sorted(root.glob("*-rapl:*")) if _read(folder / "name").startswith("package")
        ]
        self._last: dict[Path, int] = {}
        self._total = 0

    def __call__(self) -> float | None:
        """Return joules since the first call; None without a readable counter."""
        if not self._packages:
            return None
        for folder in self._packages:
            text = _read(folder / "energy_uj")
            if not text:
                return None
            now = int(text)
            step = now - self._last.get(folder, now)
            if step < 0:
                step += int(_read(folder / "max_energy_range_uj") or 0)
            self._total += step
            self._last[folder] = now
        return self._total / 1e6


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class PowerIntegral:
    """Energy from samples of power by the trapezoid rule; a thread samples it ten times a second.

    The thread ends with the last reference to the meter: a process may do many runs.
    """

    def __init__(
        self, watts: Callable[[], float], clock: Callable[[], float] = time.perf_counter, period: float = 0.1
    ) -> None:
        self._watts, self._clock = watts, clock
        self._lock = threading.Lock()
        self._time, self._power, self._joules = clock(), watts(), 0.0
        threading.Thread(target=_sample, args=(weakref.ref(self), period), name="power", daemon=True).start()

    def __call__(self) -> float:
        """Return joules since the start; take a sample now."""
        with self._lock:
            now, power = self._clock(), self._watts()
            self._joules += (now - self._time) * (power + self._power) / 2
            self._time, self._power = now, power
            return self._joules


def _sample(meter: weakref.ref[PowerIntegral], period: float) -> None:
    while True:
        time.sleep(period)
        own = meter()
        if own is None:
            return
        own()
        del own  # else it would be held while this thread sleeps, for ever


def _gpu_meter() -> Meter:
    try:
        torch.cuda.power_draw()
    except (RuntimeError, ImportError, AttributeError):  # no NVML bindings, or a GPU that does not say
        return no_meter
    return PowerIntegral(lambda: torch.cuda.power_draw() / 1000)
