"""A study's folder: its files, its identity, its lock. No torch, for processes that only draw or log studies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError
from flcore.experiment.run_folder import config_differences, list_differences
from flcore.io import disk
from flcore.io.files import remove_stale_temp, sealed
from flcore.io.locks import take_lock
from pipelines.plan import yaml_text
from pipelines.runs.folder import RunFolder
from pipelines.runs.layout import RunFiles, write_json, write_text

if TYPE_CHECKING:
    from pipelines.tuning.problem import Problem


class StudyFiles:
    """The files in a study's folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.params = directory / "params.yaml"  # as given
        self.best = directory / "best.yaml"  # with the best values
        self.record = RunFiles(directory / "study")  # for MLflow, a run with trials as rounds; names the study, too
        self.results = directory / "study.json"
        self.table = directory / "study.md"
        self.trials = directory / "trials.csv"

    def trial(self, number: int) -> RunFiles:
        return RunFiles(self.directory / "trials" / f"{number:04d}")

    def claim(self, number: int) -> Path:
        """Return the lock file of the process that runs a trial; outside the trial's folder, which may be recreated."""
        path = self.directory / ".claims" / f"{number:04d}"
        disk.make_folder(path.parent)
        return path

    @property
    def command(self) -> str:
        return f"protofl run --params {shlex.quote(str(self.best))}"


def refuse_other_study(problem: Problem, files: StudyFiles) -> None:
    """Refuse a folder with a study of another configuration, with a ConfigError that names the differing keys."""
    if not files.record.config.exists():
        return
    existing = RunFolder(files.record.directory)
    if existing.identity == problem.identity:
        return
    differences = list_differences(config_differences(existing.identity, problem.identity))
    raise ConfigError(
        f"{files.directory}: holds the study of another configuration ({differences})\n"
        "choose another --out, or delete that folder"
    )


@contextmanager
def exclusive_lock(directory: Path) -> Iterator[None]:
    """Lock a study's folder: of its processes and threads, one at a time asks or tells."""
    try:
        disk.make_folder(directory)
        handle = disk.open_lock(directory / ".lock")
    except OSError as error:
        raise ConfigError(f"{directory}: cannot write there ({error.strerror}); choose another --out") from error
    with handle:
        take_lock(handle, wait=True)
        yield


def write_record(problem: Problem, files: StudyFiles) -> None:
    """Mark a folder as a study's and store the given parameters."""
    from pipelines.runs.provenance import environment  # imports torch

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
    write_json(files.record.config, sealed(described), durable=True)


def write_params(path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a parameter file."""
    write_text(path, yaml_text.write(dict(parameters)))
