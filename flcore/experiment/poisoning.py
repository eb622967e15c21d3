"""Simulated poisoned clients: some clients send, or train on, wrong values, to measure a federation's defence.

This attacks nothing real: the section ``federation`` describes the attack, and ``metrics.json`` repeats it. Poisoned
clients receive, train and keep state like the others. They know neither each other nor the server's rule; an attacker
that adapts to the rule does more harm (docs/how-to/robust.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flcore.config.sections import FederationConfig
from flcore.core.errors import ConfigError
from flcore.core.rng import numpy_stream
from flcore.data.partition import Partition
from flcore.io.messages import Payload, Prototypes, Weights
from flcore.io.records import Payloads, Record
from flcore.methods.types import MODEL, PROTOTYPES, ClientContext


@dataclass(frozen=True)
class Poisoning:
    """The simulated attack of a run.

    Attributes:
        federation: has the attack and its scale s.
        seed: of the run.
        clients: ids of the poisoned clients, ascending; empty without an attack.
    """

    federation: FederationConfig
    seed: int
    clients: tuple[int, ...]

    @classmethod
    def of(cls, federation: FederationConfig, num_clients: int, seed: int) -> Poisoning:
        """Name the poisoned clients, or draw their number by the run's seed.

        Raises:
            ConfigError: there are fewer clients, or not that one.
        """
        if federation.poisoned > num_clients:
            raise ConfigError(f"federation.poisoned = {federation.poisoned}: there are {num_clients} clients")
        beyond = [client for client in federation.poisoned_clients if client >= num_clients]
        if beyond:
            raise ConfigError(f"federation.poisoned_clients: no client {beyond[0]}, ids go from 0 to {num_clients - 1}")
        clients = federation.poisoned_clients or numpy_stream(seed, "poisoned clients").choice(
            num_clients, federation.poisoned, replace=False
        )
        return cls(federation, seed, tuple(sorted(int(client) for client in clients)))

    @property
    def _by_labels(self) -> bool:
        return bool(self.clients) and self.federation.attack == "random_labels"

    def check(self, partition: Partition, *, has_tasks: bool) -> None:
        """Refuse random labels of samples without a single owner.

        Raises:
            ConfigError: the partition has a stream of tasks, or shared samples.
        """
        if self._by_labels and (has_tasks or partition.overlap):
            reason = "has a stream of tasks" if has_tasks else "gives samples to several clients"
            raise ConfigError(f"federation.attack = random_labels: the partition {reason}; use sign_flip or scale")

    def labels(self, labels: Tensor, partition: Partition, num_classes: int) -> Tensor:
        """Return training labels, int64 [n]; with ``random_labels`` the poisoned clients' are uniform over classes.

        They are the same in every round.
        """
        if not self._by_labels:
            return labels
        changed = labels.clone()
        for client in self.clients:
            rows = torch.from_numpy(partition.clients[client].train.copy())
            drawn = numpy_stream(self.seed, "random labels", client).integers(num_classes, size=len(rows))
            changed[rows] = torch.from_numpy(drawn)
        return changed

    def message(self, message: Payloads, ctx: ClientContext) -> Payloads:
        """Return the message that leaves a client: of a poisoned one, its update and prototypes times s, or times -s.

        The update is the difference to the parameters received. BatchNorm statistics stay, since a variance cannot be
        negative; so does everything else.
        """
        if ctx.client not in self.clients or self._by_labels:
            return message
        scale = self.federation.attack_scale
        factor = -scale if self.federation.attack == "sign_flip" else scale
        changed: dict[str, Payload] = {}
        for name, payload in message.items():
            if name == PROTOTYPES and isinstance(payload, Prototypes):
                payload = Prototypes(factor * payload.means, payload.present)
            elif name == MODEL and isinstance(payload, Weights):
                start = ctx.received[MODEL].params
                params = {key: start[key] + factor * (tensor - start[key]) for key, tensor in payload.params.items()}
                payload = Weights(params, payload.buffers)
            changed[name] = payload
        return Record(changed)

    def metrics(self, local_accuracy: Sequence[float | None]) -> dict[str, Any]:
        """Return ``poisoned`` for ``metrics.json``: the attack and honest clients' mean; empty without an attack."""
        if not self.clients:
            return {}
        accuracies = enumerate(local_accuracy)
        honest = [value for client, value in accuracies if value is not None and client not in self.clients]
        return {
            "poisoned": {
                "attack": self.federation.attack,
                "attack_scale": None if self._by_labels else self.federation.attack_scale,
                "clients": list(self.clients),
                "honest_mean_local": sum(honest) / len(honest) if honest else None,
            }
        }
