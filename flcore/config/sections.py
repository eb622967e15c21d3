"""Configuration sections: keys, defaults, ranges and meanings that do not depend on a registry's entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flcore.aggregation.settings import Aggregation
from flcore.config.analyses import AnalysisName
from flcore.config.tuning import TuneConfig
from flcore.core.errors import ConfigError
from flcore.core.host import physical_cores
from flcore.core.params import declared, param
from flcore.data.imbalance import Imbalance

if TYPE_CHECKING:
    from flcore.data.images import Normalisation  # imports torch

MOST_TSNE_CLIENTS = 4
"""Largest number of models in one joint embedding, which share its points and colours."""


@dataclass(frozen=True)
class DataConfig:
    """The images."""

    root: str | None = param(None, "folder or zip with the files; not needed for digits")
    download: bool = param(False, "fetch missing files from the dataset's publisher")
    size: int | None = param(None, "resize to this many pixels square; null keeps the stored size", low=8, high=512)
    channels: Literal[1, 3] | None = param(None, "convert to grey (1) or colour (3); null keeps what is stored")
    limit_per_class: int | None = param(None, "keep this many images per class and split; null keeps all", low=1)
    mean: float | tuple[float, ...] | None = param(
        None,
        "of pixels from 0 to 1, of all channels or a list with one for each, taken off before they are divided by std; "
        "null: the dataset's own",
    )
    std: float | tuple[float, ...] | None = param(
        None,
        "with mean; FedPA and FedPG take 0.5 and 0.5, ImageNet has [0.485, 0.456, 0.406] and [0.229, 0.224, 0.225]",
        above=0,
    )
    augmentation: Literal["none", "crop_flip", "reflect_crop_flip", "crop_flip_rot"] = param(
        "none",
        "of training batches, never of evaluation: crops of the image with a border of 4 pixels, black or (reflect) "
        "mirrored, flips, rotations by up to 15 degrees",
    )

    @property
    def normalisation(self) -> Normalisation | None:
        """Configured mean and standard deviation; None: the dataset's."""
        return None if self.mean is None or self.std is None else (self.mean, self.std)


@dataclass(frozen=True)
class PartitionConfig:
    """The division of data among clients."""

    num_clients: int = param(10, "K, the number of clients", low=1)
    seed: int | None = param(None, "seed of the division; null follows the run's seed", low=0)
    validation: float = param(0.0, "share of each client's training data set aside for validation", low=0, below=1)
    client_test: Literal["label_slices", "few_shot", "proportional", "own_group", "local_split", "task_cumulative"] = (
        param(
            "label_slices",
            "client test data: equal slices of the own classes, a few of each, in proportion, the test images of the "
            "own writers or users, from the own training data, or slices that grow with the tasks met",
        )
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
        """Configured long tail, if any."""
        if self.imbalance_gamma is None:
            return None
        return Imbalance(self.imbalance_gamma, self.imbalance_profile, self.imbalance_permute_classes)


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    batchnorm: Literal["aggregate", "local", "frozen"] = param(
        "aggregate", "BatchNorm statistics: averaged like weights, private to each client, or never updated"
    )


@dataclass(frozen=True)
class FederationConfig:
    """Rounds and participation."""

    rounds: int = param(30, "R, communication rounds", low=1)
    participation: float = param(
        1.0,
        "share of the clients sampled in a round, as a number of clients rounded, a half to the even one (2.5 to 2, "
        "3.5 to 4), and at least one",
        above=0,
        high=1,
    )
    sampler: str = param(
        "uniform",
        "client sampler: uniform, by_size, round_robin, trace, or a class of your own; applied before dropout",
    )
    sampler_options: Mapping[str, Any] = param({}, "parameters of that sampler, see `protofl show sampler NAME`")
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
    speed_jitter: float = param(0.0, "likewise, drawn for every client and round", low=0)
    on_client_error: Literal["stop", "drop"] = param(
        "stop",
        "a failing client stops the run, or is left out of the round and counted; if all of a round fail, it stops",
    )
    task_schedule: Literal["cyclic", "blocked", "none"] = param(
        "cyclic",
        "where the partition has tasks, the one of a round: all in turn again and again, or each for a block of "
        "rounds; none: all tasks' data at once",
    )
    poisoned: int = param(0, "simulation: clients, drawn by the run's seed, that send poisoned messages", low=0)
    poisoned_clients: tuple[int, ...] = param((), "likewise, their ids in place of a number", low=0)
    attack: Literal["sign_flip", "scale", "random_labels"] = param(
        "sign_flip",
        "what poisoned clients do: send minus s times their update and prototypes, s times, or train on random labels",
    )
    attack_scale: float = param(10.0, "s of sign_flip and scale", above=0)

    def __post_init__(self) -> None:
        if self.poisoned and self.poisoned_clients:
            raise ValueError("poisoned is a number of clients and poisoned_clients are ids; set one of them")
        if len(set(self.poisoned_clients)) < len(self.poisoned_clients):
            raise ValueError(f"poisoned_clients = {list(self.poisoned_clients)}: an id appears twice")

    @property
    def simulates_poison(self) -> bool:
        """True if any client is poisoned."""
        return self.poisoned > 0 or bool(self.poisoned_clients)


@dataclass(frozen=True)
class LocalConfig:
    """Local training of a client."""

    epochs: int = param(1, "passes over the client's data per round", low=1)
    steps: int | None = param(None, "mini-batches per round; where set, used instead of epochs", low=1)
    batch_size: int = param(32, "B, samples per mini-batch", low=1)
    batches: Literal["all", "full", "endless"] = param(
        "all",
        "all: the last mini-batch of a pass may be smaller; full: it is left out, but of a client with fewer than "
        "batch_size samples; endless: full ones, of passes that go on from round to round (needs local.steps)",
    )
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
    """Execution. Workers and grouping never change a result; the rest may change its last bits."""

    name: Literal["local", "ray"] = param(
        "local", "local: in this process, or in a pool of processes; ray: Ray actors, on this machine or a cluster"
    )
    workers: int | None = param(
        None,
        "local: worker processes, 0 trains in the main process; ray: actors, 0 is 1; null: one per physical core, of a "
        "local run where it saves time",
        low=0,
        high=1024,
    )
    clients_per_task: int | None = param(None, "clients per task; null gives each worker one group", low=1)
    device: Literal["cpu", "cuda"] = param("cpu", "where tensors live")
    stack: Literal[False, True, "auto"] = param("auto", "train clients stacked, many at once; auto: on a GPU")
    stack_size: int | None = param(None, "most clients in a stack; null: 8 on a CPU, 128 on a GPU", low=1)
    stack_memory_mb: int = param(2048, "memory that a stack's tensors may take", low=1)
    precision: Literal["float32", "tf32", "bf16"] = param(
        "float32", "of matrix products: tf32 on GPUs that have it, bf16 by autocast; weights and messages stay float32"
    )
    numerics: Literal["portable", "native"] = param(
        "portable", "portable: the same bytes on all x86-64 processors with AVX2; native: this processor's own kernels"
    )
    compile: Literal["none", "graph", "default", "auto"] = param(
        "auto",
        "steps of local training: none: as they are; default: compiled, on a GPU in a CUDA graph; graph: in one, but "
        "not compiled; auto: compiled in runs of 10,000 client steps or more, where that saves time",
    )
    ray_address: str | None = param(None, "of a Ray cluster; null starts Ray on this machine")
    gpus_per_worker: float = param(0.0, "ray: share of a GPU that each actor asks for", low=0)
    durable_every: float = param(
        1.0, "seconds of work that a kill or a power failure may lose; 0: sync after every exchange and reply", low=0
    )

    def __post_init__(self) -> None:
        if self.compile == "graph" and self.device == "cpu":
            raise ValueError("compile = graph is for device = cuda; use none, default or auto")

    @property
    def worker_count(self) -> int:
        """``workers``; the most that a run takes, one per physical core, if it is null. 0: in the main process."""
        count = physical_cores() if self.workers is None else self.workers
        return max(count, 1) if self.name == "ray" else count


@dataclass(frozen=True)
class EvaluationConfig:
    """Frequency and data of evaluation."""

    every: int = param(1, "evaluate after every this many rounds, and always after the last", low=1)
    split: Literal["test", "validation"] = param("test", "test data, or the clients' validation data (tuning)")
    batch_size: int = param(512, "images per evaluation batch; does not change scores", low=1)
    private: Literal[False, True, "auto"] = param(
        "auto",
        "also score each client's own model, as it left local training, on the whole global test set (A_loc, A_sel, "
        "forgetting); auto: where the partition has tasks",
    )
    analyses: tuple[AnalysisName, ...] = param((), "analyses of the finished run, by name, for its report")
    snapshots: tuple[int, ...] = param(
        (),
        "rounds (0: before the first) after which the folder keeps the state of server and clients; every analysis is "
        "made for each of them too",
        low=0,
    )
    tsne_clients: tuple[int, ...] | None = param(
        None,
        "ids of the clients that a t-SNE of clients' models shows, 4 at most; null: the first 4 that have a model. "
        "tsne_prototypes has its own",
        low=0,
    )
    tsne_classes: tuple[int, ...] | None = param(
        None, "numbers of the classes whose images a t-SNE shows; null: all. tsne_prototypes has its own", low=0
    )
    tsne_samples: int | None = param(
        None,
        "images of each class in a t-SNE, fewer where a class has fewer; null: 100, fewer where models and classes "
        "would together have more than 3000 points",
        low=1,
    )

    def __post_init__(self) -> None:
        for key, chosen in (("tsne_clients", self.tsne_clients), ("tsne_classes", self.tsne_classes)):
            if chosen is not None and (not chosen or len(set(chosen)) < len(chosen)):
                wrong = "a number appears twice" if chosen else "name at least one, or set it to null"
                raise ValueError(f"{key} = {list(chosen)}: {wrong}")
        if len(clients := list(self.tsne_clients or ())) > MOST_TSNE_CLIENTS:
            raise ValueError(f"tsne_clients = {clients}: one embedding shows {MOST_TSNE_CLIENTS} clients at most")

    def shown_by(self, analysis: str) -> dict[str, Any]:
        """Return an analysis's chosen clients, classes and samples, as JSON values. They do not change a run's hash."""
        values = {"clients": self.tsne_clients, "classes": self.tsne_classes, "samples": self.tsne_samples}
        is_tsne = analysis.startswith("tsne") and not analysis.startswith("tsne_prototypes")
        chosen = {key: value for key, value in values.items() if is_tsne and value is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}

    def check_shown(self, num_clients: int, num_classes: int | None) -> None:
        """Refuse clients and classes that do not exist; ``num_classes`` None: unknown before data are read.

        Raises:
            ConfigError: a number is too large.
        """
        for key, chosen, count, cure in (
            ("tsne_clients", self.tsne_clients, num_clients, "clients, with ids"),
            ("tsne_classes", self.tsne_classes, num_classes, "classes, with numbers"),
        ):
            beyond = [number for number in chosen or () if count is not None and number >= count]
            if count is not None and beyond:
                raise ConfigError(f"evaluation.{key} = {beyond}: there are {count} {cure} from 0 to {count - 1}")


@dataclass(frozen=True)
class TrackingConfig:
    """Logging to MLflow."""

    enabled: bool = param(True, "log runs to MLflow")
    uri: str | None = param(None, "server or store; null: MLFLOW_TRACKING_URI, else sqlite:///mlruns/mlflow.db")
    log_model: bool = param(True, "log the final model with its signature: the global one, or the clients' own")
    register: bool = param(False, "also register it under the experiment's name")


@dataclass(frozen=True)
class CompareConfig:
    """Runs of a comparison."""

    methods: tuple[str, ...] = param(("local", "fedavg", "fedproto"), "names of methods, and of variants")
    seeds: tuple[int, ...] = param((0, 1, 2), "seeds; each one a run per method", low=0)
    partition_seeds: tuple[int, ...] | None = param(
        None, "seeds of divisions; each one a run per method and seed; null: partition.seed, or the run's seed", low=0
    )
    baseline: str = param("fedavg", "the method, or variant, that paired differences are taken to")
    target_fraction: float = param(0.95, "share of the baseline's final accuracy to be reached", above=0, high=1)
    smooth: int = param(1, "evaluated rounds that drawn curves of accuracy average; 1: as measured", low=1)
    settings: Mapping[str, Any] = param({}, "per method, dotted keys that differ from the rest of the file")
    variants: Mapping[str, Any] = param(
        {},
        "further rows by name: a method and dotted keys, such as {slow: {method: fedavg, local.lr: 0.001}}; one "
        "that is called as its method is that method's row",
    )
    claims: Mapping[str, Any] = param(
        {}, "claims by name that get a verdict: which row is better than which, such as {ours: {better: A, than: B}}"
    )


SHARED: Mapping[str, type | None] = {
    "data": DataConfig,
    "partition": PartitionConfig,
    "model": ModelConfig,
    "method": None,
}
"""Sections with the ``name`` of a registry entry → their keys that do not depend on it."""

DEFAULT_NAMES: Mapping[str, str] = dict(zip(SHARED, ("digits", "dirichlet", "fedgen_cnn", "fedavg"), strict=True))
"""Default entries of these sections."""

PLAIN: Mapping[str, type] = {
    "federation": FederationConfig,
    "aggregation": Aggregation,
    "local": LocalConfig,
    "engine": EngineConfig,
    "evaluation": EvaluationConfig,
    "tracking": TrackingConfig,
    "compare": CompareConfig,
    "tune": TuneConfig,
}
"""Sections without a registry."""

SECTIONS = ("seed", "plugins", *SHARED, *PLAIN)


def own_keys(section: str) -> frozenset[str]:
    """Return the keys of a named section that do not depend on its entry, with ``name``; empty for plain sections."""
    if section not in SHARED:
        return frozenset()
    common = SHARED[section]
    return frozenset({"name", *(p.name for p in declared(common))} if common else {"name"})
