"""The parameter page is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from pipelines.cli import documentation

ROOT = Path(__file__).resolve().parents[3]


def test_the_parameter_page_is_up_to_date() -> None:
    assert (ROOT / documentation.TARGET).read_text(encoding="utf-8") == documentation.text(), "run `make docs`"


def test_the_page_names_every_method_parameter_with_its_range() -> None:
    page = documentation.text()
    assert "| `method.mu` | float | `0.01` | >= 0 | weight μ of the proximal term |" in page
    assert "### `method.name: fedproto`" in page
    assert "`plugins`" in page
