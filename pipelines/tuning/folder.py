"""A study's folder: where things lie in it, whose study it is, and who may write there at this moment.

Without torch: whoever draws and logs studies reads folders alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError
from flcore.experiment.run_folder import config_differences, list_differences
from flcore.io import disk
from flcore.io.files import remove_stale_temp
from flcore.io.locks import take_lock
from pipelines.config import yaml_text
from pipelines.runs.layout import RunFiles, read_json, write_json, write_text

if TYPE_CHECKING:
    from pipelines.tuning.problem import Problem


@dataclass(frozen=True)
class StudyFiles:
    """Where things lie in a study's folder."""

    directory: Path

    @property
    def journal(self) -> Path:
        """Optuna's storage, unless another is named."""
        return self.directory / "study.journal"

    @property
    def database(self) -> Path:
        """Optuna's storage in a study that an earlier version began."""
        return self.directory / "study.db"

    @property
    def params(self) -> Path:
        """The given configuration, as a parameter file."""
        return self.directory / "params.yaml"

    @property
    def best(self) -> Path:
        """The same with the best values."""
        return self.directory / "best.yaml"

    @property
    def record(self) -> RunFiles:
        """The study as a run whose rounds are trials, for MLflow; it also says whose folder this is."""
        return RunFiles(self.directory / "study")

    @property
    def results(self) -> Path:
        return self.directory / "study.json"

    @property
    def table(self) -> Path:
        return self.directory / "study.md"

    @property
    def trials(self) -> Path:
        """All trials, for spreadsheets: a row each."""
        return self.directory / "trials.csv"

    @property
    def figures(self) -> Path:
        """What Optuna draws of the results: ``<name>.svg``."""
        return self.directory / "figures"

    def trial(self, number: int) -> RunFiles:
        """The run of a trial."""
        return RunFiles(self.directory / "trials" / f"{number:04d}")

    def outcome(self, number: int) -> Path:
        """How a trial has ended; not there before."""
        return self.trial(number).directory / "trial.json"

    def claim(self, number: int) -> Path:
        """Locked by the process that carries a trial out; outside of its folder, which may be made anew."""
        path = self.directory / ".claims" / f"{number:04d}"
        disk.make_folder(path.parent)
        return path

    @property
    def command(self) -> str:
        """What to type to run the best configuration."""
        return f"protofl run --params {shlex.quote(str(self.best))}"


def refuse_other_study(problem: Problem, files: StudyFiles) -> None:
    """Stop before anything is written where a folder holds the study of another configuration.

    Raises:
        ConfigError: it does; names what differs.
    """
    if not files.record.config.exists():
        return
    held = read_json(files.record.config)["identity"]
    if held == problem.identity:
        return
    shown = list_differences(config_differences(held, problem.identity))
    raise ConfigError(
        f"{files.directory}: holds the study of another configuration ({shown})\n"
        "choose another --out, or delete that folder"
    )


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Have a study's storage and results to oneself for a moment; a process that ends, however, lets go of them.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        disk.make_folder(directory)
        handle = disk.open_lock(directory / ".lock")
    except OSError as error:
        raise ConfigError(f"{directory}: cannot write there ({error.strerror}); choose another --out") from error
    with handle:
        take_lock(handle, wait=True)
        yield


def claim(problem: Problem, files: StudyFiles) -> None:
    """Mark a folder as a study's, with the given parameters beside."""
    from pipelines.runs.provenance import environment  # torch

    remove_stale_temp(files.record.directory)
    write_params(files.params, problem.parameters_with({}))
    mapping = {section: values for section, values in problem.config.to_mapping().items() if section != "tracking"}
    for dimension in problem.dimensions:
        section, _, name = dimension.key.partition(".")
        mapping[section][name] = f"searched: {dimension.words}"
    described = {
        "study": problem.name,
        "config": mapping,
        "config_hash": problem.hash,
        "identity": problem.identity,
        "environment": environment(problem.config),
    }
    write_json(files.record.config, described, durable=True)


def write_params(path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a parameter file."""
    write_text(path, yaml_text.write(dict(parameters)))
