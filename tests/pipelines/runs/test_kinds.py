"""What the files of a run may contain."""

from __future__ import annotations

import pytest

from flcore.core.errors import DataError
from pipelines.runs import kinds


def test_class_names_are_texts() -> None:
    kinds.check({"class_names": ["2", "10"]}, kinds.METRICS, "metrics.json")
    for damaged in ([2], "cat", {"0": "cat"}, [["cat"]]):
        with pytest.raises(DataError, match=r"metrics\.json, class_names"):
            kinds.check({"class_names": damaged}, kinds.METRICS, "metrics.json")
