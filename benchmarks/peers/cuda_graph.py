"""The bare PyTorch loop on a CUDA device, with a step recorded once and replayed as a CUDA graph; in our environment.

The graph contains a whole step: forward, backward, SGD. It reads its batch's indices and the client's images from fixed
buffers, into which they are copied; all images are on the device. The round is the same as in the loop on the CPU.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.work import Work
from benchmarks.workload import client_data, make_model

_WARM_UP = 3  # steps before recording, for cuDNN's choice of algorithms and memory allocation


class GraphedStep:
    """One replayed step of SGD; ``images`` [n, 1, 28, 28], ``labels`` and ``chosen`` [B] are written before."""

    def __init__(self, work: Work, device: torch.device) -> None:
        """Record the step. The weights are reset to ``make_model`` afterwards."""
        self.module = make_model().to(device).train()
        first = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        images, labels = client_data(work)[0]
        self.images, self.labels = images.to(device, copy=True), labels.to(device, copy=True)
        self.chosen = torch.arange(work.batch_size, device=device)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=work.lr)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self.module.load_state_dict(first)

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        answers = self.module(self.images[self.chosen])
        F.cross_entropy(answers, self.labels[self.chosen]).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def replay(self) -> None:
        """Run the step with the current content of the tensors."""
        self._graph.replay()


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the seconds of each round, and the final weights on the CPU."""
    device = torch.device("cuda")
    data = [(images.to(device), labels.to(device)) for images, labels in client_data(work)]
    step, generator, seconds = GraphedStep(work, device), torch.Generator().manual_seed(0), []
    server = {name: tensor.clone() for name, tensor in step.module.state_dict().items()}
    for _ in range(work.rounds):
        begin = time.perf_counter()
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in server.items()}
        for client in torch.randperm(work.clients, generator=generator)[: work.cohort].tolist():
            step.module.load_state_dict(server)
            images, labels = data[client]
            step.images.copy_(images)
            step.labels.copy_(labels)
            passes = -(-work.steps * work.batch_size // work.samples)
            order = torch.cat([torch.randperm(work.samples, generator=generator) for _ in range(passes)]).to(device)
            for batch in torch.split(order, work.batch_size)[: work.steps]:
                step.chosen.copy_(batch)
                step.replay()
            for name, tensor in step.module.state_dict().items():
                total[name] += tensor.double() / work.cohort
        server = {name: total[name].to(tensor.dtype) for name, tensor in server.items()}
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds, {name: tensor.cpu() for name, tensor in server.items()}
