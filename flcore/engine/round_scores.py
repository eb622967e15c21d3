"""Scoring within a round: its end, and states on the way that the method wants scored too.

Records are immutable, so a state in front of a calibration or a retraining is there for the asking
(:meth:`flcore.methods.api.Method.score_before`): no method keeps one for this. Parts of a scoring go to the workers
that are idle between two legs, where there are some and it pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flcore.engine.checkpoint import Checkpoint
from flcore.engine.pool.executors import Executor
from flcore.engine.run_state import RunState
from flcore.evaluation.scoring import Part, Request, Scorer
from flcore.experiment.experiment import Experiment
from flcore.io.records import Record
from flcore.methods.api import Method
from flcore.methods.types import Leg

Headline = Mapping[str, float | None]

Passed = tuple[Record, Mapping[int, int]]
"""What the server held at a point within a round, and of which leg each client's memory was then."""

WORTH_SHARING = 4096
"""Answers to images from which on handing parts to workers costs less than it saves."""


def passed_through(
    method: Method, leg: Leg, before: RunState, in_front: Mapping[str, Record], after: RunState
) -> dict[str, Passed]:
    """The states of a leg that a method wants scored, by label.

    Args:
        method: whose :meth:`~flcore.methods.api.Method.score_before` says which.
        leg: that has just ended.
        before: the state at its beginning.
        in_front: what the server held in front of each of its stages.
        after: the state at its end; clients remember what they do then in front of its stages too.
    """
    passed: dict[str, Passed] = {}
    for label, asked in method.score_before().items():
        if asked.step in in_front:
            passed[label] = in_front[asked.step], after.memories
        elif asked.step == leg.name:
            passed[label] = before.server, before.memories
    return passed


class RoundScorer:
    """Scores states of one run."""

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint, executor: Executor) -> None:
        """Lay out the data to score on; their models are made with the first question."""
        self._experiment, self._checkpoint, self._executor = experiment, checkpoint, executor
        self._scorer = Scorer(experiment)

    def of_round(self, state: RunState, scored: Mapping[str, Headline]) -> dict[str, Any]:
        """The scores at the end of a round, as JSON values.

        Args:
            state: at the end.
            scored: what :meth:`on_the_way` found in the legs of this round. A state that it has no score of was never
                passed through in this round: then it is the one at the end.
        """
        memories = partial(self._checkpoint.memory, memories=state.memories)
        share = partial(self._share, state.server, state.memories)
        found = self._scorer.score(state.server, memories, round_number=state.round, share=share)
        labels = self._experiment.method.score_before()
        values = found.to_mapping()
        if labels:
            before = {label: scored.get(label, found.headline) for label in labels}
            values["alternatives"] = {**values.get("alternatives", {}), **before}
        return values

    def on_the_way(self, passed: Mapping[str, Passed], number: int) -> dict[str, Headline]:
        """Scores of the states that :func:`passed_through` found in a leg of a round."""
        scores: dict[str, Headline] = {}
        for label, (server, legs) in passed.items():
            memories = partial(self._checkpoint.memory, memories=legs)
            share = partial(self._share, server, legs)
            scores[label] = self._scorer.scored(Request((label,), number), server, memories, share).headline
        return scores

    def _share(
        self, server: Record, legs: Mapping[int, int], request: Request, parts: Sequence[Part]
    ) -> Iterable[Mapping[str, Tensor]]:
        if self._scorer.images_asked(request, parts) >= WORTH_SHARING:
            shared = self._executor.score(server, legs, request, parts)
            if shared is not None:
                return shared
        memories = partial(self._checkpoint.memory, memories=legs)
        return (self._scorer.answer(request, part, server, memories) for part in parts)
