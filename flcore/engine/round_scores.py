"""Scoring at the end of a round; parts of it go to the workers, which are idle then, where it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.pool.executors import Executor
from flcore.engine.run_state import RunState
from flcore.evaluation.scores import Scores
from flcore.evaluation.scoring import EvalRequest, EvalTask, Scorer
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record

WORTH_SHARING = 4096
"""Answers to images from which on handing parts to workers costs less than it saves."""


class RoundScorer:
    """Scores states of one run."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint, executor: Executor) -> None:
        """Lay out the data to score on."""
        self._checkpoint, self._executor = checkpoint, executor
        self._scorer = Scorer(experiment)

    def score(self, state: RunState) -> Scores:
        """Score the state at the end of a round."""
        client_states = partial(self._checkpoint.client_state, client_states=state.client_states)
        share = partial(self._share, state.client_states)
        return self._scorer.score(state.server, client_states, round_number=state.round, share=share)

    def _share(
        self, client_states: Mapping[int, int], request: EvalRequest, parts: Sequence[EvalTask]
    ) -> Sequence[Record] | None:
        if self._scorer.images_asked(request, parts) < WORTH_SHARING:
            return None
        return self._executor.score(request, parts, client_states)
