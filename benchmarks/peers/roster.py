"""Who of the peers takes part: each has a line, whether it could be measured or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import Case, Timing
from benchmarks.peers.environment import PEERS, NoEnvironmentError, held_versions, peer_python
from flcore.core.errors import ConfigError, RunError

MEASURED, NO_DEVICE = "measured", "no CUDA device"


class Roster:
    """The peers that were asked for; one that cannot be had, or fails, says so and stops nobody else."""

    def __init__(self, names: Sequence[str], say: Callable[[str], None], given: str | None = None) -> None:
        """Make their environments where they are not there, which may take minutes.

        Args:
            names: of :data:`PEERS`.
            say: told of what takes time, and of who is left out.
            given: an interpreter that has the peers' packages; None: environments are made.

        Raises:
            ConfigError: a name that is none of theirs.
        """
        for name in names:
            if name not in PEERS:
                raise ConfigError(f"bench overhead: --only-peers {name}: expected some of {', '.join(PEERS)}")
        self._say, self._given = say, given
        self._held: dict[str, list[str]] = {}
        self.pythons: dict[str, str] = {}
        self._status = {name: self._prepare(name) for name in names}

    def _prepare(self, name: str) -> str:
        if PEERS[name].cuda and not torch.cuda.is_available():
            return NO_DEVICE
        try:
            if self._given is not None and PEERS[name].packages:
                self._held[name] = held_versions(name, self._given)
                self.pythons[name] = self._given
            else:
                self.pythons[name] = peer_python(name, self._say)
        except NoEnvironmentError as error:
            self._say(f"{name} is left out: {error}")
            return f"cannot be installed: {error.reason}"
        return MEASURED

    def attempt(self, name: str, case: Case) -> Mapping[str, Timing]:
        """Carry out a case of a peer; nothing from the time on that it has failed once."""
        if self._status[name] == MEASURED:
            try:
                return case()
            except RunError as error:
                self._say(f"{name} is left out: {error}")
                self._status[name] = f"failed: {' '.join(str(error).split())}"
        return {}

    @property
    def measured(self) -> list[str]:
        """Those that have done all that was asked of them so far."""
        return [name for name, status in self._status.items() if status == MEASURED]

    def settings(self) -> dict[str, Any]:
        """By name: version, what its environment holds, and how it went."""
        return {
            name: {
                "version": self._held[name][0] if name in self._held else PEERS[name].version,
                "requirements": self._held.get(name, list(PEERS[name].requirements)),
                "status": status,
            }
            for name, status in self._status.items()
        }
