"""A project for one's own images: its files, and what they depend on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from pipelines.cli.new_project import create
from pipelines.plan.params import override


def images(folder: Path, *sides: int, splits: bool = False, channels: int = 3) -> Path:
    """Two classes; image n is of the side n mod len(sides)."""
    for split in ("train", "test") if splits else (".",):
        for name in ("Rost", "in Ordnung"):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(10):
                side = sides[number % len(sides)]
                shape = (side, side, 3) if channels == 3 else (side, side)
                Image.fromarray(np.full(shape, 20 * number, np.uint8)).save(place / f"Bild {number} ä.png")
    return folder


def test_a_project_has_what_its_stages_need(tmp_path: Path) -> None:
    """A fifth of ten images of each of two classes are four test images; images of two sizes are scaled."""
    folder = tmp_path / "line"
    (tmp_path / "Bilder").mkdir()
    (images(tmp_path / "Bilder", 20, 40) / "Rost" / "kaputt.png").write_bytes(b"no image")
    about, left_out = create(folder, tmp_path / "Bilder")
    assert about == "Bilder: 16 training and 4 test images, 2 classes; colour, scaled to 32 x 32"
    assert left_out.startswith("left out: Rost/kaputt.png (")
    params = yaml.safe_load((folder / "params.yaml").read_text())
    assert params["data"] | {"augmentation": None} == {
        **{"name": "imagefolder", "root": "../Bilder", "title": "Bilder", "size": 32, "channels": 3},
        **{"test_fraction": 0.2, "on_bad_file": "skip", "augmentation": None},
    }
    for method in params["compare"]["methods"]:
        Config.from_mapping(override(params, [f"method.name={method}"]))
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    assert stages["code"].get("deps") is None and stages["code"]["always_changed"] is True
    for stage in stages.values():
        for key in stage.get("params", ()):
            value = params
            for part in key.split("."):
                assert part in value, key
                value = value[part]
    files = ["artifacts/x", "artifacts/comparison/x", "artifacts/comparison/metrics.json", "runs/x", "line3.zip"]
    asked = ["git", "-C", str(folder), "check-ignore", *files]
    ignored = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert set(files) - set(ignored) == {"artifacts/comparison/metrics.json"}
    assert (folder / ".dvc" / "plots" / "methods.json").exists()


def test_images_alike_stay_as_they_are_and_git_ignores_them(tmp_path: Path) -> None:
    folder = tmp_path / "line"
    about = create(folder, images(folder / "images", 28, splits=True, channels=1), title="Line 3")
    assert about == ["Line 3: 20 training and 20 test images, 2 classes; grey, as they are"]
    params = yaml.safe_load((folder / "params.yaml").read_text())
    assert params["data"]["root"] == "images" and params["data"]["test_fraction"] is None
    asked = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "params.yaml" in listed and "Bild" not in listed
    assert "A  .dvcignore\n" in listed  # DVC stages it; a change after that would be "AM"


def test_nothing_is_overwritten_and_nothing_is_left_of_a_refusal(tmp_path: Path) -> None:
    found = images(tmp_path / "images", 20)
    for wrong, error in (({"title": "a/b"}, ConfigError), ({}, None), ({}, ConfigError)):
        if error is None:
            create(tmp_path / "line", found)
            continue
        with pytest.raises(error):
            create(tmp_path / "line", found, **wrong)
    for folder in (found, found / "project"):
        with pytest.raises(ConfigError, match=r"folder of the images"):
            create(folder, found)
    assert sorted(path.name for path in found.iterdir()) == ["Rost", "in Ordnung"]
    with pytest.raises(DataError):
        create(tmp_path / "other", tmp_path / "none")
    assert not (tmp_path / "other").exists()
