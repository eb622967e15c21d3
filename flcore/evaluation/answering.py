"""Which model answers for whom, complete with what never travels (baselines.md section 21)."""

from __future__ import annotations

from collections.abc import Callable

from flcore.aggregation.mean import average_weights
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.types import BATCHNORM, MODEL, PRIVATE, with_statistics

Memories = Callable[[int], Record]
"""Client id → what that client remembers."""


def global_model(experiment: Experiment, server: Record, memories: Memories) -> Weights | None:
    """The model that answers for everybody, with a complete set of parameters and buffers; None where there is none.

    What only clients have (upper layers, BatchNorm statistics) never travels; for scoring alone it is averaged over
    them, weighted by training samples.
    """
    method, setting = experiment.method, experiment.setting
    model = method.global_model(server)
    if model is None:
        return None
    missing = [name for name in setting.initial.params if name not in model.params]
    if missing:
        model = _completed(experiment, model, missing, server, memories)
    if has_own_statistics(experiment):
        remembered = ((client, memories(client)) for client in range(setting.num_clients))
        private = {client: memory[BATCHNORM] for client, memory in remembered if BATCHNORM in memory}
        if private:
            sizes = {client: len(experiment.trainers[client]) for client in private}
            model = Weights(model.params, average_weights(private, sizes).buffers)
    return with_statistics(model, {}, setting)


def _completed(
    experiment: Experiment, model: Weights, missing: list[str], server: Record, memories: Memories
) -> Weights:
    """The model with the parameters that it lacks: means over all clients of their own, by training samples."""
    method, setting = experiment.method, experiment.setting
    parts: dict[int, Weights] = {}
    for client in range(setting.num_clients):
        own = method.client_model(server, client, memories(client), setting)
        assert own is not None  # who has no whole global model answers with clients' own
        parts[client] = Weights({name: own.params[name] for name in missing})
    sizes = {client: len(experiment.trainers[client]) for client in parts}
    return Weights({**model.params, **average_weights(parts, sizes).params}, model.buffers)


def own_model(experiment: Experiment, server: Record, client: int, memory: Record) -> Weights | None:
    """The model that answers for one client alone; None where the global one does."""
    method, setting = experiment.method, experiment.setting
    own = method.client_model(server, client, memory, setting)
    if own is None and has_own_statistics(experiment):
        # Everybody has statistics of its own; those of a client that was never sampled are the initial ones.
        shared = method.global_model(server)
        own = None if shared is None else shared.without_buffers()
    return None if own is None else with_statistics(own, memory, setting)


def private_model(memory: Record) -> Weights | None:
    """A client's model as its last local training left it; None before its first."""
    return memory.get(PRIVATE) or memory.get(MODEL)


def has_own_statistics(experiment: Experiment) -> bool:
    """Whether every client keeps BatchNorm statistics of its own."""
    return experiment.batchnorm == "local" and bool(experiment.setting.initial.buffers)
