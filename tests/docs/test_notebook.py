"""The notebook: its cells run from top to bottom in a fresh process, and print what it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
_END = "==== end of a cell ===="


@pytest.mark.slow
def test_its_cells_print_what_it_shows(tmp_path: Path) -> None:
    script = "\n".join("".join(cell["source"]) + f"\nprint({_END!r})" for cell in CODE)
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{_END}\n")[:-1]
    shown = [
        "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        for cell in CODE
    ]
    assert printed == shown


def test_it_is_a_notebook_with_a_picture() -> None:
    assert [cell["execution_count"] for cell in CODE] == [1, 2, 3, 4]
    (picture,) = (output for cell in CODE for output in cell["outputs"] if output["output_type"] == "display_data")
    assert picture["data"]["image/png"].startswith("iVBOR")  # the signature of PNG in base64
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
