"""The page "From your images to a nightly comparison", typed in order with messy images."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "fifteen-minutes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SECONDS = 1200

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


class Shell:
    """Somebody who types the page's blocks; folder and variables of a block stay for the next one."""

    def __init__(self, folder: Path) -> None:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "PROTOFL_", "GIT_"))}
        names = {
            f"GIT_{role}_{kind}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for kind in ("NAME", "EMAIL")
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.folder, self.environment = folder, {**outside, **names, "PATH": path}
        self._after = folder / "environment"

    def type(self, block: str) -> str:
        """Run a block; return what it prints."""
        script = f"set -e\n{block}\nenv -0 > {self._after}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        pairs = self._after.read_text().split("\0")
        self.environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        self.folder = Path(self.environment["PWD"])
        return done.stdout


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
    init, check, repro, commit, up, run, best, archive, reproduce = (text for kind, text in BLOCKS if kind == "sh")
    (shown,) = (text for kind, text in BLOCKS if kind == "text")

    assert shell.type(init).startswith(shown)
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
    address = {entry["name"]: entry["address"] for entry in json.loads(shell.type("protofl status --json"))}
    shell.type(run.replace("http://127.0.0.1:4200", address["prefect"]))
    deadline = time.monotonic() + SECONDS
    while not list((project / "runs" / "nightly").glob("*/report.html")):
        assert time.monotonic() < deadline, shell.type("cat .protofl/logs/*.log | tail -60")
        time.sleep(2)
    assert "champion" in shell.type(best)
    shell.type(archive)
    assert "same" in shell.type(reproduce)
