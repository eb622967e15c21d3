"""A run's folder: where things lie in it, and whose run it is. To ask where they lie, torch is not imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flcore.config.stored import resolve_paths, without_removed
from flcore.core.errors import ConfigError, Cure, DataError
from flcore.core.text import to_yaml
from flcore.io import disk
from flcore.io.files import json_text, read_json, replace_file, unsealed

if TYPE_CHECKING:
    from flcore.config.schema import Config

_UNSET = object()


@dataclass(frozen=True)
class RunFiles:
    """Where things lie in a run directory (ARCHITECTURE, "A run on disk")."""

    directory: Path

    @property
    def config(self) -> Path:
        """Resolved configuration without ``tracking``, run hash and environment; a side file: it names this machine."""
        return self.directory / "config.json"

    @property
    def checkpoint(self) -> Path:
        """What a running run needs to resume; gone when it has finished."""
        return self.directory / "checkpoint"

    @property
    def history(self) -> Path:
        """A record per evaluated round; its presence means that training has finished."""
        return self.directory / "history.jsonl"

    @property
    def model(self) -> Path:
        """The global model as a plain state dict; without tensors where a method has none."""
        return self.directory / "model.safetensors"

    @property
    def server(self) -> Path:
        """Everything the server holds, as a record."""
        return self.directory / "server.safetensors"

    @property
    def clients(self) -> Path:
        """What clients keep: one record per client that remembers something."""
        return self.directory / "clients"

    @property
    def snapshots(self) -> Path:
        """What server and clients held after rounds of ``evaluation.snapshots``; see :meth:`snapshot`."""
        return self.directory / "snapshots"

    def snapshot(self, number: int, name: str) -> Path:
        """What ``server`` or ``client.<id>`` held after a round; 0: before the first."""
        return self.snapshots / f"{number:04d}.{name}.safetensors"

    def records(self) -> list[Path]:
        """What is there of :attr:`clients` and :attr:`snapshots`."""
        # In this order: fingerprints of finished runs are taken over it.
        folders = (self.clients, self.snapshots)
        return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]

    @property
    def timing(self) -> Path:
        """Seconds by exchange and phase, and when each exchange began and ended, in milliseconds since 1970."""
        return self.directory / "timing.json"

    @property
    def metrics(self) -> Path:
        """The final scores and costs; written last, so that its presence means that the run is whole."""
        return self.directory / "metrics.json"

    @property
    def seal(self) -> Path:
        """SHA-256 of history and metrics: whoever reads these knows whether they are what was written."""
        return self.directory / "seal.json"

    @property
    def curves(self) -> Path:
        """The history as a table for plotting tools."""
        return self.directory / "curves.csv"

    @property
    def analyses(self) -> Path:
        """Data of the analyses that were asked for: ``index.json``, and ``<name>.npz`` and ``<name>.csv`` of each."""
        return self.directory / "analyses"

    @property
    def figures(self) -> Path:
        """Figures with their data: ``<name>.svg`` and ``.csv``; of analyses ``<name>.png``."""
        return self.directory / "figures"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.directory / "report.html"

    @property
    def prepared(self) -> Path:
        """The data, where the run has its own."""
        return self.directory / "prepared"

    @property
    def partition(self) -> Path:
        """Which client holds what, likewise."""
        return self.directory / "partition"


_CURE = "no run was begun there, or its folder is damaged: delete that, and begin it again"


def read_run_config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = RunFiles(directory).config
    content = read_json(path, _CURE)
    sections = content.get("config")
    whole = isinstance(sections, dict) and all(isinstance(sections.get(name), dict) for name in ("data", "partition"))
    if not whole or not isinstance(content.get("identity"), dict) or not isinstance(content.get("config_hash"), str):
        raise DataError(f"{path}: damaged, without config, identity or config_hash; {_CURE}")
    if "check" in content:  # else of a run that came by DVC from an earlier version
        written = unsealed(content)
        if written is None:
            raise DataError(f"{path}: damaged, its content is not what was written; {_CURE}")
        content = written
    return {**content, "config": without_removed(content["config"])}


def seal(directory: Path, metrics: str) -> None:
    """Say what the results of a finished run are, before its ``metrics.json`` is written, which says that it is whole.

    Args:
        directory: of the run.
        metrics: the text that ``metrics.json`` will have.
    """
    files = RunFiles(directory)
    contents = {files.history.name: files.history.read_bytes(), files.metrics.name: metrics.encode()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    write_result(files.seal, digests, durable=True)


def check_seal(directory: Path) -> None:
    """Refuse results that are not those that were written; runs of earlier versions have no seal, and pass.

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
    """The configuration of a run as nested mapping; its plug-ins are the copies in its folder.

    Raises:
        DataError: it names a plug-in elsewhere, which would be carried out as code of this run.
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
    """The configuration of a run."""
    from flcore.config.schema import Config

    return Config.from_mapping(stored_mapping(directory))


def holds_run(directory: Path, run_hash: str) -> bool:
    """Whether a directory holds the run of this hash, whole or half."""
    return RunFiles(directory).config.exists() and read_run_config(directory)["config_hash"] == run_hash


def is_finished(directory: Path, run_hash: str) -> bool:
    """Whether the run of this hash has finished in a directory."""
    return RunFiles(directory).history.exists() and holds_run(directory, run_hash)


def finished_by_other_code(directory: Path, code: str) -> bool:
    """Whether a directory holds a run's results, and other code than this has made them."""
    files = RunFiles(directory)
    return files.history.exists() and files.config.exists() and read_run_config(directory).get("code") != code


def forget_results(directory: Path) -> None:
    """Take away what says that a run has finished, and what was made of its results: it is trained anew."""
    files = RunFiles(directory)
    # The seal behind what it is of: a kill in between leaves results that are damaged, which are forgotten as well.
    for path in (files.history, files.metrics, files.seal, files.report, files.analyses / "index.json"):
        disk.remove(path, missing_ok=True)


def forget_damaged_results(directory: Path) -> None:
    """As :func:`forget_results`, where they are not those that were written; whole ones stay."""
    try:
        check_seal(directory)
    except DataError:
        forget_results(directory)


_OWNED = ("checkpoint", "clients", "snapshots", "prepared", "partition", "analyses", "figures", "plugins")
"""Folders in a run's folder, which the run empties or removes when it needs to."""


def refuse_inside_a_run(place: Path) -> None:
    """Stop before anything is written in a folder that belongs to a run, which may remove it.

    Args:
        place: where something is to be written.

    Raises:
        ConfigError: it is inside such a folder.
    """
    whole = place.resolve()
    for folder in (whole, *whole.parents):
        if folder.name in _OWNED and RunFiles(folder.parent).config.exists():
            raise ConfigError(
                f"{place}: lies in {folder.name}, which the run in {folder.parent} may remove; choose another folder"
            )


def refuse_other_run(config: Config, directory: Path, *, by_places: bool = True) -> None:
    """Stop before anything is written where a folder holds a run of another configuration.

    Args:
        config: of the run that is to go there. directory: the folder.
        by_places: also where its data and its partition lay elsewhere. Not for a caller that reads them next, and then
            sees whether they are others.

    Raises:
        ConfigError: it does; or it holds results, and nothing says whose.
    """
    files = RunFiles(directory)
    if not files.config.exists():
        if files.history.exists():
            raise ConfigError(
                f"{directory}: holds results without {files.config.name}, which says whose they are; "
                "choose another folder, or delete that one"
            )
        return
    found, wanted = read_run_config(directory), json.loads(json.dumps(config.to_mapping()))
    here = json.loads(json.dumps(config.identity()))
    # Files elsewhere may hold other images under the same configuration; whether they do, only reading them would tell.
    places = (("data", "root"), ("partition", "path"))
    moved = [{s: {key: held[s].get(key)} for s, key in places} for held in (found["config"], wanted)]
    if found["identity"] != here or (by_places and moved[0] != moved[1]):
        differs = config_differences(found["identity"], here) + (config_differences(*moved) if by_places else [])
        raise ConfigError(
            f"{directory}: holds a run with another configuration or other files ({list_differences(differs)}); "
            "choose another folder, or delete that one"
        )


def config_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two nested mappings of JSON values: ``local.lr is 0.1 there``, in order of keys."""
    held, wanted = dict(_dotted(there)), dict(_dotted(here))
    differing = [key for key in sorted({*held, *wanted}) if held.get(key, _UNSET) != wanted.get(key, _UNSET)]
    return [f"{key} is {to_yaml(held[key]) if key in held else 'not set'} there" for key in differing]


def list_differences(differing: Sequence[str], most: int = 3) -> str:
    """The first of what differs, and that there is more."""
    return ", ".join(differing[:most]) + (", ..." if len(differing) > most else "")


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def on_other_data(directory: Path) -> ConfigError:
    """What to raise where a folder holds a run of this configuration on other data, or another partition."""
    return ConfigError(f"{directory}: holds a run on other data; choose another folder, or delete that one")


def write_result(path: Path, content: Any, *, durable: bool = False) -> None:
    """Write JSON of a run in one step; a figure that is infinite, as where a model's answers overflow, is null there.

    Args:
        path: the file. content: JSON values.
        durable: as for :func:`flcore.io.files.replace_file`.
    """
    write_text(path, result_text(content), durable=durable)


def result_text(content: Any) -> str:
    """What :func:`write_result` writes."""
    return json_text(content, indent=2) + "\n"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file in one step, line ends as they are."""
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)
