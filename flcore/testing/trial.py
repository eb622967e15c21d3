"""The runs that checks share: a method on made-up images, with uneven clients."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.core.params import build
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.partitioners.imported import Imported
from flcore.data.sources.base import RawDataset, RawSplit, Source
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.rounds import Observers, run_rounds
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record, serialise
from flcore.methods.api import Method
from flcore.testing.watching import Recording

PER_CLASS, CLASSES, SIZE = 20, 6, 16
ODD = ((0, 1), (1, 20), (21, 24), (45, 15), (60, 30))
"""Clients as (first image, images): one sample; one class; others. Images are sorted, the last class is left out."""
EQUAL = ((0, 25), (25, 25), (50, 25), (75, 25))
ROUNDS = 3

COMMON: Mapping[str, Any] = {
    "model": {"name": "fedgen_cnn", "feature_dim": 8, "projection_dim": 16},
    "federation": {"rounds": ROUNDS, "participation": 0.6},
    "local": {"lr": 0.05, "batch_size": 16, "momentum": 0.5},
    "partition": {"name": "iid"},
}


@dataclass(frozen=True)
class Finished:
    """The results of a run."""

    server: Record
    client_states: dict[int, Record]
    history: list[dict[str, Any]]

    @property
    def records(self) -> dict[str, Record]:
        """The records by owner: ``the server's``, ``client 0's``, ..."""
        clients = {f"client {client}'s": record for client, record in self.client_states.items()}
        return {"the server's": self.server, **clients}

    def difference(self, other: Finished) -> str | None:
        """Name the first difference from another run, to the bit; None: there is none."""
        for owner in {**self.records, **other.records}:
            pair = (run.records.get(owner, Record()) for run in (self, other))
            if (where := difference(*pair)) is not None:
                return f"other bytes in {owner} {where}"
        for one, two in zip(self.history, other.history, strict=True):
            apart = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
            if apart:
                return f"other {', '.join(apart)} in round {one['round']}"
        return None


def difference(one: Record, two: Record) -> str | None:
    """Name the first payload that differs, to the bit; None: all are equal."""
    if one.keys() != two.keys():
        return f"names, {', '.join(sorted(one)) or 'none'} and {', '.join(sorted(two)) or 'none'}"
    return next((name for name in sorted(one) if serialise(one.only(name)) != serialise(two.only(name))), None)


@dataclass(frozen=True)
class Bars(Source, name="bars"):
    """Six classes of grey images, a bright bar each, sorted by class."""

    def load(self, root: Path | None, download: bool) -> RawDataset:
        rng = np.random.default_rng(20261129)
        names = tuple("abcdef")
        return RawDataset(self._split(rng, PER_CLASS), self._split(rng, 5), names, (0.3,), (0.3,), "none", "made up")

    @staticmethod
    def _split(rng: np.random.Generator, per_class: int) -> RawSplit:
        labels = np.repeat(np.arange(CLASSES), per_class)
        images = rng.integers(0, 100, (len(labels), SIZE, SIZE))
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label + 2 : 2 * label + 4] += 150
        return RawSplit(images.astype(np.uint8), labels.astype(np.int64))


class Trial:
    """The runs of one method that the checks share."""

    def __init__(self, cls: type[Method], settings: Mapping[str, Any], params: Mapping[str, Any], home: Path) -> None:
        self.cls, self.settings, self.params, self.home = cls, settings, params, home
        self._runs = 0

    @cached_property
    def dataset(self) -> Dataset:
        return prepare_dataset(Bars())

    def partition(self, clients: tuple[tuple[int, int], ...]) -> Partition:
        path = self.home / f"clients-{len(clients)}.json"
        order = list(range(PER_CLASS * (CLASSES - 1)))
        if clients is EQUAL:  # several classes each
            order = order[::4] + order[1::4] + order[2::4] + order[3::4]
        own = [{"train": sorted(order[first : first + count])} for first, count in clients]
        path.write_text(json.dumps({"clients": own}))
        return make_partition(self.dataset, Imported(path=str(path)), num_clients=len(clients), seed=0)

    def config(self, method: Method, **changes: Mapping[str, Any]) -> Config:
        """Return the configuration of a run, with the settings that the method requires."""
        raw: dict[str, dict[str, Any]] = {section: dict(values) for section, values in COMMON.items()}
        needs = {key: allowed[0] for key, allowed in method.required_config.items()}
        if "model.name" in needs:
            del raw["model"]
        for key, value in needs.items():
            section, _, name = key.partition(".")
            raw.setdefault(section, {})[name] = value
        for section, values in [*self.settings.items(), *changes.items()]:
            other = "name" in values and values["name"] != raw.get(section, {}).get("name")
            raw[section] = {**({} if other else raw.get(section, {})), **values}
        return dataclasses.replace(Config.from_mapping(raw), method=method, plugins=_plugins_of(method))

    def method(self, **params: Any) -> Method:
        return build(self.cls, {**self.params, **params}, "method")

    def experiment(self, method: Method, clients: Any = ODD, **changes: Mapping[str, Any]) -> Experiment:
        return Experiment(self.config(method, **changes), self.dataset, self.partition(clients)).decided()

    def run(self, experiment: Experiment, folder: Path | None = None, **watched: Any) -> Finished:
        self._runs += 1
        folder = folder or self.home / f"run-{self._runs}"
        checkpoint = Checkpoint(folder)
        state = run_rounds(
            experiment,
            checkpoint,
            InlineExecutor(experiment, checkpoint),
            InlineOrchestrator(),
            Observers(**watched),
        )
        return self.finished(checkpoint, state)

    def finished(self, checkpoint: Checkpoint, state: Any) -> Finished:
        client_states = {
            client: checkpoint.client_state(client, state.client_states) for client in sorted(state.client_states)
        }
        return Finished(state.server, client_states, checkpoint.records("history.jsonl"))

    @cached_property
    def first(self) -> Finished:
        """The reference run."""
        return self.run(self.experiment(self.method()))

    @cached_property
    def recorded(self) -> tuple[Finished, Recording]:
        """The same run, with a watched method."""
        recording = Recording()
        method = recording.watch(self.method())
        return self.run(self.experiment(method)), recording


def _plugins_of(method: Method) -> tuple[plugins.Plugin, ...]:
    """Return the plug-ins of a method from outside the package."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{plugins.PACKAGE}.")]
    files = [Path(str(module.__file__)) for module in modules]
    return plugins.used([plugins.load(file) for file in files if file.is_file()], [method])
