"""Stage *train*: all federated rounds of one run (`flcore/training.py`), with a word on what they ran on."""

from __future__ import annotations

from pathlib import Path

from flcore import training
from flcore.config import Config
from flcore.engine.orchestrator import Orchestrator
from flcore.engine.rounds import Observers
from pipelines.runs.provenance import environment


def train(
    config: Config,
    prepared: Path,
    partition: Path,
    directory: Path,
    *,
    orchestrator: Orchestrator | None = None,
    observers: Observers | None = None,
    replace: bool = False,
    restart: bool = False,
) -> bool:
    """Run, or go on with, one run in ``directory``; arguments and errors as :func:`flcore.training.train` has them.

    Returns:
        False if the run had already finished there and nothing was done.
    """
    return training.train(
        config,
        prepared,
        partition,
        directory,
        orchestrator=orchestrator,
        observers=observers,
        replace=replace,
        restart=restart,
        about=environment(config),
    )
