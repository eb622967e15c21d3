"""Clients of several runs in one stack: what can be trained together, and how it is put together.

Runs of one kin (:meth:`flcore.config.schema.Config.kin`) differ in their seed alone, so what a step does is the same in
all of them; what it does it with comes with the turn: weights, samples, the seed of its streams, what the method makes
of its setting. One module serves them all, since a step puts the stack's values in place of its own. One thing of a
run's own a step could still reach: a frozen model that is asked with a part of its weights takes the rest from the
initial model (:class:`flcore.models.view.View`), and that is another one in each run. Such a question is refused here.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from flcore.engine.client import make_trainer
from flcore.engine.client_data import ClientData
from flcore.engine.cohort import stack_limit
from flcore.engine.local.serial import Outcome, Trainer, Training
from flcore.engine.local.step import name_of
from flcore.experiment.experiment import Experiment
from flcore.methods.types import Setting, Update
from flcore.models.base import Backbone
from flcore.models.network import Network, Values

logger = logging.getLogger(__name__)

Answer = list[Outcome] | Exception
"""What comes of a call: its outcomes, or why there are none."""


@dataclass(frozen=True)
class Call:
    """One call of :meth:`flcore.engine.local.serial.Trainer.train` by a run.

    Attributes:
        experiment: the run. trainer: its own, which trains what can be trained with nobody.
        training: as the trainer is given it.
    """

    experiment: Experiment
    trainer: Trainer
    training: Training

    def alone(self) -> Answer:
        """Trained by the run's own trainer."""
        try:
            return self.trainer.train(self.training)
        except Exception as error:  # it is for the run whose call this is
            return error

    @cached_property
    def kind(self) -> Hashable:
        """What is equal of calls that may be trained together: run, phases, and the shapes of what they bring.

        Contexts are not among it: they are made once, in the training itself, which refuses those that do not go
        together.
        """
        experiment, training, first = self.experiment, self.training, self.training.starts[0]
        phases = [
            (
                *(phase.trainable, phase.epochs, phase.steps, phase.source, phase.note, _known(phase.loss)),
                *((update.trainable, *map(_known, _functions(update))) for update in phase.updates),
            )
            for phase in training.phases
        ]
        return (
            (experiment.config.kin(), experiment.dataset.meta.fingerprint, experiment.chosen),
            (training.turns[0].round, training.turns[0].leg, training.first_phase, tuple(phases)),
            tuple((name, values[0].shape[1:], values[0].dtype) for name, values in sorted(training.tables.items())),
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(first.values.items())),
        )


def _functions(update: Update) -> tuple[object, ...]:
    return update.loss, update.probe, update.optimizer


def _known(function: object) -> Hashable:
    """What a function of the method's is told by: one without a name may do something else in each run."""
    return name_of(function) or id(function)


class JoinedTrainer:
    """Trains calls of several runs, those that go together in stacks as large as one run's may be."""

    def __init__(self) -> None:
        """Have no module yet: which one is needed, the first calls say."""
        self._trainers: dict[Hashable, Trainer] = {}
        self.refused: set[str] = set()

    def train(self, calls: Sequence[Call]) -> list[Answer]:
        """An answer per call, in order; a function of the calls alone.

        Where a joined stack cannot be trained, for whatever reason, each of its calls is tried alone, so that an error
        reaches the run that it comes from and no other.
        """
        groups: dict[Hashable, list[int]] = {}
        for position, call in enumerate(calls):
            groups.setdefault(call.kind, []).append(position)
        answers: dict[int, Answer] = {}
        for positions in groups.values():
            found = self._group([calls[position] for position in positions])
            answers |= zip(positions, found, strict=True)
        return [answers[position] for position in range(len(calls))]

    def _group(self, calls: Sequence[Call]) -> list[Answer]:
        if len(calls) > 1 and calls[0].experiment.stacked:
            try:
                return list(self._joined(calls))
            except Exception as error:
                self._tell(calls[0], error)
        return [call.alone() for call in calls]

    def _joined(self, calls: Sequence[Call]) -> list[list[Outcome]]:
        """Outcomes by call. Clients in order of their samples, then of run and client, are cut into stacks."""
        asked, trainer = [call.training for call in calls], self._trainer(calls[0])
        members = [(number, place) for number, own in enumerate(asked) for place in range(len(own.turns))]
        members.sort(key=lambda member: -len(asked[member[0]].data[member[1]]))
        found: dict[tuple[int, int], Outcome] = {}
        for part in np.array_split(np.arange(len(members)), -(-len(members) // stack_limit(calls[0].experiment))):
            stack = [members[position] for position in part]
            outcomes = trainer.train(
                replace(
                    asked[0],
                    turns=[asked[number].turns[place] for number, place in stack],
                    data=ClientData.together([asked[number].data[place] for number, place in stack]),
                    starts=[asked[number].starts[place] for number, place in stack],
                    tables={
                        name: [asked[number].tables[name][place] for number, place in stack] for name in asked[0].tables
                    },
                )
            )
            found |= zip(stack, outcomes, strict=True)
        return [[found[number, place] for place in range(len(own.turns))] for number, own in enumerate(asked)]

    def _trainer(self, call: Call) -> Trainer:
        name = call.experiment.config.kin()
        if name not in self._trainers:
            self._trainers[name] = make_trainer(_JoinedExperiment.of(call.experiment))
        return self._trainers[name]

    def _tell(self, call: Call, error: Exception) -> None:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if reason not in self.refused:
            self.refused.add(reason)
            method = call.experiment.method.name
            logger.warning("engine.stack_runs: runs of %s are trained apart (%s)", method, reason)


class _JoinedExperiment(Experiment):
    """One of the runs, for a module that serves them all."""

    @cached_property
    def setting(self) -> Setting:
        """The run's, whose network never falls back on the run's initial weights."""
        return replace(super().setting, network=_NothingOfItsOwn(self.new_module()))

    @classmethod
    def of(cls, experiment: Experiment) -> Experiment:
        """Of a run."""
        joined = cls(**{field.name: getattr(experiment, field.name) for field in fields(Experiment)})
        joined.setting  # noqa: B018 - made now: inside of a step no module can be built
        return joined


class _NothingOfItsOwn(Network):
    """A network that is asked with all weights of a part, or not at all."""

    def __init__(self, module: Backbone) -> None:
        super().__init__(module)
        named = (*module.named_parameters(), *module.named_buffers())
        self._names = tuple(name for name, _ in named)

    def encode(self, images: Tensor, values: Values) -> Tensor:
        self._check(values, "encoder.")
        return super().encode(images, values)

    def project(self, encoded: Tensor, values: Values) -> Tensor:
        self._check(values, "projection.")
        return super().project(encoded, values)

    def features(self, images: Tensor, values: Values) -> Tensor:
        self._check(values, "encoder.", "projection.")
        return super().features(images, values)

    def classify(self, features: Tensor, values: Values) -> Tensor:
        self._check(values, "head.")
        return super().classify(features, values)

    def apply_extra(self, name: str, features: Tensor, values: Values) -> Tensor:
        self._check(values, f"extra.{name}.")
        return super().apply_extra(name, features, values)

    def _check(self, values: Values, *parts: str) -> None:
        missing = [name for name in self._names if name.startswith(parts) and name not in values]
        if missing:
            raise ValueError(f"a frozen model without {missing[0]}, which would be one run's initial weights for all")
