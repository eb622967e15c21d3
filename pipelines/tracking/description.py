"""How a run is called in MLflow: experiment, name, parameters, tags and the data sets it is made from."""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from flcore.core.errors import DataError
from pipelines.runs.compared import flatten
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs, inputs_of
from pipelines.runs.layout import read_json

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
    """``<dataset>/<partition>``: within it runs are compared."""
    return f"{data_name(run)}/{run.config['partition']['name']}"


def data_name(run: RunFolder) -> str:
    """``data.title``, else ``data.name``."""
    data = run.config["data"]
    return str(data.get("title") or data["name"])


def registered_name(experiment: str) -> str:
    """Of the registered model of an experiment: the registry allows no slash."""
    return experiment.replace("/", "-")


def run_name(run: RunFolder) -> str:
    """``<method>-s<seed>-<first 8 digits of the configuration's hash>``; of a study its name."""
    return run.study or f"{run.config['method']['name']}-s{run.config['seed']}-{run.config_hash[:8]}"


def parameters(run: RunFolder) -> dict[str, str]:
    """By what people compare it (`pipelines/runs/compared.py`); all else is in the artifact ``config.json``.

    Runs that do not say (made by `flcore` alone, or brought by DVC) have all that can change a result. A value of null
    says that something is not used, and is left out.
    """
    chosen = run.environment.get("compared_by")

    def counts(name: str) -> bool:  # what is in no section of the configuration says what a study is
        return chosen is None or name in chosen or name.partition(".")[0] not in run.config

    return {name: text for name, text in flatten(run.identity).items() if text != "null" and counts(name)}


def tags(run: RunFolder) -> dict[str, str]:
    """What the run is searched and grouped by; hashes of data and partition are known once it is finished."""
    known = run.environment
    told = present(
        {
            "method": run.config["method"]["name"],
            "seed": run.config["seed"],
            "engine": run.config.get("engine", {}).get("name"),
            "device": known.get("device"),
            "cpu_capability": known.get("cpu_capability"),
            "processor": known.get("processor"),
            "code_version": known.get("code_version"),
            "lock_hash": known.get("lock_hash"),
            CONFIG_HASH_TAG: run.config_hash,
            CODE_TAG: run.code,
        }
    )
    return told | made_from(run) | origin(run)


def made_from(run: RunFolder) -> dict[str, str]:
    """Hashes of data and partition; none before it has finished."""
    found = run.metrics or {}
    return present({"partition_hash": found.get("partition_fingerprint"), "data_hash": found.get("data_fingerprint")})


def study_note(run: RunFolder) -> dict[str, str]:
    """What a study's page says: its table, where it has one by now; nothing of a run."""
    table = run.directory / "study.md"
    return {NOTE_TAG: note(table.read_text(encoding="utf-8"))} if run.study and table.exists() else {}


def note(table: str, links: Sequence[str] = ()) -> str:
    """Return a description of a length that MLflow keeps: a table and links, each cut at a line.

    Links have a quarter of the room, and what the table leaves.
    """
    room = max(_LONGEST_NOTE // 4, _LONGEST_NOTE - len(table)) - len("\n\n## Runs\n\n- and 1,000,000 more\n")
    kept = _first_lines(links, room)
    more = [f"- and {len(links) - len(kept):,} more"] if len(kept) < len(links) else []
    end = "\n".join(["", "", "## Runs", "", *kept, *more]) if links else ""
    return "\n".join(_first_lines(table.splitlines(), _LONGEST_NOTE - len(end))) + end


def _first_lines(lines: Sequence[str], room: int) -> list[str]:
    """Return as many lines as fit into a number of characters."""
    sizes = accumulate(len(line) + 1 for line in lines)
    return [line for line, size in zip(lines, sizes, strict=True) if size <= room + 1]


def origin(run: RunFolder) -> dict[str, str]:
    """Who made it by what, in MLflow's own words, which its pages show as user, source and version."""
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
    """The login of whoever this process belongs to; in a container perhaps just a number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def present(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as text, without those that are not there."""
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


# ---- data sets ---------------------------------------------------------------------------------------------------


def dataset_inputs(run: RunFolder) -> list[DatasetInput]:
    """What a finished run was trained on and what it was scored on, each a data set with a digest of its own.

    It was trained on images as they are divided, and every seed divides them anew: the digest is the partition's. The
    source is of a type that every MLflow knows: a folder, which MLflow opens, or if that is missing a mere statement.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if run.metrics is None:
        return []
    images, partition = data_name(run), run.config["partition"]
    seed = run.config["seed"] if partition.get("seed") is None else partition["seed"]
    names = f"{images}/{partition['name']} s{seed}", images
    digests = run.metrics.get("partition_fingerprint"), run.metrics.get("data_fingerprint")
    contexts = TRAINING, run.config.get("evaluation", {}).get("split", "test")
    try:
        about = _folders(inputs_of(run.directory))
    except DataError:
        about = [{"source_type": "code", "source": json.dumps({"tags": {"digest": digest}})} for digest in digests]
    return [
        DatasetInput(Dataset(name, digest[:_DIGEST_LENGTH], **known), tags=[InputTag("mlflow.data.context", context)])
        for name, digest, context, known in zip(names, digests, contexts, about, strict=True)
        if digest is not None
    ]


def _folders(found: Inputs) -> list[dict[str, str]]:
    """Source, schema and profile of a partition and of the prepared images, in the form that MLflow's pages show."""
    meta, manifest = read_json(found.prepared / "meta.json"), read_json(found.partition / "manifest.json")
    features = [{"type": "tensor", "tensor-spec": {"dtype": "uint8", "shape": [-1, *meta["shape"]]}}]
    targets = [{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}]
    schema = {"mlflow_tensorspec": {"features": json.dumps(features), "targets": json.dumps(targets)}}
    rows = sum(client["sizes"]["train"] for client in manifest["clients"])
    parameters = {key: value for key, value in manifest["parameters"].items() if value is not None}
    divided = {"num_rows": rows, "num_clients": len(manifest["clients"]), **parameters}
    sizes = {"num_rows": meta["test_size"], "num_training_rows": meta["train_size"]}
    return [
        {
            "source_type": "local",
            "source": json.dumps({"uri": str(folder.absolute())}),
            "schema": json.dumps(schema),
            "profile": json.dumps(profile),
        }
        for folder, profile in (
            (found.partition, divided),
            (found.prepared, {**sizes, "num_classes": meta["num_classes"]}),
        )
    ]
