"""Records of runs, in memory and on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.runs.folder import RunFolder
from pipelines.runs.record import RoundRecord, RunRecord, record_of


def make_round(number: int, accuracy: float | None, **changes: Any) -> RoundRecord:
    """A round with the same accuracy everywhere; 100 bytes up and 50 down per round, loss 1/round."""
    values: dict[str, Any] = {
        "round": number,
        "participants": (),
        "top1_global": accuracy,
        "top1_vote": None,
        "loss_global": None,
        "mean_local": accuracy,
        "pooled_local": accuracy,
        "client_std": None,
        "local_accuracy": (accuracy, None, 1.0),
        "class_accuracy": (),
        "train_loss": {"cross_entropy": 1 / number} if number else {},
        "bytes_up": {"weights": 100 * number},
        "bytes_down": {"weights": 50 * number},
    }
    return RoundRecord(**(values | changes))


def make_run(method: str, seed: int, history: Sequence[RoundRecord], **changes: Any) -> RunRecord:
    """A run around a history; what figures do not read is empty."""
    values: dict[str, Any] = {
        "method": method,
        "dataset": "digits",
        "partition": "iid",
        "seed": seed,
        "rounds": len(history),
        "class_acc": (),
        "class_acc_vote": (),
        "tasks": {},
        "figures": {},
        "block_ends": (),
        "bytes_up_by_kind": {},
        "bytes_down_by_kind": {},
        "best_round": None,
        "history": tuple(history),
    }
    empty: dict[str, Any] = dict.fromkeys(set(RunRecord.__dataclass_fields__) - set(values) - {"folder"})
    return RunRecord(**(empty | values | changes))


def two_seeds() -> list[RunRecord]:
    """fedavg: seed 0 has 0.2, 0.4, 0.5 in rounds 0 to 2, seed 1 has 0.6 and 0.7 in rounds 1 and 2."""
    return [
        make_run(
            "fedavg", 0, [make_round(0, 0.2), make_round(1, 0.4), make_round(2, 0.5)], class_acc=(0.2, None, None)
        ),
        make_run("fedavg", 1, [make_round(1, 0.6), make_round(2, 0.7)], class_acc=(0.4, 0.9, None)),
        make_run("local", 0, [make_round(1, 0.3, top1_global=None, bytes_up={}, bytes_down={})]),
    ]


def write_run(folder: Path, history: Sequence[dict[str, Any]] = ({"round": 1},), **metrics: Any) -> RunRecord:
    """A finished run on disk, read back."""
    folder.mkdir(parents=True)
    values = {"method": "fedavg", "dataset": "digits", "seed": 0, "rounds": 1, **metrics}
    (folder / "metrics.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history), encoding="utf-8")
    return record_of(RunFolder(folder))
