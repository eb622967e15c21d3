"""Stage *code*: what of the code each later stage depends on, without comments.

DVC hashes files as they are, and a comment changes no result. So this stage alone depends on sources, and writes one
file for each other stage, with a digest per module; these files are what the other stages depend on.
"""

from __future__ import annotations

from pathlib import Path

import flcore
from flcore.core.loaded_code import code_digest, read_sources
from flcore.experiment.run_folder import write_text
from pipelines.stages.parameters import PLUGINS

_LIBRARY, _OURS = Path(flcore.__file__).parent, Path(__file__).parents[1]
_USES = {
    "prepare": ("stages/prepare.py", "runs/cache.py"),
    "partition": ("stages/partition.py", "runs/cache.py"),
    "train": ("stages/train.py", "runs/cache.py"),
    "compare": ("reporting/", "runs/"),
}
"""Modules of `pipelines`. Every stage also depends on the whole library, as a default may be anywhere in it."""


def write_digests(directory: Path) -> None:
    """Write ``<stage>.txt`` for each stage into a folder: a line per module, its digest and its path."""
    library, ours, plugins = map(_digests, (_LIBRARY, _OURS, PLUGINS))
    for stage, uses in _USES.items():
        lines = library | {
            path: digest for path, digest in ours.items() if path.removeprefix("pipelines/").startswith(uses)
        }
        lines |= plugins if stage != "compare" else {}
        write_text(directory / f"{stage}.txt", "".join(f"{digest} {path}\n" for path, digest in sorted(lines.items())))


def _digests(root: Path) -> dict[str, str]:
    return {f"{root.name}/{path}": code_digest(source) for path, source in read_sources(root).items()}
