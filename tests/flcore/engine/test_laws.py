"""Laws of a run: changes of how it is asked for that may not change what it gives, whatever that is.

Most stand beside what they hold for: twice, grouped and in any order of completion (`test_rounds.py`); workers, one of
them killed (`pool/`); resumed wherever it was stopped (`test_checkpoint.py`, `test_cohort.py`, `test_failures.py`);
stacks handed to anybody (`local/test_stacked.py`, `local/test_compiled.py`); runs side by side, as a sweep or alone,
inline or as a flow (`tests/pipelines`, `tests/services`). Here are those that have no such place.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.data.dividing import make_partition
from flcore.data.partitioners.imported import Imported
from flcore.methods import METHODS

# What a method does in a round depends on how many there will be: a rate or weight that falls, work in the last one.
_LOOKS_AHEAD = {"ccvr", "fedpg", "fedproc", "closed_head", "lda_head", "protolda", "protolda_blocks"}
_QUICK = ("fedavg", "gfpl", "moon")
_OTHERS = sorted(set(METHODS) - _LOOKS_AHEAD - set(_QUICK))
SAMPLED: dict[str, Any] = {"federation__participation": 0.6, "local__momentum": 0.5}


def of(lab: Any, method: str, **changes: Any) -> Any:
    options = {"name": method} | ({"interval": 1, "first_exchange": 1} if method == "gfpl" else {})
    momentum = METHODS[method]().required_config.get("local.momentum", (SAMPLED["local__momentum"],))[0]
    return lab.experiment(
        method=options, model=lab.model_of(method), **{**SAMPLED, "local__momentum": momentum}, **changes
    )


@pytest.mark.parametrize("method", [*_QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)])
def test_more_rounds_begin_with_the_same_ones(lab: Any, method: str, tmp_path: Path) -> None:
    short = lab.run(of(lab, method, federation__rounds=2), tmp_path / "short")
    long = lab.run(of(lab, method, federation__rounds=4), tmp_path / "long")
    assert [record["round"] for record in long.history] == [1, 2, 3, 4]
    assert json.dumps(long.history[:2]) == json.dumps(short.history)


@pytest.mark.parametrize("method", ["fedproto", pytest.param("gfpl", marks=pytest.mark.slow)])
def test_looking_changes_nothing(lab: Any, method: str, tmp_path: Path) -> None:
    """Scored after every round, after every other one and at the end alone: the same models, the same last record."""
    seen = {every: lab.run(of(lab, method, federation__rounds=3, evaluation__every=every), tmp_path / str(every))
            for every in (1, 2, 3)}  # fmt: skip
    assert [[record["round"] for record in run.history] for run in seen.values()] == [[1, 2, 3], [2, 3], [3]]
    kept = [run.arrays for run in seen.values()]
    assert kept[0] and kept[0] == kept[1] == kept[2]
    first, second, third = ([without_looking(record) for record in run.history] for run in seen.values())
    assert first[-1] == second[-1] == third[-1]
    assert first[1] == second[0]


def without_looking(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the bytes of scoring messages; each evaluation has its own."""
    return {key: value for key, value in record.items() if not key.startswith("bytes_eval_")}


@pytest.mark.parametrize("seed", range(5))
def test_a_configuration_has_no_order(lab: Any, seed: int) -> None:
    def shuffled(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        items = [(key, shuffled(value)) for key, value in values.items()]
        random.Random(seed).shuffle(items)
        return dict(items)

    raw = lab.config(method={"name": "fedproto"}, federation__rounds=7).to_mapping()
    assert list(shuffled(raw)) != list(raw)
    assert Config.from_mapping(shuffled(raw)).hash("data", "partition") == Config.from_mapping(raw).hash(
        "data", "partition"
    )


@pytest.mark.parametrize("seed", range(3))
def test_an_imported_partition_has_an_order_of_clients_alone(lab: Any, seed: int, tmp_path: Path) -> None:
    """Keys and indices may stand in any order in the file; a client's number is its place among the clients."""
    rng = random.Random(seed)
    clients = [
        {"val": list(range(start + 40, start + 50)), "train": list(range(start, start + 40))} for start in (0, 60, 120)
    ]

    def bytes_of(entries: list[dict[str, list[int]]], name: str) -> bytes:
        (tmp_path / f"{name}.json").write_text(json.dumps({"clients": entries}))
        partitioner = Imported(path=str(tmp_path / f"{name}.json"))
        make_partition(lab.dataset, partitioner, num_clients=3, seed=0).save(tmp_path / name)
        return (tmp_path / name / "indices.safetensors").read_bytes()

    mixed = [
        {key: rng.sample(entry[key], len(entry[key])) for key in rng.sample(sorted(entry), 2)} for entry in clients
    ]
    assert mixed != clients
    assert bytes_of(mixed, "mixed") == bytes_of(clients, "given")
    assert bytes_of(clients[::-1], "reversed") != bytes_of(clients, "given")


@pytest.mark.slow
def test_nothing_of_the_process_counts(tmp_path: Path) -> None:
    """Another order of sets, time zone, language, number of threads, folder and name of the host's user."""
    raw = {
        "method": {"name": "fedcspc"},
        "model": {"name": "fedgen_cnn", "projection_dim": 8},
        "federation": {"rounds": 2},
    }
    raw["data"] = {"limit_per_class": 20}
    raw["partition"] = {"num_clients": 3, "min_size": 5}
    code = "import json, sys; from flcore import run; run(json.loads(sys.argv[1]), 'run')"
    found = []
    for number, changes in enumerate(
        (
            {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "USER": "ann"},
            {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "4", "USER": "bob"},
        )
    ):
        home = tmp_path / ("deeper/" * number) / str(number)
        home.mkdir(parents=True)
        environment = {**os.environ, **changes, "PYTHONPATH": str(Path(__file__).parents[3])}
        subprocess.run([sys.executable, "-c", code, json.dumps(raw)], cwd=home, env=environment, check=True)
        files = sorted(path for path in (home / "run").rglob("*") if path.is_file())
        found.append({path.relative_to(home).as_posix(): path.read_bytes() for path in files})
    names = [name for name in found[0] if not name.endswith(("config.json", "timing.json"))]
    assert len(names) > 8
    assert [name for name in names if found[0][name] != found[1][name]] == []
