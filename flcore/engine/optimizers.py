"""Optimiser steps over lists of tensors: element-wise, so one client or a stack of clients is the same code.

The arithmetic is PyTorch's (`torch.optim.SGD`, `torch.optim.Adam`), without the per-parameter Python loop that costs a
small model a tenth of its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flcore.config import LocalConfig


class Optimizer(Protocol):
    """Moves parameters in place."""

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """One step; ``grads`` may be overwritten."""

    def keep(self, count: int) -> None:
        """Of a stack [A, ...], only the first ``count`` clients go on."""


@dataclass
class Sgd:
    """w ← w − lr·v with v ← momentum·v + (g + weight_decay·w), v = g at the first step."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    _velocity: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """One step."""
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
        """Drop the velocity of clients behind ``count``."""
        if self._velocity is not None:
            self._velocity = [velocity[:count] for velocity in self._velocity]


@dataclass
class Adam:
    """Adam (Kingma and Ba, ICLR 2015) with L2 weight decay added to the gradient; betas 0.9, 0.999, epsilon 1e-8."""

    lr: float
    weight_decay: float = 0.0
    _count: int = 0
    _first: list[Tensor] | None = None
    _second: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """One step."""
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        if self._first is None or self._second is None:
            self._first = [torch.zeros_like(param) for param in params]
            self._second = [torch.zeros_like(param) for param in params]
        self._count += 1
        torch._foreach_lerp_(self._first, grads, 0.1)
        torch._foreach_mul_(self._second, 0.999)
        torch._foreach_addcmul_(self._second, grads, grads, value=0.001)
        denominators = torch._foreach_sqrt(self._second)
        torch._foreach_div_(denominators, math.sqrt(1 - 0.999**self._count))
        torch._foreach_add_(denominators, 1e-8)
        torch._foreach_addcdiv_(params, self._first, denominators, value=-self.lr / (1 - 0.9**self._count))

    def keep(self, count: int) -> None:
        """Drop the moments of clients behind ``count``."""
        if self._first is not None and self._second is not None:
            self._first = [moment[:count] for moment in self._first]
            self._second = [moment[:count] for moment in self._second]


def clip_gradients(grads: list[Tensor], limit: float, *, stacked: bool) -> None:
    """Scale gradients in place to a global norm of at most ``limit``, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        grads: of all parameters that move; with ``stacked`` each [A, ...], and every client has its own norm.
        limit: largest norm.
        stacked: whether a leading dimension counts clients.
    """
    start = 1 if stacked else 0
    squares = [grad.square().reshape(*grad.shape[:start], -1).sum(dim=start) for grad in grads]
    norm = torch.stack(squares).sum(dim=0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.reshape(factor.shape + (1,) * (grad.ndim - start)))


def make_optimizer(local: LocalConfig, round_number: int, rounds: int) -> Optimizer:
    """A fresh optimiser with the learning rate of a round (1-based)."""
    lr = learning_rate(local, round_number, rounds)
    if local.optimizer == "adam":
        return Adam(lr, local.weight_decay)
    return Sgd(lr, local.momentum, local.weight_decay)


def learning_rate(local: LocalConfig, round_number: int, rounds: int) -> float:
    """The learning rate of round ``round_number`` (1-based, so that round 1 has ``local.lr``)."""
    passed = round_number - 1
    if local.schedule == "exponential":
        return local.lr * local.decay**passed
    if local.schedule == "step":
        return local.lr * local.decay ** (passed // local.decay_every)
    if local.schedule == "cosine":
        return local.lr * 0.5 * (1 + math.cos(math.pi * passed / rounds))
    return local.lr
