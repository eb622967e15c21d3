"""The configuration of one run: frozen, closed, typed. Every default stands here or in the class it belongs to, once.

A configuration is a mapping of sections. Sections with a ``name`` (data, partition, model, method) hold the keys of the
section itself and those of the chosen entry of a registry. :meth:`Config.from_mapping` is the only way in: what it
accepts can be run, what it refuses it refuses before any data are read, naming the key, the value and what is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flcore.data.imbalance import Imbalance
from flcore.data.partitioners import PARTITIONERS
from flcore.data.partitioners.base import Partitioner
from flcore.data.sources import SOURCES
from flcore.data.sources.base import Source
from flcore.errors import ConfigError
from flcore.evaluation.analyses import SUMMARIES
from flcore.methods import METHODS, Method
from flcore.models import MODELS, ModelSpec
from flcore.params import build, declared, param, unknown_key


@dataclass(frozen=True)
class DataConfig:
    """Which images."""

    root: str | None = param(None, "folder or zip with the files; not needed for digits")
    download: bool = param(False, "fetch missing files from the dataset's publisher")
    size: int | None = param(None, "resize to this many pixels square; null keeps the stored size", low=8, high=512)
    channels: Literal[1, 3] | None = param(None, "convert to grey (1) or colour (3); null keeps what is stored")
    limit_per_class: int | None = param(None, "keep this many images per class and split; null keeps all", low=1)
    augmentation: Literal["none", "crop_flip", "crop_flip_rot"] = param(
        "none", "of training batches; never of evaluation"
    )


@dataclass(frozen=True)
class PartitionConfig:
    """Which client holds what."""

    num_clients: int = param(10, "K, the number of clients", low=1)
    seed: int | None = param(None, "seed of the division; null follows the run's seed", low=0)
    validation: float = param(0.0, "share of each client's training data set aside for validation", low=0, below=1)
    client_test: Literal["label_slices", "few_shot", "proportional", "local_split", "task_cumulative"] = param(
        "label_slices",
        "client test data: equal slices of the own classes, a few of each, in proportion, from the own data, or slices "
        "that grow with the tasks met",
    )
    test_fraction: float = param(0.2, "share of a client's own data for client_test: local_split", above=0, below=1)
    test_shots: int = param(15, "test samples per class held for client_test: few_shot", low=1)
    imbalance_gamma: float | None = param(
        None, "long tail: smallest over largest class size of the training set; null leaves it alone", above=0, high=1
    )
    imbalance_profile: Literal["exp", "step"] = param(
        "exp", "with imbalance_gamma: class sizes fall exponentially, or half of the classes are small"
    )
    imbalance_permute_classes: bool = param(
        False, "with imbalance_gamma: draw which classes are small; else the last ones"
    )

    @property
    def imbalance(self) -> Imbalance | None:
        """The long tail asked for."""
        if self.imbalance_gamma is None:
            return None
        return Imbalance(self.imbalance_gamma, self.imbalance_profile, self.imbalance_permute_classes)


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    batchnorm: Literal["aggregate", "local", "frozen"] = param(
        "aggregate", "BatchNorm statistics: averaged like weights, private to each client, or never updated"
    )


@dataclass(frozen=True)
class FederationConfig:
    """Rounds and who takes part."""

    rounds: int = param(30, "R, communication rounds", low=1)
    participation: float = param(1.0, "share of the clients sampled in a round", above=0, high=1)
    dropout: float = param(
        0.0, "probability that a sampled client is absent: sent nothing, answers nothing", low=0, below=1
    )
    oversampling: float = param(
        1.0, "invite this many times the cohort; the fastest are taken, the others' work is lost", low=1, high=100
    )
    deadline: float | None = param(
        None, "simulated seconds after which a round ends without those still at work; null waits for them", above=0
    )
    step_seconds: float = param(0.1, "simulated seconds that a mini-batch takes on a client of average speed", above=0)
    speed_spread: float = param(
        0.0, "how much clients differ in speed: standard deviation of the logarithm, fixed per client", low=0
    )
    speed_jitter: float = param(0.0, "likewise, drawn anew per client and round", low=0)
    on_client_error: Literal["stop", "drop"] = param(
        "stop", "a client that fails repeatedly stops the run, or is left out of the round and counted"
    )
    task_schedule: Literal["cyclic", "blocked", "none"] = param(
        "cyclic",
        "where the partition has tasks, the one of a round: all in turn again and again, or each for a block of "
        "rounds; none: all tasks' data at once",
    )


@dataclass(frozen=True)
class LocalConfig:
    """What a client does in a round."""

    epochs: int = param(1, "passes over the client's data per round", low=1)
    steps: int | None = param(None, "mini-batches per round; where set, used instead of epochs", low=1)
    batch_size: int = param(32, "B, samples per mini-batch", low=1)
    optimizer: Literal["sgd", "adam"] = param("sgd", "fresh in every round, as in the papers")
    lr: float = param(0.01, "learning rate of the first round", above=0)
    momentum: float = param(0.0, "of SGD", low=0, below=1)
    weight_decay: float = param(0.0, "added to the gradient as weight_decay · w", low=0)
    clip: float | None = param(None, "largest norm of a step's gradient; null leaves it alone", above=0)
    schedule: Literal["constant", "exponential", "step", "cosine"] = param(
        "constant", "of the learning rate over rounds"
    )
    decay: float = param(0.99, "factor per round (exponential) or per decay_every rounds (step)", above=0, high=1)
    decay_every: int = param(10, "rounds between two decays of schedule: step", low=1)


@dataclass(frozen=True)
class EngineConfig:
    """Where and how the work is done. Workers and grouping never change a result; the rest may change its last bits."""

    name: Literal["local", "ray"] = param(
        "local", "local: in this process, or in a pool of processes; ray: Ray actors, on this machine or a cluster"
    )
    workers: int | None = param(
        0,
        "local: worker processes, 0 trains in the main process; ray: actors, 0 is 1; null: one per physical core",
        low=0,
        high=1024,
    )
    clients_per_task: int | None = param(None, "clients per task; null gives each worker one group", low=1)
    device: Literal["cpu", "cuda"] = param("cpu", "where tensors live")
    stack: Literal[False, True, "auto"] = param(
        False, "train clients stacked, many at once: false, true, or auto, which measures both before the first round"
    )
    stack_size: int | None = param(None, "most clients in a stack; null: 8 on a CPU, 128 on a GPU", low=1)
    stack_memory_mb: int = param(2048, "memory that a stack's tensors may take", low=1)
    precision: Literal["float32", "tf32", "bf16"] = param(
        "float32", "of matrix products: tf32 on GPUs that have it, bf16 by autocast; weights and messages stay float32"
    )
    compile: Literal["none", "default", "reduce-overhead"] = param(
        "none", "torch.compile of the model's parts; reduce-overhead records CUDA graphs"
    )
    ray_address: str | None = param(None, "of a Ray cluster; null starts Ray on this machine")
    gpus_per_worker: float = param(0.0, "ray: share of a GPU that each actor asks for", low=0)


@dataclass(frozen=True)
class EvaluationConfig:
    """How often and on what models are scored."""

    every: int = param(1, "evaluate after every this many rounds, and always after the last", low=1)
    split: Literal["test", "validation"] = param("test", "test data, or the clients' validation data (tuning)")
    batch_size: int = param(512, "images per evaluation batch; does not change scores", low=1)
    private: Literal[False, True, "auto"] = param(
        "auto",
        "also score each client's own model, as it left local training, on the whole global test set (A_loc, A_sel, "
        "forgetting); auto: where the partition has tasks",
    )
    analyses: tuple[str, ...] = param((), "analyses of the finished run, for its report; see protofl analyse --help")


@dataclass(frozen=True)
class TrackingConfig:
    """Logging to MLflow."""

    enabled: bool = param(True, "log runs to MLflow")
    uri: str | None = param(
        None, "tracking server or store; null: MLFLOW_TRACKING_URI, else sqlite:///mlruns/mlflow.db"
    )
    log_model: bool = param(True, "log the final global model with its signature")
    register: bool = param(False, "also register it under the experiment's name")


@dataclass(frozen=True)
class CompareConfig:
    """What a comparison runs."""

    methods: tuple[str, ...] = param(("local", "fedavg", "fedproto"), "names of methods")
    seeds: tuple[int, ...] = param((0, 1, 2), "seeds; each one a run per method", low=0)
    baseline: str = param("fedavg", "the method that paired differences are taken to")
    target_fraction: float = param(
        0.95, "rounds to target: this share of the baseline's final accuracy", above=0, high=1
    )
    settings: Mapping[str, Any] = param({}, "per method, dotted keys that differ from the rest of the file")


_NAMED: dict[str, tuple[type, Mapping[str, type], str]] = {
    "data": (DataConfig, SOURCES, "digits"),
    "partition": (PartitionConfig, PARTITIONERS, "dirichlet"),
    "model": (ModelConfig, MODELS, "fedgen_cnn"),
}
_PLAIN: dict[str, type] = {
    "federation": FederationConfig,
    "local": LocalConfig,
    "engine": EngineConfig,
    "evaluation": EvaluationConfig,
    "tracking": TrackingConfig,
    "compare": CompareConfig,
}
DEFAULT_METHOD = "fedavg"
SECTIONS = ("seed", "data", "partition", "model", "method", *_PLAIN)

# What cannot change a result: where data and partitions lie (what they hold is in the hash of a run), who computes, who
# watches, what else is compared, what is looked at afterwards.
_NOT_IDENTITY = {
    "data": {"root", "download"},
    "partition": {"path"},
    "evaluation": {"analyses"},
    "engine": {"name", "workers", "clients_per_task", "ray_address", "gpus_per_worker"},
    "tracking": None,
    "compare": None,
}


@dataclass(frozen=True)
class Config:
    """Every value of one run; ``source``, ``partitioner``, ``model_spec``, ``method`` are registry entries."""

    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    source: Source = field(default_factory=lambda: SOURCES["digits"]())
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    partitioner: Partitioner = field(default_factory=lambda: PARTITIONERS["dirichlet"]())
    model: ModelConfig = field(default_factory=ModelConfig)
    model_spec: ModelSpec = field(default_factory=lambda: MODELS["fedgen_cnn"]())
    method: Method = field(default_factory=lambda: METHODS[DEFAULT_METHOD]())
    federation: FederationConfig = field(default_factory=FederationConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Config:
        """Parse a nested mapping, as read from ``params.yaml``.

        Raises:
            ConfigError: an unknown key, a key of another registry entry, a wrong type, a value out of range, or values
                that do not go together.
        """
        for key in raw:
            if key not in SECTIONS:
                raise ConfigError(unknown_key(str(key), str(key), SECTIONS))
        sections = {name: _section(raw, name) for name in SECTIONS if name != "seed"}
        parsed: dict[str, Any] = {"seed": _seed(raw.get("seed", 0))}
        entries = ("source", "partitioner", "model_spec")
        for (name, (common, registry, default)), entry in zip(_NAMED.items(), entries, strict=True):
            parsed[name], parsed[entry] = _named_section(name, sections[name], common, registry, default)
        parsed["method"] = _named_section("method", sections["method"], None, METHODS, DEFAULT_METHOD)[1]
        parsed |= {name: build(section, sections[name], name) for name, section in _PLAIN.items()}
        config = cls(**parsed)
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.evaluation.split == "validation" and self.partition.validation == 0:
            raise ConfigError("evaluation.split = validation: needs partition.validation above 0, for example 0.2")
        for name in self.evaluation.analyses:
            if name not in SUMMARIES:
                unknown = unknown_key(name, name, SUMMARIES).replace("key", "analysis", 1)
                raise ConfigError(f"evaluation.analyses: {unknown}")
        if len(set(self.evaluation.analyses)) < len(self.evaluation.analyses):
            raise ConfigError(f"evaluation.analyses = {list(self.evaluation.analyses)}: a name stands twice")
        for name in (*self.compare.methods, self.compare.baseline, *self.compare.settings):
            if name not in METHODS:
                raise ConfigError(f"compare: {unknown_key(name, name, METHODS).replace('key', 'method', 1)}")
        if self.engine.compile != "none" and self.engine.stack is not False:
            raise ConfigError(
                f"engine.compile = {self.engine.compile}: stacked clients are not compiled; use engine.stack=false or "
                "engine.compile=none"
            )
        if len(set(self.compare.seeds)) < len(self.compare.seeds):
            raise ConfigError(f"compare.seeds = {list(self.compare.seeds)}: a seed stands twice")

    @property
    def partition_seed(self) -> int:
        """The seed that divides the data: ``partition.seed``, else the run's."""
        return self.seed if self.partition.seed is None else self.partition.seed

    def to_mapping(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON values; :meth:`from_mapping` reads it back to an equal object."""
        mapping: dict[str, Any] = {"seed": self.seed}
        for name, entry in (("data", self.source), ("partition", self.partitioner), ("model", self.model_spec)):
            mapping[name] = {"name": entry.name, **_values(getattr(self, name)), **_values(entry)}
        mapping["method"] = {"name": self.method.name, **_values(self.method)}
        return mapping | {name: _values(getattr(self, name)) for name in _PLAIN}

    def identity(self) -> dict[str, Any]:
        """The values that can change a result, and no others (data are identified by fingerprint, not by place)."""
        mapping = self.to_mapping()
        for section, dropped in _NOT_IDENTITY.items():
            if dropped is None:
                del mapping[section]
            else:
                mapping[section] = {key: value for key, value in mapping[section].items() if key not in dropped}
        return mapping

    def hash(self, data_fingerprint: str, partition_fingerprint: str) -> str:
        """SHA-256 that names a run: its identity with the data and the partition it ran on."""
        named = {"config": self.identity(), "data": data_fingerprint, "partition": partition_fingerprint}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def own_keys(section: str) -> frozenset[str]:
    """Keys of a named section that do not depend on the chosen entry, ``name`` included; empty for plain sections."""
    if section == "method":
        return frozenset({"name"})
    if section not in _NAMED:
        return frozenset()
    return frozenset({"name", *(p.name for p in declared(_NAMED[section][0]))})


def _seed(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"seed = {value}: expected a whole number >= 0")
    return value


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} = {section}: expected a section with keys, not a value")
    return section


def _named_section(
    name: str, values: Mapping[str, Any], common: type | None, registry: Mapping[str, type], default: str
) -> tuple[Any, Any]:
    chosen = values.get("name", default)
    if not isinstance(chosen, str) or chosen not in registry:
        raise ConfigError(f"{name}.name = {'null' if chosen is None else chosen}: must be one of {', '.join(registry)}")
    shared = {p.name for p in declared(common)} if common else set()
    rest = {key: value for key, value in values.items() if key != "name" and key not in shared}
    own = {p.name for p in declared(registry[chosen])}
    for key in rest:
        if key in own:
            continue
        owners = [other for other, cls in registry.items() if key in {p.name for p in declared(cls)}]
        if owners:
            raise ConfigError(f"{name}.{key}: {chosen} has no such parameter; it belongs to {', '.join(owners)}")
        raise ConfigError(unknown_key(f"{name}.{key}", str(key), shared | own | {"name"}))
    section = build(common, {k: v for k, v in values.items() if k in shared}, name) if common else None
    return section, build(registry[chosen], rest, name)


def _values(section: Any) -> dict[str, Any]:
    values = {p.name: getattr(section, p.name) for p in declared(type(section))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
