"""What ``protofl tune`` is asked for; without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StudyRequest:
    """What a study is asked for, beside its configuration.

    Attributes:
        trials: total number of trials (finished, pruned or failed).
        objective: ``accuracy`` or ``accuracy,bytes``.
        metric: a number of ``metrics.json``, dotted where it is nested; None: ``top1_global``, or ``mean_local`` for a
            method without a global model.
        storage: Optuna's storage, as a URL or a journal's path; None: the journal of this folder.
        max_bytes: the most that a result may send; None: any number.
        max_steps: mini-batches that the clients of each trial may train on in all, of their own images, which says how
            many rounds it has; None: all have those of the configuration.
    """

    trials: int = 20
    objective: str = "accuracy"
    metric: str | None = None
    storage: str | None = None
    max_bytes: int | None = None
    max_steps: int | None = None
