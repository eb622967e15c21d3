"""The arguments of ``protofl tune``; without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StudyRequest:
    """The settings of a study in addition to its configuration.

    Attributes:
        trials: total number of trials (finished, pruned or failed).
        objective: ``accuracy`` or ``accuracy,bytes``.
        metric: a number of ``metrics.json``, dotted if nested; None: ``top1_global``, or ``mean_local`` for a method
            without a global model.
        storage: Optuna's storage, as a URL or a journal's path; None: the journal of this folder.
        max_bytes: limit of bytes that a result may send; None: no limit.
    """

    trials: int = 20
    objective: str = "accuracy"
    metric: str | None = None
    storage: str | None = None
    max_bytes: int | None = None
