"""What the tests share: one intra-op thread, and tiny data in memory and on disk as the first two stages leave it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import flcore  # noqa: F401 - before numpy and torch: it chooses their kernels

# isort: split
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from flcore.config import plugins
from flcore.config.schema import Config
from flcore.data.dataset import Dataset, Meta, Split, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import ClientSplit, Partition
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources.base import RawDataset, RawSplit, Source
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ExchangeWork, Failure, Reply, round_context
from flcore.engine.local.program import Function
from flcore.engine.orchestrator import InlineOrchestrator, Orchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.pool.process import local_pool
from flcore.engine.rounds import Observers, broadcast, run_rounds
from flcore.engine.run_state import RunState
from flcore.evaluation.forward import Forward, StoredImages
from flcore.evaluation.model_selection import scoring_messages
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import cost, outgoing
from flcore.io.messages import Payload, Size, Weights
from flcore.io.records import Payloads, Record, serialise
from flcore.methods.api import Method
from flcore.methods.types import ClientContext, Exchange, FederationContext, RoundContext
from flcore.models import Backbone


def pytest_collection_finish() -> None:
    """Every run has garbage collected before it counts memory; the thousands of tests and what they import are none.

    Walking them took two fifths of the processor time of tests that train.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_power_failure() -> Iterator[None]:
    """Files of a test need not survive one, and waiting for the disk took a tenth of the time of tests that train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def unload_plugins() -> Iterator[Callable[[], None]]:
    """Forget all plug-ins after each test, and when called: as in a new process."""

    def unload() -> None:
        for plugin in plugins.Finder.sources:
            sys.modules.pop(plugin, None)
        for table in (plugins.Finder.sources, *(registry.added for registry, *_ in plugins.KINDS)):
            table.clear()

    yield unload
    unload()


@dataclass(frozen=True)
class TinySource(Source):
    """Six classes of grey 16×16 images: a bright bar per class, and noise. 240 for training, 60 for testing."""

    name: ClassVar[str] = "tiny"
    summary: ClassVar[str] = "six bars"

    def load(self, root: Path | None, download: bool) -> RawDataset:
        rng = np.random.default_rng(20261121)
        names = tuple("abcdef")
        parts = [self._split(rng, per_class) for per_class in (40, 10)]
        return RawDataset(parts[0], parts[1], names, (0.3,), (0.3,), "none", "made up")

    @staticmethod
    def _split(rng: np.random.Generator, per_class: int) -> RawSplit:
        labels = rng.permutation(np.repeat(np.arange(6), per_class))
        images = rng.integers(0, 100, (len(labels), 16, 16))
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label + 2 : 2 * label + 4] += 150
        return RawSplit(images.astype(np.uint8), labels.astype(np.int64))


class Toy(Backbone):
    """Pixels, perhaps through a square linear layer that starts as the identity, then a head that starts at zero."""

    def __init__(self, dim: int, num_classes: int, encoder: bool) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        if encoder:
            layers.append(nn.Linear(dim, dim, bias=False))
            nn.init.eye_(layers[-1].weight)
        head = nn.Linear(dim, num_classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        super().__init__(nn.Sequential(*layers), nn.Identity(), head)


@dataclass(frozen=True)
class ToySpec:
    """A linear model that starts at zero: small enough to train by hand."""

    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "linear"
    encoder: bool = False

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        return Toy(shape[0] * shape[1] * shape[2], num_classes, self.encoder)


def _toy_dataset(pixels: Sequence[Sequence[int]], labels: Sequence[int], test: Any, test_labels: Any) -> Dataset:
    """Images of 1×1×d whose normalised values are the pixel values themselves (mean 0, std 1/255)."""
    splits = []
    for values, targets in ((pixels, labels), (test or pixels, test_labels or labels)):
        images = torch.tensor(values, dtype=torch.uint8).reshape(len(values), 1, 1, -1)
        splits.append(Split(images, torch.tensor(targets, dtype=torch.int64)))
    num_classes = max(max(labels), max(test_labels or labels)) + 1
    meta = Meta(
        name="toy",
        num_classes=num_classes,
        class_names=tuple(map(str, range(num_classes))),
        shape=(1, 1, len(pixels[0])),
        mean=(0.0,),
        std=(1 / 255,),
        licence="none",
        source="by hand",
        train_size=len(splits[0]),
        test_size=len(splits[1]),
        preparation={},
        fingerprint="toy",
    )
    return Dataset(*splits, meta)


def _by_hand(
    dataset: Dataset, clients: Any, tests: Any = None, vals: Any = None, test_source: Any = "test", tasks: Any = None
) -> Partition:
    """A partition from lists of indices per client; ``tasks``: per client a list of such lists, its stream."""

    def indices(values: Any) -> np.ndarray:
        return np.array(sorted(values), dtype=np.int64)

    def counts(parts: list[np.ndarray], labels: torch.Tensor) -> np.ndarray:
        return np.stack([np.bincount(labels.numpy()[part], minlength=dataset.meta.num_classes) for part in parts])

    none: list[list[int]] = [[] for _ in clients]
    streams = [tuple(map(indices, own)) for own in tasks or none]
    splits = tuple(
        ClientSplit(indices(train), indices(val), indices(test), stream)
        for train, val, test, stream in zip(clients, vals or none, tests or none, streams, strict=True)
    )
    labels = dataset.train.labels
    by_task = (
        np.zeros((0, 0, 0), dtype=np.int64) if tasks is None else np.stack([counts(own, labels) for own in streams])
    )
    tested = dataset.test if test_source == "test" else dataset.train
    return Partition(
        clients=splits,
        counts=counts([split.train for split in splits], dataset.train.labels),
        test_counts=counts([split.test for split in splits], tested.labels),
        test_source=test_source,
        parameters={},
        retries=0,
        notes=(),
        overlap=False,
        source_fingerprint=dataset.meta.fingerprint,
        version="0",
        fingerprint="by hand",
        class_counts=np.bincount(labels.numpy(), minlength=dataset.meta.num_classes),
        task_counts=by_task,
    )


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {section: dict(values) if isinstance(values, dict) else values for section, values in base.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            merged.setdefault(section, {})[name] = value
        else:
            merged[section] = value
    return merged


def _run(
    experiment: Experiment,
    directory: Path,
    executor: Any = None,
    orchestrator: Orchestrator | None = None,
    *,
    restart: bool = False,
) -> SimpleNamespace:
    """All rounds, in this process if no executor is given: final state, history, the checkpoint, committed bytes."""
    checkpoint = executor.checkpoint if hasattr(executor, "checkpoint") else Checkpoint(directory)
    state = run_rounds(
        experiment,
        checkpoint,
        executor or InlineExecutor(experiment, checkpoint),
        orchestrator or InlineOrchestrator(),
        Observers(),
        restart=restart,
    )
    return SimpleNamespace(
        state=state,
        history=(history := checkpoint.records("history.jsonl")),
        failures=[tuple(failure) for record in history for failure in record.get("failures", ())],
        checkpoint=checkpoint,
        client_state=lambda client: checkpoint.client_state(client, state.client_states),
        bytes=_committed(directory),
        arrays=_arrays(directory),
    )


@dataclass(frozen=True)
class Told(Reply):
    """A reply, and what it and the message before it cost by kind."""

    up: Mapping[str, Size] = field(default_factory=dict)
    down: Mapping[str, Size] = field(default_factory=dict)


def _train(
    experiment: Experiment,
    client: int = 0,
    *,
    number: int = 1,
    exchange: int = 0,
    server: Record | None = None,
    client_state: Record | None = None,
    worker: ClientRunner | None = None,
) -> tuple[Any, Record]:
    """One client's turn, by default its first and in a new worker: its reply (or failure) and what it remembers."""
    found = _train_stack(
        experiment,
        [client],
        {client: client_state or {}},
        number=number,
        exchange=exchange,
        server=server,
        worker=worker,
    )
    result = found[client]
    return (result, {}) if isinstance(result, Failure) else result


def _train_stack(
    experiment: Experiment,
    clients: Sequence[int],
    client_states: Mapping[int, Record] | None = None,
    *,
    number: int = 1,
    exchange: int = 0,
    server: Record | None = None,
    worker: ClientRunner | None = None,
) -> dict[int, tuple[Reply, Record] | Failure]:
    """One turn of some clients: all at once where they are stacked, else one after the other in the same worker."""
    worker = worker or ClientRunner(experiment)
    work = _work(experiment, clients, number=number, exchange=exchange, server=server)
    groups = [list(clients)] if experiment.stacked else [[client] for client in clients]
    results: dict[int, tuple[Reply, Record] | Failure] = {}
    for group in groups:
        for client, result in worker.train(work, group, lambda client: (client_states or {}).get(client, {})).items():
            if not isinstance(result, Failure):
                reply, kept = result
                up, down = (cost([sent], experiment) for sent in (reply.message, work.received[client]))
                result = Told(**vars(reply), up=up, down=down), kept
            results[client] = result
    return results


def _work(
    experiment: Experiment, clients: Sequence[int], *, number: int = 1, exchange: int = 0, server: Any = None
) -> ExchangeWork:
    """What the server hands out in a leg."""
    server = experiment.method.start_server(experiment.setting) if server is None else server
    return broadcast(experiment, RunState(number - 1, Record(server), exchange=exchange), clients)[0]


def _handed_out(experiment: Experiment, state: RunState) -> ExchangeWork:
    """What the server hands out in the leg after a state, to everybody."""
    return broadcast(experiment, state, range(experiment.setting.num_clients))[0]


def _client_model(
    method: Method, server: Any, client: int, client_state: Any, setting: FederationContext
) -> Weights | None:
    """The model that answers for a client, made from what it is sent for that and what it remembers."""
    sent = method.scoring_message(Record(server), client, RoundContext(setting, 1, "evaluate"))
    return method.client_model(Record(sent), Record(client_state), setting)


def _scoring_message(experiment: Experiment, server: Any, client: int) -> Record:
    """What a client is sent to be scored, as it leaves the server."""
    (sent,) = scoring_messages(experiment, Record(server), [client])
    return sent


def _receive(
    runner: ClientRunner, number: int, exchange: Exchange, client: int, server: Any, client_state: Any
) -> ClientContext:
    """A client's turn with the message that the server sends it."""
    experiment = runner.experiment
    ctx = round_context(experiment.method, runner._setting, number, exchange)
    sent = outgoing(experiment.method.broadcast(Record(server), client, ctx), experiment)
    return runner.ctx(number, exchange, client, *runner._received.of([sent]), client_state)


def _scores(
    experiment: Experiment,
    weights: Any,
    images: torch.Tensor,
    server: Any = None,
    classes: torch.Tensor | None = None,
    predict: Any = None,
) -> torch.Tensor:
    """The method's scores [N, K] for uint8 images, by a model with some weights."""
    asked = {"": predict or experiment.method.predict}
    stored = StoredImages(experiment, images)
    return Forward(experiment).answers(weights, stored, asked, Record(server or {}), classes)[""]


def _same(first: Payload | Payloads, second: Payload | Payloads) -> bool:
    """Whether two payloads, or two messages or states of them, are equal to the bit, names and order included."""
    ours, theirs = (value if isinstance(value, Mapping) else {"value": value} for value in (first, second))
    kinds = [
        [(name, part.type_name, part.header()) for name, part in sorted(record.items())] for record in (ours, theirs)
    ]
    return kinds[0] == kinds[1] and serialise(ours) == serialise(theirs)


def _apart(first: Payload, second: Payload) -> float:
    """The largest difference between values of the same name."""
    ours, theirs = first.arrays(), second.arrays()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


class Threaded(InlineOrchestrator):
    """Groups run on threads at once, as under an orchestrator that shows tasks."""

    def map(self, name: str, function: Any, items: Any) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(function, items))


@dataclass
class Direct:
    """A step that is no program but the function itself, called."""

    function: Function
    terms: Sequence[str] = ()

    def run(self, fixed: list[torch.Tensor], moment: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        terms, noted = self.function([*fixed, *moment])
        self.terms = tuple(terms)
        return [*terms.values(), *noted]

    def finish(self) -> None:
        """Nothing: all moved in place."""


class DirectMaker:
    """Stands for a compiler, in tests of what programs are made from."""

    def make(self, function: Function, example: Any, moved: int, facts: Any) -> Direct:
        return Direct(function)


def _arrays(directory: Path) -> dict[str, dict[str, Any]]:
    """What is in the files of tensors, without the seals that say whose they are."""
    files = {name: content for name, content in _committed(directory).items() if name.endswith(".safetensors")}
    return {
        name: {key: (str(tensor.dtype), tensor.tolist()) for key, tensor in safetensors.torch.load(content).items()}
        for name, content in files.items()
    }


def _committed(directory: Path) -> dict[str, bytes]:
    """Everything a checkpoint guarantees to the byte: state, history, the memories that the state names, snapshots."""
    checkpoint = Checkpoint(directory)
    client_states = [*map(checkpoint.states.path, sorted(set(checkpoint.read_state().client_states.values())))]
    snapshots = sorted(directory.glob("rounds/*"))
    paths = [*checkpoint.state_files(), directory / "history.jsonl", *client_states, *snapshots]
    return {path.name: path.read_bytes() for path in paths}


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from flcore.methods.fedprox import FedProx

@dataclass(frozen=True)
class Mine(FedProx):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "FedProx by another name"
    citation: ClassVar[str] = "nobody"
"""


@pytest.fixture(scope="session")
def plugin_text() -> str:
    """A user's method: FedProx by another name, ``mine``."""
    return PLUGIN


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """``own/mine.py`` with that method."""
    path = tmp_path / "own" / "mine.py"
    path.parent.mkdir()
    path.write_text(PLUGIN)
    return path


# What a method's model must have: FedCSPC calibrates a projection, ProtoLDA fits a dictionary.
PROJECTED = {"name": "fedcspc_cnn", "projection_dim": 16}
PATCHES = {"name": "patch_dictionary", "atoms": 6, "patch": 5, "grid": 2}


class Lab:
    """Builders of small federations; a fixture, since test modules cannot import each other."""

    TinySource, ToySpec, Threaded, DirectMaker = TinySource, ToySpec, Threaded, DirectMaker
    toy_dataset = staticmethod(_toy_dataset)
    by_hand = staticmethod(_by_hand)
    run = staticmethod(_run)
    train = staticmethod(_train)
    train_stack = staticmethod(_train_stack)
    work, receive = staticmethod(_work), staticmethod(_receive)
    handed_out, client_model = staticmethod(_handed_out), staticmethod(_client_model)
    scoring_message = staticmethod(_scoring_message)
    committed = staticmethod(_committed)
    scores = staticmethod(_scores)
    same, apart = staticmethod(_same), staticmethod(_apart)

    @staticmethod
    def model_of(method: str) -> dict[str, Any]:
        """Batch normalisation, which is harder to get right, but where a method needs another model."""
        return dict(
            {"fedcspc": PROJECTED, "protolda": PATCHES, "protolda_blocks": PATCHES}.get(
                method, {"name": "fedgen_cnn", "feature_dim": 8}
            )
        )

    def __init__(self, prepared: Path, partition: Path) -> None:
        self.prepared, self.partition_folder = prepared, partition
        self.dataset, self.partition = Dataset.load(prepared), Partition.load(partition)

    @staticmethod
    def mapping(**changes: Any) -> dict[str, Any]:
        """A raw configuration of the tiny federation; changes are dotted keys with ``__`` for the dot."""
        base = {
            "model": {"name": "fedgen_cnn", "feature_dim": 8},
            "federation": {"rounds": 3},
            "local": {"lr": 0.05, "batch_size": 16},
            "partition": {"num_clients": 4},
        }
        return _merge(base, {key.replace("__", "."): value for key, value in changes.items()})

    def config(self, **changes: Any) -> Config:
        return Config.from_mapping(self.mapping(**changes))

    def experiment(
        self, dataset: Any = None, partition: Any = None, spec: Any = None, algorithm: Any = None, **changes: Any
    ):
        """An experiment of the tiny data, or of what is given."""
        config = self.config(**changes)
        engine = config.engine
        if engine.device == "cpu":  # what `auto` stands for in runs of a few steps, without counting them
            stack, way = engine.stack != "auto" and engine.stack, engine.compile.replace("auto", "none")
            config = replace(config, engine=replace(engine, stack=stack, compile=way))
        if spec is not None:
            config = replace(config, model_spec=spec)
        if algorithm is not None:
            config = replace(config, method=algorithm)
        return Experiment(config, dataset or self.dataset, partition or self.partition).decided()

    def linear(
        self,
        pixels: Sequence[Sequence[int]] = ((2, 0), (0, 4)),
        labels: Sequence[int] = (0, 1),
        clients: Sequence[Sequence[int]] = ((0,), (1,)),
        tests: tuple[Any, Any] = (None, None),
        encoder: bool = False,
        **changes: Any,
    ) -> Experiment:
        """A linear model that starts at zero, on a few pixels; full batches, plain SGD with learning rate 0.1."""
        dataset = _toy_dataset(pixels, labels, *tests)
        partition = _by_hand(dataset, clients, [[0, 1]] * len(clients))
        settings = {"local": {"lr": 0.1, "batch_size": 100}, "federation": {"rounds": 1}} | changes
        return self.experiment(dataset, partition, ToySpec(encoder), **settings)

    def run_in_pool(self, directory: Path, orchestrator: Orchestrator | None = None, **changes: Any) -> SimpleNamespace:
        """All rounds of a run of the tiny data, trained by worker processes."""
        experiment = self.experiment(**changes)
        executor = local_pool(experiment, self.prepared, self.partition_folder, Checkpoint(directory))
        try:
            return _run(experiment, directory, executor, orchestrator or Threaded())
        finally:
            executor.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Tiny data, divided among four clients of unequal size and classes, in memory and on disk."""
    root = tmp_path_factory.mktemp("tiny")
    dataset = prepare_dataset(TinySource())
    dataset.save(root / "prepared")
    partitioner = PARTITIONERS["dirichlet"](alpha=0.5, min_size=10)
    make_partition(dataset, partitioner, num_clients=4, seed=3).save(root / "partition")
    return Lab(root / "prepared", root / "partition")
