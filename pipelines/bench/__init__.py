"""Benchmarks: ``protofl bench NAME``. Machines are noisy: cases alternate, figures are medians, ratios are paired.

Nothing heavy is imported here: the cases run in processes of their own, some in environments without our packages,
and this is the first module that they all load.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

BENCHMARKS: dict[str, str] = {
    "overhead": "a whole run beside a bare PyTorch loop doing the same steps; --peers: and beside Flower and pfl",
    "cifar10-cross-device": "pfl's published setting: 1,000 clients of 50 images, 50 a round, small CNN",
    "population": "seconds per round and peak memory at 100, 1,000 and 10,000 clients, with the same cohort",
    "workers": "speed-up of 1, 2, ... worker processes",
    "stack": "clients per second, serial against stacked, over group sizes, per device",
}
"""What there is, with a line each; the module is the name, as Python spells it."""

_MODULES = {"cifar10-cross-device": "cross_device"}


def run(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a benchmark.

    Args:
        name: one of :data:`BENCHMARKS`.
        options: those that were given; the others take the defaults of the benchmark's ``Options``.

    Returns:
        JSON (CONTRACT, ``protofl bench``): ``name``, ``machine``, ``settings``, ``cases``, ``ratios``.

    Raises:
        ConfigError: an option that this benchmark does not have, or its value.
        RunError: a case failed.
    """
    from pipelines.bench.common import carry_out

    module = importlib.import_module(f"pipelines.bench.{_MODULES.get(name, name)}")
    return carry_out(name, module.Options, module.measure, options)


def describe(result: Mapping[str, Any]) -> str:
    """A result for reading."""
    machine = result["machine"]
    lines = [f"{result['name']}: {machine['cores']} cores, torch {machine['torch']}, {machine['cpu_capability']}"]
    width = max(len(case["case"]) for case in result["cases"])
    for case in result["cases"]:
        seconds = case["seconds"]
        lines.append(
            f"  {case['case']:{width}s} {seconds['median']:9.3f} s  ({seconds['min']:.3f} to {seconds['max']:.3f})"
            f"  {case['steps_per_second']:9.0f} steps/s  {case['peak_mb']:7.0f} MB"
        )
    lines += [f"  {name:{width + 12}s} {ratio:7.3f}" for name, ratio in result["ratios"].items()]
    return "\n".join(lines)
