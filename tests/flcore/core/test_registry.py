"""Things by name: imported when asked for, added to by plug-ins."""

from __future__ import annotations

import subprocess
import sys

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


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = """
import sys
from flcore.methods import METHODS
names, loaded = list(METHODS), {name for name in sys.modules if name.startswith("flcore.methods.")}
METHODS["fedprox"]
print(len(names) > 20, sorted({name for name in sys.modules if name.startswith("flcore.methods.")} - loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True ['flcore.methods.fedavg', 'flcore.methods.fedprox']\n"
