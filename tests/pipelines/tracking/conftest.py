"""A real SQLite store, a reader of it that is MLflow's own client, and run folders as training leaves them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flcore.io.files import sealed, write_json
from pipelines.tracking.store import set_mlflow_environment

set_mlflow_environment()

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "mlflow-names.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Metrics that the page of names lacks; ``<phase>`` there is any word, ``<metric>`` any name."""
    known = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8").partition("## Tags")[0], re.MULTILINE)
    known = [re.escape(name).replace("<metric>", ".+") for name in known]
    patterns = [re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in known]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


CONFIG = {
    "seed": 3,
    "data": {"name": "digits", "limit_per_class": None},
    "partition": {"name": "dirichlet", "alpha": 0.1, "num_clients": 2, "seed": None},
    "model": {"name": "fedgen_cnn", "feature_dim": 16},
    "method": {"name": "fedavg"},
    "engine": {"name": "local", "workers": 2},
}
ENVIRONMENT = {
    "torch": "2.15.0",
    "device": "cpu",
    "cpu_capability": "AVX2",
    "processor": "x86_64-AVX2-0123abcd",
    "lock_hash": "l0ck",
    "code_version": "a" * 40 + "-dirty",
    "source": {"name": "protofl compare", "type": "LOCAL"},
    "compared_by": ["seed", "partition.alpha", "method.name", "federation.rounds", "data.limit_per_class"],
}
BEGAN = 1_700_000_000_000
"""When the first round of every run began, in milliseconds since 1970; each round takes 1,000 of them."""


def record_of(number: int, shift: float = 0.0) -> dict[str, Any]:
    """A history record whose values are awkward on purpose: 0.1 has no exact binary form, some are null."""
    return {
        "round": number,
        "top1_global": 0.1 * number + shift,
        "loss_global": 2.3 / number,
        "mean_local": None if number % 2 else 0.7,
        "pooled_local": None,
        "client_std": 0.01,
        "train_loss": {"cross_entropy": 1.0 / (number + shift)},
        "bytes_up": {"weights": 100 * number, "prototypes": 7 * number},
        "bytes_down": {"weights": 200 * number},
        "a_key_of_the_future": [1, 2],
    }


def leg_of(number: int, began: int) -> dict[str, Any]:
    """A leg's record: round n ends n seconds after the run began."""
    times = {"began_ms": began + 1000 * (number - 1), "ended_ms": began + 1000 * number}
    return {"round": number, "leg": "train-clients", "seconds": {"train-clients": 0.5, "evaluate": 0.25}, **times}


def write(
    run_dir: Path,
    rounds: int,
    *,
    finished: bool = False,
    shift: float = 0.0,
    method: str = "fedavg",
    seed: int = 3,
    began: int = BEGAN,
    **sections: Any,
) -> Path:
    """A run's folder after ``rounds`` rounds; ``sections`` of its configuration are not :data:`CONFIG`'s."""
    (run_dir / "checkpoint").mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **sections, "seed": seed, "method": {"name": method}}
    identity = {section: values for section, values in config.items() if section != "engine"}
    header = {"config": config, "identity": identity, "config_hash": f"{seed:02d}{method:x<30}{'0' * 32}"}
    write_json(run_dir / "config.json", sealed({**header, "code": "c0de", "environment": ENVIRONMENT}))
    history = "".join(json.dumps(record_of(n, shift)) + "\n" for n in range(1, rounds + 1))
    legs = [leg_of(n, began) for n in range(1, rounds + 1)]
    (run_dir / "checkpoint" / "history.jsonl").write_text(history)
    (run_dir / "checkpoint" / "timing.jsonl").write_text("".join(json.dumps(leg) + "\n" for leg in legs))
    (run_dir / "checkpoint" / "state.json").write_text(json.dumps({"round": rounds}))
    (run_dir / "checkpoint" / "state.safetensors").write_bytes(b"not an artifact")
    if finished:
        _finish(run_dir, header, history, legs, shift)
    return run_dir


def _finish(run_dir: Path, header: dict[str, Any], history: str, legs: list[dict[str, Any]], shift: float) -> None:
    rounds, config = len(legs), header["config"]
    seconds = {"train-clients": 0.5 * rounds, "evaluate": 0.25 * rounds}
    metrics = {
        "method": config["method"]["name"],
        "seed": config["seed"],
        "rounds": rounds,
        "top1_global": 0.1 * rounds + shift,
        "mean_local": 0.7,
        "pooled_local": None,
        "best_top1_global": 0.9,
        "best_round": 2,
        "bytes_up": 107 * rounds,
        "bytes_down": 200 * rounds,
        "config_hash": header["config_hash"],
        "partition_fingerprint": f"{config['seed']:x>64}",
        "data_fingerprint": "d" * 64,
    }
    (run_dir / "metrics.json").write_text(json.dumps(metrics))
    (run_dir / "timing.json").write_text(json.dumps({"rounds": legs, "seconds": seconds, "steps_per_second": 321.5}))
    (run_dir / "figures").mkdir(exist_ok=True)
    (run_dir / "figures" / "accuracy.svg").write_text("<svg/>")
    (run_dir / "report.html").write_text("<html/>")
    (run_dir / "inputs.json").write_text(json.dumps({"prepared": "../prepared", "partition": "../partition"}))
    save_file({"head": np.arange(10, dtype=np.float32)}, run_dir / "model.safetensors")
    (run_dir / "clients").mkdir(exist_ok=True)
    save_file({"head": np.zeros(1, np.float32)}, run_dir / "clients" / "0000.safetensors")
    (run_dir / "history.jsonl").write_text(history)


@dataclass(frozen=True)
class Reader:
    """What a store holds, as MLflow's own client reads it."""

    uri: str

    @property
    def client(self) -> Any:
        """Of this store."""
        from mlflow.tracking.client import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def runs(self, name: str = "digits/dirichlet") -> list[Any]:
        """All runs of an experiment, the oldest first, those made at the same moment by name."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            return []
        found = self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_name))

    def points(self, run: Any) -> dict[str, list[tuple[int, float]]]:
        """Every metric of a run as (step, value) pairs, in the order of steps; duplicates would show."""
        return {
            key: sorted((point.step, point.value) for point in self.client.get_metric_history(run.info.run_id, key))
            for key in run.data.metrics
        }

    def of_rounds(self, run: Any) -> dict[str, list[tuple[int, float]]]:
        """The points that come from the history."""
        groups = ("accuracy/", "loss/", "comm/bytes_")
        return {key: values for key, values in self.points(run).items() if key.startswith(groups)}

    def contents(self) -> list[str]:
        """Everything that a sync could change."""
        return [
            str((run.info, run.data.tags, run.data.params, self.points(run), run.inputs.to_dictionary()))
            for run in self.runs()
        ]

    def artifacts(self, run: Any) -> set[str]:
        """The files kept with a run, by their places."""
        stored = Path(run.info.artifact_uri)
        return {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works in an empty directory, in which nothing may be left: MLflow likes to make a store where it stands."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    assert list((tmp_path / "here").iterdir()) == []


@pytest.fixture
def reader(tmp_path: Path, empty_store: Path) -> Reader:
    """Of a fresh SQLite store."""
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(empty_store.read_bytes())
    return Reader(f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}")


@pytest.fixture
def uri(reader: Reader) -> str:
    """The fresh store's address."""
    return reader.uri


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """Makes a run's folder: ``write_run(run_dir, rounds, finished=, shift=, method=, seed=, began=)``."""
    return write


@pytest.fixture(scope="session")
def expected_points() -> Callable[..., dict[str, list[tuple[int, float]]]]:
    """What the history of a run says, by hand, in the form of :meth:`Reader.points`: of rounds and their ``shift``."""

    def expected(rounds: int, shift: float = 0.0) -> dict[str, list[tuple[int, float]]]:
        numbers, even = range(1, rounds + 1), range(2, rounds + 1, 2)
        return {
            "accuracy/top1_global": [(n, 0.1 * n + shift) for n in numbers],
            **({"accuracy/mean_local": [(n, 0.7) for n in even]} if rounds > 1 else {}),
            "accuracy/client_std": [(n, 0.01) for n in numbers],
            "loss/global": [(n, 2.3 / n) for n in numbers],
            "loss/train_cross_entropy": [(n, 1.0 / (n + shift)) for n in numbers],
            "comm/bytes_up": [(n, 107.0 * n) for n in numbers],
            "comm/bytes_up_weights": [(n, 100.0 * n) for n in numbers],
            "comm/bytes_up_prototypes": [(n, 7.0 * n) for n in numbers],
            "comm/bytes_down": [(n, 200.0 * n) for n in numbers],
            "comm/bytes_down_weights": [(n, 200.0 * n) for n in numbers],
        }

    return expected
