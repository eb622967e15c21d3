"""How long a table takes, found out from a few rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.papers.timing_probe import per_round

from .conftest import TINY

SCRIPT = """
import json, sys
from pathlib import Path
from pipelines.orchestration.commands import operation
from pipelines.papers.catalogue import table_of
from pipelines.papers.plan import TableSelection, plan_table, estimated_duration
from pipelines.papers.timing_probe import measure

if __name__ == "__main__":
    table = table_of(json.loads(sys.argv[1]))
    selection = TableSelection(seeds=(0, 1), rounds_scale=float(sys.argv[2]))
    planned = plan_table(table, selection)
    with operation({"tracking": {"enabled": False}}) as (how, _):
        print(measure(planned, Path("trial"), how), measure(planned, Path("trial"), how))
    print(estimated_duration(plan_table(table, selection)))
"""


def test_the_first_round_does_not_count_and_legs_are_added(tmp_path: Path) -> None:
    """Round 2 takes 1 + 0.5 + 0.25, round 3 takes 2 + 0.25: 2 seconds on average."""
    rounds = [
        {"round": 1, "leg": "train", "seconds": {"train": 100.0}},
        {"round": 2, "leg": "train", "seconds": {"train": 1.0, "aggregate": 0.5}},
        {"round": 2, "leg": "retrain", "seconds": {"retrain": 0.25}},
        {"round": 3, "leg": "train", "seconds": {"train": 2.0, "aggregate": 0.25}},
    ]
    (tmp_path / "history.jsonl").touch()
    (tmp_path / "timing.json").write_text(json.dumps({"rounds": rounds}))
    assert per_round(tmp_path) == pytest.approx((1.75 + 2.25) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "said"), [("4", "True False"), ("1", "False False")])
def test_kinds_that_nobody_knows_are_timed_once_where_that_is_little_of_them(
    tmp_path: Path, scale: str, said: str
) -> None:
    """Of forty rounds three are worth it, of ten they are not. Two rows in two settings with two seeds: 8 runs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), json.dumps(TINY), scale]
    environment = os.environ | {"PROTOFL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    measured, length = done.stdout.splitlines()
    assert measured == said
    known = "about 1 minute on one core" if scale == "4" else "is not known"
    assert length.startswith("8 runs in 2 settings") and known in length
