"""The work of ``overhead`` in fluke: ``FedAVG`` with manually created clients and server.

- ``FastDataLoader`` shuffles and cuts tensors in memory; one local epoch, which is 20 steps of 32 of 640 samples.
- Averages of parameters and BatchNorm's statistics, weighted by the number of samples; counters: the largest.
- One process: its parallel server asks for two GPUs. Nothing is evaluated; fluke's progress bars stay on.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from benchmarks.work import CLASSES, Work
from benchmarks.workload import client_data, make_model

from fluke import FlukeENV  # type: ignore[import-not-found]  # isort: skip
from fluke.algorithms.fedavg import FedAVG  # type: ignore[import-not-found]  # isort: skip
from fluke.client import Client  # type: ignore[import-not-found]  # isort: skip
from fluke.config import OptimizerConfigurator  # type: ignore[import-not-found]  # isort: skip
from fluke.data import FastDataLoader  # type: ignore[import-not-found]  # isort: skip
from fluke.server import Server  # type: ignore[import-not-found]  # isort: skip
from fluke.utils import FederationObserver  # type: ignore[import-not-found]  # isort: skip


class _Clock(FederationObserver):  # type: ignore[misc]
    """Records the start and end of rounds."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def start_round(self, round: int, global_model: Any) -> None:
        self.begins.append(time.perf_counter())

    def end_round(self, round: int) -> None:
        self.ends.append(time.perf_counter())


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Any]]:
    """Do the work."""
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    sgd = OptimizerConfigurator({"name": "SGD", "lr": work.lr})
    clients = [
        Client(
            index=index,
            train_set=FastDataLoader(
                *tensors, num_labels=CLASSES, batch_size=work.batch_size, shuffle=True, skip_singleton=False
            ),
            test_set=None,
            optimizer_cfg=sgd,
            loss_fn=nn.CrossEntropyLoss(),
            local_epochs=1,
        )
        for index, tensors in enumerate(client_data(work))
    ]
    server = Server(model=make_model(), test_set=None, clients=clients, weighted=True)
    algorithm, clock = FedAVG(work.clients, None, {}, clients=clients, server=server), _Clock()
    algorithm.set_callbacks([clock])
    algorithm.run(n_rounds=work.rounds, eligible_perc=work.cohort / work.clients)
    seconds = [end - begin for begin, end in zip(clock.begins, clock.ends, strict=True)]
    return seconds, server.model.state_dict()
