"""Things by name: imported when asked for, added to by plug-ins."""

from __future__ import annotations

import pytest

from flcore.core.registry import Registry


def test_entries_stand_in_the_order_of_the_table_and_those_added_follow() -> None:
    table: Registry[object] = Registry("thing", {"path": "pathlib:Path", "counter": "collections:Counter"})
    table.added["own"] = int
    assert list(table) == ["path", "counter", "own"]
    assert (len(table), "own" in table, "other" in table) == (3, True, False)
    assert table["counter"].__name__ == "Counter"  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        table["other"]
