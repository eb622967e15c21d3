"""What a step of local training is made of besides the loss: the optimiser of a round."""

from __future__ import annotations

import math

from flcore.optim import Adam, Optimizer, Sgd
from flcore.sections import LocalConfig


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
