"""The results that must have the same bytes elsewhere, and descriptions of differences between two of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from flcore.experiment.run_folder import RunFiles
from pipelines.runs.record import COMMUNICATION, SCORES, TASK_SCORES

COMPARED = (
    "comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "curves.csv", "metrics.json", "runs.csv",
)  # fmt: skip
"""Files of a comparison's folder; figures and page are drawn again from the same data."""

ACCURACY_TOLERANCE = 0.02
"""Largest difference of an accuracy (a fraction) between two processor classes: two of a hundred predictions."""

_ACCURACIES = (*(name for name in SCORES if name != "client_std"), *TASK_SCORES)
_EXACT = ("method", "dataset", "partition", "rounds", "seed", "num_clients", "steps", *COMMUNICATION)
_SHOWN = 3  # differences listed per file


def result_files(run: Path) -> dict[str, Path]:
    """Return the files of a finished run with machine-independent bytes, by their names in its folder.

    Figures and page are drawn from them; ``config.json``, ``inputs.json`` and ``timing.json`` depend on the machine.
    """
    files = RunFiles(run)
    single = (files.metrics, files.history, files.curves, files.model, files.server)
    paths = [path for path in single if path.is_file()]
    paths += [*files.records(), *files.analyses.glob("*")]
    return {path.relative_to(run).as_posix(): path for path in sorted(paths) if not path.name.startswith(".")}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of files by name."""
    return {name: digest_of(path) for name, path in files.items()}


# ---- in words ----------------------------------------------------------------------------------------------------


def difference(name: str, expected: bytes, actual: bytes) -> str:
    """Describe how a file differs from the expected bytes: JSON values, arrays, or the first differing line."""
    try:
        one, other = _values(name, expected), _values(name, actual)
    except (ValueError, RecursionError):
        return "other bytes, which cannot be decoded"
    differences = list(_differing(one, other))
    if not differences:
        return "other bytes with the same values"
    more = len(differences) - _SHOWN
    return "; ".join([*differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _values(name: str, content: bytes) -> dict[str, Any]:
    """Return a file's content by the names of its parts."""
    if name.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            return dict(sorted(load(content).items()))
        except (SafetensorError, KeyError) as error:  # KeyError: NumPy lacks the type
            raise ValueError(str(error)) from error
    if name.endswith(".json"):
        document = json.loads(content)
        return document if isinstance(document, dict) else {"": document}
    lines = content.splitlines()
    if not name.endswith(".jsonl"):
        return {f"line {number}": line for number, line in enumerate(lines, start=1)}
    records = [json.loads(line) for line in lines]
    numbers = [
        record.get("round", position) if isinstance(record, dict) else position
        for position, record in enumerate(records)
    ]
    return {f"round {number}": record for number, record in zip(numbers, records, strict=True)}


def _differing(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Yield the places where two values differ, with both values."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in [*expected, *(key for key in actual if key not in expected)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in actual or key not in expected:
                yield f"{where} is {'missing' if key in expected else 'new'}"
            else:
                yield from _differing(expected[key], actual[key], where)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from _differing(one, other, f"{path}[{number}]")
    elif isinstance(expected, np.ndarray):
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            yield f"{path} has another shape or type"
        elif expected.tobytes() != actual.tobytes():
            yield f"{path} differs by {abs(expected.astype('float64') - actual.astype('float64')).max():.2g} at most"
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path} is {_short(actual)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def beyond_tolerance(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return the differences of two ``metrics.json`` beyond last bits, for runs on two processor classes.

    Counts must be equal: rounds, clients, steps, bytes. An accuracy may differ by :data:`ACCURACY_TOLERANCE`.
    Accuracies by class or client are not compared: with few test images, one prediction exceeds any tolerance.
    """
    differences = [f"{key} is {_short(actual.get(key))} instead of {_short(expected.get(key))}"
             for key in _EXACT if actual.get(key) != expected.get(key)]  # fmt: skip
    one, other = _with_tasks(expected), _with_tasks(actual)
    for key in _ACCURACIES:
        before, now = one.get(key), other.get(key)
        if before == now:
            continue
        if not (_is_number(before) and _is_number(now)):
            differences.append(f"{key} is {_short(now)} instead of {_short(before)}")
        elif abs(before - now) > ACCURACY_TOLERANCE:
            differences.append(f"{key} is {now:.4f} instead of {before:.4f}, more than {ACCURACY_TOLERANCE} apart")
    return differences


def _with_tasks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics merged with the figures of a task stream, if any."""
    tasks = metrics.get("tasks")
    tasks = tasks if isinstance(tasks, dict) else {}
    last = tasks.get("last_epochs")
    return {**metrics, **tasks, **(last if isinstance(last, dict) else {})}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
