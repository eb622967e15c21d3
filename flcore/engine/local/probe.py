"""Timing of a run's first steps; their results are discarded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flcore.engine.client import ClientRunner
from flcore.engine.client_data import ClientData
from flcore.engine.exchange import round_context
from flcore.engine.local.serial import Trainer, TrainJob
from flcore.experiment.experiment import EngineChoice, Experiment
from flcore.experiment.traffic import leaving
from flcore.io.records import Record, SharedOnDevice
from flcore.methods.types import Exchange


@dataclass
class StepTimer:
    """The first steps of a run's first stack, to be trained in different ways; nothing of it enters the run."""

    experiment: Experiment
    exchange: Exchange
    clients: Sequence[int]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        runner = ClientRunner(replace(self.experiment, choice=EngineChoice(False, False)))
        server = Record(self.experiment.method.start_server(self.experiment.setting))
        ctx = round_context(self.experiment.method, self.experiment.setting, 1, self.exchange)
        messages = [self.experiment.method.broadcast(server, client, ctx) for client in self.clients]
        received = SharedOnDevice(self.experiment.config.engine.device).of(leaving(messages, self.experiment))
        contexts = [
            runner.ctx(1, self.exchange, client, message, Record())
            for client, message in zip(self.clients, received, strict=True)
        ]
        starts = [ctx.with_statistics(self.experiment.method.initial_weights(ctx)) for ctx in contexts]
        data = ClientData.of(self.experiment, self.clients, 1)
        self.training = TrainJob(
            contexts, data, starts, self.exchange.phases, 0, runner.tables(contexts, data, self.exchange)
        )

    def seconds(self, trainer: Trainer, count: int, steps: int) -> float:
        """Return the seconds of ``steps`` steps of the first ``count`` clients."""
        phases = [replace(self.exchange.phases[0], steps=steps, epochs=None)]
        training = replace(self.training.of(range(count)), phases=phases)
        begin = self.clock()
        trainer.train(training)
        return self.clock() - begin
