"""The work of ``overhead``, and pfl's own published setting, in Apple's pfl (pfl-research).

- ``SimulatedBackend`` in one process, as its benchmarks run it: clients one after the other in a single module.
- ``FederatedAveraging`` weighted by the number of samples; one local epoch, which is 20 steps of 32 of 640 samples.
- Clients' data are tensors on the device (PFL_PYTORCH_DEVICE), normalised once. pfl cuts them into the same batches in
  every round and averages only parameters: BatchNorm statistics stay in the one module. It does less than the others.
- Evaluation cannot be switched off in the first round; the function that it calls computes nothing.
"""

from __future__ import annotations

import os
import time
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.work import Work
from benchmarks.workload import client_data, make_model

os.environ["PFL_PYTORCH_DEVICE"] = DEVICE = os.environ.get("PFL_PYTORCH_DEVICE", "cpu")  # read when pfl is imported

from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]


def _loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    module.train()
    return F.cross_entropy(module(images), labels)


def _no_metrics(module: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"nothing": Weighted(0, 1)}


class _Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Records the end of rounds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *, model: Any) -> Any:
        self._note()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self._note()
        return False, Metrics()

    def _note(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Any]]:
    """Do the work."""
    np.random.seed(0)  # pfl samples clients with it
    module = make_model(model=work.model).to(DEVICE)
    module.loss, module.metrics = MethodType(_loss, module), MethodType(_no_metrics, module)  # type: ignore[assignment]
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    data = {number: tuple(tensor.to(DEVICE) for tensor in own) for number, own in enumerate(client_data(work))}
    clients = FederatedDataset.from_slices(data, get_user_sampler("random", range(work.clients)))
    clock = _Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.lr, local_num_epochs=1, local_batch_size=work.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=work.samples),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return seconds, {name: tensor.cpu() for name, tensor in module.state_dict().items()}
