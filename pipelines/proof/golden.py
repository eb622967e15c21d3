"""Golden hashes: the exact results of every method on digits, kept with the code.

An edit that changes a number, intended or not, changes a hash here: ``protofl reproduce --golden`` (``make golden`` in
CI) names the method and the file. If intended, ``--record`` stores the new hashes, and
``pipelines/proof/golden/hashes.json`` changes in the same commit as the code.

The record is valid for every x86-64 processor with AVX2 (`flcore.core.portable`). Elsewhere, and with other numerics,
figures are compared instead of bytes, and the first line says so.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flcore.config.schema import Config
from flcore.core.cpu_class import is_portable, processor_class
from flcore.core.errors import ConfigError
from flcore.core.text import unknown_key
from flcore.experiment.inputs import divide, prepare_data
from flcore.experiment.provenance import package_versions
from flcore.io.files import read_json, write_json
from flcore.methods import METHODS
from flcore.running import run
from pipelines.proof.results import beyond_tolerance, digest_of, result_files
from pipelines.runs.folder import RunFolder

FILE = Path(__file__).parent / "golden" / "hashes.json"

COMMON: Mapping[str, Any] = {
    "seed": 7,
    "data": {"name": "digits", "limit_per_class": 30},
    "partition": {"name": "dirichlet", "num_clients": 4, "alpha": 0.5, "min_size": 10},
    "federation": {"rounds": 3, "participation": 0.75},
    "local": {"lr": 0.05, "batch_size": 16, "momentum": 0.5},
}
"""Configuration of every method: small, and clients are sampled, so some have state and some have never trained."""

_GENERATOR = {"gen_steps": 5, "gen_batch": 16}
OWN: Mapping[str, Mapping[str, Any]] = {
    "ccvr": {"method": {"per_class": 20, "epochs": 2}},
    "creff": {"method": {"per_class": 10, "match_steps": 5, "retrain_epochs": 5}},
    "fedcspc": {
        "model": {"name": "fedgen_cnn", "feature_dim": 8, "projection_dim": 16},
        "method": {"cal_epochs": 2, "n_aug": 1},
    },
    "fedgen": {"method": _GENERATOR},
    "fedpa": {"method": _GENERATOR},
    "fedpg": {"method": {**_GENERATOR, "n_virtual": 8, "virtual_batch": 16}},
    "gfpl": {"method": {"interval": 1, "first_exchange": 1}},
    "scaffold": {"local": {"momentum": 0.0}},
    "linear_probe": {"model": {"name": "patch_dictionary", "atoms": 6, "patch": 3, "grid": 2}},
    "protolda": {"model": {"name": "patch_dictionary", "atoms": 6, "patch": 3, "grid": 2}},
    "protolda_blocks": {"model": {"name": "patch_dictionary", "atoms": 6, "patch": 3, "grid": 2}},
    "protolda_distilled": {"method": {"teacher": {"model.atoms": 6}}},
    "vhl": {"method": {"per_class": 20, "virtual_batch": 16}},
}
"""Differences for some methods: a required model or momentum, and less of slow parts; every mechanism is used."""

_MODEL = {"name": "fedgen_cnn", "feature_dim": 8}
_FIGURES = ("top1_global", "top1_vote", "mean_local", "bytes_up", "bytes_down", "steps")
_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn")
_CURE = "record it again with protofl reproduce --golden --record"


@dataclass(frozen=True)
class Outcome:
    """The result of a check.

    Attributes:
        lines: for people; the first is the overall result.
        checked: number of methods that were run.
        different: methods that differ from the record.
    """

    lines: Sequence[str]
    checked: int
    different: Sequence[str]


def run_methods(names: Sequence[str], engine: Mapping[str, Any] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run methods; yield each name with its result hashes (``files``) and some figures (``figures``).

    ``engine`` is that section of the configuration; without it, clients are trained one by one, as for the record.
    ``metrics.json`` is hashed without the run's name, which changes with every new option although no number does.
    """
    with tempfile.TemporaryDirectory(prefix="protofl-golden-") as folder:
        home = Path(folder)
        common = Config.from_mapping(COMMON)
        prepare_data(common, home / "prepared")
        divide(common, home / "prepared", home / "partition")
        for name in names:
            config = {**_config(name), "engine": dict(engine or {})}
            metrics = run(config, home / name, prepared=home / "prepared", partition=home / "partition")
            yield name, {"files": _hashes(home / name), "figures": {key: metrics[key] for key in _FIGURES}}


def _config(name: str) -> dict[str, Any]:
    differences = OWN.get(name, {})
    local = {**COMMON["local"], **differences.get("local", {})}
    return {
        **COMMON,
        "local": local,
        "model": differences.get("model", _MODEL),
        "method": {"name": name, **differences.get("method", {})},
    }


def _hashes(directory: Path) -> dict[str, str]:
    """Return the hash of each file; the files of a folder share one."""
    files = result_files(directory)
    hashes: dict[str, str] = {}
    for name, path in files.items():
        folder, _, rest = name.rpartition("/")
        digest = digest_of(path)
        if folder:
            hashes[folder] = hashlib.sha256(f"{hashes.get(folder, '')}{rest} {digest}".encode()).hexdigest()
        else:
            hashes[name] = digest
    metrics = {key: value for key, value in RunFolder(directory).metrics.items() if key != "config_hash"}
    hashes["metrics.json"] = hashlib.sha256(json.dumps(metrics, sort_keys=True).encode()).hexdigest()
    return hashes


def check(names: Sequence[str] | None = None) -> Outcome:
    """Run methods and compare them with the record.

    Args:
        names: of methods; None: all.
    """
    chosen, here, recorded = _chosen(names), processor_class(), read_json(FILE, _CURE)
    is_same = here == recorded["processor"]
    compared = {
        name: _problems(recorded["methods"].get(name), result, by_bytes=is_same) for name, result in run_methods(chosen)
    }
    different = {name: "; ".join(problems) for name, problems in compared.items() if problems}
    agree = f"{len(chosen) - len(different)} of {len(chosen)} methods"
    lines = [f"golden: {agree} have the recorded bytes (class {here})"]
    if not is_same:
        lines = [
            f"golden: NOT CHECKED BY BYTES: this process computes as class {here}, the record is of class "
            f"{recorded['processor']}; {agree} have its figures"
        ]
    lines += [f"{name}: {problem}" for name, problem in different.items()]
    installed, versions = package_versions(_PACKAGES), recorded["versions"]
    apart = [f"{name} {installed[name]} instead of {versions.get(name)}" for name in _PACKAGES
             if installed[name] != versions.get(name)]  # fmt: skip
    if different and apart:
        lines.append(f"note: other packages than recorded: {', '.join(apart)}")
    return Outcome(lines, len(chosen), list(different))


def record(names: Sequence[str] | None = None) -> str:
    """Run methods and record their results; other methods' entries stay.

    Returns:
        A summary for people.

    Raises:
        ConfigError: a method is unknown, or this process's numerics are not the AVX2 ones.
    """
    chosen = _chosen(names)
    if is_portable() is False:
        raise ConfigError(f"--record: class {processor_class()} is not that of all processors with AVX2; record there")
    before = read_json(FILE, _CURE)["methods"] if FILE.is_file() else {}
    results = dict(run_methods(chosen))
    others = {name: entry for name, entry in before.items() if name in METHODS}
    versions = package_versions(_PACKAGES)
    write_json(FILE, {"processor": processor_class(), "versions": versions, "methods": {**others, **results}})
    changed = [name for name in results if before.get(name) != results[name]]
    return f"{FILE}: {len(results)} methods recorded, of which {len(changed)} are new or other than before"


def _chosen(names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in METHODS:
            raise ConfigError(f"--methods: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
    return list(METHODS) if names is None else list(names)


def _problems(expected: Mapping[str, Any] | None, result: Mapping[str, Any], *, by_bytes: bool) -> list[str]:
    if expected is None:
        return [f"is not recorded; {_CURE}"]
    figures = beyond_tolerance(expected["figures"], result["figures"])
    if not by_bytes:
        return figures
    one, other = expected["files"], result["files"]
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [f"other bytes in {', '.join(names)}", *figures] if names else []
