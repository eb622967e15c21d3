"""The page "From your images to a nightly comparison", typed in order with messy images."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.docs.pages import HOW_TO, SECONDS, Shell, assert_printed, blocks

SMALLER = {"rounds: 20": "rounds: 2", "seeds: [0, 1, 2]": "seeds: [0, 1]", "alpha: 0.3": "alpha: 5.0"}
"""Changes of params.yaml with which the test takes minutes."""


def write_messy_images(folder: Path) -> None:
    """Two classes of 30 images: odd sizes, grey, RGBA, rotated by EXIF, names with blanks and umlauts; one damaged."""
    rng = np.random.default_rng(0)
    for label, (name, level) in enumerate({"Rost": 60, "in Ordnung": 190}.items()):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            height, width = rng.integers(20, 90, 2).tolist()
            channels = {0: None, 1: 3, 2: 4}[number % 3]
            shape = (height, width) if channels is None else (height, width, channels)
            pixels = np.clip(rng.normal(level, 30, shape), 0, 255).astype(np.uint8)
            image, file = Image.fromarray(pixels), folder / name / f"Bild Nr {number} für {label}.png"
            if number % 3 == 1:
                exif = Image.Exif()
                exif[0x0112] = 6  # a quarter to the right
                image.save(file.with_suffix(".jpg"), exif=exif)
            else:
                image.save(file)
    (folder / "Rost" / "kaputt.jpg").write_bytes(io.BytesIO(b"\xff\xd8 no image").getvalue())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    typing = Shell(tmp_path)
    try:
        yield typing
    finally:
        typing.type("protofl down")


@pytest.mark.services
def test_the_page_from_top_to_bottom(shell: Shell) -> None:
    write_messy_images(shell.folder / "images")
    page = blocks(HOW_TO / "fifteen-minutes.md")
    init, check, repro, commit, up, run, best, archive, reproduce = (block.text for block in page if block.kind == "sh")
    (shown,) = (block.text for block in page if block.kind == "console")

    assert_printed(shown, shell.type(init))
    project = shell.folder
    params = (project / "params.yaml").read_text()
    for value, smaller in SMALLER.items():
        assert value in params
        params = params.replace(value, smaller)
    (project / "params.yaml").write_text(params)
    shell.type(check)
    assert "fedproto" in (project / "runs" / "check" / "comparison.json").read_text()

    shell.type(repro)
    report = project / "artifacts" / "comparison" / "report.html"
    assert "Line 3" in report.read_text()
    assert "Running stage 'train'" not in shell.type(repro)
    shell.type(commit)

    shell.type(up)
    address = {entry["name"]: entry["address"] for entry in json.loads(shell.type("protofl status --json 2>/dev/null"))}
    shell.type(run.replace("http://127.0.0.1:4200", address["prefect"]))
    deadline = time.monotonic() + SECONDS
    while not list((project / "runs" / "nightly").glob("*/report.html")):
        assert time.monotonic() < deadline, shell.type("cat .protofl/logs/*.log | tail -60")
        time.sleep(2)
    assert "champion" in shell.type(best)
    shell.type(archive)
    assert "same" in shell.type(reproduce)
