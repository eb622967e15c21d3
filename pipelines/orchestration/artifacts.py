"""Artifacts of flows: their keys, and a progress artifact, which a lost server leaves incomplete."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.runtime import deployment, flow_run

from pipelines.execution.progress import Watcher
from pipelines.orchestration.address import is_lost

_EVERY_SECONDS = 2.0  # an update is a request to the server


def artifact_key(what: str) -> str:
    """Return the key of an artifact of this flow run: ``protofl-<deployment, or flow>-<what>``.

    Prefect shows all artifacts of one key as versions of one artifact, whichever flow of the server made them.
    """
    name = str(deployment.name or flow_run.flow_name).lower().removeprefix("protofl-")
    return "-".join(["protofl", *re.findall("[a-z0-9]+", name), what])


class ProgressArtifact(Watcher):
    """Passes everything to other watchers, and the share of finished rounds to Prefect."""

    def __init__(self, *others: Watcher) -> None:
        """Make the artifact; inside a flow."""
        self._others = others
        self._lock = threading.Lock()
        self._rounds: dict[str, tuple[int, int]] = {}
        self._ended = self._total = 0
        self._last = time.monotonic()
        self._is_lost = False
        artifact = create_progress_artifact(0.0, key=artifact_key("progress"), description="rounds of all runs")
        assert isinstance(artifact, UUID)  # and nothing to be awaited: flows are synchronous
        self._artifact = artifact

    def step(self, name: str) -> None:
        for other in self._others:
            other.step(name)

    def runs(self, total: int, done: int) -> None:
        for other in self._others:
            other.runs(total, done)
        self._total, self._ended = total, done

    def run(self, label: str, rounds: int, done: int) -> None:
        for other in self._others:
            other.run(label, rounds, done)
        with self._lock:
            self._rounds[label] = (done, rounds)

    def round(self, label: str, number: int, record: Mapping[str, Any] | None) -> None:
        """Update the artifact every two seconds."""
        for other in self._others:
            other.round(label, number, record)
        with self._lock:
            self._rounds[label] = (number, self._rounds.get(label, (0, number))[1])
            due = time.monotonic() - self._last >= _EVERY_SECONDS
            if due:
                self._last = time.monotonic()
        if due:
            self.update()

    def run_ended(self, label: str) -> None:
        for other in self._others:
            other.run_ended(label)
        with self._lock:
            self._rounds.pop(label, None)
            self._ended += 1

    def say(self, text: str) -> None:
        for other in self._others:
            other.say(text)

    def close(self) -> None:
        for other in self._others:
            other.close()

    @property
    def share(self) -> float:
        """The share of finished runs; running ones count by their rounds."""
        with self._lock:
            under_way = sum(done / rounds for done, rounds in self._rounds.values() if rounds)
            return min((self._ended + under_way) / max(self._total, 1), 1.0)

    def update(self) -> None:
        """Send the share to Prefect, until its server is lost."""
        if self._is_lost:
            return
        try:
            update_progress_artifact(self._artifact, progress=round(100 * self.share, 1))
        except Exception as error:
            if not is_lost(error):
                raise
            self._is_lost = True
            self.say(f"the Prefect server does not answer ({type(error).__name__}); runs continue, its pages do not")
