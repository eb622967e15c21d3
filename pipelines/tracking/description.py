"""How a run is called in MLflow: experiment, name, parameters, tags and the data sets it is made from."""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flcore.core.errors import DataError
from pipelines.runs.compared import flatten
from pipelines.runs.folder import RunFolder

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

CONFIG_HASH_TAG = "protofl.config_hash"
CODE_TAG = "protofl.code"
NOTE_TAG = "mlflow.note.content"
"""MLflow's own name of a description."""

TRAINING = "training"
"""The context of the data set that a run was trained on."""

_LONGEST_NOTE = 8000  # characters of a tag, which is what MLflow keeps a description in

_DIGEST_LENGTH = 36  # of MLflow; whole digests are the tags data_hash and partition_hash


def experiment_name(run: RunFolder) -> str:
    """Return ``<dataset>/<partition>``: within it runs are compared."""
    return f"{data_name(run)}/{run.config['partition']['name']}"


def data_name(run: RunFolder) -> str:
    """Return ``data.title``, else ``data.name``."""
    data = run.config["data"]
    return str(data.get("title") or data["name"])


def registered_name(experiment: str) -> str:
    """Return the name of an experiment's registered model: the registry allows no slash."""
    return experiment.replace("/", "-")


def run_name(run: RunFolder) -> str:
    """Return ``<method>-s<seed>-<first 8 digits of the configuration's hash>``, or a study's name."""
    return run.study or f"{run.config['method']['name']}-s{run.config['seed']}-{run.config_hash[:8]}"


def parameters(run: RunFolder) -> dict[str, str]:
    """Return the parameters that people compare by (`pipelines/runs/compared.py`); ``config.json`` has all.

    Runs that do not say (made by `flcore` alone, or brought by DVC) have all that can change a result. A value of null
    says that something is not used, and is left out.
    """
    chosen = run.environment.get("compared_by")

    def counts(name: str) -> bool:  # what is in no section of the configuration says what a study is
        return chosen is None or name in chosen or name.partition(".")[0] not in run.config

    return {name: text for name, text in flatten(run.identity).items() if text != "null" and counts(name)}


def tags(run: RunFolder) -> dict[str, str]:
    """Return the tags by which runs are searched and grouped; a finished run has hashes of data and partition."""
    environment = run.environment
    values = present(
        {
            "method": run.config["method"]["name"],
            "seed": run.config["seed"],
            "engine": run.config.get("engine", {}).get("name"),
            "device": environment.get("device"),
            "cpu_capability": environment.get("cpu_capability"),
            "processor": environment.get("processor"),
            "code_version": environment.get("code_version"),
            "lock_hash": environment.get("lock_hash"),
            CONFIG_HASH_TAG: run.config_hash,
            CODE_TAG: run.code,
        }
    )
    return values | made_from(run) | origin(run)


def made_from(run: RunFolder) -> dict[str, str]:
    """Return the hashes of data and partition; none before the run has finished."""
    metrics = run.metrics if run.is_finished else {}
    return present(
        {"partition_hash": metrics.get("partition_fingerprint"), "data_hash": metrics.get("data_fingerprint")}
    )


def study_note(run: RunFolder) -> dict[str, str]:
    """Return the description of a study, its table if it exists; nothing for a run."""
    table = run.directory / "study.md"
    return {NOTE_TAG: note(table.read_text(encoding="utf-8"))} if run.study and table.exists() else {}


def note(table: str) -> str:
    """Return a table as a description of a length that MLflow keeps, cut at a line."""
    return table if len(table) <= _LONGEST_NOTE else table[:_LONGEST_NOTE].rpartition("\n")[0]


def origin(run: RunFolder) -> dict[str, str]:
    """Return MLflow's own tags for user, source and version."""
    source = run.environment.get("source") or {}
    version = str(run.environment.get("code_version") or "")
    commit = re.match(r"[0-9a-f]{40}", version)
    return present(
        {
            "mlflow.user": user(),
            "mlflow.source.name": source.get("name", "flcore.run"),  # without this project's commands around it
            "mlflow.source.type": source.get("type", "LOCAL"),
            "mlflow.source.git.commit": commit and commit.group(),
            "mlflow.source.git.dirty": commit and str(version.endswith("-dirty")).lower(),
        }
    )


def user() -> str:
    """Return the login of this process; in a container perhaps a number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def present(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text, without missing ones."""
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


# ---- data sets ---------------------------------------------------------------------------------------------------


def dataset_inputs(run: RunFolder) -> list[DatasetInput]:
    """Return the data sets that a finished run was trained and scored on, each with its own digest.

    It was trained on images as they are divided, and every seed divides them anew: the digest is the partition's. The
    source is of a type that every MLflow knows: a folder, which MLflow opens, or if that is missing a mere statement.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not run.is_finished:
        return []
    images, partition = data_name(run), run.config["partition"]
    seed = run.config["seed"] if partition.get("seed") is None else partition["seed"]
    names = f"{images}/{partition['name']} s{seed}", images
    digests = run.metrics.get("partition_fingerprint"), run.metrics.get("data_fingerprint")
    contexts = TRAINING, run.config.get("evaluation", {}).get("split", "test")
    sources: list[tuple[str, dict[str, Any]]]
    try:
        sources = [("local", {"uri": str(folder.absolute())}) for folder in (run.inputs.partition, run.inputs.prepared)]
    except DataError:
        sources = [("code", {"tags": {"digest": digest}}) for digest in digests]
    return [
        DatasetInput(
            Dataset(name, digest[:_DIGEST_LENGTH], source_type=kind, source=json.dumps(source)),
            tags=[InputTag("mlflow.data.context", context)],
        )
        for name, digest, context, (kind, source) in zip(names, digests, contexts, sources, strict=True)
        if digest is not None
    ]
