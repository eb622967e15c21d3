"""First steps of a run, trained to see how long they take; what they give is thrown away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flcore.engine.client import TurnRunner
from flcore.engine.client_data import ClientData
from flcore.engine.local.serial import Trainer, Training
from flcore.engine.turns import exchange_in
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.traffic import leaving
from flcore.io.records import Record, SharedOnDevice
from flcore.methods.types import Leg


@dataclass
class Probe:
    """The first steps of a run's first stack, to be trained in different ways; nothing of it enters the run."""

    experiment: Experiment
    leg: Leg
    clients: Sequence[int]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        runner = TurnRunner(replace(self.experiment, choice=EngineChoice(False, False)))
        server = Record(self.experiment.method.start_server(self.experiment.setting))
        exchange = exchange_in(self.experiment.method, self.experiment.setting, 1, self.leg)
        messages = [self.experiment.method.broadcast(server, client, exchange) for client in self.clients]
        received = SharedOnDevice(self.experiment.config.engine.device).of(leaving(messages, self.experiment))
        turns = [
            runner.turn(1, self.leg, client, message, Record())
            for client, message in zip(self.clients, received, strict=True)
        ]
        starts = [turn.with_statistics(self.experiment.method.begin(turn)) for turn in turns]
        data = ClientData.of(self.experiment, self.clients, 1)
        self.training = Training(turns, data, starts, self.leg.phases, 0, runner.tables(turns, data, self.leg))

    def seconds(self, trainer: Trainer, count: int, steps: int) -> float:
        """Of so many steps of the first ``count`` clients."""
        phases = [replace(self.leg.phases[0], steps=steps, epochs=None)]
        training = replace(self.training.of(range(count)), phases=phases)
        begin = self.clock()
        trainer.train(training)
        return self.clock() - begin
