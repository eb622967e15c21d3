"""The work of ``overhead`` in BlazeFL, with its own FedAvg (``blazefl.contrib``).

- A process pool with shared memory, one process per core of the work; BlazeFL creates the pool again in every round.
- Clients' data and an optimiser are created before the first pool forks: creating an optimiser makes torch import its
  compiler, which would otherwise cost every process of every round seconds.
- Batches are cut out of tensors by whole lists of indices (``BatchSampler`` as the loader's sampler).
- One local epoch, which is 20 steps of 32 of 640 samples; averages of the whole state, including counters, weighted by
  the number of samples. Nothing is evaluated.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.work import Work
from benchmarks.workload import client_data, make_model

from blazefl.contrib import (  # type: ignore[import-not-found]  # isort: skip
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
)
from blazefl.core import IPCMode  # type: ignore[import-not-found]  # isort: skip


class _Selector:
    """BlazeFL's access to a model, by name."""

    def select_model(self, model_name: str) -> nn.Module:
        return make_model()


class _Data:
    """BlazeFL's access to a client's data, by number. Only ``work`` is sent to other processes."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def get_dataset(self, type_: Any, cid: int | None) -> TensorDataset:
        assert cid is not None
        return TensorDataset(*client_data(self._work)[cid])

    def set_dataset(self, type_: Any, cid: int | None, dataset: Any) -> None:
        """Ignore the data that a client has trained on, which do not change."""

    def get_dataloader(
        self, type_: Any, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> DataLoader[Any]:
        assert batch_size is not None
        dataset = self.get_dataset(type_, cid)
        batches = BatchSampler(RandomSampler(dataset, generator=generator), batch_size, drop_last=False)
        # Loaders draw a seed for their workers from the generator, or else from torch's global one.
        return DataLoader(dataset, sampler=batches, batch_size=None, generator=generator)


class _Trainer(FedAvgProcessPoolClientTrainer):  # type: ignore[misc]
    """The trainer without progress bars."""

    def progress_fn(self, it: list[Any]) -> list[Any]:
        return it


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Any]]:
    """Do the work."""
    client_data(work)
    torch.optim.SGD(make_model().parameters(), lr=work.lr).step()
    common: dict[str, Any] = {
        "model_selector": _Selector(),
        "model_name": "",
        "dataset": _Data(work),
        "device": "cpu",
        "num_clients": work.clients,
        "batch_size": work.batch_size,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(global_round=work.rounds, sample_ratio=work.cohort / work.clients, **common)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(
            share_dir=Path(folder) / "share",
            state_dir=Path(folder) / "state",
            epochs=1,
            lr=work.lr,
            num_parallels=work.cores,
            ipc_mode=IPCMode.SHARED_MEMORY,
            **common,
        )
        while not server.if_stop():
            begin = time.perf_counter()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            seconds.append(time.perf_counter() - begin)
    return seconds, server.model.state_dict()
