"""Which model answers for whom, complete with what never travels (baselines.md section 21)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flcore.aggregation.mean import average_weights
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import leaving
from flcore.io.messages import Count, Payload, Weights
from flcore.io.records import Payloads, Record
from flcore.methods.types import BATCHNORM, MODEL, NUM_SAMPLES, PRIVATE, RoundContext, with_statistics

ClientStates = Callable[[int], Record]
"""Client id → what that client remembers."""


def answers_for_itself(experiment: Experiment) -> bool:
    """Whether clients are asked with models of their own; else what they remember is not even read for it."""
    method = experiment.method
    return not method.has_global_model or method.predicts_from_client_state or has_own_statistics(experiment)


def scoring_messages(
    experiment: Experiment, server: Record, clients: Sequence[int], round_number: int | None = None
) -> list[Record]:
    """Return what clients are sent to be scored with models of their own, as it leaves the server.

    Args:
        experiment: the run. server: what the server holds. clients: ids.
        round_number: after which round; None for the last.
    """
    setting = experiment.setting
    number = setting.rounds if round_number is None else round_number
    ctx = RoundContext(setting, number, "evaluate", is_later_leg=True)
    return leaving([experiment.method.scoring_message(server, client, ctx) for client in clients], experiment)


def personal_model(experiment: Experiment, received: Record, client_state: Record) -> Weights | None:
    """The model that answers for one client alone; None where the global one does.

    Args:
        experiment: the run.
        received: the message that the client was sent for it. client_state: what it remembers.
    """
    if not answers_for_itself(experiment):
        return None
    own = experiment.method.client_model(received, client_state, experiment.setting)
    if own is None:
        return None
    # Everybody has statistics of its own; those of a client that was never sampled are the initial ones.
    return with_statistics(own, client_state, experiment.setting)


def missing_of(experiment: Experiment, model: Weights | None) -> tuple[str, ...]:
    """Names of the parameters that the server's model lacks: upper layers that never leave the clients."""
    return (
        () if model is None else tuple(name for name in experiment.setting.initial.params if name not in model.params)
    )


def contribution(
    experiment: Experiment, client: int, received: Record, client_state: Record, missing: Sequence[str]
) -> dict[str, Payload]:
    """Return what a client sends for the global model, for scoring alone: what of its model never travels, with n_k.

    That is, ``missing`` parameters (:func:`missing_of`), and BatchNorm statistics of its own.
    """
    found: dict[str, Payload] = {}
    if missing:
        own = experiment.method.client_model(received, client_state, experiment.setting)
        assert own is not None  # who has no whole global model answers with clients' own
        found[MODEL] = Weights({name: own.params[name] for name in missing})
    if has_own_statistics(experiment) and BATCHNORM in client_state:
        found[BATCHNORM] = client_state[BATCHNORM]
    return {**found, NUM_SAMPLES: Count(len(experiment.trainers[client]))} if found else found


def global_model_of(
    experiment: Experiment, server: Record, client_states: ClientStates, model: Weights | None = None
) -> Weights | None:
    """As :func:`global_model`, where clients' memories are at hand; for another ``model`` of the server's too."""
    model = experiment.method.global_model(server) if model is None else model
    clients, missing = range(experiment.setting.num_clients), missing_of(experiment, model)
    contributions: dict[int, Payloads] = {}
    if missing or has_own_statistics(experiment):
        sent = scoring_messages(experiment, server, clients)
        contributions = {k: contribution(experiment, k, sent[k], client_states(k), missing) for k in clients}
    return global_model(experiment, model, contributions)


def global_model(
    experiment: Experiment, model: Weights | None, contributions: Mapping[int, Payloads]
) -> Weights | None:
    """The model that answers for everybody, with a complete set of parameters and buffers; None where there is none.

    What only clients have (upper layers, BatchNorm statistics) never travels in training; for scoring alone it is
    averaged over them, weighted by training samples.

    Args:
        experiment: the run. model: the server's.
        contributions: by client what :func:`contribution` found.
    """
    if model is None:
        return None
    sent = {client: Record(message) for client, message in contributions.items()}
    sizes = {client: message[NUM_SAMPLES].value for client, message in sent.items() if message}
    parts = {client: message[MODEL] for client, message in sent.items() if MODEL in message}
    if parts:
        model = Weights({**model.params, **average_weights(parts, sizes).params}, model.buffers)
    statistics = {client: message[BATCHNORM] for client, message in sent.items() if BATCHNORM in message}
    if statistics:
        model = Weights(model.params, average_weights(statistics, sizes).buffers)
    return with_statistics(model, {}, experiment.setting)


def private_model(client_state: Record) -> Weights | None:
    """A client's model as its last local training left it; None before its first."""
    return client_state.get(PRIVATE) or client_state.get(MODEL)


def has_own_statistics(experiment: Experiment) -> bool:
    """Whether every client keeps BatchNorm statistics of its own."""
    return experiment.batchnorm == "local" and bool(experiment.setting.initial.buffers)
