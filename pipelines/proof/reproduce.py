"""``protofl reproduce``: run the contents of an archive again and compare the results.

An archive is not trusted: it is read strictly (:mod:`pipelines.proof.contents`), its configuration is validated like
any other, and its code runs only with explicit permission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flcore.config.stored import resolve_paths, without_removed
from flcore.core.errors import ConfigError, DataError, RunError, listed
from flcore.experiment.run_folder import RunFiles, refuse_inside_a_run, write_run_config
from flcore.io import disk
from flcore.io.files import read_json, remove_stale_temp, replace_file
from pipelines.orchestration.commands import operation
from pipelines.plan.params import override
from pipelines.proof.contents import (
    PROOF,
    SHOWN,
    Archive,
    ArchivedComparison,
    ArchivedRun,
    read_archive,
    without_places,
)
from pipelines.proof.results import ACCURACY_TOLERANCE, COMPARED, beyond_tolerance, difference, digests, result_files
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs
from pipelines.runs.standard_error import print_drawn

if TYPE_CHECKING:
    from flcore.config.schema import Config
    from pipelines.execution.one_run import PlacedRun
    from pipelines.execution.operation import Operation

_CURE = "delete the folder, or name another with --out"
_TOLD = 12  # number of differences printed


@dataclass
class Findings:
    """The result of a check.

    Attributes:
        same: number of files with the same bytes.
        other: differences from the archive, each as a sentence.
        classes: processor classes of the archive and of this machine, if they differ.
        tolerated: number of files with other bytes that ``other`` leaves out because of that.
        remarks: other differences of the environment, each as a sentence.
    """

    same: int = 0
    other: list[str] = field(default_factory=list)
    classes: tuple[str, str] | None = None
    tolerated: int = 0
    remarks: list[str] = field(default_factory=list)


def reproduce(
    path: Path, out: Path | None, assignments: Sequence[str], *, check: bool, trust_plugins: bool = False
) -> Findings | None:
    """Run the runs of an archive, or resume them.

    Args:
        path: the archive.
        out: their folder; None: ``runs/reproduced/<name of the archive>``.
        assignments: ``KEY=VALUE`` for this machine, such as ``data.root=...``; must not change the run's identity.
        check: compare the results.
        trust_plugins: allow the archive's methods from outside the package to run.

    Returns:
        The result of the check; None without one.

    Raises:
        DataError: the archive is damaged, or the data here differ from the archive's.
        ConfigError: a value changes the run's identity, or code in the archive is not allowed to run.
        RunError: a run failed.
    """
    archive = read_archive(path)
    home = out or Path("runs") / "reproduced" / path.stem  # not the folder of the archived run with this name
    _reserve(home, archive)
    brought = sorted({plugin for run in archive.runs for plugin in run.plugins})
    if brought and not trust_plugins:
        raise ConfigError(
            f"{path}: brings code of its own ({listed(brought)}); read it, then allow it to run with --trust-plugins"
        )
    with operation({"tracking": {"enabled": False}}) as (how, _):
        placed = [_place(archive, run, home, assignments, how) for run in archive.runs]
        _execute(placed, how)
        if archive.comparison is not None:
            _compare(archive.comparison, home, how)
        return _check(archive, placed, home, how) if check else None


def _reserve(home: Path, archive: Archive) -> None:
    """Reserve a folder for this archive; resume it if it was begun."""
    refuse_inside_a_run(home)
    proof = home / PROOF
    content = archive.read(PROOF)
    remove_stale_temp(home, PROOF)  # left by a process killed at the start; no reason to refuse the folder
    if proof.is_file() and proof.read_bytes() == content:
        return
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConfigError(f"{home}: holds something else than what this archive gives; name another folder with --out")
    replace_file(proof, lambda file: file.write(content))


# ---- running -----------------------------------------------------------------------------------------------------


def _place(archive: Archive, run: ArchivedRun, home: Path, assignments: Sequence[str], how: Operation) -> PlacedRun:
    """Return a run with its configuration, data and partition, ready to start or resume."""
    from pipelines.execution.one_run import placed

    folder = home / run.folder
    for plugin in run.plugins:
        _unpack(archive, f"{run.folder}/{plugin}", folder / plugin)
    config = _config(archive, run, folder, assignments)
    prepared = how.steps.call("prepare-data", Cache.here().prepared, config)
    fingerprint = read_json(prepared / "meta.json", _CURE)["fingerprint"]
    if fingerprint != run.proof.data:
        raise DataError(
            f"{run.name}: the data {config.source.name} here are not the archive's (fingerprint {fingerprint[:8]}, not "
            f"{run.proof.data[:8]}): other files or another version; set --set data.root=FOLDER to the right ones"
        )
    partition = home / run.partition_folder
    for name in ("manifest.json", "indices.safetensors"):
        _unpack(archive, f"{run.partition_folder}/{name}", partition / name)
    ready = placed(config, Inputs(prepared, partition), home, label=run.name, directory=folder)
    _begin(ready, run)
    return ready


def _config(archive: Archive, run: ArchivedRun, folder: Path, assignments: Sequence[str]) -> Config:
    """Return a run's configuration for this machine, without the original machine's folders and workers."""
    from flcore.config.schema import Config

    raw = resolve_paths(without_removed(without_places(run.header.config)), folder)
    try:
        before = Config.from_mapping(raw)
    except ConfigError as error:
        raise DataError(f"{archive.file.filename}: {run.folder}/config.json: {error}") from error
    if "auto" in (before.engine.stack, before.engine.compile):
        raise DataError(
            f"{archive.file.filename}: {run.folder}/config.json: engine.stack or engine.compile is auto, which an "
            "earlier version of protofl measured; reproduce it with that version"
        )
    config = Config.from_mapping({**override(raw, assignments), "tracking": {"enabled": False}})
    if config.identity() != before.identity():
        raise ConfigError(
            f"--set {' --set '.join(assignments)}: makes another run of it than the archive's; only what does not "
            "change a result may be set, such as data.root, data.download or engine.workers"
        )
    return config


def _begin(ready: PlacedRun, run: ArchivedRun) -> None:
    """Mark a run as just begun, so that results elsewhere on this machine, maybe the archived ones, are not reused."""
    files = RunFiles(ready.directory)
    if files.config.exists():
        return
    disk.make_folder(files.checkpoint)
    write_run_config(ready.directory, ready.config, ready.hash, code=ready.code, environment={})


def _execute(placed: Sequence[PlacedRun], how: Operation) -> None:
    """Run one run in this process, several in parallel; finished runs are not repeated.

    Raises:
        RunError: one failed; of several, the others finish first.
    """
    from pipelines.execution.bodies import carry_out_placed, experiment

    if len(placed) == 1:
        experiment(placed[0].config, placed[0].directory, how, inputs=placed[0].inputs)
        return
    failed = carry_out_placed(placed, how)
    if failed:
        label, reason = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(placed)} runs failed; the first of them, {label}: {reason}")


def _compare(comparison: ArchivedComparison, home: Path, how: Operation) -> None:
    """Compare the runs with the archive's settings."""
    how.follower.compare(
        "comparison",
        {"compare": comparison.section},
        [home / "runs" / run for run, _, _ in comparison.rows],
        home,
        name=home.name,
        rows=[row for _, row, _ in comparison.rows],
        draws=[draw for _, _, draw in comparison.rows],
        budget=comparison.budget,
        tuning=[tuned.model_dump() for tuned in comparison.tuning] or None,
        failed=dict(comparison.failed),
        **how.console,
        command=how.command,
    )
    print_drawn(how.follower.wait().get("table", ""))


def _unpack(archive: Archive, name: str, path: Path) -> None:
    content = archive.read(name)
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, lambda file: file.write(content))


# ---- compared ----------------------------------------------------------------------------------------------------


def _check(archive: Archive, placed: Sequence[PlacedRun], home: Path, how: Operation) -> Findings:
    findings = Findings()
    for run, ready in zip(archive.runs, placed, strict=True):
        _note_circumstances(run, ready, findings)
        _check_division(run, ready, how, findings)
    of_partitions, of_classes = list(findings.other), list[str]()
    for run, ready in zip(archive.runs, placed, strict=True):
        apart = _check_files(archive, run.folder, run.proof.results, result_files(ready.directory), findings, SHOWN)
        if apart and findings.classes is not None:
            metrics = f"{run.folder}/metrics.json"
            here = RunFolder(ready.directory).metrics
            of_classes += [f"{metrics}: {text}" for text in beyond_tolerance(archive.json(metrics), here)]
    if archive.comparison is not None:
        files = {name: path for name in COMPARED if (path := home / name).is_file()}
        _check_files(archive, "comparison", archive.comparison.results, files, findings, COMPARED)
    if findings.classes is not None:
        findings.tolerated = len(findings.other) - len(of_partitions)
        findings.other = of_partitions + of_classes
    return findings


def _check_files(
    archive: Archive,
    folder: str,
    expected: Mapping[str, str],
    files: Mapping[str, Path],
    findings: Findings,
    shown: Sequence[str],
) -> bool:
    """Compare files with their hashes; return whether any differs."""
    hashes = digests(files)
    before = len(findings.other)
    for name in sorted(expected.keys() | hashes.keys()):
        if name not in expected or name not in hashes:
            findings.other.append(f"{folder}/{name}: {'was not written' if name in expected else 'is new'}")
        elif expected[name] == hashes[name]:
            findings.same += 1
        elif name in shown:
            text = difference(name, archive.read(f"{folder}/{name}"), files[name].read_bytes())
            findings.other.append(f"{folder}/{name}: {text}")
        else:
            findings.other.append(f"{folder}/{name}: other bytes")
    return len(findings.other) > before


def _note_circumstances(run: ArchivedRun, ready: PlacedRun, findings: Findings) -> None:
    """Record differences of the environment that could explain other bytes."""
    from flcore.experiment.provenance import code_modules
    from flcore.running import describe_environment

    here = describe_environment(ready.config)
    there = run.header.environment
    everywhere = [*run.header.earlier_environments, there]
    # Older archives have the instruction set instead of kernel digests: compare what both have.
    key = "processor" if there.get("processor") else "cpu_capability"
    kinds = [f"{about.get(key) or 'unknown'}, {about.get('device') or 'cpu'}" for about in (*everywhere, here)]
    if len(set(kinds)) > 1 and findings.classes is None:
        findings.classes = (" and then ".join(dict.fromkeys(kinds[:-1])), kinds[-1])
    if ready.code != run.header.code:
        modules = code_modules(ready.config)
        names = sorted(
            name
            for name in modules.keys() | run.proof.modules.keys()
            if modules.get(name) != run.proof.modules.get(name)
        )
        _remark(findings, f"the code here is another than the archive's: {listed(names)}")
    all_known = [about["versions"] for about in everywhere if isinstance(about.get("versions"), dict)]
    other = [f"{name} {version} instead of {known[name]}" for known in all_known
             for name, version in here["versions"].items() if name in known and known[name] != version]  # fmt: skip
    if other:
        _remark(findings, f"packages here are others than the archive's: {listed(other)}")


def _check_division(run: ArchivedRun, ready: PlacedRun, how: Operation, findings: Findings) -> None:
    """Partition the data again and compare the indices with the archive's."""
    if ready.config.partitioner.name == "imported":
        return
    division = how.steps.call("partition-data", Cache.here().partition, ready.config, ready.inputs.prepared)
    if read_json(division / "manifest.json", _CURE)["fingerprint"] != run.proof.partition:
        text = "dividing the data as configured gives other indices"
        if f"{run.partition_folder}: {text}" not in findings.other:
            findings.other.append(f"{run.partition_folder}: {text}")


def _remark(findings: Findings, text: str) -> None:
    if text not in findings.remarks:
        findings.remarks.append(text)


def report(path: Path, findings: Findings) -> list[str]:
    """Return the result of a check in lines; the first names the measure."""
    lines = [f"{path}: {findings.same} files of results are the same to the byte"]
    if findings.classes is not None:
        there, here = findings.classes
        lines = [f"{path}: ANOTHER CLASS OF PROCESSOR: {here} here, {there} in the archive", *lines]
    if findings.tolerated:
        lines.append(
            f"{path}: {findings.tolerated} files have other bytes, as they may on another class; of each run were "
            "compared rounds, clients, steps and bytes sent, which must be equal, and accuracies, which may be "
            f"{ACCURACY_TOLERANCE} apart: {f'{len(findings.other)} are not so' if findings.other else 'all are so'}"
        )
    lines += findings.other[:_TOLD]
    if len(findings.other) > _TOLD:
        lines.append(f"and {len(findings.other) - _TOLD} more")
    return [*lines, *(f"note: {text}" for text in findings.remarks)]
