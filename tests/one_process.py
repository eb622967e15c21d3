"""A pool of runs without processes, which take seconds to start; what they do is tested in `test_bodies.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from flcore.core.errors import ProtoflError
from flcore.engine.numerics import alone
from flcore.engine.rounds import Observers
from pipelines.execution.one_run import PlacedRun, PrunedError, carry_out
from pipelines.execution.progress import Watcher
from pipelines.execution.run_pool import Prune, run_error
from pipelines.runs import memory
from pipelines.runs.cache import Cache


class ThisProcess:
    """Trains runs in the calling process, one at a time, in place of `RunPool`."""

    def __init__(self, size: int, watcher: Watcher, prune: Prune | None = None) -> None:
        self._watcher, self._prune = watcher, prune

    def __enter__(self) -> ThisProcess:
        """Use it until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def carry_out(self, run: PlacedRun) -> ProtoflError | None:
        """Train a run, as `RunPool.carry_out` does."""
        watcher, rounds = self._watcher, run.config.federation.rounds

        def on_round(number: int, record: Mapping[str, Any] | None) -> None:
            watcher.round(run.label, number, record)
            if self._prune is not None and self._prune(run.label):
                raise PrunedError(f"pruned after round {number}")

        observers = Observers(on_round, on_start=partial(watcher.run, run.label, rounds))
        try:
            with alone():
                carry_out(run, Cache.here(), observers=observers)
        except ProtoflError as raised:
            return raised
        except OSError as raised:
            return run_error(raised)
        return None

    def wait(self, seconds: float) -> None:
        """Wait before a run is tried again."""
        time.sleep(seconds)

    def held_by(self, label: str) -> int:
        """Return 0: no other run starts during one."""
        return 0

    def held_idle(self) -> int:
        """Return the memory of this process, which trains the next run."""
        return memory.resident(os.getpid())
