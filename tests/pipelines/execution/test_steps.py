"""Pieces of work side by side: each asked for when there is room, their results in order, the first error at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.execution.steps import InlineSteps, Work


def test_the_next_piece_is_asked_for_when_one_has_ended() -> None:
    """Two at once: the third is asked for after the second has ended, which the first outlives; the order stays."""
    told: list[str] = []
    third = threading.Event()

    def long() -> int:
        assert third.wait(20)
        return 1

    def last() -> int:
        third.set()
        return 3

    def works() -> Iterator[Work[int]]:
        for name, work in (("a", long), ("b", lambda: told.append("b ended") or 2), ("c", last)):
            told.append(f"{name} asked for")
            yield Work(name, Path(name), work)

    assert InlineSteps().together(works(), 2) == [1, 2, 3]
    assert told.index("b ended") < told.index("c asked for")
    assert InlineSteps().together(iter(()), 2) == []


def test_an_error_ends_it_while_others_are_at_work() -> None:
    release, begun = threading.Event(), []

    def fail() -> None:
        raise ValueError("no")

    works: list[Work[None]] = [
        Work("waits", Path(), lambda: begun.append("waits") or (release.wait(20) and None)),
        Work("fails", Path(), fail),
        Work("is never begun", Path(), lambda: begun.append("never")),
    ]
    with pytest.raises(ValueError, match="no"):
        InlineSteps().together(works, 2)
    assert not release.is_set()
    release.set()
    assert begun == ["waits"]
