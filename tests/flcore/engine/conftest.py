"""What the tests of the engine share: sudden stops, methods that misbehave, and comparisons of records."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import Observers, run_rounds
from flcore.io.records import Record

QUICK = {"local", "central", "fedavg", "fedprox", "fedproto"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is tested of every method belongs to the slow part, but for the references: other methods take longer."""
    for item in items:
        method = item.callspec.params.get("method") if hasattr(item, "callspec") else None
        if Path(__file__).parent in item.path.parents and isinstance(method, str) and method not in QUICK:
            item.add_marker(pytest.mark.slow)


class Crash(BaseException):
    """As sudden as a kill: nothing in the library catches it."""


def _crash_points(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Counter[str]:
    """Stop at the n-th operation on the disk (before or after it is carried out); count them."""
    seen: Counter[str] = Counter()

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            seen["all"] += 1
            seen[name] += 1
            now = seen["all"] == at
            if now and not after:
                raise Crash
            result = original(*arguments, **keywords)
            if now:
                raise Crash
            return result

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
        patch(owner, name)
    return seen


def _stopped_everywhere(
    lab: Any,
    experiment: Any,
    tmp_path: Path,
    *,
    after: bool,
    before: Callable[[Path], None] = lambda folder: None,
    restart: bool = False,
    step: int = 1,
) -> Counter[str]:
    """Stop at every operation on the disk in turn and go on; each time the bytes are those of an undisturbed run.

    ``before`` makes what the run finds in its folder; of ``step`` operations one is stopped at.
    """
    experiment.setting  # noqa: B018 - built once, for all attempts
    expected = lab.run(experiment, tmp_path / "whole").bytes
    at, finished = 1 - step, False
    while not finished:
        at += step
        folder = tmp_path / f"stopped-{at}"
        before(folder)
        with pytest.MonkeyPatch.context() as patch:
            seen = _crash_points(patch, at, after=after)
            try:
                lab.run(experiment, folder, restart=restart)
                finished = True
            except Crash:
                pass
        assert lab.run(experiment, folder, restart=restart).bytes == expected, (at, seen)
    assert at > seen["replace"]
    return seen


class Stopping(InlineOrchestrator):
    """Notes which clients are asked for what, and stops suddenly when it is asked for the n-th time."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.asked = at, list[tuple[str, list[int]]]()

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        self.asked.append((name, [client for group in items for stack in group for client in stack]))
        if len(self.asked) == self.at:
            raise Crash
        return super().map(name, function, items)


def _run_until(experiment: Any, folder: Path, round_number: int) -> None:
    """Begin a run in this process and stop suddenly behind a round."""
    checkpoint = Checkpoint(folder)

    def stop(number: int, record: Any) -> None:
        if number == round_number:
            raise Crash

    with pytest.raises(Crash):
        run_rounds(
            experiment, checkpoint, InlineExecutor(experiment, checkpoint), InlineOrchestrator(), Observers(stop)
        )


@dataclass(frozen=True)
class Stops:
    """Sudden stops; a fixture, since test modules cannot import each other."""

    Crash = Crash
    Stopping = Stopping
    everywhere = staticmethod(_stopped_everywhere)
    run_until = staticmethod(_run_until)


@pytest.fixture(scope="session")
def stops() -> Stops:
    return Stops()


def _distance(first: Record, second: Record) -> float:
    """Largest difference of two records' floating-point arrays, each relative to its array's largest value.

    Everything else (names, shapes, integers) has to be equal.
    """
    assert first.keys() == second.keys()
    worst = 0.0
    for name, payload in first.items():
        ours, theirs = payload.arrays(), second[name].arrays()
        assert ours.keys() == theirs.keys(), name
        for key, tensor in ours.items():
            other = theirs[key]
            assert tensor.shape == other.shape, (name, key)
            if not tensor.is_floating_point():
                assert torch.equal(tensor, other), (name, key)
            elif tensor.numel():
                scale = float(tensor.abs().max().clamp_min(1e-3))
                worst = max(worst, float((tensor - other).abs().max()) / scale)
    return worst


@pytest.fixture(scope="session")
def distance() -> Any:
    return _distance
