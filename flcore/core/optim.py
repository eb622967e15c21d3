"""Optimiser steps over lists of tensors, element-wise, for one client or a stack of clients.

The arithmetic is PyTorch's (`torch.optim.SGD`, `torch.optim.Adam`), without its Python loop over parameters, a tenth of
a small model's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from flcore.core.portable import square_root


class Optimizer(Protocol):
    """Update parameters in place; ``lr`` may change between two steps.

    :meth:`memory`, :meth:`rates` and :meth:`move` make the same step as :meth:`step` from tensors alone, for
    compilation. Both agree to float32 rounding.
    """

    lr: float

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Make one step; ``grads`` may be overwritten."""

    def keep(self, count: int) -> None:
        """Keep the state of the first ``count`` clients of a stack [A, ...]."""

    def memory(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the initial state for :meth:`move`, in tensors of the parameters' shapes."""

    def rates(self, steps: int) -> Tensor:
        """Return the numbers that the first ``steps`` steps of :meth:`move` need, float32 [steps, n]."""

    def move(self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Sequence[Tensor], rates: Tensor) -> None:
        """Make one step in place of ``params`` and ``memory``; ``rates`` [n] is a row of :meth:`rates`."""


@dataclass
class Sgd:
    """w ← w − lr·v with v ← momentum·v + (g + weight_decay·w), v = g at the first step."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    _velocity: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        if self.momentum:
            if self._velocity is None:
                self._velocity = [grad.clone() for grad in grads]
            else:
                torch._foreach_mul_(self._velocity, self.momentum)
                torch._foreach_add_(self._velocity, grads)
            grads = self._velocity
        torch._foreach_add_(params, grads, alpha=-self.lr)

    def keep(self, count: int) -> None:
        if self._velocity is not None:
            self._velocity = [velocity[:count] for velocity in self._velocity]

    def memory(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return zero velocities if there is momentum; the first is then g, as in :meth:`step`."""
        return [torch.zeros_like(param, requires_grad=False) for param in params] if self.momentum else []

    def rates(self, steps: int) -> Tensor:
        return torch.full((steps, 1), self.lr)

    @torch.no_grad()
    def move(self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Sequence[Tensor], rates: Tensor) -> None:
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            change = grad + self.weight_decay * param if self.weight_decay else grad
            if self.momentum:
                change = memory[index].mul_(self.momentum).add_(change)
            param.sub_(rates[0] * change)


@dataclass
class Adam:
    """Adam (Kingma and Ba, ICLR 2015) with L2 weight decay, which is added to the gradient (not decoupled as in AdamW).

    ``fused`` takes PyTorch's fused kernel: same arithmetic, a quarter of the time for millions of weights; not for
    stacks.
    """

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    fused: bool = False
    _count: int = 0
    _first: list[Tensor] | None = None
    _second: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if self._first is None or self._second is None:
            self._first = [torch.zeros_like(param, requires_grad=False) for param in params]
            self._second = [torch.zeros_like(param, requires_grad=False) for param in params]
        self._count += 1
        if self.fused:
            return self._fused_step(params, grads, self._first, self._second)
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        one, two = self.betas
        torch._foreach_lerp_(self._first, grads, 1 - one)
        torch._foreach_mul_(self._second, two)
        torch._foreach_addcmul_(self._second, grads, grads, value=1 - two)
        denominators = [square_root(second) for second in self._second]
        torch._foreach_div_(denominators, math.sqrt(1 - two**self._count))
        torch._foreach_add_(denominators, self.epsilon)
        torch._foreach_addcdiv_(params, self._first, denominators, value=-self.lr / (1 - one**self._count))
        return None

    def _fused_step(self, params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
        # `torch.optim.Adam(fused=True)` imports PyTorch's compiler at its first use, which takes seconds.
        counts = [torch.full((), float(self._count), device=param.device) for param in params]
        torch._fused_adam_(
            [param.detach() for param in params], list(grads), first, second, [], counts,
            lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.weight_decay, eps=self.epsilon,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def keep(self, count: int) -> None:
        if self._first is not None and self._second is not None:
            self._first = [moment[:count] for moment in self._first]
            self._second = [moment[:count] for moment in self._second]

    def memory(self, params: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(param, requires_grad=False) for _ in range(2) for param in params]

    def rates(self, steps: int) -> Tensor:
        """Return lr / (1 - β1^t) and the root of 1 - β2^t by step, [steps, 2]."""
        one, two = self.betas
        counts = range(1, steps + 1)
        return torch.tensor([[self.lr / (1 - one**t), math.sqrt(1 - two**t)] for t in counts]).reshape(steps, 2)

    @torch.no_grad()
    def move(self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Sequence[Tensor], rates: Tensor) -> None:
        one, two = self.betas
        firsts, seconds = memory[: len(params)], memory[len(params) :]
        for param, grad, first, second in zip(params, grads, firsts, seconds, strict=True):
            change = grad + self.weight_decay * param if self.weight_decay else grad
            first.lerp_(change, 1 - one)
            second.mul_(two).addcmul_(change, change, value=1 - two)
            param.sub_(rates[0] * first / (square_root(second) / rates[1] + self.epsilon))

    def state(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state for a later round: ``steps`` int64 [1], ``first/<name>`` and ``second/<name>``.

        Args:
            params: by name, in the order in which :meth:`step` gets them.
        """
        zeros = [torch.zeros_like(param, requires_grad=False) for param in params.values()]
        first = dict(zip(params, self._first or zeros, strict=True))
        second = dict(zip(params, self._second or zeros, strict=True))
        named = {f"first/{name}": tensor.detach().clone() for name, tensor in first.items()}
        named |= {f"second/{name}": tensor.detach().clone() for name, tensor in second.items()}
        return {"steps": torch.tensor([self._count], dtype=torch.int64)} | named

    def restore(self, params: Iterable[str], state: Mapping[str, Tensor]) -> Self:
        """Restore a state from :meth:`state`; ``params`` are the names in the order of :meth:`step`."""
        names = list(params)
        self._count = int(state["steps"][0])
        self._first = [state[f"first/{name}"].clone() for name in names]
        self._second = [state[f"second/{name}"].clone() for name in names]
        return self


def clip_gradients(grads: list[Tensor], limit: float, *, stacked: bool) -> None:
    """Scale gradients in place to a global norm of at most ``limit``, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        grads: of all trained parameters; with ``stacked`` each [A, ...].
        limit: largest norm.
        stacked: the leading dimension counts clients; each client has its own norm.
    """
    start = 1 if stacked else 0
    squares = [grad.square().reshape(*grad.shape[:start], -1).sum(dim=start) for grad in grads]
    norm = square_root(torch.stack(squares).sum(dim=0))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.reshape(factor.shape + (1,) * (grad.ndim - start)))
