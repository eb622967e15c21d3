"""Which files of a run or of a comparison MLflow keeps, and in what form."""

from __future__ import annotations

from pathlib import Path

from flcore.experiment.run_folder import RunFiles

_MAX_BYTES = 32 * 2**20
_OF_A_COMPARISON = (".csv", ".html", ".json", ".md", ".png", ".svg", ".tex")
_OF_THIS_MACHINE = ("inputs.json", "prepared.request.json")  # where data lie


def small_files(run_dir: Path) -> list[Path]:
    """The files of a run that MLflow keeps: all but weights, states, data, checkpoints and very large ones."""
    layout = RunFiles(run_dir)
    skipped = {place.name for place in (layout.checkpoint, layout.clients, layout.prepared, layout.partition)}
    files = (path for path in sorted(run_dir.rglob("*")) if path.is_file() and _is_below(path, run_dir))
    return [
        path
        for path in files
        if path.suffix != ".safetensors"
        and path.name not in _OF_THIS_MACHINE
        and not any(part in skipped or part.startswith(".") for part in path.relative_to(run_dir).parts)
        and path.stat().st_size <= _MAX_BYTES
    ]


def comparison_files(directory: Path) -> list[Path]:
    """The files of a comparison that MLflow keeps: what lies in its folder itself, and its figures."""
    found = [*sorted(directory.glob("*")), *sorted((directory / "figures").rglob("*"))]
    return [
        path
        for path in found
        if path.is_file()
        and _is_below(path, directory)
        and path.suffix in _OF_A_COMPARISON
        and not path.name.startswith(".")
        and path.stat().st_size <= _MAX_BYTES
    ]


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder, and is no link to what lies elsewhere: that is nobody's to publish."""
    return path.resolve().is_relative_to(folder.resolve())
