"""A run's fixed ingredients, rebuilt from files in any process: configuration, data, partition, initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flcore.config import Config
from flcore.data.dataset import Dataset
from flcore.data.partition import Partition
from flcore.errors import ConfigError
from flcore.methods.base import Method, Setting
from flcore.models import Backbone, build_model, extract_weights
from flcore.rng import numpy_stream


@dataclass(frozen=True)
class Experiment:
    """Everything a process needs to take part in a run."""

    config: Config
    dataset: Dataset
    partition: Partition

    @classmethod
    def open(cls, config: Config, prepared: Path, partition: Path) -> Experiment:
        """Load the artefacts of the first two stages.

        Raises:
            DataError: an artefact is missing, damaged, or the partition was made for other data.
            ConfigError: the model cannot read these images.
        """
        dataset = Dataset.load(prepared)
        division = Partition.load(partition)
        division.check_matches(dataset)
        experiment = cls(config, dataset, division)
        if config.engine.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("engine.device = cuda: no CUDA device on this machine; use engine.device=cpu")
        return experiment

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
            module = build_model(self.config.model_spec, self.dataset.meta.shape, self.dataset.meta.num_classes, seed)
        except ValueError as error:
            raise ConfigError(f"model.name = {self.config.model_spec.name}: {error}") from error
        return module.to(self.config.engine.device)

    @cached_property
    def setting(self) -> Setting:
        """What every party knows before the first round."""
        module = self.new_module()
        return Setting(
            seed=self.config.seed,
            num_clients=len(self.partition.clients),
            num_classes=self.dataset.meta.num_classes,
            feature_dim=module.feature_dim,
            rounds=self.config.federation.rounds,
            initial=extract_weights(module),
        )

    @cached_property
    def trainers(self) -> Mapping[int, Tensor]:
        """Training indices by trainer: each client's own, or for the centralised reference the union under id 0."""
        own = {k: torch.from_numpy(client.train.copy()) for k, client in enumerate(self.partition.clients)}
        if self.method.data_scope == "union":
            return {0: torch.unique(torch.cat(list(own.values())))}
        return own
