"""The command line of the benchmarks: ``protofl bench`` in a checkout, or ``python -m benchmarks``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from cyclopts import App

BENCHMARKS = {
    "overhead": "a whole run, a bare PyTorch loop with the same steps and, with --peers, other simulators",
    "comparison": "runs per hour of `protofl compare`, 8 methods x 3 seeds, with 1 and 2 cores",
    "models": "rounds of every model at its paper's batch size, and a bare PyTorch loop",
    "population": "seconds per round and memory with 100, 1,000 and 10,000 clients, with the same cohort",
    "gpu": "steps per second on a CUDA device: serial, stacked, stacked and compiled; --peers: others",
}
"""Name of a module → its summary."""

app = App(name="bench", help="Run a benchmark; in a source checkout only.", version_flags=())
for benchmark, summary in BENCHMARKS.items():
    app.command(f"benchmarks.{benchmark}:bench", benchmark, help=summary, version_flags=())


def report(name: str, options: Any, measure: Callable[[Any, Any], Any], *, as_json: bool) -> int:
    """Run a benchmark and print its result; return the exit code.

    Raises:
        ConfigError: an option has a wrong value. RunError: a case failed.
    """
    from benchmarks.measuring import result_of

    result = result_of(name, options, measure)
    print(json.dumps(result, indent=2) if as_json else describe(result))
    return 0


def run(name: str, **options: Any) -> dict[str, Any]:
    """Run a benchmark and return the JSON of CONTRACT (``name``, ``machine``, ``settings``, ``cases``, ``ratios``).

    Args:
        name: one of :data:`BENCHMARKS`.
        options: fields of the module's ``Options``.

    Raises:
        ConfigError: an option has a wrong value. RunError: a case failed.
    """
    from benchmarks.measuring import result_of

    module = importlib.import_module(f"benchmarks.{name}")
    return result_of(name, module.Options(**options), module.measure)


def describe(result: Mapping[str, Any]) -> str:
    """Format a result for a terminal."""
    machine, cases = result["machine"], result["cases"]
    lines = [f"{result['name']}: {machine['cores']} cores, torch {machine['torch']}, {machine['cpu_capability']}"]
    width = max(len(case["case"]) for case in cases)
    for case in cases:
        seconds = case["seconds"]
        lines.append(
            f"  {case['case']:{width}s} {seconds['median']:9.3f} s  ({seconds['min']:.3f} to {seconds['max']:.3f})"
            f"  {case['steps_per_second']:9.0f} steps/s  {case['peak_mb']:7.0f} MB"
            + (f"  {case['runs_per_hour']:7.0f} runs/h" if "runs_per_hour" in case else "")
        )
    lines += [f"  {name:{width + 12}s} {ratio:7.3f}" for name, ratio in result["ratios"].items()]
    if any("bits" in case for case in cases):
        lines.append(f"  {'same bits':{width}s}  repeated  other workers")
        for case in (case for case in cases if "bits" in case):
            repeated, workers = (case["bits"][key] or "-" for key in ("repeated", "workers"))
            lines.append(f"  {case['case']:{width}s}  {repeated:8s}  {workers}")
    peers = result["settings"].get("peers", {})
    return "\n".join([*lines, *(f"  {name} ({peer['version']}): {peer['status']}" for name, peer in peers.items())])
