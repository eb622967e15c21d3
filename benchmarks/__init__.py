"""Benchmarks: ``protofl bench NAME``. Machines are noisy: cases alternate, figures are medians, ratios are paired.

Nothing heavy is imported here: the cases run in processes of their own, some in environments without our packages,
and this is the first module that they all load.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

BENCHMARKS: dict[str, str] = {
    "overhead": "a whole run beside a bare PyTorch loop doing the same steps; --peers: and beside other simulators",
    "cifar10-cross-device": "pfl's published setting: 1,000 clients of 50 images, 50 a round, small CNN",
    "comparison": "runs per hour of a whole comparison, 8 methods x 3 seeds on MNIST, with 1 and 2 cores",
    "population": "seconds per round and peak memory at 100, 1,000 and 10,000 clients, with the same cohort",
    "workers": "speed-up of 1, 2, ... worker processes",
    "models": "rounds of every model at its paper's batch size, beside a bare PyTorch loop: serial, and engine auto",
    "gpu": "steps per second on a CUDA device: serial, stacked, stacked and compiled; --peers: and by others",
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
    from benchmarks.common import carry_out

    module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name)}")
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
            + (f"  {case['runs_per_hour']:7.0f} runs/h" if "runs_per_hour" in case else "")
        )
    lines += [f"  {name:{width + 12}s} {ratio:7.3f}" for name, ratio in result["ratios"].items()]
    return "\n".join([*lines, *_describe_bits(result, width), *_describe_decisions(result), *_describe_peers(result)])


def _describe_bits(result: Mapping[str, Any], width: int) -> list[str]:
    """A table of the cases whose bits were compared; nothing for benchmarks that compare none."""
    known = {case["case"]: case["bits"] for case in result["cases"] if "bits" in case}
    if not known:
        return []
    heads = {"repeated": "repeated", "workers": "other workers", "killed": "after a kill"}
    lines = [f"  {'same bits':{width}s}  " + "  ".join(f"{head:13s}" for head in heads.values()).rstrip()]
    for case, bits in known.items():
        lines.append(f"  {case:{width}s}  " + "  ".join(f"{bits[key] or '-':13s}" for key in heads).rstrip())
    return lines


def _describe_decisions(result: Mapping[str, Any]) -> list[str]:
    """A line for each case whose engine settings were left to us: what was taken, and why."""
    lines = []
    for case in result["cases"]:
        if decision := case.get("decision"):
            taken = [word for word, key in (("stacked", "stack"), ("compiled", "compile")) if decision[key]]
            lines.append(f"  {case['case']} took {' and '.join(taken) or 'serial'}: {decision['reason']}")
    return lines


def _describe_peers(result: Mapping[str, Any]) -> list[str]:
    """A line for each peer that was asked for: version, and whether it was measured."""
    peers = result["settings"].get("peers", {})
    return [f"  {name} ({peer['version']}): {peer['status']}" for name, peer in peers.items()]
