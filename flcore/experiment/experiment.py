"""The fixed parts of a run, rebuilt from files in any process: configuration, data, partition, initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
from flcore.experiment.engine_rule import EngineChoice, client_steps, multiply_adds, rule, workers
from flcore.experiment.poisoning import Poisoning
from flcore.methods.api import Method
from flcore.methods.types import FederationContext
from flcore.models import Backbone, build_model, extract_weights
from flcore.models.base import HiddenHead
from flcore.models.network import Network


@dataclass(frozen=True)
class Experiment:
    """The parts of a run that a process needs.

    ``config`` has no ``auto`` in ``engine.stack`` and ``engine.compile``, and a number of workers: :meth:`decided`
    replaces what was left to the rule, and stores the reason in ``choice``.
    """

    config: Config
    dataset: Dataset
    partition: Partition
    choice: EngineChoice | None = None

    @classmethod
    def open(cls, config: Config, prepared: Path, partition: Path) -> Experiment:
        """Load prepared data and their partition, check the configuration against them, and decide how to train.

        Raises:
            DataError: an artefact is missing or damaged, the partition was made for other data, or no model of the run
                would be tested.
            ConfigError: the configuration does not fit the data or the partition.
        """
        refuse_missing(config)
        dataset = Dataset.load(prepared)
        division = Partition.load(partition)
        division.check_matches(dataset)
        experiment = cls(config, dataset, division)
        experiment._check()
        return experiment.decided()

    def decided(self) -> Experiment:
        """Return the experiment with the rule's answers in its configuration (`flcore/experiment/engine_rule.py`)."""
        engine, facts = self.config.engine, (cache(self.client_steps), self.cohort_size, cache(self.step_size))
        choice = rule(engine, *facts)
        engine = replace(engine, stack=choice.stack, compile=choice.compile, workers=workers(engine, *facts))
        return replace(self, config=replace(self.config, engine=engine), choice=choice)

    def _check(self) -> None:
        config, clients, tasks = self.config, self.partition.clients, self._tasks
        if tasks and config.federation.rounds < tasks:
            raise ConfigError(
                f"federation.rounds = {config.federation.rounds}: the partition has {tasks} tasks, and each needs a "
                "round; raise it, or set federation.task_schedule=none"
            )
        if tasks:
            config.check_tasks()
        self.poisoning.check(self.partition, has_tasks=bool(tasks))
        if (reason := config.sampler.refusal(len(clients))) is not None:
            raise ConfigError(f"federation.sampler = {config.sampler.name}: {reason}")
        noise = config.aggregation.noise
        if noise > 0 and self.batchnorm == "aggregate" and self.setting.initial.buffers:
            raise ConfigError(
                f"aggregation.noise = {noise:g}: this model has BatchNorm statistics, which noise would make negative; "
                "set model.batchnorm=local or frozen, or take a model without"
            )
        method, split = self.method, config.evaluation.split
        has_model = method.has_global_model or method.has_vote or self.keeps_private_models
        if not has_model and not any(len(one.val if split == "validation" else one.test) for one in clients):
            raise DataError(
                f"partition: none of the {len(clients)} clients has a {split} image, and {method.name} has no global "
                "model, so that the run would have no score; take fewer clients or more data "
                "(partition.num_clients, data.limit_per_class)"
            )
        config.evaluation.check_shown(len(clients), self.dataset.meta.num_classes)

    @cached_property
    def poisoning(self) -> Poisoning:
        """The simulated attack."""
        return Poisoning.of(self.config.federation, len(self.partition.clients), self.config.seed)

    @cached_property
    def train_labels(self) -> Tensor:
        """Labels of the training split as clients have them, int64 [n]."""
        return self.poisoning.labels(self.dataset.train.labels, self.partition, self.dataset.meta.num_classes)

    @property
    def _tasks(self) -> int:
        """The number of tasks of each client; 0 without a stream of tasks."""
        if self.config.federation.task_schedule == "none" or self.method.data_scope == "union":
            return 0
        return len(self.partition.clients[0].tasks)

    def task(self, round_number: int) -> int | None:
        """Return the task, from 0, of a round; None without a stream of tasks."""
        return self.stream.task(round_number)

    @cached_property
    def stream(self) -> TaskStream:
        """The tasks and their classes; a single task without a stream."""
        changing = bool(self._tasks)
        counts = self.partition.task_counts if changing else self.partition.counts[:, None]
        minority = np.zeros(self.dataset.meta.num_classes, dtype=bool)
        minority[list(self.partition.minority_classes)] = True
        schedule = self.config.federation.task_schedule if changing else "none"
        return TaskStream(counts > 0, schedule, self.config.federation.rounds, minority)

    @property
    def keeps_private_models(self) -> bool:
        """True if clients keep their locally trained models, which are scored before aggregation."""
        if self.config.evaluation.private == "auto":
            return bool(self._tasks)
        return self.config.evaluation.private and self.method.data_scope == "client"

    @cached_property
    def trains_models(self) -> bool:
        """True if clients train; otherwise the global model is also each client's own."""
        rounds = {1, self.config.federation.rounds}
        return any(
            exchange.phases for number in rounds for exchange in self.method.round_exchanges(number, self.setting)
        )

    def task_counts(self, trainer: int) -> Tensor:
        """Return a trainer's samples per task and class, int64 [T, C]; one row without a stream of tasks."""
        if self._tasks:
            return torch.from_numpy(self.partition.task_counts[trainer].copy())
        return self.label_counts(trainer, 1).unsqueeze(0)

    def training_indices(self, trainer: int, round_number: int) -> Tensor:
        """Return a trainer's training samples in a round, of all tasks or the round's, int64, ascending."""
        task = self.task(round_number)
        if task is None:
            return self.trainers[trainer]
        return torch.from_numpy(self.partition.clients[trainer].tasks[task].copy())

    def label_counts(self, trainer: int, round_number: int) -> Tensor:
        """Return a trainer's training samples per class in a round, int64 [C]."""
        key = trainer, self.task(round_number)
        if key not in self._label_counts:
            labels = self.train_labels[self.training_indices(trainer, round_number)]
            self._label_counts[key] = torch.bincount(labels, minlength=self.dataset.meta.num_classes)
        return self._label_counts[key].clone()

    @cached_property
    def _label_counts(self) -> dict[tuple[int, int | None], Tensor]:
        """Cache by trainer and task."""
        return {}

    def client_steps(self) -> int:
        """Return the mini-batches of all clients in the run by phase, estimated from the first round."""
        sizes = [len(self.training_indices(client, 1)) for client in self.trainers]
        return client_steps(self.method.round_exchanges(1, self.setting), self.config, sizes, self.cohort_size)

    def step_size(self) -> int:
        """Return the multiply-adds of a client's step, forward."""
        image = torch.zeros(1, *self.dataset.meta.shape, device=self.config.engine.device)
        return multiply_adds(self.new_module(), image) * self.config.local.batch_size

    @property
    def stacked(self) -> bool:
        """True if clients are trained in stacks."""
        stack = self.config.engine.stack
        assert stack != "auto", "not decided"
        return stack

    @property
    def compiled(self) -> bool:
        """True if steps are compiled, or on a GPU recorded."""
        assert self.config.engine.compile != "auto", "not decided"
        return self.config.engine.compile != "none"

    @cached_property
    def resident_train(self) -> Split:
        """The training split on the device, uint8; on a CPU the mapped files, which all processes share."""
        images, device = self.dataset.train.images, self.config.engine.device
        return Split(images.to(device), self.train_labels.to(device))

    @property
    def method(self) -> Method:
        """The method of this run."""
        return self.config.method

    @cached_property
    def hash(self) -> str:
        """The name of this run, from configuration, data and partition."""
        return self.config.hash(self.dataset.meta.fingerprint, self.partition.fingerprint)

    @property
    def batchnorm(self) -> Literal["aggregate", "local", "frozen"]:
        """The policy for BatchNorm statistics; with centralised training they are never local."""
        policy = self.config.model.batchnorm
        return "aggregate" if policy == "local" and self.method.data_scope == "union" else policy

    def new_module(self) -> Backbone:
        """Return a model with the run's initial weights, on the run's device."""
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
        """The values that all parties know before the first round."""
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
        """m, the clients of a round: ``max(1, round(participation · K))``, a half rounded to the even number."""
        return max(1, round(self.config.federation.participation * len(self.trainers)))

    def privacy(self, rounds: int) -> Mapping[str, Any] | None:
        """Return the privacy account after some rounds: of noisy averages, otherwise the method's."""
        clients = len(self.partition.clients)
        noisy = account(self.config.aggregation, rounds, cohort=self.cohort_size, clients=clients)
        return self.method.privacy(rounds) if noisy is None else noisy

    @cached_property
    def client_sizes(self) -> Mapping[int, int]:
        """Training samples of all tasks, n_k, by trainer; ids ascending."""
        return {trainer: len(self.trainers[trainer]) for trainer in sorted(self.trainers)}

    @cached_property
    def trainers(self) -> Mapping[int, Tensor]:
        """Training indices by trainer: by client, or for the centralised reference their union under id 0."""
        own = {k: torch.from_numpy(client.train.copy()) for k, client in enumerate(self.partition.clients)}
        if self.method.data_scope == "union":
            return {0: torch.unique(torch.cat(list(own.values())))}
        return own


def refuse_missing(config: Config) -> None:
    """Refuse a run without its device or optional package, before data are read.

    Raises:
        ConfigError: names it.
    """
    if config.aggregation.noise:
        require_accounting()
    config.method.privacy(0)  # requires the package that accounts for its noise
    if config.engine.name == "ray":
        require("ray", "engine.name = ray", "'protofl[ray]'")
    if config.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device = cuda: no CUDA device on this machine; use engine.device=cpu")
