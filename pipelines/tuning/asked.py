"""What a study is asked for; without torch, so that a command line can say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """What is asked of a study.

    Attributes:
        trials: how many ended trials (finished, given up or failed) are wanted in all.
        objective: ``accuracy`` or ``accuracy,bytes``.
        metric: a number of ``metrics.json``, dotted where it is nested; None: ``top1_global``, or ``mean_local`` for a
            method without a global model.
        storage: Optuna's storage as an SQLAlchemy URL; None for a journal in the folder.
        at_once: trials that are under way at the same time, at most, and so how many of those before it a trial is
            chosen without; None: as the study began, or four.
        max_bytes: the most that a result may send; None: any number.
        max_steps: mini-batches that the clients of each trial may train on in all, of their own images, which says how
            many rounds it has; None: all have those of the configuration.
    """

    trials: int = 20
    objective: str = "accuracy"
    metric: str | None = None
    storage: str | None = None
    at_once: int | None = None
    max_bytes: int | None = None
    max_steps: int | None = None
