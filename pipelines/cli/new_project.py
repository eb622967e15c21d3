"""``protofl init DIR --images IMAGES``: a folder in which ``dvc repro`` compares methods on your own images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from flcore.core.errors import ConfigError, RunError
from flcore.data.sources.imagefiles import ImageFiles, size_of
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.layouts import SPLITS
from flcore.experiment.run_folder import refuse_inside_a_run, write_text

_TEMPLATES = Path(__file__).parent / "templates"
_IGNORED = (
    *(".protofl/", "mlruns/", "mlflow.db*", "runs/", "dvc_plots/", "__pycache__/"),
    "*.zip",  # of `protofl archive`
    # All but the metrics of dvc.yaml, which are in git.
    *("artifacts/*", "!artifacts/comparison/", "artifacts/comparison/*", "!artifacts/comparison/metrics.json"),
)
_SIDE = 32
"""Height and width that images of several sizes, or large ones, are scaled to."""
_LOOKED_AT = 200
"""Images that decide whether all are of one size."""
_CODE_OF_THE_CHECKOUT = """\
    deps:
      - flcore
      - pipelines/stages
      - pipelines/runs
      - pipelines/reporting
      - plugins
"""
_DEPLOYMENTS = Path(__file__).parents[1] / "orchestration" / "prefect.yaml"
_CODE_OF_THE_PACKAGE = "    always_changed: true # the digests of the installed package\n"


def create(folder: Path, images: Path, title: str | None = None) -> list[str]:
    """Write params.yaml, dvc.yaml, infra/prefect.yaml and a git repository with DVC; return lines about the images.

    ``images`` is a folder or zip of images by class, with ``train`` and ``test`` or without.

    Raises:
        ConfigError: a file exists already, the folder is among the images, or the title is not valid.
        DataError: there are no images to use. RunError: git or DVC failed.
    """
    refuse_inside_a_run(folder)
    params, stages = folder / "params.yaml", folder / "dvc.yaml"
    for file in (params, stages):
        if file.exists():
            raise ConfigError(f"{file}: is there already; choose another folder")
    if folder.resolve().is_relative_to(images.resolve()):
        raise ConfigError(f"{folder}: is in the folder of the images, where it would be a class; choose another folder")
    if shutil.which("git") is None:
        raise ConfigError("init: git is not installed, and DVC needs it; install git")
    name, fraction = title or images.stem, None if all((images / split).is_dir() for split in SPLITS) else 0.2
    try:
        source = ImageFolder(title=name, test_fraction=fraction, on_bad_file="skip", image_size=_SIDE)
    except ValueError as error:
        raise ConfigError(f"--title: {error}") from error
    raw = source.load(images)
    files = raw.train.images
    assert isinstance(files, ImageFiles)
    sides = {size_of(file, files.read) for file in files.names[:_LOOKED_AT]}
    size = None if len(sides) == 1 and max(*next(iter(sides))) <= 2 * _SIDE else _SIDE
    values = {
        "root": json.dumps(os.path.relpath(images, folder)),
        "title": json.dumps(name),
        "size": json.dumps(size),
        "channels": json.dumps(files.channels),
        "test_fraction": json.dumps(fraction),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(params, Template(_template("project_params.yaml.txt")).substitute(values))
    write_text(stages, _template("project_dvc.yaml.txt").replace(_CODE_OF_THE_CHECKOUT, _CODE_OF_THE_PACKAGE))
    (folder / "infra").mkdir(exist_ok=True)
    write_text(folder / "infra" / "prefect.yaml", _DEPLOYMENTS.read_text(encoding="utf-8"))
    _make_repository(folder, images)
    counts = f"{len(raw.train.labels)} training and {len(raw.test.labels)} test images, {len(raw.class_names)} classes"
    colour = "grey" if files.channels == 1 else "colour"
    form = "as they are" if size is None else f"scaled to {size} x {size}"
    left_out = [f"left out: {file} ({reason})" for file, reason in raw.skipped.items()]
    return [f"{name}: {counts}; {colour}, {form}", *left_out]


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _make_repository(folder: Path, images: Path) -> None:
    """Make a git repository with DVC where there is none; git ignores results, and images in the folder."""
    asked = ["git", "rev-parse", "--is-inside-work-tree"]
    if subprocess.run(asked, cwd=folder, capture_output=True, check=False).returncode:
        _run(["git", "init", "-q"], folder)
    place = Path(os.path.relpath(images.resolve(), folder.resolve()))
    own = [] if place.parts[0] == ".." else [f"/{place.as_posix()}"]
    if not (folder / ".gitignore").exists():
        write_text(folder / ".gitignore", "\n".join((*_IGNORED, *own)) + "\n")
    write_text(folder / ".dvcignore", _template("dvcignore"))
    if not (folder / ".dvc").exists():  # stages .dvcignore, so its content comes before
        is_root = (folder / ".git").exists()
        _run([sys.executable, "-m", "dvc", "init", "-q", *([] if is_root else ["--subdir"])], folder)
    (folder / ".dvc" / "plots").mkdir(exist_ok=True)
    write_text(folder / ".dvc" / "plots" / "methods.json", _template("plot_methods.json"))


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"init: {' '.join(command[-3:])} failed in {folder}: {done.stderr.strip()[:200]}")
