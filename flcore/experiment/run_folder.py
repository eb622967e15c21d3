"""A run's folder: its files, and the run that it holds. This module does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flcore.config.stored import as_decided, resolve_paths, without_removed
from flcore.core.errors import ConfigError, Cure, DataError
from flcore.core.text import to_yaml
from flcore.io import disk
from flcore.io.files import json_text, read_json, replace_file, sealed, unsealed

if TYPE_CHECKING:
    from flcore.config.schema import Config

_UNSET = object()


class RunFiles:
    """Paths in a run folder (docs/reference/run-folder.md).

    Attributes:
        config: resolved configuration without ``tracking``, run hash and environment; it names this machine.
        checkpoint: state of an unfinished run.
        history: a record per evaluated round; exists only after training has finished.
        model: the global model as a state dict; without tensors where a method has none.
        server: the server's record. clients: folder of one record per client that has state.
        snapshots: folder of the states after rounds of ``evaluation.snapshots``.
        timing: seconds by exchange and phase, and start and end of each exchange in milliseconds since 1970.
        metrics: final scores and costs; written last, so it exists only in a whole run.
        seal: SHA-256 of history and metrics. curves: the history as CSV.
        analyses: folder of ``index.json``, and ``<name>.npz`` and ``<name>.csv`` of each analysis.
        figures: folder of ``<name>.svg`` and ``.csv``; of analyses ``<name>.png``.
        report: the HTML page.
        prepared, partition: the run's inputs, where it has its own.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "config.json"
        self.checkpoint = directory / "checkpoint"
        self.history = directory / "history.jsonl"
        self.model = directory / "model.safetensors"
        self.server = directory / "server.safetensors"
        self.clients = directory / "clients"
        self.snapshots = directory / "snapshots"
        self.timing = directory / "timing.json"
        self.metrics = directory / "metrics.json"
        self.seal = directory / "seal.json"
        self.curves = directory / "curves.csv"
        self.analyses = directory / "analyses"
        self.figures = directory / "figures"
        self.report = directory / "report.html"
        self.prepared = directory / "prepared"
        self.partition = directory / "partition"

    def client(self, number: int) -> Path:
        """Return the path of a client's last state."""
        return self.clients / f"{number:04d}.safetensors"

    def snapshot(self, number: int, name: str) -> Path:
        """Return the path of the state of ``server`` or ``client.<id>`` after a round; 0: before the first."""
        return self.snapshots / f"{number:04d}.{name}.safetensors"

    def inputs(self) -> list[Path]:
        """Return the existing files of :attr:`prepared` and :attr:`partition`, and what was asked for."""
        requests = self.directory.glob("*.request.json")
        found = (path for folder in (self.prepared, self.partition) for path in folder.glob("*") if path.is_file())
        return sorted([*requests, *found])

    def records(self) -> list[Path]:
        """Return the existing files of :attr:`clients` and :attr:`snapshots`; fingerprints of runs use this order."""
        return [path for folder in (self.clients, self.snapshots) for path in sorted(folder.glob("*.safetensors"))]


_CURE = "no run was started there, or its folder is damaged: delete it and start the run again"


def read_run_config(directory: Path) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        DataError: it is missing or damaged.
    """
    path = RunFiles(directory).config
    content = unsealed(read_json(path, _CURE))
    if content is None:
        raise DataError(f"{path}: damaged, or of an earlier version: its check sum is wrong or missing; {_CURE}")
    sections = content.get("config")
    whole = isinstance(sections, dict) and all(isinstance(sections.get(name), dict) for name in ("data", "partition"))
    if not whole or not isinstance(content.get("identity"), dict) or not isinstance(content.get("config_hash"), str):
        raise DataError(f"{path}: damaged, without config, identity or config_hash; {_CURE}")
    return {**content, "config": without_removed(content["config"])}


def write_run_config(directory: Path, config: Config, run_hash: str, **content: Any) -> None:
    """Write ``config.json``.

    Args:
        directory: of the run. run_hash: its hash.
        config: the run's, with plug-ins in its folder. Their paths are stored relative to it, so it may be moved.
        content: further JSON values, such as ``code``, ``environment`` and ``decision``.
    """
    mapping = config.to_mapping()
    del mapping["tracking"], mapping["tune"]  # no part of the run; the first may hold a password
    for entry in mapping.get("plugins", ()):
        entry["path"] = Path(entry["path"]).relative_to(directory.absolute()).as_posix()
    header = {"config": mapping, "identity": config.identity(), "config_hash": run_hash}
    write_result(RunFiles(directory).config, sealed({**header, **content}), durable=True)


def seal(directory: Path, metrics: str) -> None:
    """Write the digests of a finished run's results, before ``metrics.json`` with this text is written."""
    files = RunFiles(directory)
    contents = {files.history.name: files.history.read_bytes(), files.metrics.name: metrics.encode()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    write_result(files.seal, digests, durable=True)


def check_seal(directory: Path) -> None:
    """Refuse results that have changed; runs of earlier versions have no seal, and pass.

    Raises:
        DataError: history or metrics have changed since the run finished.
    """
    files = RunFiles(directory)
    if not files.seal.exists() or not files.metrics.exists():
        return
    stated = read_json(files.seal, Cure.TRAIN_AGAIN)
    for path in (files.history, files.metrics):
        content = path.read_bytes() if path.is_file() else b""
        if stated.get(path.name) != hashlib.sha256(content).hexdigest():
            raise DataError(f"{path}: damaged, its content is not what was written; {Cure.TRAIN_AGAIN}")


def stored_mapping(directory: Path) -> dict[str, Any]:
    """Return the configuration of a run as nested mapping; its plug-ins are the copies in its folder.

    Raises:
        DataError: it names a plug-in elsewhere, which would run as code of this run.
    """
    stored = read_run_config(directory)["config"]
    for entry in stored.get("plugins") or ():
        path = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(path, str) or PurePosixPath(path).parent != PurePosixPath("plugins"):
            raise DataError(
                f"{RunFiles(directory).config}: damaged, names a plug-in that is not in its folder; {_CURE}"
            )
    return resolve_paths(stored, directory)


def stored_config(directory: Path) -> Config:
    """Return the configuration of a run."""
    from flcore.config.schema import Config

    return Config.from_mapping(stored_mapping(directory))


def holds_run(directory: Path, run_hash: str) -> bool:
    """Return whether a directory holds the run of this hash, finished or not."""
    return RunFiles(directory).config.exists() and read_run_config(directory)["config_hash"] == run_hash


def is_finished(directory: Path, run_hash: str) -> bool:
    """Return whether the run of this hash has finished in a directory."""
    return RunFiles(directory).history.exists() and holds_run(directory, run_hash)


def finished_by_other_code(directory: Path, code: str) -> bool:
    """Return whether a directory holds results of other code than this."""
    files = RunFiles(directory)
    return files.history.exists() and files.config.exists() and read_run_config(directory).get("code") != code


def forget_results(directory: Path) -> None:
    """Remove the files that mark a finished run, and those made from its results, so that it is trained again."""
    files = RunFiles(directory)
    # The seal comes after its files: a kill in between leaves damaged results, which are removed too.
    for path in (files.history, files.metrics, files.seal, files.report, files.analyses / "index.json"):
        disk.remove(path, missing_ok=True)


def forget_damaged_results(directory: Path) -> None:
    """Do :func:`forget_results` if the results have changed since they were written."""
    try:
        check_seal(directory)
    except DataError:
        forget_results(directory)


_OWNED = ("checkpoint", "clients", "snapshots", "prepared", "partition", "analyses", "figures", "plugins")
"""Subfolders that a run may empty or remove."""


def refuse_inside_a_run(place: Path) -> None:
    """Refuse to write to a path inside a folder that a run may remove.

    Raises:
        ConfigError: the path is inside such a folder.
    """
    whole = place.resolve()
    for folder in (whole, *whole.parents):
        if folder.name in _OWNED and RunFiles(folder.parent).config.exists():
            raise ConfigError(
                f"{place}: is in {folder.name}, which the run in {folder.parent} may remove; choose another folder"
            )


def refuse_other_run(config: Config, directory: Path, *, by_places: bool = True) -> None:
    """Refuse a folder that holds a run of another configuration.

    Args:
        config: of the new run. directory: the folder.
        by_places: also compare the paths of data and partition; False for a caller that compares their contents.

    Raises:
        ConfigError: it holds another run, or results without ``config.json``.
    """
    files = RunFiles(directory)
    if not files.config.exists():
        if files.history.exists():
            raise ConfigError(
                f"{directory}: holds results without {files.config.name}, which describes their run; "
                "choose another folder, or delete that one"
            )
        return
    found, wanted = read_run_config(directory), json.loads(json.dumps(config.to_mapping()))
    here = as_decided(json.loads(json.dumps(config.identity())), found["identity"])
    # Files in another place may hold other images under the same configuration.
    places = (("data", "root"), ("partition", "path"))
    moved = [{s: {key: held[s].get(key)} for s, key in places} for held in (found["config"], wanted)]
    if found["identity"] != here or (by_places and moved[0] != moved[1]):
        differs = config_differences(found["identity"], here) + (config_differences(*moved) if by_places else [])
        raise ConfigError(
            f"{directory}: holds a run with another configuration or other files ({list_differences(differs)}); "
            "choose another folder, or delete that one"
        )


def config_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two nested mappings of JSON values: ``local.lr is 0.1 there``, in order of keys."""
    held, wanted = dict(_dotted(there)), dict(_dotted(here))
    differing = [key for key in sorted({*held, *wanted}) if held.get(key, _UNSET) != wanted.get(key, _UNSET)]
    return [f"{key} is {to_yaml(held[key]) if key in held else 'not set'} there" for key in differing]


def list_differences(differing: Sequence[str], most: int = 3) -> str:
    """Join the first differences; an ellipsis replaces the rest."""
    return ", ".join(differing[:most]) + (", ..." if len(differing) > most else "")


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def on_other_data(directory: Path) -> ConfigError:
    """Return the error for a folder with a run of this configuration on other data or another partition."""
    return ConfigError(f"{directory}: holds a run on other data; choose another folder, or delete that one")


def write_result(path: Path, content: Any, *, durable: bool = False) -> None:
    """Write JSON values to a file in one step; numbers that are not finite become null."""
    write_text(path, result_text(content), durable=durable)


def result_text(content: Any) -> str:
    """Return the text of :func:`write_result`."""
    return json_text(content, indent=2) + "\n"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file in one step, without changing line ends."""
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)
