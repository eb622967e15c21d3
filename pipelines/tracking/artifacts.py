"""Which files of a run or of a comparison MLflow keeps, and in what form."""

from __future__ import annotations

from pathlib import Path

from flcore.experiment.run_folder import RunFiles

_MAX_BYTES = 32 * 2**20
_OF_A_COMPARISON = (".csv", ".html", ".json", ".md", ".png", ".svg", ".tex")
_OF_THIS_MACHINE = ("inputs.json", "prepared.request.json")  # where data lie


def small_files(run_dir: Path) -> list[Path]:
    """Return the files of a run that MLflow keeps: not weights, states, data, checkpoints and very large ones."""
    layout = RunFiles(run_dir)
    skipped = {folder.name for folder in (layout.checkpoint, layout.clients, layout.prepared, layout.partition)}
    return [
        path
        for path in sorted(run_dir.rglob("*"))
        if path.suffix != ".safetensors"
        and path.name not in _OF_THIS_MACHINE
        and not any(part in skipped or part.startswith(".") for part in path.relative_to(run_dir).parts)
        and _may_be_logged(path, run_dir)
    ]


def comparison_files(directory: Path) -> list[Path]:
    """Return the files of a comparison that MLflow keeps: those in its folder itself, and its figures."""
    candidates = [*sorted(directory.glob("*")), *sorted((directory / "figures").rglob("*"))]
    return [
        path
        for path in candidates
        if path.suffix in _OF_A_COMPARISON and not path.name.startswith(".") and _may_be_logged(path, directory)
    ]


def _may_be_logged(path: Path, folder: Path) -> bool:
    """Return whether a path is a file of at most 32 MiB inside a folder; links to other places are not published."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve()) and path.stat().st_size <= _MAX_BYTES
