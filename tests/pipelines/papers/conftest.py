"""A table of two methods and two settings on digits, and comparisons of it as if they had been run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flcore.experiment.run_folder import RunFiles
from flcore.io.files import sealed, write_json
from pipelines.papers.catalogue import PaperTable, table_of
from pipelines.runs.record import Pair
from pipelines.tuning.metrics import PER_ROUND

REPOSITORY = Path(__file__).resolve().parents[3]
TINY: dict[str, Any] = {
    "id": "fedpa.tiny",
    "title": "Two methods on digits",
    "about": "Accuracy in %.",
    "metric": "top1_global",
    "baseline": "fedavg",
    "common": {
        "data.name": "digits",
        "data.limit_per_class": 10,
        "partition.name": "iid",
        "partition.num_clients": 2,
        "federation.rounds": 10,
        "local.batch_size": 32,
    },
    "columns": {
        "even": {"title": "even"},
        "sent": {"title": "kilobytes", "metric": "bytes_up", "scale": 0.001},
        "skewed": {"title": "skewed", "values": {"partition.name": "dirichlet", "partition.min_size": 1}},
    },
    "rows": {
        "fedavg": {"title": "FedAvg", "method": "fedavg"},
        "near": {"title": "FedProx", "method": "fedprox", "values": {"method.mu": 0.1}},
        "other": {"title": "Unheard-of", "method": None},
    },
    "printed": {"fedavg": {"even": [70.0, 1.5], "skewed": 60}, "near": {"even": 71.25}, "other": {"even": 80.0}},
    "missing": [{"row": "near", "column": "sent", "why": "its bytes are not told"}],
}

RUNS: dict[str, Any] = {
    "fedavg": {0: {"top1_global": 0.70, "bytes_up": 3000}, 1: {"top1_global": 0.72, "bytes_up": 3000}},
    "near": {0: {"top1_global": 0.74, "bytes_up": 3000}, 1: {"top1_global": 0.78, "bytes_up": 3000}},
}
"""Figures of the first column's runs, by row and seed."""


def tiny(**changes: Any) -> PaperTable:
    """The table, with other keys at its top."""
    return table_of({**TINY, **changes})


@pytest.fixture(scope="session")
def printed_tables() -> Path:
    """The papers' tables as they were transcribed: in PROTOFL_PAPERS, or shared/papers beside the repository."""
    file = Path(os.environ.get("PROTOFL_PAPERS") or REPOSITORY.parent / "shared" / "papers") / "tables.yaml"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    return file


Values = Mapping[str, Mapping[Pair, Mapping[str, float]]]


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Path]:
    """Leaves a setting's comparison as a finished one does.

    Given are figures of ``metrics.json`` by row and by seed, or by division and seed. The method of a row is
    that of :data:`TINY`, and a division's fingerprint says the seed that drew it. Without a division each seed
    divides anew, or ``fixed`` did for all. ``failed`` are reasons by name. Returns the table's folder.
    """

    def leave(
        setting: str, values: Values, *, fixed: int | None = None, failed: Mapping[str, str] | None = None
    ) -> Path:
        place = tmp_path / "table" / setting
        runs = []
        for row, by_pair in values.items():
            for pair, figures in by_pair.items():
                division, seed = pair if isinstance(pair, tuple) else (None, pair)
                hash = f"{row}{division}".ljust(8, "-")[:8]
                method = TINY["rows"][row]["method"]
                files = RunFiles(place / "runs" / f"{method}-s{seed}-{hash}")
                files.metrics.parent.mkdir(parents=True)
                draw = fixed if division is None else division
                divided = {"partition_fingerprint": f"division of {seed if draw is None else draw}"}
                header = {"data": {}, "partition": {"seed": draw}}
                write_json(files.config, sealed({"config": header, "identity": {}, "config_hash": hash}))
                files.metrics.write_text(json.dumps({"method": method, **divided, **figures}))
                record = {"round": 1, **{key: figures.get(key) for key in PER_ROUND}}
                files.history.write_text(json.dumps(record) + "\n")
                runs.append({"method": row, "seed": seed, "division": division, "config_hash": hash + "0" * 56})
        (place / "comparison.json").write_text(json.dumps({"failed": failed or {}, "runs": runs}))
        return place.parent

    return leave
