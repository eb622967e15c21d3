"""Poisoned clients, simulated: some of a run's clients send what they should not, to see what the server makes of it.

This is a way to *measure* a federation's defence, and attacks nobody: who is poisoned and how stands in ``federation``,
and in the run's ``metrics.json``. Poisoned clients receive, train and remember like the others; only what leaves them
differs, or, with ``random_labels``, what they train on. They know nothing of each other nor of the server's rule; an
attacker who adapts to it does more harm (docs/how-to/robust.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flcore.config.sections import FederationConfig
from flcore.core.errors import ConfigError
from flcore.core.rng import numpy_stream
from flcore.io.messages import Payload, Prototypes, Weights
from flcore.io.records import Payloads, Record
from flcore.methods.types import MODEL, PROTOTYPES, ClientContext


def poisoned_clients(federation: FederationConfig, num_clients: int, seed: int) -> tuple[int, ...]:
    """Ids of the poisoned clients, ascending: those named, or as many as asked for, drawn by the run's seed.

    Raises:
        ConfigError: there are not so many clients, or not that one.
    """
    if federation.poisoned > num_clients:
        raise ConfigError(f"federation.poisoned = {federation.poisoned}: there are {num_clients} clients")
    beyond = [client for client in federation.poisoned_clients if client >= num_clients]
    if beyond:
        raise ConfigError(f"federation.poisoned_clients: no client {beyond[0]}, ids go from 0 to {num_clients - 1}")
    if federation.poisoned_clients:
        return tuple(sorted(federation.poisoned_clients))
    drawn = numpy_stream(seed, "poisoned clients").choice(num_clients, federation.poisoned, replace=False)
    return tuple(sorted(int(client) for client in drawn))


def with_random_labels(
    labels: Tensor, owned: Mapping[int, np.ndarray], poisoned: Sequence[int], num_classes: int, seed: int
) -> Tensor:
    """Labels int64 [n] of which those of poisoned clients are uniform over all classes, the same in every round.

    Args:
        labels: of the training split.
        owned: client id to its samples, int64 [n_k]; no two clients share one.
        poisoned: ids. num_classes: C. seed: the run's.
    """
    changed = labels.clone()
    for client in poisoned:
        drawn = numpy_stream(seed, "random labels", client).integers(num_classes, size=len(owned[client]))
        changed[torch.from_numpy(owned[client])] = torch.from_numpy(drawn)
    return changed


def poisoned_message(message: Payloads, ctx: ClientContext, federation: FederationConfig) -> Record:
    """What a poisoned client sends in place of a message: s times its update and its prototypes, or minus that.

    The update is what training did to the parameters of the model it received; BatchNorm statistics stay as they are,
    since variances times a negative number are no variances. Everything else is sent as it is.

    Args:
        message: of the method. ctx: the client's. federation: has the attack and s.
    """
    if federation.attack == "random_labels":
        return Record(message)
    factor = -federation.attack_scale if federation.attack == "sign_flip" else federation.attack_scale
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
