"""A leg's messages: the server makes all of them before anybody trains, and workers are handed nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable

from flcore.engine.failures import ClientError, client_step, failure_of, is_the_machines
from flcore.engine.run_state import RunState
from flcore.engine.turns import Failure, LegWork, leg_of, round_context
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import leaving
from flcore.io.records import Payloads


def broadcast(experiment: Experiment, state: RunState, clients: Iterable[int]) -> tuple[LegWork, dict[int, Failure]]:
    """Make the messages of the exchange after a state.

    Returns:
        What is handed out, and why some clients have no message: where failures are dropped, an error of the method's
        in making one is that client's failure.

    Raises:
        TurnError: it stops the run.
    """
    place, method = state.place, experiment.method
    exchange = leg_of(experiment, place)
    ctx = round_context(method, experiment.setting, place.round, exchange)
    messages: dict[int, Payloads] = {}
    failures: dict[int, Failure] = {}
    for client in clients:
        try:
            with client_step(place, exchange.name, [client], "receive"):
                messages[client] = method.broadcast(state.server, client, ctx)
        except ClientError as error:
            if experiment.config.federation.on_client_error != "drop" or is_the_machines(error):
                raise
            failures[client] = failure_of(error)
    received = dict(zip(messages, leaving(messages.values(), experiment), strict=True))
    return LegWork(place, state.exchanges + 1, state.run.digest, received, state.client_states), failures
