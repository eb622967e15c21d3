"""Stage *evaluate*: the finished run's models, scored afresh from its files, with costs and summaries over rounds."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from flcore.config import Config
from flcore.engine.client import Worker
from flcore.engine.rounds import single_thread
from flcore.errors import DataError
from flcore.evaluation.scoring import Scorer
from flcore.evaluation.summaries import summarise
from flcore.experiment import Experiment
from flcore.records import Record, load_record
from pipelines.files import RunFiles, write_json, write_text


def evaluate(config: Config, prepared: Path, partition: Path, directory: Path) -> dict[str, Any]:
    """Write ``metrics.json`` and ``curves.csv`` of a finished run, and return the metrics.

    Raises:
        DataError: the run has not finished, or a file of it is damaged.
    """
    single_thread()
    files = RunFiles(directory)
    if not files.history.exists():
        raise DataError(f"{directory}: no finished run there (history.jsonl is missing); run the train stage first")
    history = [json.loads(line) for line in files.history.read_text().splitlines()]
    experiment = Experiment.open(config, prepared, partition, stack=False)  # nothing is trained here
    server, _ = load_record(files.server)

    def memory(client: int) -> Record:
        path = files.clients / f"{client:04d}.safetensors"
        return load_record(path)[0] if path.exists() else Record()

    scores = Scorer(Worker(experiment)).score(server, memory, vote=True)
    metrics = summarise(experiment, scores, history)
    write_json(files.metrics, metrics)
    write_text(files.curves, _curves(history))
    return metrics


def _curves(history: list[dict[str, Any]]) -> str:
    """The history as CSV with one number per column; empty where a method has no such figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ("round", "top1_global", "mean_local", "pooled_local", "client_std", "loss_global")
    writer.writerow([*columns, "bytes_up", "bytes_down"])
    for record in history:
        values = ["" if record[column] is None else record[column] for column in columns]
        writer.writerow([*values, sum(record["bytes_up"].values()), sum(record["bytes_down"].values())])
    return out.getvalue()
