"""Files of changelog/ can be joined; every version of CHANGELOG.md begins with a short summary."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_entries_have_a_kind_and_are_one_short_item() -> None:
    for path in sorted((ROOT / "changelog").iterdir()):
        if path.name == "README.md":
            continue
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|removed|fixed)\.md", path.name), path.name
        first, *others = path.read_text(encoding="utf-8").splitlines()
        assert first.startswith("- ") and all(line.startswith("  ") for line in others), path.name
        assert len(others) < 3, path.name


def test_a_version_begins_with_at_most_ten_lines() -> None:
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [version[:7] for version in versions] == ["[0.2.0]", "[0.1.0]"]
    for version in versions:
        summary = version.partition("\n### ")[0]
        assert 1 <= summary.count("\n- ") <= 10
