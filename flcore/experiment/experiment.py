"""A run's fixed ingredients, rebuilt from files in any process: configuration, data, partition, initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flcore.aggregation.account import account
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError, require, require_accounting
from flcore.core.rng import numpy_stream
from flcore.data.dataset import Dataset, Split
from flcore.data.partition import Partition
from flcore.data.tasks import TaskStream
from flcore.experiment.poisoning import poisoned_clients, with_random_labels
from flcore.methods.api import Method
from flcore.methods.types import FederationContext
from flcore.models import Backbone, build_model, extract_weights
from flcore.models.base import HiddenHead
from flcore.models.network import Network


@dataclass(frozen=True)
class EngineChoice:
    """How local training is carried out: what ``engine.stack`` and ``engine.compile`` say, or what they leave to us.

    ``fuse``: on a GPU a step is compiled before it is recorded, which takes half a minute, once.
    """

    stack: bool
    compile: bool
    fuse: bool = True


@dataclass(frozen=True)
class Experiment:
    """Everything a process needs to take part in a run.

    ``choice`` is what was decided where ``engine.stack`` or ``engine.compile`` is ``auto``
    (`flcore/engine/local/choice.py`); None: nothing yet.
    """

    config: Config
    dataset: Dataset
    partition: Partition
    choice: EngineChoice | None = None

    @classmethod
    def open(cls, config: Config, prepared: Path, partition: Path, *, choice: EngineChoice | None = None) -> Experiment:
        """Load the artefacts of the first two stages.

        Raises:
            DataError: an artefact is missing, damaged, or the partition was made for other data; or no model of the
                run would be tested.
            ConfigError: the model cannot read these images, or the configuration does not go with data or partition.
        """
        refuse_missing(config)
        dataset = Dataset.load(prepared)
        division = Partition.load(partition)
        division.check_matches(dataset)
        experiment = cls(config, dataset, division, choice)
        experiment._check_tasks()
        experiment._check_poison()
        experiment._check_sampler()
        experiment._check_noise()
        experiment._check_scored()
        config.evaluation.check_shown(len(division.clients), dataset.meta.num_classes)
        return experiment

    def _check_tasks(self) -> None:
        if self._tasks and self.config.federation.rounds < self._tasks:
            raise ConfigError(
                f"federation.rounds = {self.config.federation.rounds}: the partition has {self._tasks} tasks, and each "
                "needs a round; raise it, or set federation.task_schedule=none"
            )
        if self._tasks:
            self.config.check_tasks()

    def _check_poison(self) -> None:
        by_label = self.poisoned and self.config.federation.attack == "random_labels"
        if by_label and (self._tasks or self.partition.overlap):
            what = "has a stream of tasks" if self._tasks else "gives samples to several clients"
            raise ConfigError(f"federation.attack = random_labels: the partition {what}; use sign_flip or scale")

    def _check_sampler(self) -> None:
        reason = self.config.sampler.refusal(len(self.partition.clients))
        if reason is not None:
            raise ConfigError(f"federation.sampler = {self.config.sampler.name}: {reason}")

    def _check_noise(self) -> None:
        noise = self.config.aggregation.noise
        if noise > 0 and self.batchnorm == "aggregate" and self.setting.initial.buffers:
            raise ConfigError(
                f"aggregation.noise = {noise:g}: this model has BatchNorm statistics, which noise would make negative; "
                "set model.batchnorm=local or frozen, or take a model without"
            )

    def _check_scored(self) -> None:
        method, clients, split = self.method, self.partition.clients, self.config.evaluation.split
        if method.has_global_model or method.has_vote or self.keeps_private_models:
            return
        if not any(len(client.val if split == "validation" else client.test) for client in clients):
            raise DataError(
                f"partition: none of the {len(clients)} clients has a {split} image, and {method.name} has no global "
                "model, so that the run would have no score; take fewer clients or more data "
                "(partition.num_clients, data.limit_per_class)"
            )

    @cached_property
    def poisoned(self) -> tuple[int, ...]:
        """Ids of the clients that are poisoned for simulation, ascending.

        Raises:
            ConfigError: there are not so many clients.
        """
        return poisoned_clients(self.config.federation, len(self.partition.clients), self.config.seed)

    @cached_property
    def train_labels(self) -> Tensor:
        """int64 [n], of the training split as clients have them: those of poisoned clients may be random."""
        labels = self.dataset.train.labels
        if not self.poisoned or self.config.federation.attack != "random_labels":
            return labels
        owned = {k: client.train for k, client in enumerate(self.partition.clients)}
        return with_random_labels(labels, owned, self.poisoned, self.dataset.meta.num_classes, self.config.seed)

    @property
    def _tasks(self) -> int:
        """Tasks of each client that rounds go through; 0 where data do not change."""
        if self.config.federation.task_schedule == "none" or self.method.data_scope == "union":
            return 0
        return len(self.partition.clients[0].tasks)

    def task(self, round_number: int) -> int | None:
        """The task, from 0, of a round; None where data do not change."""
        return self.stream.task(round_number)

    @cached_property
    def stream(self) -> TaskStream:
        """The tasks with the classes that they bring; a single one where data do not change."""
        changing = bool(self._tasks)
        counts = self.partition.task_counts if changing else self.partition.counts[:, None]
        minority = np.zeros(self.dataset.meta.num_classes, dtype=bool)
        minority[list(self.partition.minority_classes)] = True
        schedule = self.config.federation.task_schedule if changing else "none"
        return TaskStream(counts > 0, schedule, self.config.federation.rounds, minority)

    @property
    def keeps_private_models(self) -> bool:
        """Whether what clients trained themselves is kept, to be scored before aggregation."""
        if self.config.evaluation.private == "auto":
            return bool(self._tasks)
        return self.config.evaluation.private and self.method.data_scope == "client"

    @cached_property
    def trains_models(self) -> bool:
        """Whether clients train anything; else the model that answers for everybody is also each one's own."""
        rounds = {1, self.config.federation.rounds}
        return any(
            exchange.phases for number in rounds for exchange in self.method.round_exchanges(number, self.setting)
        )

    def task_counts(self, trainer: int) -> Tensor:
        """int64 [T, C]: a trainer's samples per task and class; one row where data do not change."""
        if self._tasks:
            return torch.from_numpy(self.partition.task_counts[trainer].copy())
        return self.label_counts(trainer, 1).unsqueeze(0)

    def training_indices(self, trainer: int, round_number: int) -> Tensor:
        """The training samples of a trainer in a round, int64, ascending: all of its own, or those of the task."""
        task = self.task(round_number)
        if task is None:
            return self.trainers[trainer]
        return torch.from_numpy(self.partition.clients[trainer].tasks[task].copy())

    def label_counts(self, trainer: int, round_number: int) -> Tensor:
        """int64 [C]: a trainer's training samples per class in a round."""
        key = trainer, self.task(round_number)
        if key not in self._label_counts:
            labels = self.train_labels[self.training_indices(trainer, round_number)]
            self._label_counts[key] = torch.bincount(labels, minlength=self.dataset.meta.num_classes)
        return self._label_counts[key].clone()

    @cached_property
    def _label_counts(self) -> dict[tuple[int, int | None], Tensor]:
        """By trainer and task what has been counted so far: it is asked for in every turn."""
        return {}

    @property
    def stacked(self) -> bool:
        """Whether clients are trained in stacks.

        Raises:
            ValueError: that is to be decided by measuring, and nobody has.
        """
        return self.chosen.stack

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled, or on a GPU recorded.

        Raises:
            ValueError: that is to be decided by measuring, and nobody has.
        """
        return self.chosen.compile

    @property
    def chosen(self) -> EngineChoice:
        """How local training is carried out.

        Raises:
            ValueError: that is to be decided by measuring, and nobody has.
        """
        engine = self.config.engine
        if self.choice is not None:
            return self.choice
        if engine.stack == "auto" or engine.compile == "auto":
            raise ValueError("engine.stack or engine.compile = auto is not decided yet")
        return EngineChoice(engine.stack, engine.compile != "none")

    @cached_property
    def resident_train(self) -> Split:
        """The training split on the device, uint8; on a CPU the files' own pages, which all processes share."""
        images, device = self.dataset.train.images, self.config.engine.device
        return Split(images.to(device), self.train_labels.to(device))

    @property
    def method(self) -> Method:
        """The method of this run."""
        return self.config.method

    @cached_property
    def hash(self) -> str:
        """The name of this run: configuration, data and partition."""
        return self.config.hash(self.dataset.meta.fingerprint, self.partition.fingerprint)

    @property
    def batchnorm(self) -> Literal["aggregate", "local", "frozen"]:
        """The policy for BatchNorm statistics; a trainer that stands at the server has no private ones."""
        policy = self.config.model.batchnorm
        return "aggregate" if policy == "local" and self.method.data_scope == "union" else policy

    def new_module(self) -> Backbone:
        """A fresh model with the run's initial weights, on the run's device."""
        seed = int(numpy_stream(self.config.seed, "initial weights").integers(2**31))
        try:
            meta = self.dataset.meta
            outputs, extra = self.method.num_outputs(meta.num_classes), self.method.extra_layers
            module = build_model(self.config.model_spec, meta.shape, meta.num_classes, seed, outputs, extra)
        except ValueError as error:
            raise ConfigError(f"model.name = {self.config.model_spec.name}: {error}") from error
        if self.method.needs_linear_head and isinstance(module.head, HiddenHead):
            raise ConfigError(
                f"model.name = {self.config.model_spec.name}: its head has a hidden layer, and {self.method.name} "
                "needs a linear one; set model.hidden=0"
            )
        return module.to(self.config.engine.device)

    @cached_property
    def setting(self) -> FederationContext:
        """What every party knows before the first round."""
        module = self.new_module()
        return FederationContext(
            seed=self.config.seed,
            num_clients=len(self.partition.clients),
            num_classes=self.dataset.meta.num_classes,
            feature_dim=module.feature_dim,
            rounds=self.config.federation.rounds,
            batch_size=self.config.local.batch_size,
            image_shape=self.dataset.meta.shape,
            pixel_mean=self.dataset.meta.mean,
            pixel_std=self.dataset.meta.std,
            initial=extract_weights(module),
            network=Network(module),
            device=self.config.engine.device,
            aggregation=self.config.aggregation,
            cohort_size=self.cohort_size,
        )

    @property
    def cohort_size(self) -> int:
        """m, the clients that a round asks: ``max(1, round(participation · K))``, a half rounded to the even number."""
        return max(1, round(self.config.federation.participation * len(self.trainers)))

    def privacy(self, rounds: int) -> Mapping[str, Any] | None:
        """The account of what is differentially private after so many rounds: of noisy averages, else the method's."""
        clients = len(self.partition.clients)
        noisy = account(self.config.aggregation, rounds, cohort=self.cohort_size, clients=clients)
        return self.method.privacy(rounds) if noisy is None else noisy

    @cached_property
    def client_sizes(self) -> Mapping[int, int]:
        """n_k by trainer, ids ascending: all its training samples, of all tasks."""
        return {trainer: len(self.trainers[trainer]) for trainer in sorted(self.trainers)}

    @cached_property
    def trainers(self) -> Mapping[int, Tensor]:
        """Training indices by trainer: each client's own, or for the centralised reference the union under id 0."""
        own = {k: torch.from_numpy(client.train.copy()) for k, client in enumerate(self.partition.clients)}
        if self.method.data_scope == "union":
            return {0: torch.unique(torch.cat(list(own.values())))}
        return own


def refuse_missing(config: Config) -> None:
    """Stop before data are read where a run asks for a device or a package that is not there.

    Raises:
        ConfigError: it does.
    """
    if config.aggregation.noise:
        require_accounting()
    config.method.privacy(0)  # requires the package that accounts for its noise
    if config.engine.name == "ray":
        require("ray", "engine.name = ray", "'protofl[ray]'")
    if config.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device = cuda: no CUDA device on this machine; use engine.device=cpu")
