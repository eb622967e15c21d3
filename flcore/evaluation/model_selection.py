"""Select the model that answers for a client or for all, completed with parts that never travel (baselines.md 21)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flcore.aggregation.mean import average_weights
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import leaving
from flcore.io.messages import Count, Payload, Weights
from flcore.io.records import Payloads, Record
from flcore.methods.types import BATCHNORM, MODEL, NUM_SAMPLES, PRIVATE, RoundContext, with_statistics

ClientStates = Callable[[int], Record]
"""Client id → its state."""


def answers_for_itself(experiment: Experiment) -> bool:
    """Return whether clients answer with models of their own; otherwise their states are not read."""
    method = experiment.method
    return not method.has_global_model or method.predicts_from_client_state or has_own_statistics(experiment)


def scoring_messages(
    experiment: Experiment, server: Record, clients: Sequence[int], round_number: int | None = None
) -> list[Record]:
    """Return the clients' scoring messages, as they leave the server after a round; None: the last."""
    setting = experiment.setting
    number = setting.rounds if round_number is None else round_number
    ctx = RoundContext(setting, number, "evaluate", is_later_leg=True)
    return leaving([experiment.method.scoring_message(server, client, ctx) for client in clients], experiment)


def personal_model(experiment: Experiment, received: Record, client_state: Record) -> Weights | None:
    """Return the model that answers for one client alone; None where the global one does.

    ``received``: the client's scoring message.
    """
    if not answers_for_itself(experiment):
        return None
    own = experiment.method.client_model(received, client_state, experiment.setting)
    if own is None:
        return None
    # A client that was never sampled has the initial statistics.
    return with_statistics(own, client_state, experiment.setting)


def missing_of(experiment: Experiment, model: Weights | None) -> tuple[str, ...]:
    """Return names of parameters that the server's model lacks: upper layers that never leave the clients."""
    names = experiment.setting.initial.params
    return () if model is None else tuple(name for name in names if name not in model.params)


def contribution(
    experiment: Experiment, client: int, received: Record, client_state: Record, missing: Sequence[str]
) -> dict[str, Payload]:
    """Return a client's message for scoring the global model.

    It holds the parts that never travel in training, ``missing`` parameters (:func:`missing_of`) and local BatchNorm
    statistics, with n_k.
    """
    found: dict[str, Payload] = {}
    if missing:
        own = experiment.method.client_model(received, client_state, experiment.setting)
        assert own is not None  # an incomplete global model implies clients' own
        found[MODEL] = Weights({name: own.params[name] for name in missing})
    if has_own_statistics(experiment) and BATCHNORM in client_state:
        found[BATCHNORM] = client_state[BATCHNORM]
    return {**found, NUM_SAMPLES: Count(len(experiment.trainers[client]))} if found else found


def global_model_of(
    experiment: Experiment, server: Record, client_states: ClientStates, model: Weights | None = None
) -> Weights | None:
    """Return :func:`global_model` from clients' states; ``model`` replaces the server's."""
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
    """Return the complete global model; None where there is none.

    Upper layers and BatchNorm statistics that only clients have, their :func:`contribution`, are averaged, weighted by
    training samples. ``model``: the server's.
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
    """Return a client's locally trained model; None before its first training."""
    return client_state.get(PRIVATE) or client_state.get(MODEL)


def has_own_statistics(experiment: Experiment) -> bool:
    """Return whether clients keep BatchNorm statistics of their own."""
    return experiment.batchnorm == "local" and bool(experiment.setting.initial.buffers)
