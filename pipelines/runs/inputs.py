"""Folders of a run's data and partition, in ``inputs.json`` of its folder, a file for this machine only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.core.errors import DataError
from flcore.io.files import read_json, write_json
from flcore.experiment.run_folder import RunFiles

_CURE = "the command that made the run makes them again"


@dataclass(frozen=True)
class Inputs:
    """Folders of a run's prepared data and partition."""

    prepared: Path
    partition: Path


def write_inputs(directory: Path, inputs: Inputs, into: Path | None = None) -> None:
    """Write the folders of a run's data, relative to ``directory``, in which the file is, or will be if ``into`` is."""
    home = directory.absolute()
    places = {"prepared": inputs.prepared, "partition": inputs.partition}
    seen = {key: os.path.relpath(path.absolute(), home) for key, path in places.items()}
    write_json((into or home) / "inputs.json", seen, durable=True)


def inputs_of(directory: Path, metrics: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a run: from ``inputs.json``, or from the run's own folder, where `flcore` leaves them.

    A run from DVC has neither; its data are two folders above it, as in ``artifacts/``.

    Raises:
        DataError: they are missing, or are not those of ``metrics``, which are empty while the run has not finished.
    """
    places = _places(RunFiles(directory), metrics.get("seed"))
    found = next((place for place in places if place.prepared.exists() and place.partition.exists()), places[0])
    for folder, told, described, fingerprint in (
        (found.prepared, "prepared data", "meta.json", "data_fingerprint"),
        (found.partition, "clients' indices", "manifest.json", "partition_fingerprint"),
    ):
        if not (folder / described).exists():
            raise DataError(f"{directory}: its {told} lay in {folder} and are not there any more; {_CURE}")
        wanted = metrics.get(fingerprint)
        if wanted is not None and read_json(folder / described, _CURE).get("fingerprint") != wanted:
            raise DataError(f"{directory}: what lies in {folder} is not what the run was made from; {_CURE}")
    return found


def _places(files: RunFiles, seed: int | None) -> list[Inputs]:
    """Return the candidates, the likeliest first."""
    home, said = files.directory.absolute(), files.directory / "inputs.json"
    places = [Inputs(files.prepared, files.partition)]
    places += [Inputs(folder / "prepared", folder / "partitions" / f"seed-{seed}") for folder in home.parents[:2]]
    if said.exists():
        stated = read_json(said, _CURE)
        seen = [place for key in ("prepared", "partition") if isinstance(place := stated.get(key), str)]
        if len(seen) < 2:
            raise DataError(f"{said}: damaged, does not say where prepared data and partition lie; {_CURE}")
        # Normalised, not resolved: a link in the path keeps its name.
        places.insert(0, Inputs(*(Path(os.path.normpath(home / place)) for place in seen)))
    return places
