"""A follower without a subprocess, for tests of what gives it folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class NoFollower:
    """Draws and logs nothing, and remembers the names of the folders that it was given."""

    def __init__(self, *arguments: object) -> None:
        self.configured: Mapping[str, Any] = {}
        self.followed: list[str] = []
        self.finished: list[str] = []
        self.stopped: dict[str, str | None] = {}
        self.compared: list[dict[str, Any]] = []

    def __enter__(self) -> NoFollower:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def configure(self, tracking: Mapping[str, Any]) -> None:
        self.configured = tracking

    def follow(self, folder: Path) -> None:
        self.followed.append(folder.name)

    def finish(self, folder: Path) -> None:
        self.finished.append(folder.name)

    def stop(self, folder: Path, reason: str | None = None) -> None:
        self.stopped[folder.name] = reason

    def compare(
        self, kind: str, config: Mapping[str, Any], runs: Sequence[Path], directory: Path, **facts: Any
    ) -> None:
        self.compared.append({"kind": kind, "config": config, "runs": runs, "directory": directory, "facts": facts})

    def wait(self) -> Mapping[str, str]:
        return {}

    def leave(self) -> None:
        pass

    close = leave
