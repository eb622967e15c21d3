"""What a run or a comparison gives that must be the same bytes elsewhere, and how two of them differ, in words."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from flcore.experiment.run_folder import RunFiles
from pipelines.runs.record import COMMUNICATION, SCORES, TASK_SCORES

COMPARED = (
    "comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "curves.csv", "metrics.json", "runs.csv",
)  # fmt: skip
"""Of a comparison's folder; figures and page show the same and are drawn anew."""

ACCURACY_TOLERANCE = 0.02
"""How far an accuracy, as a fraction, may be from that of another class of processor: two of a hundred answers."""

_ACCURACIES = (*(name for name in SCORES if name != "client_std"), *TASK_SCORES)
_EXACT = ("method", "dataset", "partition", "rounds", "seed", "num_clients", "steps", *COMMUNICATION)
_SHOWN = 3  # differences of a file that are told


def result_files(run: Path) -> dict[str, Path]:
    """The files of a finished run that are the same bytes wherever it is carried out, by their names in its folder.

    Figures and page are drawn from them; ``config.json``, ``inputs.json`` and ``timing.json`` name a machine.
    """
    files = RunFiles(run)
    single = (files.metrics, files.history, files.curves, files.model, files.server)
    found = [path for path in single if path.is_file()]
    found += [*files.records(), *files.analyses.glob("*")]
    return {path.relative_to(run).as_posix(): path for path in sorted(found) if not path.name.startswith(".")}


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of files by name."""
    return {name: digest_of(path) for name, path in files.items()}


# ---- in words ----------------------------------------------------------------------------------------------------


def difference(name: str, expected: bytes, found: bytes) -> str:
    """What is other in a file than expected: figures of JSON, lines of text, entries of arrays.

    Args:
        name: of the file, whose ending says what it holds.
        expected: its bytes as recorded. found: as they are.
    """
    if name.endswith(".safetensors"):
        return _listed(_differing_arrays(expected, found))
    try:
        if name.endswith(".json"):
            return _listed(_differing_values(json.loads(expected), json.loads(found)))
        if name.endswith(".jsonl"):
            return _listed(_differing_records(expected, found))
    except (ValueError, RecursionError):
        return "one of the two is no JSON"
    pairs = enumerate(zip(expected.splitlines(), found.splitlines(), strict=False), start=1)
    first = next((number for number, (one, other) in pairs if one != other), None)
    return "other bytes, the same lines" if first is None else f"line {first} is the first that differs"


def _listed(differences: Iterator[str]) -> str:
    told = list(differences)
    if not told:
        return "other bytes with the same values"
    more = len(told) - _SHOWN
    return "; ".join([*told[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _differing_records(expected: bytes, found: bytes) -> Iterator[str]:
    one, other = expected.splitlines(), found.splitlines()
    if len(one) != len(other):
        yield f"{len(other)} records instead of {len(one)}"
    for before, now in zip(one, other, strict=False):
        if before != now:
            record = json.loads(before)
            number = record.get("round") if isinstance(record, dict) else None
            yield from (f"round {number}: {text}" for text in _differing_values(record, json.loads(now)))


def _differing_values(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Places where two JSON values differ, with both values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            where = f"{place}.{key}" if place else str(key)
            if key not in found or key not in expected:
                yield f"{where} is {'missing' if key in expected else 'new'}"
            else:
                yield from _differing_values(expected[key], found[key], where)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differing_values(one, other, f"{place}[{number}]")
    elif type(expected) is not type(found) or expected != found:
        yield f"{place} is {_short(found)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _differing_arrays(expected: bytes, found: bytes) -> Iterator[str]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        one, other = load(expected), load(found)
    except (SafetensorError, KeyError):  # a type that NumPy does not have
        yield "other bytes"
        return
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"{name} is {'missing' if name in one else 'new'}"
        elif one[name].shape != other[name].shape or one[name].dtype != other[name].dtype:
            yield f"{name} has another shape or type"
        elif one[name].tobytes() != other[name].tobytes():
            gap = abs(one[name].astype("float64") - other[name].astype("float64")).max()
            yield f"{name} differs by {gap:.2g} at most"


def beyond_tolerance(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where two ``metrics.json`` are further apart than last bits explain: for runs on two classes of processor.

    What is counted must be equal: rounds, clients, steps, bytes. An accuracy may differ by :data:`ACCURACY_TOLERANCE`.
    Accuracies by class or client are not compared: of a few test images, one answer more is beyond any tolerance.
    """
    apart = [f"{key} is {_short(found.get(key))} instead of {_short(expected.get(key))}"
             for key in _EXACT if found.get(key) != expected.get(key)]  # fmt: skip
    one, other = _with_tasks(expected), _with_tasks(found)
    for key in _ACCURACIES:
        before, now = one.get(key), other.get(key)
        if before == now:
            continue
        if not (_is_number(before) and _is_number(now)):
            apart.append(f"{key} is {_short(now)} instead of {_short(before)}")
        elif abs(before - now) > ACCURACY_TOLERANCE:
            apart.append(f"{key} is {now:.4f} instead of {before:.4f}, more than {ACCURACY_TOLERANCE} apart")
    return apart


def _with_tasks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the figures of a stream of tasks among them, where there is one."""
    tasks = metrics.get("tasks")
    tasks = tasks if isinstance(tasks, dict) else {}
    last = tasks.get("last_epochs")
    return {**metrics, **tasks, **(last if isinstance(last, dict) else {})}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
