"""The work of ``overhead`` in Flower's simulation.

- ``run_simulation`` with the Ray backend, from Python: ``flwr run`` would start servers first. Flower marks it as
  deprecated, but has no other single-command interface.
- Ray gets the cores of the work (two) and each client one, so that two clients train at once.
- Clients keep their data and module in the worker's process (a cache): the fastest option for function clients.
- ``FedAvg`` weighted by the number of samples; evaluation off; parameters and BatchNorm statistics go both ways.
- Python's generator, with which Flower samples clients, is seeded; the client ids are random all the same, and replies
  are averaged as they arrive. No dashboard, no telemetry, no workers' output.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.work import Work
from benchmarks.workload import client_data, make_model, train_client

# Read when Flower and Ray are imported.
os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]


@cache
def _client_module() -> nn.Sequential:
    return make_model()


def _client_app(work: Work) -> Any:
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        return _train(work, message, int(context.node_config["partition-id"]))

    return app


def _train(work: Work, message: Any, client: int) -> Any:
    """Train a client once; a module-level function, so that Ray sends its name and the worker keeps the caches."""
    module, (images, labels) = _client_module(), client_data(work)[client]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(1000 * message.content["config"]["server-round"] + client)
    train_client(module, images, labels, work, generator)
    reply = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


class _TimedFedAvg(FedAvg):  # type: ignore[misc]
    """FedAvg that records the end of rounds, and requires all replies."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        self._cohort = work.cohort
        self.ends = [time.perf_counter()]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average, and record the time."""
        received = list(replies)
        failed = sum(reply.has_error() for reply in received)
        if failed or len(received) != self._cohort:
            raise RuntimeError(f"round {server_round}: {len(received)} replies, {failed} of them failures")
        averaged = super().aggregate_train(server_round, received)
        self.ends.append(time.perf_counter())
        return averaged


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Any]]:
    """Do the work."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    random.seed(0)  # Flower samples clients with it, among ids that are random all the same
    strategy, server = _TimedFedAvg(work), ServerApp()
    final: dict[str, torch.Tensor] = {}

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        result = strategy.start(grid, initial_arrays=ArrayRecord(make_model().state_dict()), num_rounds=work.rounds)
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(
        server,
        _client_app(work),
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": work.cores, "num_gpus": 0, "log_to_driver": False, "include_dashboard": False},
        },
    )
    seconds = [after - before for before, after in zip(strategy.ends, strategy.ends[1:], strict=False)]
    return seconds, final
