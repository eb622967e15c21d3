"""What the tests of pools share: a method with a fault, in a file that workers can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ERRING = """
from dataclasses import dataclass
from typing import ClassVar

from flcore.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Erring(FedAvg):
    name: ClassVar[str] = "erring"
    summary: ClassVar[str] = "FedAvg with a fault in client 2's reply"
    citation: ClassVar[str] = "nobody, nowhere"

    def reply(self, turn, trained):
        if turn.client == 2:
            return super().reply(turn, trained.no_such_thing)
        return super().reply(turn, trained)
"""


@pytest.fixture
def erring(tmp_path: Path) -> dict[str, Any]:
    """Changes of the tiny configuration that choose the method."""
    path = tmp_path / "erring.py"
    path.write_text(ERRING)
    return {"plugins": [str(path)], "method": {"name": "erring"}}
