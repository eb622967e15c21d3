"""What the data tests share: the place of real images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def real_data() -> Path:
    """The folder of real images: PROTOFL_DATA, or shared/data beside the repository."""
    return Path(os.environ.get("PROTOFL_DATA") or REPOSITORY.parent / "shared" / "data")
