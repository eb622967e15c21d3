"""Things by name: imported when asked for, added to by plug-ins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flcore.core.registry import Registry


def test_entries_stand_in_the_order_of_the_table_and_those_added_follow() -> None:
    table: Registry[object] = Registry("thing", {"path": "pathlib:Path", "counter": "collections:Counter"})
    table.add("own", int)
    assert list(table) == ["path", "counter", "own"]
    assert (len(table), "own" in table, "other" in table) == (3, True, False)
    assert table["counter"].__name__ == "Counter"  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        table["other"]


def test_a_name_is_not_taken_twice_and_the_tables_own_stay() -> None:
    table: Registry[object] = Registry("thing", {"path": "pathlib:Path"})
    with pytest.raises(ValueError, match="there is a thing called path already"):
        table.add("path", int)
    table.add("path", table["path"])  # the same thing again
    table.add("own", int)
    for name in ("own", "path", "own"):
        table.remove(name)
    assert list(table) == ["path"]


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
