"""Values that change over rounds or steps."""

from __future__ import annotations


def decayed_weight(initial: float, decay: float, passed: int, floor: float = 0.0) -> float:
    """A loss weight after ``passed`` rounds: max(floor, initial·decay^passed), and 0 where ``initial`` is 0.

    A weight configured as 0 is a term that is off; the floor must not revive it (fedpa.md section 4, baselines.md
    section 6).
    """
    return max(floor, initial * decay**passed) if initial else 0.0


def exponential_lr(lr: float, decay: float, passed: int) -> float:
    """The learning rate after ``passed`` rounds: lr·decay^passed (FedGen, FedPA: decay 0.98 for the generator)."""
    return lr * decay**passed


def step_lr(lr: float, gamma: float, every: int, passed: int) -> float:
    """The learning rate after ``passed`` steps: lr·gamma^⌊passed/every⌋ (FedPG's generator: gamma 0.95 every 20)."""
    return lr * gamma ** (passed // every)
